//go:build failpoint

package clustercontroller_test

import (
	"cmp"
	"encoding/json"
	"regexp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// volatile are the fields whose values differ from run to run, or with the names of Namespace and PersistentVolumes.
var volatile = []string{"uid", "resourceVersion", "generation", "observedGeneration", "creationTimestamp", "managedFields", "lastTransitionTime", "since", "startTime", "startedAt",
	"completionTime", "operationId", "containerID", "imageID", "hostIP", "podIP", "shutdownTime", "sandbox.flux.io/sandbox-uid", "sandbox.flux.io/replaces", "deletionTimestamp", "lastPhaseTransitionTime", "attached", "entryHash"}

// drawn is the random end of a sandbox's name, after a set's, of which all in these tests end in "-set".
var drawn = regexp.MustCompile(`-set-[a-z0-9]{5}\b`)

// state is all that there is in a Namespace, on the node of it, and of the PersistentVolumes that begin with its name, without
// what differs from run to run: a text to compare.
func (c *cluster) state(namespace string) string {
	var lines []string
	for _, kind := range kinds {
		for _, o := range c.list(kind, namespace) {
			lines = append(lines, line(kind.Resource, o.Object))
		}
	}
	volumes, err := c.admin.CoreV1().PersistentVolumes().List(c.Context(), metav1.ListOptions{})
	if err != nil {
		return err.Error()
	}
	for _, pv := range volumes.Items {
		if strings.HasPrefix(pv.Name, namespace) {
			var o map[string]any
			if err := json.Unmarshal(must(json.Marshal(pv)), &o); err != nil {
				panic(err)
			}
			lines = append(lines, line("persistentvolumes", o))
		}
	}
	lines = append(lines, c.agent.state(namespace)...)
	for i := range lines {
		lines[i] = strings.ReplaceAll(drawn.ReplaceAllString(lines[i], "-set-*"), namespace, "NAMESPACE")
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func line(kind string, o map[string]any) string {
	deleting := ""
	if _, is := o["metadata"].(map[string]any)["deletionTimestamp"]; is {
		deleting = " (is being deleted)"
	}
	return kind + deleting + " " + string(must(json.Marshal(without(o))))
}

// without leaves out what is volatile, and sorts conditions.
func without(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := map[string]any{}
		for key, value := range v {
			if !slices.Contains(volatile, key) {
				out[key] = without(value)
			}
		}
		return out
	case []any:
		out := make([]any, 0, len(v))
		for _, value := range v {
			out = append(out, without(value))
		}
		// Conditions are in the order in which they came to be.
		slices.SortStableFunc(out, func(a, b any) int { return cmp.Compare(typeOf(a), typeOf(b)) })
		return out
	}
	return v
}

// typeOf is the type of a condition; empty for what is none.
func typeOf(v any) string {
	o, _ := v.(map[string]any)
	kind, _ := o["type"].(string)
	return kind
}

// differences are the lines of each of two states that the other has not.
func differences(want, got string) string {
	var out []string
	for _, side := range []struct{ mark, has, not string }{{"- ", want, got}, {"+ ", got, want}} {
		rest := strings.Split(side.not, "\n")
		for _, l := range strings.Split(side.has, "\n") {
			if i := slices.Index(rest, l); i >= 0 {
				rest = slices.Delete(rest, i, i+1)
			} else {
				out = append(out, side.mark+l)
			}
		}
	}
	return strings.Join(out, "\n")
}
