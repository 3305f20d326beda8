package anchors

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// Place is where an anchor belongs. That of a Pod which is none has no Claim.
type Place struct{ Namespace, Claim, Node string }

// facts is what is kept of an anchor.
type facts struct {
	// The name, the UID and the deletion.
	metav1.ObjectMeta
	place Place
	// claimUID is the claim's that it is owned by, sandbox the UID of the one that it is for, empty for all.
	claimUID types.UID
	sandbox  string
	phase    corev1.PodPhase
	// trouble is why it does not come up, as far as its status tells.
	trouble string
}

// strip reduces a Pod to its facts before it is kept.
func strip(o any) (any, error) {
	if pod, ok := o.(*corev1.Pod); ok {
		return factsOf(pod), nil
	}
	return o, nil
}

func factsOf(pod *corev1.Pod) *facts {
	f := &facts{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			CreationTimestamp: pod.CreationTimestamp, DeletionTimestamp: pod.DeletionTimestamp},
		place:   Place{Namespace: pod.Namespace, Node: nodeOf(pod)},
		sandbox: pod.Annotations[v1alpha1.AnnotationAnchorSandbox],
		phase:   pod.Status.Phase,
		trouble: trouble(pod),
	}
	f.place.Claim, f.claimUID = claimOf(pod)
	return f
}

// claimOf is the claim of which a Pod is an anchor, empty where it is none of ours. The label alone makes none: anchors are
// deleted, and a Pod that somebody else labelled never is.
func claimOf(pod *corev1.Pod) (name string, uid types.UID) {
	owners, volumes := pod.OwnerReferences, pod.Spec.Volumes
	if pod.GenerateName != namePrefix || pod.Labels[labelManagedBy] != managedBy ||
		len(owners) != 1 || owners[0].Kind != "PersistentVolumeClaim" ||
		len(volumes) != 1 || volumes[0].PersistentVolumeClaim == nil || volumes[0].PersistentVolumeClaim.ClaimName != owners[0].Name {
		return "", ""
	}
	return owners[0].Name, owners[0].UID
}

// nodeOf is the node for which an anchor was made: that of its affinity, also before it is scheduled.
func nodeOf(pod *corev1.Pod) string {
	if pod.Spec.NodeName != "" {
		return pod.Spec.NodeName
	}
	if a := pod.Spec.Affinity; a != nil && a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		for _, t := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			for _, r := range t.MatchFields {
				if r.Key == metav1.ObjectNameField && len(r.Values) == 1 {
					return r.Values[0]
				}
			}
		}
	}
	return ""
}

// trouble is what is wrong with a Pod. What keeps kubelet from mounting is in Events alone.
func trouble(pod *corev1.Pod) string {
	var parts []string
	if pod.Status.Reason != "" || pod.Status.Message != "" {
		parts = append(parts, strings.TrimSpace(pod.Status.Reason+" "+pod.Status.Message))
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			parts = append(parts, strings.TrimSpace(c.Reason+": "+c.Message))
		}
	}
	for _, s := range pod.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil && w.Reason != "" && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing" {
			parts = append(parts, strings.TrimSpace(w.Reason+": "+w.Message))
		}
	}
	text := strings.Join(parts, "; ")
	const most = 512
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most-3], "") + "..."
	}
	return text
}

// over says of an anchor that it will never have its volume again, as one that was evicted.
func (f *facts) over() bool { return f.phase == corev1.PodFailed || f.phase == corev1.PodSucceeded }

// alive says that an anchor has its volume, or will.
func (f *facts) alive() bool { return !f.over() && f.DeletionTimestamp == nil }

func (f *facts) running() bool { return f.phase == corev1.PodRunning }

// best is the anchor of a place that is to stay: one that runs before one that does not yet, the oldest first.
func best(all []*facts) *facts {
	var alive []*facts
	for _, f := range all {
		if f.alive() {
			alive = append(alive, f)
		}
	}
	if len(alive) == 0 {
		return nil
	}
	return slices.MinFunc(alive, func(a, b *facts) int {
		if a.running() != b.running() {
			if a.running() {
				return -1
			}
			return 1
		}
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
}
