package claims

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/sets"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// troubles are what is wrong with the sandboxes that a claim was given, in the order of their names, at most one for each.
func (p *pass) troubles(given []string) []cause {
	var all []cause
	for _, name := range given {
		i := slices.IndexFunc(p.taken, func(sb *v1alpha1.Sandbox) bool { return sb.Name == name })
		if i < 0 {
			all = append(all, cause{"SandboxGone", about(name) + "it was deleted, and is not replaced once the claim is over", true})
			continue
		}
		if sb := p.taken[i]; !sets.Available(sb) {
			reason, message := troubleOf(sb)
			all = append(all, cause{reason, about(name) + message, true})
		}
	}
	return all
}

// about is how the message of a cause begins that is a sandbox's.
func about(sandbox string) string { return "sandbox " + sandbox + ": " }

// troubleOf says why a sandbox is not ready: the volume that failed rather than that one has.
func troubleOf(sb *v1alpha1.Sandbox) (reason, message string) {
	for _, row := range sb.Status.Volumes {
		if row.Phase == v1alpha1.VolumeFailed {
			return cmp.Or(row.Reason, "VolumeFailed"), fmt.Sprintf("%s %s at %s: %s", row.VolumeType, row.Source, row.Target, row.Message)
		}
	}
	phase := cmp.Or(string(sb.Status.Phase), string(v1alpha1.SandboxPending))
	if sb.Status.Reason != "" {
		return sb.Status.Reason, cmp.Or(sb.Status.Message, "it is "+phase)
	}
	if c := meta.FindStatusCondition(sb.Status.Conditions, v1alpha1.ConditionReady); c != nil && c.Status != metav1.ConditionTrue {
		return cmp.Or(c.Reason, phase), cmp.Or(c.Message, "it is "+phase)
	}
	return phase, "it is " + phase
}

// setReady sets the condition SandboxesReady of a claim that is Completed, and says whether it was another. Its message alone is no
// change: it goes on to name the sandbox that it names, as long as that one's trouble is of the same reason.
func (p *pass) setReady(st *agentsv1alpha1.SandboxClaimStatus) (changed bool) {
	troubles := p.troubles(st.SandboxNames)
	was := meta.FindStatusCondition(st.Conditions, agentsv1alpha1.ClaimSandboxesReady)
	if len(troubles) == 0 {
		if was != nil && was.Status == metav1.ConditionTrue {
			return false
		}
		p.condition(st, agentsv1alpha1.ClaimSandboxesReady, true, "Ready", "every sandbox that the claim was given is ready")
		return true
	}
	if was != nil && was.Status == metav1.ConditionFalse && slices.ContainsFunc(troubles, func(c cause) bool {
		named, _, _ := strings.Cut(c.message, ": ")
		return c.reason == was.Reason && strings.Contains(was.Message, named+": ")
	}) {
		return false
	}
	p.condition(st, agentsv1alpha1.ClaimSandboxesReady, false, troubles[0].reason,
		fmt.Sprintf("%d of %d sandboxes are not ready; %s", len(troubles), len(st.SandboxNames), troubles[0].message))
	return true
}

// watch keeps the condition SandboxesReady of a claim that is Completed true to its sandboxes.
func (p *pass) watch(ctx context.Context) error {
	if p.claim.Status.Phase != agentsv1alpha1.ClaimCompleted || !p.setReady(p.claim.Status.DeepCopy()) {
		return nil
	}
	var now *metav1.Condition
	steps("status", false)
	_, err := p.Claims.Claims.UpdateStatus(ctx, store.KeyOf(p.claim), store.Preconditions{UID: p.claim.UID}, func(o *agentsv1alpha1.SandboxClaim) error {
		if now = nil; p.setReady(&o.Status) {
			now = meta.FindStatusCondition(o.Status.Conditions, agentsv1alpha1.ClaimSandboxesReady)
		}
		return nil
	})
	steps("status", true)
	switch {
	case errdefs.IsNotFound(err):
		return nil
	case err != nil || now == nil:
		return err
	case now.Status == metav1.ConditionTrue:
		p.Events.About(p.claim, corev1.EventTypeNormal, agentsv1alpha1.ClaimSandboxesReady, now.Message)
	default:
		p.Events.About(p.claim, corev1.EventTypeWarning, now.Reason, now.Message)
	}
	return nil
}
