package scheduler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// release takes our finalizer off. The sandbox goes, unless somebody else holds it.
func (p *pass) release(ctx context.Context) error {
	return failpoint.Step(finalizerSteps, "release", func() error {
		return p.updateSpec(ctx, func(o *v1alpha1.Sandbox) error {
			if now := o.Spec.PersistentVolumeClaimRetentionPolicy.Deleted(); p.hasClaims() && now != p.a.settled {
				return fmt.Errorf("its retention policy was changed to %s just now, which its claims have to follow first: %w", now, errdefs.ErrConflict)
			}
			o.Finalizers = slices.DeleteFunc(o.Finalizers, func(f string) bool { return f == v1alpha1.FinalizerVolumes })
			return nil
		})
	})
}

// deleting has the agent remove everything, then lets the sandbox go.
func (p *pass) deleting() {
	a := p.a
	a.status.Phase, a.status.Reason, a.status.Message = v1alpha1.SandboxTerminating, "", ""
	p.stage = stageIdle
	a.cancelVolumes(errSandboxGone)
	if !slices.Contains(p.sb.Finalizers, v1alpha1.FinalizerVolumes) {
		return
	}
	if a.status.Node == "" || a.gone || p.Agents.Dead(a.status.Node) {
		p.finalize = true
		return
	}
	if a.life != nil && a.life.verb != verbDelete {
		a.life.cancel(errSandboxGone)
		return
	}
	if a.life != nil || !p.agent.connected || p.waits() {
		if a.lifeErr != nil {
			a.status.Reason, a.status.Message = string(fault.ReasonOf(a.lifeErr)), a.lifeErr.Error()
		}
		return
	}
	p.order(verbDelete)
}

// waits says whether the next command about the sandbox as a whole has to wait after a failure.
func (p *pass) waits() bool {
	if p.sb.Generation != p.a.lifeGeneration {
		return false // the spec changed: that may have been the cause
	}
	if p.now.Before(p.a.lifeRetry.due) {
		p.lookAt(p.a.lifeRetry.due)
		return true
	}
	return false
}

// pausing stops the process and has the agent detach everything.
func (p *pass) pausing() {
	stopped := p.state == nil || p.state.GetPhase() == stateStopped &&
		!slices.ContainsFunc(p.state.GetVolumes(), func(m *agentv1.MountRecord) bool { return m.GetPhase() == recordMounted })
	if stopped && p.a.life == nil {
		p.paused()
		return
	}
	p.stage = stageIdle
	p.a.cancelVolumes(errPausing)
	if p.a.life != nil {
		if p.a.life.verb != verbStop {
			p.a.life.cancel(errPausing)
		}
		return
	}
	if !p.waits() {
		p.order(verbStop)
	}
}

func (p *pass) paused() {
	st := &p.a.status
	if p.sb.Status.Phase != v1alpha1.SandboxPaused { // not st, which a look at the Pod that is not there made Pending
		p.log("paused")
		p.event(p.sb, EventNormal, "Paused", "nothing of it runs; its claims and the volumes in its spec are kept")
	}
	st.Phase, st.Reason, st.Message = v1alpha1.SandboxPaused, "", ""
	p.a.lifeErr, p.a.lifeRetry = nil, retry{}
	p.atRest = true
}

// bringUp takes the sandbox towards a running process: created, volumes attached, started.
func (p *pass) bringUp() {
	st := &p.a.status
	if p.stage == stageRunning || p.state.GetPhase() == stateRestarting {
		p.a.endedSince = time.Time{}
		p.running()
		return
	}
	if st.Phase == v1alpha1.SandboxPaused {
		st.Phase = v1alpha1.SandboxPending // it is resumed, and says from here on what keeps it
	}
	if p.stage == stageBringUp {
		if p.late() {
			return
		}
		if st.Phase == v1alpha1.SandboxRunning || st.Phase == v1alpha1.SandboxLost {
			st.Phase, st.Reason, st.Message = v1alpha1.SandboxPending, "", ""
		}
		return
	}
	if phase, reason := p.outcome(); phase != "" {
		st.Phase, st.Reason, st.Message = phase, reason, ""
		if phase != v1alpha1.SandboxLost {
			st.Message = p.state.GetMessage()
			p.registry.unplace(p.a.uid)
			p.retryUnplaced()
			p.event(p.sb, EventNormal, string(phase), "the process ended")
		}
		p.atRest = true
		return
	}
	if p.a.life != nil {
		return
	}
	if p.ran() && p.state != nil {
		// Its own agent restarts it, or says that it does not.
		if p.a.endedSince.IsZero() {
			p.a.endedSince = p.now
		}
		if due := p.a.endedSince.Add(restartGrace); p.now.Before(due) {
			p.lookAt(due)
			return
		}
	}
	if !p.waits() {
		p.order(verbCreate)
	}
}

func (p *pass) running() {
	st := &p.a.status
	p.a.lifeErr, p.a.lifeRetry, p.a.refused = nil, retry{}, nil
	if st.Phase != v1alpha1.SandboxRunning {
		p.log("running", "node", st.Node)
		p.event(p.sb, EventNormal, "Started", "the process runs")
	}
	st.Phase, st.Reason, st.Message = v1alpha1.SandboxRunning, "", ""
	if p.state.GetPhase() != stateRestarting {
		return
	}
	st.Reason, st.Message = stateRestarting, p.state.GetMessage()
	if reason := p.state.GetReason(); st.Message != "" && reason == strings.ToUpper(reason) {
		// The restart itself fails, for a volume or whatever. The reasons of an exit are in CamelCase.
		st.Phase, st.Reason = v1alpha1.SandboxPending, reason
		return
	}
	for _, m := range p.state.GetVolumes() {
		if m.GetPhase() == recordFailed {
			st.Phase, st.Reason, st.Message = v1alpha1.SandboxPending, m.GetReason(), m.GetTarget()+": "+m.GetMessage()
			return
		}
	}
	if st.Message == "" && p.state.ExitCode != nil {
		st.Message = fmt.Sprintf("the process ended with exit code %d and is started again; its log may say why", p.state.GetExitCode())
	}
}

// ran says whether the process that is not there any more was started after what status last saw.
func (p *pass) ran() bool {
	st := &p.a.status
	if st.Phase == v1alpha1.SandboxRunning || st.Phase == v1alpha1.SandboxLost {
		return true
	}
	started := p.state.GetStartedAt()
	// metav1.Time has whole seconds.
	return started != nil && (st.StartTime == nil || started.AsTime().Truncate(time.Second).After(st.StartTime.Time))
}

// outcome is the phase, and its reason, of a sandbox whose process ended and is not to be started again;
// empty when it is.
func (p *pass) outcome() (v1alpha1.SandboxPhase, string) {
	if !p.ran() {
		return "", ""
	}
	policy := p.sb.Spec.RestartPolicy
	known := p.state != nil && p.state.ExitCode != nil
	switch {
	case policy == v1alpha1.RestartNever && !known:
		return v1alpha1.SandboxLost, "ContainerLost"
	case policy == v1alpha1.RestartNever && p.state.GetExitCode() != 0:
		return v1alpha1.SandboxFailed, "ExitCode"
	case policy == v1alpha1.RestartNever, policy == v1alpha1.RestartOnFailure && known && p.state.GetExitCode() == 0:
		return v1alpha1.SandboxSucceeded, "Completed"
	}
	return "", ""
}

// advance starts the process once all its volumes are there.
func (p *pass) advance() {
	if p.stage != stageBringUp || p.a.life != nil || podBacked(p.sb) {
		return
	}
	for _, e := range p.entries {
		if v := p.a.volumes[e.Target]; !v.lets(e) {
			return
		}
	}
	if !p.waits() {
		p.order(verbStart)
	}
}

// lets says whether a volume lets the process start.
func (v *volumeState) lets(e *entry) bool {
	switch {
	case e.Detach != nil:
		return true // on its way out
	case v == nil || v.op != nil || v.row == nil || v.row.EntryHash != e.hash:
		return false
	case v.row.Phase == v1alpha1.VolumeMounted:
		return true
	}
	return v.row.Phase == v1alpha1.VolumeFailed && isGate(v.row.Reason)
}

// order sends a command about the sandbox as a whole.
func (p *pass) order(v verb) {
	if v == p.a.done && p.late() {
		return
	}
	op := &operation{verb: v, id: newOperationID()}
	p.a.life = op
	sb, client := p.sb, p.agent.Client
	create := p.workload.createRequest(sb, p.key)
	timeout := stopTimeout
	if v == verbCreate {
		timeout = createTimeout
	}
	p.begin(op, timeout, func(ctx context.Context, command *agentv1.Command) result {
		var r result
		switch v {
		case verbCreate:
			create.Command = command
			r.state, r.err = client.CreateSandbox(ctx, create)
		case verbStart:
			r.state, r.err = client.StartSandbox(ctx, &agentv1.StartSandboxRequest{Command: command})
		case verbStop:
			r.state, r.err = client.StopSandbox(ctx, &agentv1.StopSandboxRequest{Command: command})
		case verbDelete:
			_, r.err = client.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Command: command})
		}
		return r
	})
}

// late says whether the inventory may not have told yet what the last command did.
func (p *pass) late() bool {
	if p.now.Before(p.a.doneUntil) {
		p.lookAt(p.a.doneUntil)
		return true
	}
	return false
}

func (p *pass) lifeFailed(r result) {
	a := p.a
	if errors.Is(r.err, errSandboxGone) || errors.Is(r.err, errPausing) {
		return // abandoned by us
	}
	a.lifeErr, a.lifeGeneration = r.err, r.op.generation
	a.lifeRetry.failed(p.now)
	p.Logger.Warn("a command about the sandbox failed", "command", r.op.verb, "sandbox", a.key.String(), "tenant", p.sb.Spec.TenantID,
		"node", r.op.node, "operationId", r.op.id, "reason", fault.ReasonOf(r.err), "error", r.err)
	p.event(p.sb, EventWarning, string(fault.ReasonOf(r.err)), r.err.Error())
	if r.op.verb == verbCreate && fault.ReasonOf(r.err) == fault.NoCapacity && p.registry.state(r.op.node, a.uid) == nil && p.runtime != nil {
		p.replace(r.op.node)
	}
	if p.sb.DeletionTimestamp == nil && !isOver(a.status.Phase) && !p.sb.Spec.Paused {
		a.status.Phase = v1alpha1.SandboxPending
	}
}
