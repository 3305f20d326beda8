package scheduler

import (
	"maps"
	"sync"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// The phases of an agent's MountRecord.
const (
	recordPrepared  = "Prepared"
	recordAttaching = "Attaching"
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
		case p.unmount && (e == nil || e.Detach == nil) && have[target] != nil && !leaving(have[target]):
			m.detach(p, v, target, nil, have[target].GetEntryHash())
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
		m.explain(p, v.op, row)
		m.setPhase(p, v, row, v1alpha1.VolumeAttaching)
	case v.op.verb == verbDetach && v.row != nil && !v.retained:
		row := *v.row
		row.OperationID = v.op.id
		m.setPhase(p, v, &row, v1alpha1.VolumeDetaching)
	}
}

// explain gives the row of an attach that takes long the reason, if something is waited for. Other words alone are no change; and what
// the agent does then is short, as a rule, so that it is not written that the wait has ended.
func (m *VolumeManager) explain(p *pass, op *operation, row *v1alpha1.VolumeStatus) {
	w := op.waits.Load()
	switch {
	case w == nil:
	case w.why != nil:
		if reason := string(fault.ReasonOf(w.why)); row.Reason != reason || row.Phase != v1alpha1.VolumeAttaching {
			row.Reason, row.Message = reason, w.why.Error()
		}
	case p.now.Before(w.since.Add(slowAfter)):
		p.lookAt(w.since.Add(slowAfter))
	case row.Phase == v1alpha1.VolumeAttaching:
		row.Reason, row.Message = "", ""
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
		"topology", v.topology.result, "node", r.op.node, "operationId", r.op.id}
}
