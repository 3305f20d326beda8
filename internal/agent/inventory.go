package agent

import (
	"maps"
	"slices"
	"sync"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// inventory tells followers which sandboxes and volumes changed. It remembers which, not what: a follower that is slow
// gets the latest state of each, once.
type inventory struct {
	mu        sync.Mutex // guards the fields below
	revision  int64
	followers map[*follower]struct{}
}

// follower is one stream. Its fields are guarded by the inventory's mutex.
type follower struct {
	signal    chan struct{}
	sandboxes map[string]struct{}
	keys      map[string]struct{}
}

func newInventory() *inventory { return &inventory{followers: map[*follower]struct{}{}} }

func (i *inventory) follow() (f *follower, leave func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	f = &follower{signal: make(chan struct{}, 1), sandboxes: map[string]struct{}{}, keys: map[string]struct{}{}}
	i.followers[f] = struct{}{}
	return f, func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		delete(i.followers, f)
	}
}

func (i *inventory) changed(uid string) {
	i.mark(func(f *follower) { f.sandboxes[uid] = struct{}{} })
}

func (i *inventory) changedKey(key string) { i.mark(func(f *follower) { f.keys[key] = struct{}{} }) }

// beat has every follower sent a message, if only an empty one.
func (i *inventory) beat() { i.mark(func(*follower) {}) }

func (i *inventory) mark(note func(*follower)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.revision++
	for f := range i.followers {
		note(f)
		select {
		case f.signal <- struct{}{}:
		default:
		}
	}
}

// take empties a follower's notes.
func (i *inventory) take(f *follower) (uids, keys []string, revision int64) {
	i.mu.Lock()
	defer i.mu.Unlock()
	uids, keys = slices.Sorted(maps.Keys(f.sandboxes)), slices.Sorted(maps.Keys(f.keys))
	clear(f.sandboxes)
	clear(f.keys)
	return uids, keys, i.revision
}

// capabilities are what this agent can do, for a controller of another version.
func (a *Agent) capabilities() []string {
	c := []string{agentv1.CapabilityDynamicVolumes}
	if a.config.Pods != nil {
		c = append(c, agentv1.CapabilityPods)
	}
	return c
}

// update is an inventory message about some sandboxes and volumes, or about all.
func (a *Agent) update(uids, keys []string, revision int64, full bool) *agentv1.InventoryUpdate {
	u := &agentv1.InventoryUpdate{BootId: a.bootID, InstanceId: a.instanceID, Node: a.config.Node, Capabilities: a.capabilities(),
		Revision: revision, Full: full}
	// Not with every change of a volume: it costs more than the change.
	if heartbeat := len(uids)+len(keys) == 0; full || heartbeat {
		if mounts, err := mount.Mounts(); err == nil {
			u.MountCount = int64(len(mounts))
		}
	}
	if full {
		uids, keys = nil, nil
		for _, sb := range a.all() {
			uids = append(uids, sb.uid)
		}
		slices.Sort(uids)
		for _, p := range a.journal.AllPrepared() {
			keys = append(keys, p.Key)
		}
	}
	for _, uid := range uids {
		if s := a.state(uid); !full || !s.Removed {
			u.Sandboxes = append(u.Sandboxes, s)
		}
	}
	for _, key := range keys {
		p, ok := a.journal.Prepared(key)
		v := &agentv1.PreparedVolume{VolumeKey: key, Path: string(p.Prepared.Path), Removed: !ok}
		for _, user := range a.journal.Users(key) {
			v.Users = append(v.Users, user.SandboxUID+":"+user.Target)
		}
		u.Prepared = append(u.Prepared, v)
	}
	return u
}

// Phases of a SandboxState.
const (
	phaseCreated    = "Created"
	phaseRunning    = "Running"
	phaseRestarting = "Restarting"
	phaseStopped    = "Stopped"
)

// state is what the node has of a sandbox. One without a container and volumes is removed.
func (a *Agent) state(uid string) *agentv1.SandboxState {
	sb := a.sandbox(uid)
	record, _ := a.journal.Sandbox(uid)
	out := &agentv1.SandboxState{Uid: uid, Workload: &agentv1.Workload{Kind: &agentv1.Workload_Container{Container: &agentv1.ContainerWorkload{}}},
		Restarts: record.Restarts, Removed: true}
	for _, v := range a.journal.Volumes(uid) {
		m := mountRecord(v)
		a.offline.mark(v, m)
		out.Volumes = append(out.Volumes, m)
	}
	if sb.isPod() {
		return podSandboxState(sb, record, out)
	}
	c, ok := sb.seen()
	if !ok {
		if len(out.Volumes) > 0 {
			// Volumes that wait for its creation: whoever does not want the sandbox must hear of them.
			out.Removed, out.Phase = false, phaseStopped
		}
		return out
	}
	out.Removed = false
	out.ContainerId, out.Namespace, out.Name = c.ID, c.Namespace, c.Name
	out.TenantId, out.Group, out.SubGroup = c.TenantID, c.Group, c.SubGroup
	switch {
	case c.State == containers.Running:
		out.Phase = phaseRunning
	case record.Desired == journal.DesiredRunning:
		out.Phase = phaseRestarting
	case c.State == containers.Created:
		out.Phase = phaseCreated
	default:
		out.Phase = phaseStopped
	}
	if !record.StartedAt.IsZero() {
		out.StartedAt = timestamppb.New(record.StartedAt)
	}
	if record.ExitCode != nil {
		out.ExitCode, out.Reason, out.ExitedAt = record.ExitCode, record.ExitReason, timestamppb.New(record.ExitedAt)
	}
	sb.mu.Lock()
	trouble := sb.trouble
	sb.mu.Unlock()
	if trouble != nil {
		out.Reason, out.Message = string(fault.ReasonOf(trouble)), trouble.Error()
	}
	return out
}

// mountRecord is a volume record as the contract shows it.
func mountRecord(v journal.Volume) *agentv1.MountRecord {
	m := &agentv1.MountRecord{Target: v.Target, VolumeKey: v.Request.Key, OperationId: v.ID, EntryHash: v.EntryHash,
		MountId: v.Mount.UniqueID, Dev: v.Mount.Device, Root: v.Mount.Root, LimitEnforcement: string(v.Limit),
		CapacityBytes: v.CapacityBytes, Attached: string(v.Attached), Path: string(v.Path), Kind: string(v.Kind)}
	if m.MountId == 0 {
		m.MountId = uint64(v.Mount.MountID)
	}
	switch v.Phase {
	case journal.Waiting:
		m.Phase = "Prepared"
	case journal.Mounted:
		m.Phase = "Mounted"
	case journal.Intent:
		m.Phase = "Attaching"
	case journal.Detaching:
		m.Phase = "Detaching"
	case journal.Lazy:
		m.Phase, m.DetachState = "Detaching", string(v.DetachState)
	}
	for _, s := range v.Stages {
		m.Stages = append(m.Stages, &agentv1.Stage{Name: s.Name, Duration: durationpb.New(s.Duration)})
	}
	return m
}

// about is what every line of the log about a volume has.
func about(v journal.Volume) []any {
	return []any{"operationId", v.ID, "sandbox", v.SandboxUID, "tenant", v.Request.TenantID,
		"source", string(v.Request.Type) + ":" + v.Request.Source, "target", v.Target}
}

func modeOf(r volume.Request) v1alpha1.VolumeMode {
	if r.ReadOnly {
		return v1alpha1.VolumeModeReadOnly
	}
	return v1alpha1.VolumeModeReadWrite
}

// heartbeat tells followers that the node is there, and looks whether what was mounted still is: a sandbox can make a
// mount vanish by removing its directory from a namespace that was made before the mount.
func (a *Agent) heartbeat() {
	ticker := a.config.Clock.NewTicker(a.config.Heartbeat)
	defer ticker.Stop()
	for beats := 1; ; beats++ {
		select {
		case <-ticker.C():
		case <-a.stopping.Done():
			return
		}
		a.inventory.beat()
		if beats%offlineEvery == 0 {
			a.offline.look()
		}
		for _, sb := range a.all() {
			// Each on its own: a sandbox that is being stopped, or whose filesystem is slow, delays no other.
			if sb.isPod() {
				a.lookAtPod(sb)
			}
			if sb.verifying.CompareAndSwap(false, true) {
				a.work(func() {
					defer sb.verifying.Store(false)
					a.verify(sb)
				})
			}
		}
	}
}

// verify forgets the records of mounts that are gone from a sandbox, so that whoever wants them attaches them again.
func (a *Agent) verify(sb *sandbox) {
	release, err := sb.share(a.stopping)
	if err != nil {
		return
	}
	defer release()
	if c, ok := sb.seen(); !ok || !hasTask(c) {
		return
	}
	for _, v := range a.journal.Volumes(sb.uid) {
		if v.Phase != journal.Mounted {
			continue
		}
		unlock, free := sb.tryTarget(v.Target)
		if !free {
			continue // an operation on it is under way
		}
		a.verifyVolume(sb, v)
		unlock()
	}
}

func (a *Agent) verifyVolume(sb *sandbox, seen journal.Volume) {
	v, ok := a.journal.VolumeAt(sb.uid, seen.Target)
	if !ok || v.ID != seen.ID || v.Phase != journal.Mounted {
		return
	}
	ns, err := sb.enter()
	if err != nil {
		return
	}
	if _, there, err := ns.Find(v.Mount); err != nil || there {
		return
	}
	a.log.Warn("a volume is gone from its sandbox", append(about(v), "reason", fault.VolumeGone)...)
	if err := a.updater.forget(v); err != nil {
		a.log.Error("the record of a volume that is gone cannot be deleted", append(about(v), "error", err)...)
		return
	}
	a.changed(sb.uid)
}
