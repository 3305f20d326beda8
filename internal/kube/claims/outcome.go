package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/sets"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// cause is why a claim is where it is. trouble says that something is wrong, and not only under way.
type cause struct {
	reason, message string
	trouble         bool
}

// causeOf is an error as a cause.
func causeOf(err error) cause {
	var f final
	if errors.As(err, &f) {
		err = f.error
	}
	return cause{reason: string(fault.ReasonOf(err)), message: err.Error(), trouble: true}
}

// outstanding says why a taken sandbox is not claimed yet; nil when it is.
func outstanding(claim *agentsv1alpha1.SandboxClaim, sb *v1alpha1.Sandbox) *cause {
	about := about(sb.Name)
	mounted, waits := 0, ""
	for _, m := range claim.Spec.DynamicVolumesMount {
		e := slices.IndexFunc(sb.Spec.DynamicVolumes, func(v v1alpha1.DynamicVolume) bool { return v.Target == m.MountPath })
		if e < 0 {
			return &cause{string(fault.VolumeGone), about + "the volume at " + m.MountPath + " was removed from spec.dynamicVolumes", true}
		}
		r := slices.IndexFunc(sb.Status.Volumes, func(v v1alpha1.VolumeStatus) bool { return v.Target == m.MountPath })
		if r < 0 || sb.Status.Volumes[r].EntryHash != volume.EntryHash(&sb.Spec.DynamicVolumes[e]) {
			continue
		}
		switch row := sb.Status.Volumes[r]; row.Phase {
		case v1alpha1.VolumeMounted:
			mounted++
		case v1alpha1.VolumeAttaching:
			if row.Reason != "" && waits == "" {
				waits = fmt.Sprintf("; PersistentVolume %s at %s: %s", m.PVName, m.MountPath, row.Message)
			}
		case v1alpha1.VolumeFailed:
			return &cause{cmp.Or(row.Reason, "VolumeFailed"), fmt.Sprintf("%sPersistentVolume %s cannot be mounted at %s: %s", about, m.PVName, m.MountPath, row.Message), true}
		}
	}
	all := len(claim.Spec.DynamicVolumesMount)
	switch {
	case sets.Over(sb):
		return &cause{cmp.Or(sb.Status.Reason, string(sb.Status.Phase)), about + "it has ended: " + cmp.Or(sb.Status.Message, string(sb.Status.Phase)), true}
	case claim.Spec.InplaceUpdate != nil && !(updated(sb) && sets.Available(sb)):
		if c := meta.FindStatusCondition(sb.Status.Conditions, v1alpha1.ConditionUpdated); c != nil && c.Status != metav1.ConditionTrue {
			return &cause{c.Reason, about + "inplaceUpdate: " + c.Message, c.Reason == string(fault.PodRefused)}
		}
		return &cause{"Updating", about + "inplaceUpdate is under way", false}
	case sb.Status.Phase == v1alpha1.SandboxRunning && mounted == all && (all > 0 || sets.Available(sb)):
		return nil
	case sb.Status.Phase == v1alpha1.SandboxRunning && mounted < all:
		return &cause{"MountingVolumes", fmt.Sprintf("%s%d of %d volumes are mounted%s", about, mounted, all, waits), false}
	case sb.Status.Reason != "":
		return &cause{sb.Status.Reason, about + cmp.Or(sb.Status.Message, sb.Status.Reason), true}
	}
	return &cause{"StartingSandbox", about + "it is " + cmp.Or(string(sb.Status.Phase), string(v1alpha1.SandboxPending)), false}
}

// updated says whether a sandbox runs with what its template was changed to, as far as its status is of this template.
func updated(sb *v1alpha1.Sandbox) bool {
	c := meta.FindStatusCondition(sb.Status.Conditions, v1alpha1.ConditionUpdated)
	return sb.Status.ObservedGeneration >= sb.Generation && (c == nil || c.Status == metav1.ConditionTrue)
}

// outcome is what the claim's status is to say, and whether something is in the way. obstacle is what kept sandboxes from
// being taken; over says that there is no more time.
func (p *pass) outcome(obstacle error, over bool) (st *agentsv1alpha1.SandboxClaimStatus, trouble bool) {
	var claimed, all []string
	var why *cause
	for _, sb := range p.taken {
		all = append(all, sb.Name)
		c := outstanding(p.claim, sb)
		if c == nil {
			claimed = append(claimed, sb.Name)
		} else if why == nil || c.trouble && !why.trouble {
			why = c
		}
	}
	if obstacle != nil && (why == nil || !why.trouble) && !errdefs.IsConflict(obstacle) {
		c := causeOf(obstacle)
		why = &c
	}
	if why == nil {
		why = &cause{"TakingSandboxes", fmt.Sprintf("%d of %d sandboxes are taken", len(all), p.wanted()), false}
	}
	st = p.claim.Status.DeepCopy()
	if st.StartTime == nil {
		st.StartTime = p.time()
	}
	st.ObservedGeneration = p.claim.Generation
	st.Phase, st.SandboxNames, st.ClaimedReplicas = agentsv1alpha1.ClaimClaiming, all, int32(len(claimed))
	count := fmt.Sprintf("%d of %d sandboxes are claimed", len(claimed), p.wanted())
	isFinalError := errors.As(obstacle, &final{})
	switch {
	case len(claimed) >= p.wanted():
		claimed = claimed[:p.wanted()]
		p.end(st, agentsv1alpha1.ClaimCompleted, claimed)
		p.condition(st, agentsv1alpha1.ClaimClaimed, true, "Claimed", "every sandbox runs, with all volumes")
	case isFinalError && len(p.taken) == 0:
		p.end(st, agentsv1alpha1.ClaimFailed, nil)
		p.condition(st, agentsv1alpha1.ClaimClaimed, false, why.reason, why.message)
	case isFinalError && len(claimed) == len(p.taken):
		// What was taken is whole, and no waiting gets more.
		p.end(st, agentsv1alpha1.ClaimCompleted, claimed)
		p.condition(st, agentsv1alpha1.ClaimClaimed, false, why.reason, count+"; "+why.message)
		p.condition(st, agentsv1alpha1.ClaimPartially, true, why.reason, count+", and there are no more")
	case over && len(claimed) == 0:
		p.end(st, agentsv1alpha1.ClaimFailed, nil)
		p.condition(st, agentsv1alpha1.ClaimClaimed, false, p.lastReason(why), p.lastMessage(why))
	case over:
		p.end(st, agentsv1alpha1.ClaimCompleted, claimed)
		p.condition(st, agentsv1alpha1.ClaimClaimed, false, p.lastReason(why), count+"; "+p.lastMessage(why))
		p.condition(st, agentsv1alpha1.ClaimPartially, true, "ClaimTimeout", count+" in time")
	default:
		p.condition(st, agentsv1alpha1.ClaimClaimed, false, why.reason, count+"; "+why.message)
	}
	if st.Phase == agentsv1alpha1.ClaimCompleted {
		p.setReady(st)
	}
	return st, why.trouble
}

// lastReason and lastMessage tell of a claim whose time is over, by the last trouble that it had: when it is over nothing
// is tried any more, so there may be no new one.
func (p *pass) lastReason(why *cause) string {
	if was := p.lastTrouble(why); was != nil {
		return was.Reason
	}
	return why.reason
}

func (p *pass) lastMessage(why *cause) string {
	message := why.message
	if was := p.lastTrouble(why); was != nil {
		message = was.Message
	}
	return "the time is over (claimTimeout): " + message
}

func (p *pass) lastTrouble(why *cause) *metav1.Condition {
	was := meta.FindStatusCondition(p.claim.Status.Conditions, agentsv1alpha1.ClaimClaimed)
	if was == nil || why.trouble || len(p.taken) > 0 || was.Status == metav1.ConditionTrue {
		return nil
	}
	return was
}

// end makes a phase final.
func (p *pass) end(st *agentsv1alpha1.SandboxClaimStatus, phase agentsv1alpha1.SandboxClaimPhase, names []string) {
	st.Phase, st.SandboxNames, st.ClaimedReplicas, st.CompletionTime = phase, names, int32(len(names)), p.time()
}

func (p *pass) time() *metav1.Time {
	t := metav1.NewTime(p.now.Truncate(time.Second))
	return &t
}

func (p *pass) condition(st *agentsv1alpha1.SandboxClaimStatus, kind string, is bool, reason, message string) {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(&st.Conditions, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: fault.Text(message),
		ObservedGeneration: p.claim.Generation, LastTransitionTime: *p.time()})
}

// tell writes the status, and says in an Event what is new in it.
func (p *pass) tell(ctx context.Context, st *agentsv1alpha1.SandboxClaimStatus) error {
	if equality.Semantic.DeepEqual(&p.claim.Status, st) {
		return nil
	}
	written := false
	steps("status", false)
	_, err := p.Claims.Claims.UpdateStatus(ctx, store.KeyOf(p.claim), store.Preconditions{UID: p.claim.UID}, func(o *agentsv1alpha1.SandboxClaim) error {
		if written = !isFinal(o.Status.Phase); written {
			o.Status = *st
		}
		return nil
	})
	steps("status", true)
	if err != nil || !written {
		if errdefs.IsNotFound(err) {
			return nil
		}
		return err
	}
	if isFinal(st.Phase) {
		p.over(ctx, st)
	}
	now := meta.FindStatusCondition(st.Conditions, agentsv1alpha1.ClaimClaimed)
	was := meta.FindStatusCondition(p.claim.Status.Conditions, agentsv1alpha1.ClaimClaimed)
	switch {
	case st.Phase == agentsv1alpha1.ClaimCompleted && now.Status == metav1.ConditionTrue:
		p.Events.About(p.claim, corev1.EventTypeNormal, "Completed", "claimed "+strings.Join(st.SandboxNames, ", "))
	case isFinal(st.Phase):
		p.Events.About(p.claim, corev1.EventTypeWarning, now.Reason, string(st.Phase)+": "+now.Message)
	case isTrouble(now.Reason) && (was == nil || was.Reason != now.Reason || was.Message != now.Message):
		p.Events.About(p.claim, corev1.EventTypeWarning, now.Reason, now.Message)
	}
	return nil
}

// over tells operators of a claim that has just come to its end: Events are for users, and are soon gone.
func (p *pass) over(ctx context.Context, st *agentsv1alpha1.SandboxClaimStatus) {
	end := p.Clock.Now()
	took := end.Sub(p.firstSeen(p.claim, end))
	p.metrics.over(st, took)
	c, level := meta.FindStatusCondition(st.Conditions, agentsv1alpha1.ClaimClaimed), slog.LevelInfo
	if c.Status != metav1.ConditionTrue {
		level = slog.LevelWarn
	}
	p.Log.Log(ctx, level, "a claim is over", "claim", store.KeyOf(p.claim).String(), "set", p.claim.Spec.TemplateName, "phase", st.Phase,
		"sandboxes", st.SandboxNames, "reason", c.Reason, "message", c.Message, "took", took)
}

// isTrouble tells reasons of what is wrong from those of what is under way.
func isTrouble(reason string) bool {
	return !slices.Contains([]string{"MountingVolumes", "StartingSandbox", "TakingSandboxes", "Updating", "Outdated", "NotSeen", "Resizing", "Restarting", "NoPod"}, reason)
}

// afterwards cleans up behind a claim that is over: what it was not given goes, and the claim when its time has come.
func (p *pass) afterwards(ctx context.Context) (again time.Duration, err error) {
	var errs []error
	for _, sb := range p.taken {
		if slices.Contains(p.claim.Status.SandboxNames, sb.Name) {
			continue
		}
		steps("delete", false)
		err := p.Sandboxes.Delete(ctx, store.KeyOf(sb), store.Preconditions{UID: sb.UID})
		steps("delete", true)
		if err != nil && !errdefs.IsNotFound(err) {
			errs = append(errs, err)
			continue
		}
		p.Log.Info("deleted a sandbox that its claim was not given", "claim", store.KeyOf(p.claim).String(), "sandbox", sb.Name)
		p.Events.About(p.claim, corev1.EventTypeNormal, "SandboxDeleted", "deleted sandbox "+sb.Name+", which was taken and not claimed in time")
	}
	if err := errors.Join(errs...); err != nil {
		return 0, err
	}
	ttl, ended := p.claim.Spec.TTLAfterCompleted, p.claim.Status.CompletionTime
	if ttl == nil || ttl.Duration < 0 || ended == nil {
		return 0, nil
	}
	if left := ended.Add(ttl.Duration).Sub(p.now); left > 0 {
		return left, nil
	}
	// By us, and before it goes: the garbage collector leaves those alone that it has heard of, and one that it has not it deletes.
	for _, sb := range p.taken {
		if err := p.orphan(ctx, sb); err != nil {
			return 0, err
		}
	}
	steps("expire", false)
	err = p.Claims.Claims.DeleteClaim(ctx, store.KeyOf(p.claim), store.Preconditions{UID: p.claim.UID})
	steps("expire", true)
	if errdefs.IsNotFound(err) {
		err = nil
	}
	return 0, err
}

// orphan makes a sandbox nobody's that was the claim's.
func (p *pass) orphan(ctx context.Context, sb *v1alpha1.Sandbox) error {
	steps("orphan", false)
	_, err := p.Sandboxes.UpdateSpec(ctx, store.KeyOf(sb), store.Preconditions{UID: sb.UID}, func(o *v1alpha1.Sandbox) error {
		o.OwnerReferences = slices.DeleteFunc(o.OwnerReferences, func(r metav1.OwnerReference) bool { return r.UID == p.claim.UID })
		return nil
	})
	steps("orphan", true)
	if err != nil && !errdefs.IsNotFound(err) {
		return p.Fresh.Wrote(err)
	}
	return nil
}

// owner is the UID of a sandbox's controller.
func owner(sb *v1alpha1.Sandbox) types.UID {
	if ref := metav1.GetControllerOf(sb); ref != nil {
		return ref.UID
	}
	return ""
}
