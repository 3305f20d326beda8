package scheduler

import (
	"context"
	"fmt"
	"iter"
	"slices"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Claim is what the scheduler needs to know of a claim that a sandbox has of its volumeClaimTemplates.
type Claim struct {
	Name string
	// Phase is the claim's own; empty when the sandbox has no such claim.
	Phase corev1.PersistentVolumeClaimPhase
	// Deleting: it has a deletionTimestamp. It stays while a Pod uses it.
	Deleting bool
	// Kept says whether it outlives the sandbox, as it is now; Adopted that it always does, as somebody else made it.
	Kept, Adopted bool
}

// Claims knows and makes the claims of volumeClaimTemplates. A claim is the sandbox's by its UID, never by its name.
type Claims interface {
	// Follow yields the sandboxes of whose claims something may have changed, until ctx ends. What changed is asked of Get.
	// The Scheduler ranges over it once.
	Follow(ctx context.Context) iter.Seq[store.Key]
	// Get are the claims of a sandbox as they are known in memory, one for each template, in their order. An error says that
	// nothing is known yet: Follow yields the sandbox when that changes.
	Get(sb *v1alpha1.Sandbox) ([]Claim, error)
	// Ensure makes the claims that are not there, and has all of them outlive the sandbox or not, as its retention policy
	// says. It returns the names of those that it made, also with an error. It asks the API server itself, so that no Pod is
	// made over a claim that is another's by now. Errors: ErrAlreadyExists, reason CLAIM_NAME_TAKEN, when a claim of that
	// name is not the sandbox's: it is left alone; ErrFailedPrecondition, reason CLAIM_REFUSED, when the API server does not
	// take one; ErrUnavailable, reason CLAIM_TERMINATING, while one is being deleted.
	Ensure(ctx context.Context, sb *v1alpha1.Sandbox) (made []string, err error)
	// Settle has the claims that are there outlive the sandbox or not, before it goes. It makes none.
	Settle(ctx context.Context, sb *v1alpha1.Sandbox) error
}

// The reasons of the condition VolumeClaimsBound, beside those of errors.
const (
	ReasonClaimsBound      = "Bound"
	ReasonClaimPending     = "ClaimPending"
	ReasonClaimMissing     = "ClaimMissing"
	ReasonClaimLost        = "ClaimLost"
	ReasonClaimTerminating = "ClaimTerminating"
	ReasonClaimVolumeLost  = "VolumeLost"
)

// hasClaims says whether there are claims to look after.
func (p *pass) hasClaims() bool {
	return p.Claims != nil && p.sb.Spec.Template != nil && len(p.sb.Spec.VolumeClaimTemplates) > 0
}

// seeClaims makes the status say what there is of the claims.
func (p *pass) seeClaims() {
	if !p.hasClaims() {
		return
	}
	claims, err := p.Claims.Get(p.sb)
	if err != nil {
		return
	}
	p.claims = claims
	if p.a.lifeErr != nil && fault.ReasonOf(p.a.lifeErr) == fault.ClaimTerminating && !slices.ContainsFunc(claims, func(c Claim) bool { return c.Deleting }) {
		p.a.lifeErr, p.a.lifeRetry = nil, retry{} // that was waited for
	}
	is, reason, message := p.claimsNow()
	was := meta.FindStatusCondition(p.a.status.Conditions, v1alpha1.ConditionVolumeClaimsBound)
	if was == nil || was.Reason != reason || was.Message != message {
		switch reason {
		case ReasonClaimsBound:
			p.event(p.sb, EventNormal, "VolumeClaimsBound", message)
		case ReasonClaimLost, ReasonClaimTerminating, ReasonClaimVolumeLost:
			p.log("has a claim that is not well", "reason", reason, "message", message)
			p.event(p.sb, EventWarning, reason, message)
		}
	}
	p.condition(v1alpha1.ConditionVolumeClaimsBound, is, reason, message)
}

// claimsNow is the condition VolumeClaimsBound: the first thing that is wrong, the worst first.
func (p *pass) claimsNow() (is bool, reason, message string) {
	first := func(holds func(Claim) bool) (string, bool) {
		for _, c := range p.claims {
			if holds(c) {
				return c.Name, true
			}
		}
		return "", false
	}
	missing, isMissing := first(func(c Claim) bool { return c.Phase == "" })
	switch err := p.a.lifeErr; {
	case err != nil && isClaim(fault.ReasonOf(err)):
		return false, string(fault.ReasonOf(err)), err.Error()
	case isMissing && p.hadClaims():
		return false, ReasonClaimLost, fmt.Sprintf("claim %s was deleted, and its data with it unless its volume is retained: the sandbox's next Pod gets a new, empty one", missing)
	case isMissing:
		return false, ReasonClaimMissing, fmt.Sprintf("claim %s is not there yet", missing)
	}
	if name, is := first(func(c Claim) bool { return c.Deleting }); is {
		return false, ReasonClaimTerminating, fmt.Sprintf(
			"claim %s is being deleted: it goes with its data when the Pod ends, unless its volume is retained; copy what is needed before, the next Pod gets a new, empty one", name)
	}
	if name, is := first(func(c Claim) bool { return c.Phase == corev1.ClaimLost }); is {
		return false, ReasonClaimVolumeLost, fmt.Sprintf("the PersistentVolume of claim %s is gone, and its data with it: delete the claim for the next Pod to get a new, empty one", name)
	}
	if name, is := first(func(c Claim) bool { return c.Phase != corev1.ClaimBound }); is {
		return false, ReasonClaimPending, fmt.Sprintf("claim %s is not bound yet; its Events say why", name)
	}
	return true, ReasonClaimsBound, "every claim is bound"
}

// hadClaims says whether all claims were there once, which the condition tells.
func (p *pass) hadClaims() bool {
	c := meta.FindStatusCondition(p.a.status.Conditions, v1alpha1.ConditionVolumeClaimsBound)
	if c == nil {
		return false
	}
	switch c.Reason {
	case ReasonClaimMissing, string(fault.ClaimNameTaken), string(fault.ClaimRefused):
		return false
	}
	return true
}

// isClaim says whether a reason is one of Claims.
func isClaim(reason fault.Reason) bool {
	switch reason {
	case fault.ClaimNameTaken, fault.ClaimRefused, fault.ClaimTerminating:
		return true
	}
	return false
}

// orderClaims has the claims put right that are not as they have to be: that outlive the sandbox although they should not,
// or the other way round, or that are gone. What a Pod runs on is not replaced under it. It says whether there are any.
func (p *pass) orderClaims(pod *Pod) bool {
	keep := p.sb.Spec.PersistentVolumeClaimRetentionPolicy.Deleted() != v1alpha1.RetentionDelete
	for _, c := range p.claims {
		switch {
		case c.Phase == "" && !pod.Deleting && !pod.Running && pod.Phase == corev1.PodPending,
			c.Phase != "" && !c.Deleting && !c.Adopted && c.Kept != keep:
			p.orderOfPod(verbEnsureClaims, p.ensureClaims(p.sb))
			return true
		}
	}
	return false
}

// ensureClaims makes a sandbox's claims, and tells of them.
func (p *pass) ensureClaims(sb *v1alpha1.Sandbox) func(context.Context) error {
	s := p.Scheduler
	return func(ctx context.Context) error {
		if len(sb.Spec.VolumeClaimTemplates) == 0 {
			return nil
		}
		if s.Claims == nil {
			return fault.New(errdefs.ErrFailedPrecondition, fault.PodsUnavailable, "sandbox %s/%s has volumeClaimTemplates, and there are no claims without Kubernetes", sb.Namespace, sb.Name)
		}
		made, err := s.Claims.Ensure(ctx, sb)
		for _, name := range made {
			s.event(sb, EventNormal, "VolumeClaimCreated", "claim "+name+" is made from volumeClaimTemplates")
		}
		return err
	}
}

// releaseClaims has the claims outlive the sandbox or not, before it goes, and says whether that is done.
func (p *pass) releaseClaims() bool {
	policy := p.sb.Spec.PersistentVolumeClaimRetentionPolicy.Deleted()
	if !p.hasClaims() || p.a.settled == policy {
		return true
	}
	if p.a.life == nil && !p.waits() {
		sb := p.sb
		op := &operation{verb: verbSettleClaims, id: newOperationID(), settles: policy}
		p.a.life = op
		p.begin(op, podTimeout, func(ctx context.Context, _ *agentv1.Command) result { return result{err: p.Claims.Settle(ctx, sb)} })
	}
	return false
}
