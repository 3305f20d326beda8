package e2e

import (
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// event waits for an Event about a sandbox.
func (c *cluster) event(sandbox, reason string) {
	c.t.Helper()
	c.wait("there is an Event "+reason+" about "+sandbox, func() (bool, string) {
		list, err := c.client.CoreV1().Events(c.namespace).List(c.t.Context(), metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		var seen []string
		for _, e := range list.Items {
			if e.InvolvedObject.Name == sandbox {
				seen = append(seen, e.Reason)
			}
			if e.InvolvedObject.Name == sandbox && e.InvolvedObject.Kind == "Sandbox" && e.Reason == reason {
				return true, ""
			}
		}
		return false, "there are " + strings.Join(seen, ", ")
	})
}
