package scheduler

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// The phases of an agent's MountRecord.
const (
	recordMounted   = "Mounted"
	recordDetaching = "Detaching"
	recordFailed    = "Failed"
)

// VolumeManager makes a sandbox's volumes what its spec says: it compares the spec's entries with what the
// node really has, orders one command for each target that differs, and turns answers into rows of status.
// There is one for each sub-group.
type VolumeManager struct {
	// runtime is nil for sandboxes whose group is gone.
	runtime *SSGRuntime

	mu    sync.Mutex // guards usage
	usage map[string]DomainUsage
}

// DomainUsage is what the sandboxes of one sub-group have mounted in one topology domain.
type DomainUsage struct {
	Volumes int
	// Bytes adds up the sizes of the volumes that are filesystems of their own.
	Bytes int64
}

func newVolumeManager(runtime *SSGRuntime) *VolumeManager {
	return &VolumeManager{runtime: runtime, usage: map[string]DomainUsage{}}
}

// Usage is how the sub-group's mounted volumes spread over the topology domains; "" is for nodes without one.
func (m *VolumeManager) Usage() map[string]DomainUsage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.usage)
}

func (m *VolumeManager) use(domain string, volumes int, bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	u := m.usage[domain]
	u.Volumes += volumes
	u.Bytes += bytes
	if u == (DomainUsage{}) {
		delete(m.usage, domain)
		return
	}
	m.usage[domain] = u
}

// plan takes every target of a sandbox a step further: those of the spec, those of the rows, and those that
// the node has.
func (m *VolumeManager) plan(p *pass) {
	want := make(map[string]*entry, len(p.entries))
	for _, e := range p.entries {
		want[e.Target] = e
		p.a.volume(e.Target)
	}
	have := make(map[string]*agentv1.MountRecord, len(p.entries))
	for _, r := range p.state.GetVolumes() {
		// What is left of a lazy detach may lie beside the volume that came after it.
		if have[r.GetTarget()] == nil || !leaving(r) {
			have[r.GetTarget()] = r
		}
		p.a.volume(r.GetTarget())
	}
	if p.sb.DeletionTimestamp != nil {
		return
	}
	for target, v := range p.a.volumes {
		e := want[target]
		switch {
		case v.op != nil:
			m.watch(p, v, e)
		case v.before != nil || v.after != nil:
			// its result is not in the spec yet
		case e == nil:
			m.planGone(p, target, v, have[target])
		case e.Detach != nil:
			m.planDetach(p, v, e)
		default:
			m.planAttach(p, v, e, have[target])
		}
	}
}

// watch abandons a command that is no longer wanted, and shows one that takes long.
func (m *VolumeManager) watch(p *pass, v *volumeState, e *entry) {
	if v.op.verb == verbAttach && (e == nil || e.Detach != nil || e.hash != v.op.entry.hash) {
		v.op.cancel(errNotWanted)
	}
	if due := v.op.started.Add(slowAfter); p.now.Before(due) {
		p.lookAt(due)
		return
	}
	switch {
	case v.op.verb == verbAttach && (v.row == nil || v.row.Phase != v1alpha1.VolumeMounted || v.row.EntryHash != v.op.entry.hash):
		row := m.rowFor(v, v.op.entry)
		row.OperationID = v.op.id
		m.setPhase(p, v, row, v1alpha1.VolumeAttaching)
	case v.op.verb == verbDetach && v.row != nil && !v.retained:
		row := *v.row
		row.OperationID = v.op.id
		m.setPhase(p, v, &row, v1alpha1.VolumeDetaching)
	}
}

// rowFor is a row for an entry: the one it has, if that speaks of this entry, or a new one.
func (m *VolumeManager) rowFor(v *volumeState, e *entry) *v1alpha1.VolumeStatus {
	row := e.row()
	if v.row != nil && v.row.EntryHash == e.hash && !v.retained {
		row = *v.row
		row.ForceMount, row.OnFailure = e.ForceMount, e.OnFailure
	}
	v.retained = false
	return &row
}

// setPhase makes row the target's row in a phase, and notes since when, unless it was in that phase before.
func (m *VolumeManager) setPhase(p *pass, v *volumeState, row *v1alpha1.VolumeStatus, phase v1alpha1.VolumePhase) {
	if v.row == nil || v.row.Phase != phase || v.row.EntryHash != row.EntryHash {
		row.Since = seconds(p.now)
		row.ObservedGeneration = p.sb.Generation
	}
	row.Phase = phase
	v.row = row
}

// planAttach deals with an entry that is to be mounted.
func (m *VolumeManager) planAttach(p *pass, v *volumeState, e *entry, have *agentv1.MountRecord) {
	v.answered = nil
	if have != nil && have.GetPhase() == recordMounted && have.GetEntryHash() == e.hash {
		v.settleBy = time.Time{}
		m.mounted(p, v, e, have)
		if m.confirmed(p, v) || p.stage != stageRunning {
			return
		}
		m.attach(p, v, e) // it is a no-op if the mount is there
		return
	}
	if p.stage != stageBringUp && p.stage != stageRunning {
		m.cannotAttach(p, v, e)
		return
	}
	current := v.row != nil && v.row.EntryHash == e.hash && !v.retained
	wasMounted := current && v.row.Phase == v1alpha1.VolumeMounted
	if e.kind == v1alpha1.VolumeKindDynamic && !wasMounted {
		if err := m.gate(p); err != nil {
			if !current || v.row.Phase != v1alpha1.VolumeFailed || v.row.Reason != string(fault.ReasonOf(err)) {
				m.failed(p, v, e, err)
			}
			return
		}
	}
	if current && v.row.Phase == v1alpha1.VolumeFailed && !m.due(p, v, e) {
		return
	}
	if have != nil && (have.GetEntryHash() != e.hash || have.GetPhase() == recordDetaching) {
		if have.GetEntryHash() == e.hash && !leaving(have) && m.settles(p, v) {
			return
		}
		m.makeRoom(p, v, e, have)
		return
	}
	v.settleBy = time.Time{}
	if e.invalid != nil {
		m.failed(p, v, e, e.invalid)
		return
	}
	m.attach(p, v, e)
}

// cannotAttach is planAttach where there is no task to attach to, or the node is away.
func (m *VolumeManager) cannotAttach(p *pass, v *volumeState, e *entry) {
	current := v.row != nil && v.row.EntryHash == e.hash && !v.retained
	lost := current && (v.row.Phase == v1alpha1.VolumeMounted || v.row.Phase == v1alpha1.VolumeAttaching)
	switch {
	case p.stage == stageIdle && p.unreachable && !lost && (!current || v.row.Phase == v1alpha1.VolumePending) &&
		p.a.status.Phase == v1alpha1.SandboxRunning:
		m.failed(p, v, e, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable,
			"the agent of node %s cannot be reached: it is tried again when it is back", p.a.status.Node))
	case !current && (p.stage == stageIdle || p.stage == stageHeld && !p.atRest):
		// It will be seen soon; or the answer comes when the node is back.
		if p.a.status.Phase != v1alpha1.SandboxRunning {
			m.setPhase(p, v, m.rowFor(v, e), v1alpha1.VolumePending)
		}
	case !current, lost && (p.atRest || p.a.lifeErr != nil):
		row := m.rowFor(v, e)
		row.Reason, row.Message, row.DetachState, row.Holders, row.Attached = "", "", "", nil, ""
		m.setPhase(p, v, row, v1alpha1.VolumePending)
	}
}

// mounted makes the row say so.
func (m *VolumeManager) mounted(p *pass, v *volumeState, e *entry, have *agentv1.MountRecord) {
	row := m.rowFor(v, e)
	if !(row.Phase == v1alpha1.VolumeMounted && row.DetachState == v1alpha1.DetachBusy) {
		// What a refused detach left in the row stays, for its caller to find.
		row.Reason, row.Message, row.DetachState, row.Holders = "", "", "", nil
		row.RequestID = e.RequestID
		if id := have.GetOperationId(); id != "" {
			row.OperationID = id
		}
	}
	row.Attempts, row.NextRetryTime = 0, nil
	row.LimitEnforcement = v1alpha1.LimitEnforcement(have.GetLimitEnforcement())
	row.CapacityBytes = have.GetCapacityBytes()
	if at := have.GetAttached(); at != "" {
		row.Attached = v1alpha1.AttachTime(at)
	} else if row.Attached == "" {
		row.Attached = v1alpha1.AttachedLive
		if p.stage == stageBringUp {
			row.Attached = v1alpha1.AttachedBeforeStart
		}
	}
	if path := have.GetPath(); path != "" {
		row.Path = v1alpha1.VolumePath(path)
	}
	if r := v.resolved; r != nil {
		row.PVCName, row.PVName, row.PathReason = r.PVCName, r.PVName, r.PathReason
		if r.Path != "" {
			row.Path = r.Path
		}
	}
	row.Topology, row.VolumeDomain, row.SandboxDomain = v.topology.result, v.topology.volume, v.topology.sandbox
	v.over()
	m.setPhase(p, v, row, v1alpha1.VolumeMounted)
}

// confirmed says whether a mount need not be asked for again: the inventory has spoken since the answer that told
// of it, or still may.
func (m *VolumeManager) confirmed(p *pass, v *volumeState) bool {
	switch {
	case v.unsure == 0:
		return true
	case p.registry.heard(p.a.status.Node, p.a.uid) != v.unsure:
		v.unsure = 0
		return true
	case p.now.Before(v.confirmBy):
		p.lookAt(v.confirmBy)
		return true
	}
	return false
}

// gate says whether new dynamic volumes are refused: the group is gone, its gate is off, or one of its agents
// is too old (design, rulings 2 and 13).
func (m *VolumeManager) gate(p *pass) error {
	switch {
	case m.runtime == nil:
		return fault.New(errdefs.ErrFailedPrecondition, fault.GroupNotFound,
			"the sandbox group %s/%s does not exist, so nothing allows dynamic volumes: create it", p.key.Namespace, p.key.Group)
	case !p.set.gate:
		return fault.New(errdefs.ErrFailedPrecondition, fault.FeatureDisabled,
			"dynamic volumes are off in sandbox group %s/%s: set spec.featureGates.dynamicVolumeMount", p.key.Namespace, p.key.Group)
	case p.set.engine.skewed():
		return fault.New(errdefs.ErrFailedPrecondition, fault.VersionSkew,
			"dynamic volumes are off in sub-group %s while a node agent there lacks the capability %q: update it", p.key, CapabilityDynamicVolumes)
	}
	return nil
}

// isGate says whether a reason is one of gate's: it lasts as long as the gate is closed.
func isGate(reason string) bool {
	return slices.Contains([]string{string(fault.FeatureDisabled), string(fault.VersionSkew), string(fault.GroupNotFound)}, reason)
}

// due says whether a failed entry is to be tried again.
func (m *VolumeManager) due(p *pass, v *volumeState, e *entry) bool {
	row := v.row
	switch {
	case e.OnFailure == v1alpha1.OnFailureRemove:
		m.remove(v, e) // it was left half done
		return false
	case isGate(row.Reason), row.ForceMount != e.ForceMount:
		return true
	case row.NextRetryTime == nil:
		return false
	case isAway(row.Reason) && v.failedAt.Before(p.agent.changed):
		return true // the agent is back
	case p.now.Before(v.retry.due):
		p.lookAt(v.retry.due)
		return false
	}
	return true
}

func isAway(reason string) bool {
	return reason == string(fault.AgentUnavailable) || reason == string(fault.AgentRecovering)
}

// makeRoom deals with a target at which the node still has another entry's mount: it has to go first.
func (m *VolumeManager) makeRoom(p *pass, v *volumeState, e *entry, have *agentv1.MountRecord) {
	if row := m.rowFor(v, e); row.Phase != v1alpha1.VolumePending || row.Reason == "" {
		row.Reason = string(fault.TargetInUse)
		row.Message = "the volume that was at this target before is not detached yet"
		row.DetachState = v1alpha1.DetachState(have.GetDetachState())
		m.setPhase(p, v, row, v1alpha1.VolumePending)
	}
	if !leaving(have) {
		m.detach(p, v, have.GetTarget(), nil, have.GetEntryHash())
	}
}

// settles says whether a mount of ours that the inventory shows in the middle of a detach may still turn out to
// stay, as one that was busy does.
func (m *VolumeManager) settles(p *pass, v *volumeState) bool {
	if v.settleBy.IsZero() {
		v.settleBy = p.now.Add(settleAfter)
	}
	if p.now.Before(v.settleBy) {
		p.lookAt(v.settleBy)
		return true
	}
	return false
}

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
	if v.row != nil && v.row.Phase == v1alpha1.VolumeFailed && v.row.OnFailure == v1alpha1.OnFailureRemove {
		v.retained = true
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

// attach orders an entry's mount.
func (m *VolumeManager) attach(p *pass, v *volumeState, e *entry) {
	size := int64(0)
	if e.SizeLimit != "" {
		var err error
		if size, err = volume.ParseSize(e.SizeLimit); err != nil {
			m.failed(p, v, e, err)
			return
		}
	}
	op := &operation{verb: verbAttach, id: v.operationID("attach " + e.hash), target: e.Target, entry: e}
	v.op = op
	request := &agentv1.AttachRequest{
		Workload:       containerWorkload,
		When:           agentv1.When_NOW,
		TenantId:       p.sb.Spec.TenantID,
		Target:         e.Target,
		Mode:           string(e.Mode),
		SubPath:        e.SubPath,
		SizeLimitBytes: size,
		EntryHash:      e.hash,
		Kind:           string(e.kind),
		Policy:         &agentv1.VolumePolicy{DeniedTargets: p.set.policy.DeniedTargets},
	}
	sb, client, node, topology, resolver := p.sb, p.agent.Client, p.a.status.Node, p.set.topology, p.Resolver
	p.begin(op, volumeTimeout, func(ctx context.Context, command *agentv1.Command) result {
		var r result
		switch e.VolumeType {
		case v1alpha1.VolumeTypeLocal:
			request.Source = &agentv1.AttachRequest_Local{Local: &agentv1.LocalSource{Path: e.Source}}
		case v1alpha1.VolumeTypeSnapshot:
			request.Source = &agentv1.AttachRequest_Snapshot{Snapshot: &agentv1.SnapshotSource{Image: e.Source}}
		default:
			resolved, err := resolver.Resolve(ctx, sb, &e.DynamicVolume, node)
			if err != nil {
				r.err = err
				return r
			}
			r.resolved = resolved
			r.topology = compareTopology(topology, resolved.Domains, node, e.ForceMount)
			if r.topology.result == v1alpha1.TopologyMismatch {
				r.err = fault.New(errdefs.ErrFailedPrecondition, fault.CrossTopology,
					"volume %s is in topology domain %s and the sandbox in %s: use a volume of that domain, or set forceMount",
					e.Source, r.topology.volume, r.topology.sandbox)
				return r
			}
			request.VolumeKey = resolved.VolumeKey
			resolved.SetSource(request)
		}
		request.Command = command
		response, err := client.Attach(ctx, request)
		if err != nil {
			r.err = err
			return r
		}
		r.record, r.already = response.GetRecord(), response.GetAlreadyMounted()
		return r
	})
}

var containerWorkload = &agentv1.Workload{Kind: &agentv1.Workload_Container{Container: &agentv1.ContainerWorkload{}}}

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
	client := p.agent.Client
	p.begin(op, volumeTimeout, func(ctx context.Context, command *agentv1.Command) result {
		response, err := client.Detach(ctx, &agentv1.DetachRequest{
			Command:   command,
			Workload:  containerWorkload,
			Target:    target,
			EntryHash: hash,
			Force:     force,
		})
		return result{err: err, detach: response}
	})
}

// absorb takes over how a volume's command ended.
func (m *VolumeManager) absorb(p *pass, r result) {
	v := p.a.volumes[r.op.target]
	if v == nil || v.op != r.op {
		return
	}
	v.op = nil
	if r.op.verb == verbAttach {
		m.attached(p, v, r)
		return
	}
	m.detached(p, v, r)
}

func (m *VolumeManager) attached(p *pass, v *volumeState, r result) {
	e := r.op.entry
	if r.resolved != nil {
		v.topology, v.resolved = r.topology, r.resolved
	} else if r.err == nil {
		v.topology, v.resolved = topologyResult{}, nil
	}
	if r.err != nil {
		switch {
		case errors.Is(r.err, errNotWanted), errors.Is(r.err, errPausing), errors.Is(r.err, errSandboxGone):
			m.log(p, "attach abandoned", &e.DynamicVolume, v, r, nil)
		case m.retryAtOnce(v, r):
			m.log(p, "attach is repeated", &e.DynamicVolume, v, r, r.err)
		default:
			m.failedBy(p, v, e, r)
		}
		return
	}
	record := r.record
	if record.GetPhase() != recordMounted || record.GetEntryHash() != e.hash {
		r.err = fault.New(errdefs.ErrInternal, fault.Internal, "the agent's answer is not about this volume: phase %q, entry %q", record.GetPhase(), record.GetEntryHash())
		m.failedBy(p, v, e, r)
		return
	}
	v.unsure = 0
	if !p.registry.addVolume(r.op.node, p.a.uid, record, r.op.heard) {
		v.unsure, v.confirmBy = p.registry.heard(r.op.node, p.a.uid), p.now.Add(confirmAfter)
	}
	if !r.already {
		p.metrics.observe(record.GetStages())
		if v.topology.result == v1alpha1.TopologyForced {
			p.metrics.crossing.Inc()
			p.Logger.Warn("volume of another topology domain is attached as forceMount is set", m.fields(p, &e.DynamicVolume, v, r)...)
		}
		p.event(p.sb, EventNormal, "VolumeAttached", fmt.Sprintf("%s %s is mounted at %s", e.VolumeType, e.Source, e.Target))
	}
	m.log(p, "attached", &e.DynamicVolume, v, r, nil)
	v.resetRow(e)
}

// resetRow drops what an earlier detach left in the row of an entry that is now attached anew.
func (v *volumeState) resetRow(e *entry) {
	if v.row != nil && v.row.EntryHash == e.hash && v.row.DetachState == v1alpha1.DetachBusy {
		v.row.DetachState = ""
	}
}

// retryAtOnce says whether an error came of the state that the command was made from, which has changed: the
// command is made anew, three times at most.
func (m *VolumeManager) retryAtOnce(v *volumeState, r result) bool {
	if fault.ReasonOf(r.err) != fault.StaleCommand || v.retry.attempts >= 3 {
		return false
	}
	v.retry.attempts++
	return true
}

// isPermanent says that an attach is not tried again before the spec changes. What the agent says of its own
// state is not permanent, whatever its kind.
func isPermanent(err error) bool {
	switch fault.ReasonOf(err) {
	case fault.StaleCommand, fault.SandboxNotFound, fault.SandboxNotRunning, fault.AgentRecovering,
		fault.OperationPending, fault.Busy, fault.Conflict, fault.RateLimited:
		return false
	}
	return fault.IsPermanent(err)
}

// failedBy is failed for an answer.
func (m *VolumeManager) failedBy(p *pass, v *volumeState, e *entry, r result) {
	if r.topology.result == v1alpha1.TopologyMismatch {
		p.Logger.Warn("volume is of another topology domain", m.fields(p, &e.DynamicVolume, v, r)...)
	}
	m.log(p, "cannot be attached", &e.DynamicVolume, v, r, r.err)
	m.failed(p, v, e, r.err)
}

// failed makes the row say why an entry is not mounted, and what happens next (design, ruling 10).
func (m *VolumeManager) failed(p *pass, v *volumeState, e *entry, err error) {
	row := m.rowFor(v, e)
	if row.Phase != v1alpha1.VolumeFailed || row.Reason != string(fault.ReasonOf(err)) {
		p.event(p.sb, EventWarning, string(fault.ReasonOf(err)), e.Target+": "+err.Error())
	}
	row.OperationID = v.operationID("attach " + e.hash)
	v.retry.failed(p.now)
	v.failedAt = p.now
	row.RequestID = e.RequestID
	row.Reason, row.Message = string(fault.ReasonOf(err)), err.Error()
	row.Attempts = v.retry.attempts
	row.NextRetryTime = nil
	row.DetachState, row.Holders, row.Attached = "", nil, ""
	row.Topology, row.VolumeDomain, row.SandboxDomain = v.topology.result, v.topology.volume, v.topology.sandbox
	if !isPermanent(err) && e.OnFailure != v1alpha1.OnFailureRemove && !isGate(row.Reason) {
		next := seconds(v.retry.due.Add(999_999_999)) // the whole second after
		row.NextRetryTime = &next
		p.lookAt(v.retry.due)
	}
	row.ObservedGeneration = p.sb.Generation
	m.setPhase(p, v, row, v1alpha1.VolumeFailed)
	if e.OnFailure == v1alpha1.OnFailureRemove && e.kind == v1alpha1.VolumeKindDynamic {
		m.remove(v, e)
	}
}

// remove has a failed entry taken out of the spec once its row is written.
func (m *VolumeManager) remove(v *volumeState, e *entry) {
	v.after = &specEdit{target: e.Target, hash: e.hash, failed: true}
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
	m.log(p, "is busy", described, v, r, errors.New(message))
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
	if fault.Reason(reason) == fault.StaleCommand && v.retry.attempts <= 3 {
		v.retry.due = p.now
	}
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

// log is the line that every operation on a volume leaves.
func (m *VolumeManager) log(p *pass, message string, d *v1alpha1.DynamicVolume, v *volumeState, r result, err error) {
	fields := m.fields(p, d, v, r)
	if err != nil {
		p.Logger.Warn("volume "+message, append(fields, "reason", fault.ReasonOf(err), "error", err)...)
		return
	}
	p.Logger.Info("volume "+message, append(fields, "took", p.now.Sub(r.op.started))...)
}

func (m *VolumeManager) fields(p *pass, d *v1alpha1.DynamicVolume, v *volumeState, r result) []any {
	return []any{"sandbox", p.a.key.String(), "tenant", p.sb.Spec.TenantID, "volumeType", d.VolumeType, "source", d.Source, "target", d.Target,
		"topology", v.topology.result, "node", r.op.node, "operation", r.op.id}
}
