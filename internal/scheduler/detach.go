package scheduler

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// leaving says that a mount is detached and goes by itself.
func leaving(r *agentv1.MountRecord) bool {
	s := v1alpha1.DetachState(r.GetDetachState())
	return r.GetPhase() == recordDetaching && (s == v1alpha1.DetachLazy || s == v1alpha1.DetachReleasePending)
}

// planDetach deals with an entry whose detach was asked for.
func (m *VolumeManager) planDetach(p *pass, v *volumeState, e *entry) {
	switch {
	case m.isAnswered(p, v, e):
		v.after = &specEdit{target: e.Target, hash: e.hash, detach: e.Detach, clear: true}
	case p.stage == stageAbsent:
		v.before = &specEdit{target: e.Target, hash: e.hash, detach: e.Detach}
		p.lookAt(p.now)
	case p.stage == stageIdle:
		if p.unreachable && v.row != nil {
			row := *v.row
			row.Reason, row.Message = string(fault.AgentUnavailable), "the agent of node "+p.a.status.Node+" cannot be reached"
			m.setPhase(p, v, &row, v1alpha1.VolumeDetaching)
		}
	default:
		m.detach(p, v, e.Target, e, e.hash)
	}
}

// isAnswered says that a detach request was answered with BUSY, and only has to leave the spec: in this
// process, or, by the row, in the one before.
func (m *VolumeManager) isAnswered(p *pass, v *volumeState, e *entry) bool {
	if v.answered != nil {
		return *v.answered == *e.Detach
	}
	row := v.row
	return row != nil && !e.Detach.Force && e.Detach.RequestID != "" && row.Phase == v1alpha1.VolumeMounted &&
		row.DetachState == v1alpha1.DetachBusy && row.RequestID == e.Detach.RequestID && row.ObservedGeneration == p.sb.Generation
}

// planGone deals with a target that the spec does not have.
func (m *VolumeManager) planGone(p *pass, target string, v *volumeState, have *agentv1.MountRecord) {
	v.answered = nil
	if v.row != nil && v.row.Phase == v1alpha1.VolumeFailed && v.row.OnFailure == v1alpha1.OnFailureRemove && !v.row.HasBeenMounted {
		if !v.retained {
			v.retained = true
			v.over()
		}
		if until := v.row.Since.Add(keepFailed); p.now.Before(until) {
			p.lookAt(until)
		} else {
			v.row, v.retained = nil, false
		}
	}
	switch {
	case p.stage == stageIdle:
	case have == nil:
		if !v.retained {
			delete(p.a.volumes, target)
		}
	case leaving(have):
		if v.row != nil && !v.retained {
			row := *v.row
			row.DetachState = v1alpha1.DetachState(have.GetDetachState())
			m.setPhase(p, v, &row, v1alpha1.VolumeDetaching)
		}
	default:
		m.detach(p, v, target, nil, have.GetEntryHash())
	}
}

// detach orders a mount's end. e is the entry that asks for it, nil when there is none.
func (m *VolumeManager) detach(p *pass, v *volumeState, target string, e *entry, hash string) {
	purpose, force := "detach "+hash, false
	if e != nil {
		force = e.Detach.Force
		purpose = fmt.Sprintf("detach %s %v %s", hash, force, e.Detach.RequestID)
	}
	id := v.operationID(purpose)
	if p.now.Before(v.retry.due) {
		p.lookAt(v.retry.due)
		return
	}
	op := &operation{verb: verbDetach, id: id, target: target, entry: e, hash: hash}
	v.op = op
	client, workload := p.agent.Client, p.workloadThere()
	p.begin(op, volumeTimeout, func(ctx context.Context, command *agentv1.Command) result {
		response, err := client.Detach(ctx, &agentv1.DetachRequest{
			Command:   command,
			Workload:  workload,
			Target:    target,
			EntryHash: hash,
			Force:     force,
		})
		return result{err: err, detach: response}
	})
}

func (m *VolumeManager) detached(p *pass, v *volumeState, r result) {
	e := r.op.entry
	described := &v1alpha1.DynamicVolume{Target: r.op.target}
	switch {
	case e != nil:
		described = &e.DynamicVolume
	case v.row != nil && v.row.EntryHash == r.op.hash:
		described.Source, described.VolumeType = v.row.Source, v.row.VolumeType
	}
	answer := r.detach.GetResult()
	switch {
	case r.err != nil:
		m.log(p, "cannot be detached", described, v, r, r.err)
		if v.stale(p, r.err) {
			return
		}
		m.detachFailed(p, v, r, string(fault.ReasonOf(r.err)), r.err.Error(), "")
		return
	case answer == agentv1.DetachResponse_BUSY:
		m.busy(p, v, r, described)
		return
	}
	gone := answer != agentv1.DetachResponse_LAZY && !r.detach.GetReleasePending()
	state := v1alpha1.DetachLazy
	if answer != agentv1.DetachResponse_LAZY {
		state = v1alpha1.DetachReleasePending
	}
	if gone {
		p.registry.dropVolume(r.op.node, p.a.uid, r.op.target)
	} else {
		p.registry.leaveVolume(r.op.node, p.a.uid, &agentv1.MountRecord{
			Target: r.op.target, EntryHash: r.op.hash, OperationId: r.op.id, Phase: recordDetaching, DetachState: string(state),
		}, r.op.heard)
	}
	m.log(p, "detached", described, v, r, nil)
	if answer != agentv1.DetachResponse_ABSENT {
		p.event(p.sb, EventNormal, "VolumeDetached", fmt.Sprintf("%s is detached from %s", described.Source, r.op.target))
	}
	v.over()
	if e == nil {
		return // the next plan finds it gone, or leaving
	}
	edit := &specEdit{target: e.Target, hash: e.hash, detach: e.Detach}
	if gone {
		v.before = edit
		return
	}
	v.after = edit
	row := m.rowFor(v, e)
	row.RequestID, row.OperationID, row.DetachState = e.Detach.RequestID, r.op.id, state
	row.Reason, row.Message, row.Holders = "", "", holdersOf(r.detach)
	row.Attempts, row.NextRetryTime = 0, nil
	row.ObservedGeneration = p.sb.Generation
	m.setPhase(p, v, row, v1alpha1.VolumeDetaching)
}

// busy deals with a mount that is in use. Whoever asked for its detach gets the answer, and it stays; what
// nobody wants any more is tried again.
func (m *VolumeManager) busy(p *pass, v *volumeState, r result, described *v1alpha1.DynamicVolume) {
	holders := holdersOf(r.detach)
	message := busyMessage(r.op.target, holders)
	m.log(p, "is busy", described, v, r, fault.New(errdefs.ErrFailedPrecondition, fault.Busy, "%s", message))
	e := r.op.entry
	if e == nil || e.Detach.Force {
		m.detachFailed(p, v, r, string(fault.Busy), message, v1alpha1.DetachBusy)
		return
	}
	p.event(p.sb, EventWarning, string(fault.Busy), message)
	v.over()
	row := m.rowFor(v, e)
	row.Reason, row.Message, row.Holders, row.DetachState = string(fault.Busy), message, holders, v1alpha1.DetachBusy
	row.RequestID, row.OperationID = e.Detach.RequestID, r.op.id
	row.ObservedGeneration = p.sb.Generation
	m.setPhase(p, v, row, v1alpha1.VolumeMounted)
	v.answered = e.Detach
	v.after = &specEdit{target: e.Target, hash: e.hash, detach: e.Detach, clear: true}
}

// detachFailed has a detach tried again, and the row say why.
func (m *VolumeManager) detachFailed(p *pass, v *volumeState, r result, reason, message string, state v1alpha1.DetachState) {
	v.retry.failed(p.now)
	p.lookAt(v.retry.due)
	if v.retained {
		return
	}
	if v.row == nil {
		if r.op.entry == nil && state == "" {
			return
		}
		// A mount that nobody wants and that does not go: it is shown.
		v.row = &v1alpha1.VolumeStatus{Kind: v1alpha1.VolumeKindDynamic, Target: r.op.target, EntryHash: r.op.hash}
	}
	row := *v.row
	row.Reason, row.Message, row.DetachState, row.Holders = reason, message, state, holdersOf(r.detach)
	row.OperationID, row.Attempts = r.op.id, v.retry.attempts
	next := seconds(v.retry.due.Add(999_999_999))
	row.NextRetryTime = &next
	phase := v1alpha1.VolumeDetaching
	if row.EntryHash != r.op.hash {
		phase = row.Phase // another entry waits for it
	}
	m.setPhase(p, v, &row, phase)
}

func holdersOf(d *agentv1.DetachResponse) []v1alpha1.VolumeHolder {
	var out []v1alpha1.VolumeHolder
	for _, h := range d.GetHolders() {
		out = append(out, v1alpha1.VolumeHolder{PID: h.GetPid(), Command: h.GetCommand(), Kind: h.GetKind()})
	}
	return out
}

func busyMessage(target string, holders []v1alpha1.VolumeHolder) string {
	var names []string
	for _, h := range holders {
		names = append(names, fmt.Sprintf("%s (PID %d, %s)", h.Command, h.PID, h.Kind))
	}
	by := "processes"
	if len(names) > 0 {
		by = strings.Join(names, ", ")
	}
	return fmt.Sprintf("the volume at %s is in use by %s: end them, or detach with force", target, by)
}
