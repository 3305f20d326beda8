package e2e

import (
	"fmt"
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

// eventSays waits for an Event about an object of ours whose message ends with words.
func (c *cluster) eventSays(kind, name, reason, words string) {
	c.t.Helper()
	c.wait(fmt.Sprintf("an Event %s about %s %s says %s", reason, kind, name, words), func() (bool, string) {
		list, err := c.client.CoreV1().Events(c.namespace).List(c.t.Context(), metav1.ListOptions{
			FieldSelector: "involvedObject.kind=" + kind + ",involvedObject.name=" + name})
		if err != nil {
			return false, err.Error()
		}
		var seen []string
		for _, e := range list.Items {
			seen = append(seen, e.Reason+": "+e.Message)
			if e.Reason == reason && strings.HasSuffix(e.Message, words) {
				return true, ""
			}
		}
		return false, strings.Join(seen, "\n")
	})
}
