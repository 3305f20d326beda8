package agents

import (
	"maps"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// AnnotationMaxSandboxes, on a Node, is the most container-backed sandboxes that it may hold; no bound without it.
const AnnotationMaxSandboxes = "sandbox.flux.io/max-sandboxes"

// nodeFacts is what is kept of a Node: a cluster has thousands, and a Node is large.
type nodeFacts struct {
	metav1.ObjectMeta
	// OutOfService: its administrator says that it does not run any more.
	OutOfService bool
	Capacity     scheduler.Capacity
}

// strip reduces a Node to what is needed before it is kept.
func strip(o any) (any, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	facts := &nodeFacts{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, Labels: n.Labels},
		Capacity: scheduler.Capacity{
			CPUMilli:    n.Status.Allocatable.Cpu().MilliValue(),
			MemoryBytes: n.Status.Allocatable.Memory().Value(),
		},
	}
	if most, err := strconv.ParseInt(n.Annotations[AnnotationMaxSandboxes], 10, 64); err == nil && most > 0 {
		facts.Capacity.Sandboxes = most
	}
	for _, t := range n.Spec.Taints {
		if t.Key == corev1.TaintNodeOutOfService {
			facts.OutOfService = true
		}
	}
	return facts, nil
}

// same says whether nothing that matters changed: a Node is written every few minutes for its conditions.
func (n *nodeFacts) same(other *nodeFacts) bool {
	return n != nil && n.UID == other.UID && n.OutOfService == other.OutOfService && n.Capacity == other.Capacity &&
		maps.Equal(n.Labels, other.Labels)
}
