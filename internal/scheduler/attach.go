package scheduler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// planAttach deals with an entry that is to be mounted.
func (m *VolumeManager) planAttach(p *pass, v *volumeState, e *entry, have *agentv1.MountRecord) {
	v.answered = nil
	if have != nil && have.GetPhase() == recordMounted && have.GetEntryHash() == e.hash {
		v.settleBy = time.Time{}
		if have.GetReason() != "" {
			m.offline(p, v, e, have)
			return
		}
		m.tellMounted(p, v, e)
		m.mounted(p, v, e, have)
		if m.confirmed(p, v) || p.stage != stageRunning {
			return
		}
		m.attach(p, v, e) // it is a no-op if the mount is there
		return
	}
	if isBegun(have, v.answeredID) && p.now.Before(v.confirmBy) {
		p.lookAt(v.confirmBy) // the inventory is behind the answer
		return
	}
	current := v.row != nil && v.row.EntryHash == e.hash && !v.retained
	if p.off != nil {
		if !current || v.row.Phase != v1alpha1.VolumeMounted {
			m.refuse(p, v, e, p.off)
		}
		return
	}
	if p.stage != stageBringUp && p.stage != stageRunning {
		m.cannotAttach(p, v, e)
		return
	}
	if have != nil && have.GetPhase() == recordPrepared && have.GetEntryHash() == e.hash {
		m.prepared(p, v, e)
		return
	}
	wasMounted := current && v.row.Phase == v1alpha1.VolumeMounted
	if e.kind == v1alpha1.VolumeKindDynamic && !wasMounted {
		if err := m.gate(p); err != nil {
			m.refuse(p, v, e, err)
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

// refuse is failed for what lasts until something else changes: it is said once.
func (m *VolumeManager) refuse(p *pass, v *volumeState, e *entry, err error) {
	current := v.row != nil && v.row.EntryHash == e.hash && !v.retained
	if !current || v.row.Phase != v1alpha1.VolumeFailed || v.row.Reason != string(fault.ReasonOf(err)) {
		m.failed(p, v, e, err)
	}
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
		m.pend(p, v, *m.rowFor(v, e))
	}
}

// pend makes the row say that the volume is to be attached once there is a task.
func (m *VolumeManager) pend(p *pass, v *volumeState, row v1alpha1.VolumeStatus) {
	row.Reason, row.Message, row.DetachState, row.Holders, row.Attached = "", "", "", nil, ""
	m.setPhase(p, v, &row, v1alpha1.VolumePending)
}

// offline makes the row say that what is mounted is of no use any more. Nothing is done about it: it may come back, and whether
// a process can be without it is for its user to say.
func (m *VolumeManager) offline(p *pass, v *volumeState, e *entry, have *agentv1.MountRecord) {
	row := m.rowFor(v, e)
	if row.Phase == v1alpha1.VolumeFailed && row.Reason == have.GetReason() && row.ObservedGeneration == p.sb.Generation {
		return
	}
	message := have.GetMessage() + ": once its storage works again, detach it (with force if it is in use) and attach it anew"
	if row.Phase != v1alpha1.VolumeFailed || row.Reason != have.GetReason() {
		p.event(p.sb, EventWarning, have.GetReason(), e.Target+": "+message)
		p.Logger.Warn("volume is offline", "sandbox", p.a.key.String(), "target", e.Target, "source", e.Source, "node", p.a.status.Node, "error", have.GetMessage())
	}
	row.Reason, row.Message = have.GetReason(), message
	row.DetachState, row.Holders = "", nil
	row.Attempts, row.NextRetryTime = 0, nil
	row.ObservedGeneration = p.sb.Generation
	m.setPhase(p, v, row, v1alpha1.VolumeFailed)
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
	row.HasBeenMounted = true
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
// is too old (design, rulings 2 and 13). A sandbox of a SandboxSet has the set's gate with it, its runtime csi.
func (m *VolumeManager) gate(p *pass) error {
	switch set := p.sb.Labels[agentsv1alpha1.LabelSandboxSet]; {
	case slices.Contains(p.sb.Spec.Runtimes, v1alpha1.RuntimeCSI):
		return nil
	case set != "" && podBacked(p.sb):
		return fault.New(errdefs.ErrFailedPrecondition, fault.FeatureDisabled,
			"dynamic volumes are off in SandboxSet %s/%s: add the runtime csi to its spec.runtimes, which counts for new sandboxes", p.key.Namespace, set)
	case m.runtime == nil:
		return fault.New(errdefs.ErrFailedPrecondition, fault.GroupNotFound,
			"the sandbox group %s/%s does not exist, so nothing allows dynamic volumes: create it", p.key.Namespace, p.key.Group)
	case !p.set.gate:
		return fault.New(errdefs.ErrFailedPrecondition, fault.FeatureDisabled,
			"dynamic volumes are off in sandbox group %s/%s: set spec.featureGates.dynamicVolumeMount", p.key.Namespace, p.key.Group)
	case podBacked(p.sb): // its own node's agent is what counts (pass.off)
	case p.set.engine.skewed():
		return fault.New(errdefs.ErrFailedPrecondition, fault.VersionSkew,
			"dynamic volumes are off in sub-group %s while a node agent there lacks the capability %q: update it", p.key, CapabilityDynamicVolumes)
	}
	return nil
}

// isGate says whether a reason is one of gate's or of pass.off: it lasts as long as the gate is closed.
func isGate(reason string) bool {
	return slices.Contains([]string{string(fault.FeatureDisabled), string(fault.VersionSkew), string(fault.GroupNotFound), string(fault.NoAgent)}, reason)
}

// due says whether a failed entry is to be tried again.
func (m *VolumeManager) due(p *pass, v *volumeState, e *entry) bool {
	row := v.row
	switch {
	case v.removable(e):
		m.remove(v, e) // it was left half done
		return false
	case isGate(row.Reason), row.ForceMount != e.ForceMount:
	case row.NextRetryTime == nil && !m.fits(p, row, e):
		return false
	case isAway(row.Reason) && v.failedAt.Before(p.agent.changed):
		// The agent is back.
	case (isWaiting(fault.Reason(row.Reason)) || isAnchor(fault.Reason(row.Reason))) && v.failedAt.Before(p.a.movedAt()):
		// What was waited for may be there.
	case p.now.Before(v.retry.due):
		p.lookAt(v.retry.due)
		return false
	}
	v.retry.due = time.Time{}
	return true
}

// fits says whether what was refused for where volume and node are would not be by now: a label of either changed.
func (m *VolumeManager) fits(p *pass, row *v1alpha1.VolumeStatus, e *entry) bool {
	if reason := fault.Reason(row.Reason); reason != fault.CrossTopology && reason != fault.UnreachableVolume || p.Resolver == nil {
		return false
	}
	node := p.a.status.Node
	at, err := p.Resolver.Locate(wish(p.sb, e, p.set.topology))
	return err == nil && at.Reach.check(node, p.agent.Labels) == nil &&
		compareTopology(p.set.topology, at.Domains, node, e.ForceMount).result != v1alpha1.TopologyMismatch
}

// isAnchor says of a reason that it ends with a change of what a volume needs on its node (Keeper.Anchor).
func isAnchor(reason fault.Reason) bool {
	return reason == fault.AnchorPending || reason == fault.AnchorLost
}

// isUnusable says of an agent's reason that what there is of a volume on the node is no good (ResolvedVolume.Unusable).
func isUnusable(reason fault.Reason) bool {
	return reason == fault.AnchorLost || reason == fault.DriverFailed || reason == fault.VolumeOffline
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
	id := v.operationID("attach " + e.hash)
	if p.now.Before(v.retry.due) {
		p.lookAt(v.retry.due)
		return
	}
	op := &operation{verb: verbAttach, id: id, target: e.Target, entry: e}
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
	if p.pod != nil {
		p.aimAtPod(op, v, request)
	}
	s, sb, key, client, node, labels, topology, resolver := p.Scheduler, p.sb, p.a.key, p.agent.Client, p.a.status.Node, p.agent.Labels, p.set.topology, p.Resolver
	p.begin(op, volumeTimeout, func(ctx context.Context, command *agentv1.Command) result {
		var r result
		switch e.VolumeType {
		case v1alpha1.VolumeTypeLocal:
			request.Source = &agentv1.AttachRequest_Local{Local: &agentv1.LocalSource{Path: e.Source}}
		case v1alpha1.VolumeTypeSnapshot:
			request.Source = &agentv1.AttachRequest_Snapshot{Snapshot: &agentv1.SnapshotSource{Image: e.Source}}
		default:
			w := wish(sb, e, topology)
			w.Waits = func(why error) {
				op.waits.Store(&waiting{why, s.Clock.Now()})
				s.queue.add(item{key: key})
			}
			resolved, err := resolver.Resolve(ctx, w, node)
			if op.waits.Load() != nil {
				op.waits.Store(&waiting{nil, s.Clock.Now()})
				s.queue.add(item{key: key})
			}
			if err == nil {
				err = resolved.Reach.check(node, labels)
			}
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
			if r.err = s.hold(ctx, sb, op, resolved); r.err != nil {
				return r
			}
			request.VolumeKey = resolved.VolumeKey
			resolved.SetSource(request)
		}
		request.Command = command
		response, err := client.Attach(ctx, request)
		if err != nil {
			r.err = err
			if reason := fault.ReasonOf(fault.FromGRPC(err)); r.resolved != nil && r.resolved.Unusable != nil && isUnusable(reason) {
				r.resolved.Unusable(ctx)
			}
			return r
		}
		r.record, r.already = response.GetRecord(), response.GetAlreadyMounted()
		return r
	})
}

func wish(sb *v1alpha1.Sandbox, e *entry, topology *TopologyDomainCache) Wish {
	w := Wish{Sandbox: sb, Volume: &e.DynamicVolume, TopologyKey: v1alpha1.DefaultTopologyKey}
	if topology != nil {
		w.TopologyKey = topology.Key()
	}
	return w
}

var containerWorkload = &agentv1.Workload{Kind: &agentv1.Workload_Container{Container: &agentv1.ContainerWorkload{}}}

func (m *VolumeManager) attached(p *pass, v *volumeState, r result) {
	e := r.op.entry
	if r.resolved != nil {
		v.topology, v.resolved = r.topology, r.resolved
	} else if r.err == nil {
		v.topology, v.resolved = topologyResult{}, nil
	}
	if r.err != nil {
		p.a.unsettle(r.op.hold)
		switch {
		case errors.Is(r.err, errNotWanted), errors.Is(r.err, errPausing), errors.Is(r.err, errSandboxGone), errors.Is(r.err, errNodeDead):
			m.log(p, "attach abandoned", &e.DynamicVolume, v, r, nil)
		case r.op.pod != nil && r.op.now && fault.ReasonOf(r.err) == fault.SandboxNotRunning:
			v.atCreate = true // it is attached when the container is created again
			p.lookAt(p.now)
		case r.op.pod != nil && v.formerPod(p, r.err):
			m.log(p, "attach waits for the former Pod's end", &e.DynamicVolume, v, r, r.err)
		case v.stale(p, r.err):
			m.log(p, "attach is repeated", &e.DynamicVolume, v, r, r.err)
		default:
			m.failedBy(p, v, e, r)
		}
		return
	}
	record := r.record
	v.atCreate = false
	prepared := r.op.pod != nil && !r.op.now && record.GetPhase() == recordPrepared
	if record.GetPhase() != recordMounted && !prepared || record.GetEntryHash() != e.hash {
		r.err = fault.New(errdefs.ErrInternal, fault.Internal, "the agent's answer is not about this volume: phase %q, entry %q", record.GetPhase(), record.GetEntryHash())
		m.failedBy(p, v, e, r)
		return
	}
	v.unsure, v.answeredID, v.confirmBy = 0, record.GetOperationId(), p.now.Add(confirmAfter)
	if !p.registry.addVolume(r.op.node, p.a.uid, record, r.op.heard, r.op.pod) {
		v.unsure = p.registry.heard(r.op.node, p.a.uid)
	}
	if prepared {
		m.log(p, "prepared for the Pod's container", &e.DynamicVolume, v, r, nil)
		return
	}
	if !r.already {
		p.metrics.observe(record.GetStages())
		if v.topology.result == v1alpha1.TopologyForced {
			p.metrics.crossing.Inc()
			p.Logger.Warn("volume of another topology domain is attached as forceMount is set", m.fields(p, &e.DynamicVolume, v, r)...)
			p.event(p.sb, EventWarning, "ForcedAcrossTopology", fmt.Sprintf("%s: volume %s of topology domain %s is mounted in domain %s, as forceMount is set",
				e.Target, e.Source, v.topology.volume, v.topology.sandbox))
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

// stale deals with a command that the agent refused as out of date, and says whether it was. It was made from a
// state that has changed: it is made anew, at once and, when that does not help, later. It is no failure of the
// volume: a leader that was followed by another must not touch the entry for it.
func (v *volumeState) stale(p *pass, err error) bool {
	if fault.ReasonOf(err) != fault.StaleCommand {
		return false
	}
	v.retry.failed(p.now)
	if v.retry.attempts <= 3 {
		v.retry.due = p.now
	}
	p.lookAt(v.retry.due)
	return true
}

// isPermanent says that an attach is not tried again before the spec changes. What the agent says of its own
// state is not permanent, whatever its kind, nor is what a Resolver waits for.
func isPermanent(err error) bool {
	switch fault.ReasonOf(err) {
	case fault.StaleCommand, fault.SandboxNotFound, fault.SandboxNotRunning, fault.AgentRecovering,
		fault.OperationPending, fault.Busy, fault.Conflict, fault.RateLimited:
		return false
	}
	return fault.IsPermanent(err) && !isWaiting(fault.ReasonOf(err))
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
	removable := v.removable(e)
	if !isPermanent(err) && !removable && !isGate(row.Reason) {
		next := seconds(v.retry.due.Add(999_999_999)) // the whole second after
		row.NextRetryTime = &next
		p.lookAt(v.retry.due)
	}
	row.ObservedGeneration = p.sb.Generation
	m.setPhase(p, v, row, v1alpha1.VolumeFailed)
	if removable && e.kind == v1alpha1.VolumeKindDynamic {
		m.remove(v, e)
	}
}

// removable says whether an entry goes when it fails: until it was mounted once. After that its sandbox counts on it, and
// would write elsewhere what is meant for the volume, were it brought up again without it.
func (v *volumeState) removable(e *entry) bool {
	before := v != nil && v.row != nil && v.row.EntryHash == e.hash && !v.retained && v.row.HasBeenMounted
	return e.OnFailure == v1alpha1.OnFailureRemove && !before
}

// remove has a failed entry taken out of the spec once its row is written.
func (m *VolumeManager) remove(v *volumeState, e *entry) {
	v.after = &specEdit{target: e.Target, hash: e.hash, failed: true}
}
