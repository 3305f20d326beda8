package sets

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// status is what the set's status is to say. done is what the pass could not do.
func (p *pass) status(done error) *agentsv1alpha1.SandboxSetStatus {
	v := look(p.pool, p.revision, p.tenant)
	st := p.set.Status.DeepCopy()
	st.ObservedGeneration = p.set.Generation
	st.Replicas, st.AvailableReplicas = int32(len(v.live)), int32(v.available)
	st.UpdatedReplicas, st.UpdatedAvailableReplicas = int32(v.updated), int32(v.updatedAvailable)
	st.UpdateRevision = p.revision
	st.Selector = agentsv1alpha1.LabelSandboxSet + "=" + p.set.Name + ",!" + agentsv1alpha1.LabelClaimName
	st.Runtimes = nil
	for _, r := range p.set.Spec.Runtimes {
		s := agentsv1alpha1.RuntimeStatus{Name: r.Name, State: "Enabled", Message: "sandboxes may have dynamic volumes, which the node's agent attaches"}
		if r.Name != agentsv1alpha1.RuntimeCSI {
			s.State, s.Message = "Accepted", "it has no effect in this version: nothing is added to the Pod"
		}
		st.Runtimes = append(st.Runtimes, s)
	}
	ready := metav1.Condition{Type: agentsv1alpha1.SetReady, Status: metav1.ConditionFalse, ObservedGeneration: p.set.Generation, LastTransitionTime: metav1.NewTime(p.Clock.Now())}
	refused := refusal(done)
	switch {
	case refused != nil:
		ready.Reason, ready.Message = string(fault.ReasonOf(refused)), refused.Error()
	case v.available >= int(p.set.Spec.Replicas):
		ready.Status, ready.Reason = metav1.ConditionTrue, "Available"
		ready.Message = fmt.Sprintf("%d sandboxes can be claimed", v.available)
	default:
		ready.Reason, ready.Message = p.waiting(v)
	}
	ready.Message = fault.Text(ready.Message)
	meta.SetStatusCondition(&st.Conditions, ready)
	return st
}

// waiting says what keeps the set from being whole: the trouble of the first sandbox that has any.
func (p *pass) waiting(v view) (reason, message string) {
	count := fmt.Sprintf("%d of %d sandboxes are available", v.available, p.set.Spec.Replicas)
	for _, sb := range slices.Concat(v.over, v.live) {
		doomed := Doomed(sb)
		switch {
		case doomed != nil:
			return doomed.Reason, fmt.Sprintf("%s; sandbox %s is replaced: %s", count, sb.Name, doomed.Message)
		case sb.Labels[agentsv1alpha1.LabelClaimName] != "":
			return "SandboxInUse", fmt.Sprintf("%s; sandbox %s has the label %s, and no SandboxClaim has it: take the label away, or delete the sandbox", count, sb.Name, agentsv1alpha1.LabelClaimName)
		case inUse(sb):
			return "SandboxInUse", fmt.Sprintf("%s; sandbox %s is in use, though nobody has claimed it: it is replaced once it has no volumes of its own, no shutdownTime, and is not paused", count, sb.Name)
		case !claimable(sb) && sb.Status.Reason != "":
			return sb.Status.Reason, fmt.Sprintf("%s; sandbox %s: %s", count, sb.Name, cmp.Or(sb.Status.Message, string(sb.Status.Phase)))
		}
	}
	return "Creating", count
}

// refusal is what the API server refused, of what a pass could not do; nil for what is only tried again.
func refusal(err error) error {
	if f, ok := err.(*fault.Error); ok {
		if errdefs.IsConflict(f) || errdefs.IsNotFound(f) || !fault.IsPermanent(f) {
			return nil
		}
		return f
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range joined.Unwrap() {
			if r := refusal(e); r != nil {
				return r
			}
		}
	}
	return nil
}

func same(a, b *agentsv1alpha1.SandboxSetStatus) bool { return equality.Semantic.DeepEqual(a, b) }

func readyOf(st *agentsv1alpha1.SandboxSetStatus) *metav1.Condition {
	return meta.FindStatusCondition(st.Conditions, agentsv1alpha1.SetReady)
}
