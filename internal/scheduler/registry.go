package scheduler

import (
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
)

// InMemoryRegistry holds what the scheduler knows of agents and of sandboxes: who is where, what each node
// has room for, and what each node really has by its inventory. It is rebuilt at every start, from the store
// and the agents' inventories. Its methods may be called from any goroutine, and what they return is not
// changed afterwards.
type InMemoryRegistry struct {
	mu        sync.Mutex // guards all below, and the candidate indexes with what they point to
	agents    map[string]*agentEntry
	sandboxes map[types.UID]*placement
	byNode    map[string]map[types.UID]*placement
	// inSubGroup counts the sandboxes of each sub-group.
	inSubGroup map[SubSandboxGroupKey]int
	indexes    map[SubSandboxGroupKey]*candidateIndex
	// located has the node whose inventory lists a sandbox.
	located map[types.UID]string
	// prepared has the nodes on which a volume is prepared, images those on which a sandbox runs an image.
	prepared map[string]map[string]*agentEntry
	images   map[string]map[string]*agentEntry
}

// agentEntry is an agent and what its node has.
type agentEntry struct {
	agent Agent
	// connected: the inventory stream is up and its full message was applied. changed is when that was last
	// otherwise, or when the agent was added. synced: there was a full inventory once.
	connected, synced bool
	changed           time.Time
	capabilities      []string
	states            map[types.UID]*agentv1.SandboxState
	// said counts the inventory's messages; about is the last about each sandbox, all the last about all.
	said, all uint64
	about     map[types.UID]uint64
	prepared  map[string]struct{}
	images    map[string]int
	// What sandboxes that are placed here ask for together.
	sandboxes, cpuMilli, memoryBytes int64
	load                             float64
	members                          []*member
}

// placement is a sandbox on a node, from the moment it is reserved.
type placement struct {
	node     string
	subGroup SubSandboxGroupKey
	requests Requests
	image    string
}

// Requests are what a sandbox needs of its node.
type Requests struct {
	CPUMilli, MemoryBytes int64
}

// NewInMemoryRegistry makes an empty registry.
func NewInMemoryRegistry() *InMemoryRegistry {
	return &InMemoryRegistry{
		agents:     map[string]*agentEntry{},
		sandboxes:  map[types.UID]*placement{},
		byNode:     map[string]map[types.UID]*placement{},
		inSubGroup: map[SubSandboxGroupKey]int{},
		indexes:    map[SubSandboxGroupKey]*candidateIndex{},
		located:    map[types.UID]string{},
		prepared:   map[string]map[string]*agentEntry{},
		images:     map[string]map[string]*agentEntry{},
	}
}

// putAgent adds an agent or renews what is known of it. It returns the sandboxes that are on the node.
func (r *InMemoryRegistry) putAgent(a Agent, now time.Time) []types.UID {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.agents[a.Node]
	if e == nil {
		e = &agentEntry{
			changed:  now,
			states:   map[types.UID]*agentv1.SandboxState{},
			about:    map[types.UID]uint64{},
			prepared: map[string]struct{}{},
			images:   map[string]int{},
		}
		r.agents[a.Node] = e
		e.agent = a
		for _, p := range r.byNode[a.Node] {
			r.account(e, p, 1)
		}
	}
	e.agent = a
	e.load = e.loadNow()
	r.reindex(e)
	return r.onNode(e)
}

// removeAgent forgets an agent. Sandboxes placed on its node stay placed there.
func (r *InMemoryRegistry) removeAgent(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.agents[node]
	if e == nil {
		return
	}
	e.connected = false
	delete(r.agents, node)
	for uid := range e.states {
		r.dropLocked(e, uid)
	}
	e.leaveAll()
	for key := range e.prepared {
		removeNode(r.prepared, key, node)
	}
	for image := range e.images {
		removeNode(r.images, image, node)
	}
}

// agentView is what a reconcile needs to know of an agent.
type agentView struct {
	Agent
	known, connected, synced bool
	// pods: it attaches to the containers of Pods.
	pods    bool
	changed time.Time
}

func (r *InMemoryRegistry) agent(node string) agentView {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.agents[node]
	if e == nil {
		return agentView{}
	}
	return agentView{Agent: e.agent, known: true, connected: e.connected, synced: e.synced,
		pods: slices.Contains(e.capabilities, agentv1.CapabilityPods), changed: e.changed}
}

// disconnected notes that an agent's inventory stream has ended. What it said last is kept. It returns the
// sandboxes that are on the node.
func (r *InMemoryRegistry) disconnected(node string, now time.Time) []types.UID {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.agents[node]
	if e == nil || !e.connected {
		return nil
	}
	e.connected, e.changed = false, now
	r.reindex(e)
	return r.onNode(e)
}

// applyInventory takes over a message of an agent's inventory and returns the sandboxes that it concerns: with
// a full one all that are on the node, by the inventory or by their placement.
func (r *InMemoryRegistry) applyInventory(node string, u *agentv1.InventoryUpdate, now time.Time) []types.UID {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.agents[node]
	if e == nil {
		return nil
	}
	var concerned []types.UID
	e.said++
	if u.GetFull() {
		e.all = e.said
		clear(e.about)
		concerned = r.onNode(e) // those that the agent forgot are among them
		for uid := range e.states {
			r.dropLocked(e, uid)
		}
		for key := range e.prepared {
			removeNode(r.prepared, key, node)
		}
		clear(e.prepared)
		e.capabilities = u.GetCapabilities()
		e.connected, e.synced, e.changed = true, true, now
	}
	for _, s := range u.GetSandboxes() {
		uid := types.UID(s.GetUid())
		if s.GetRemoved() {
			r.dropLocked(e, uid)
			delete(e.about, uid)
			e.all = e.said
		} else {
			r.haveLocked(e, uid, s)
			e.about[uid] = e.said
		}
		concerned = append(concerned, uid)
	}
	for _, p := range u.GetPrepared() {
		if p.GetRemoved() {
			delete(e.prepared, p.GetVolumeKey())
			removeNode(r.prepared, p.GetVolumeKey(), node)
		} else {
			e.prepared[p.GetVolumeKey()] = struct{}{}
			addNode(r.prepared, p.GetVolumeKey(), e)
		}
	}
	if u.GetFull() {
		r.reindex(e)
	}
	slices.Sort(concerned)
	return slices.Compact(concerned)
}

func (r *InMemoryRegistry) onNode(e *agentEntry) []types.UID {
	uids := slices.Collect(maps.Keys(e.states))
	return slices.AppendSeq(uids, maps.Keys(r.byNode[e.agent.Node]))
}

// state is what a node really has of a sandbox; nil for nothing.
func (r *InMemoryRegistry) state(node string, uid types.UID) *agentv1.SandboxState {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.agents[node]; e != nil {
		return e.states[uid]
	}
	return nil
}

// usersOf are the sandboxes for which a node has a volume, by its identity on the node.
func (r *InMemoryRegistry) usersOf(volumeKey string) []types.UID {
	r.mu.Lock()
	defer r.mu.Unlock()
	var uids []types.UID
	for _, e := range r.agents {
		for uid, s := range e.states {
			if slices.ContainsFunc(s.GetVolumes(), func(m *agentv1.MountRecord) bool { return m.GetVolumeKey() == volumeKey }) {
				uids = append(uids, uid)
			}
		}
	}
	return uids
}

// preparedOn are the nodes that have a volume ready, by its identity there.
func (r *InMemoryRegistry) preparedOn(volumeKey string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.prepared[volumeKey]))
}

// heard is the number of the inventory's last message that may concern the sandbox. The answer to a command and
// the inventory come by two ways: an answer is known to be the newer word only if this did not change since before
// the command.
func (r *InMemoryRegistry) heard(node string, uid types.UID) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.agents[node]; e != nil {
		return e.heard(uid)
	}
	return 0
}

func (e *agentEntry) heard(uid types.UID) uint64 { return max(e.all, e.about[uid]) }

// setState takes over what an agent answered to a command about a sandbox, unless the inventory spoke since before
// the command: it says the same, or something newer, or will.
func (r *InMemoryRegistry) setState(node string, uid types.UID, s *agentv1.SandboxState, since uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.agents[node]; e != nil && e.heard(uid) == since {
		r.haveLocked(e, uid, s)
	}
}

// dropState notes that an agent has deleted a sandbox.
func (r *InMemoryRegistry) dropState(node string, uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.agents[node]; e != nil {
		r.dropLocked(e, uid)
	}
}

func (r *InMemoryRegistry) haveLocked(e *agentEntry, uid types.UID, s *agentv1.SandboxState) {
	e.states[uid] = s
	r.located[uid] = e.agent.Node
}

func (r *InMemoryRegistry) dropLocked(e *agentEntry, uid types.UID) {
	delete(e.states, uid)
	if r.located[uid] == e.agent.Node {
		delete(r.located, uid)
	}
}

// addVolume takes over an attached volume, unless the inventory knows better: it lists the target, or the
// sandbox has no task any more. sure is false when the inventory spoke since before the command and does not list
// it: then either it will, or the mount is gone again already. Of a Pod the agent knows nothing before its first
// volume: with pod, that is what the agent has of it until the inventory tells.
func (r *InMemoryRegistry) addVolume(node string, uid types.UID, record *agentv1.MountRecord, since uint64, pod *agentv1.SandboxState) (sure bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.agents[node]
	if e == nil {
		return true
	}
	target, quiet := record.GetTarget(), e.heard(uid) == since
	if pod != nil && (e.states[uid] == nil || e.states[uid].GetWorkload().GetPod().GetUid() != pod.GetWorkload().GetPod().GetUid()) {
		r.haveLocked(e, uid, withVolume(pod, target, record))
		return quiet
	}
	if e.states[uid] == nil {
		return true
	}
	s := e.states[uid]
	i := slices.IndexFunc(s.GetVolumes(), func(m *agentv1.MountRecord) bool { return m.GetTarget() == target })
	listed := i >= 0 && !isBegun(s.GetVolumes()[i], record.GetOperationId())
	if !quiet && (listed || pod == nil && s.GetPhase() != stateRunning && s.GetPhase() != stateCreated) {
		return true
	}
	e.states[uid] = withVolume(s, target, record)
	return quiet
}

// isBegun says whether a record is the one of an attach from before its end: its answer says more.
func isBegun(m *agentv1.MountRecord, operationID string) bool {
	return m.GetPhase() == recordAttaching && m.GetOperationId() == operationID
}

// leaveVolume takes over a volume that is detached and not quite gone, unless the inventory says that it is gone.
func (r *InMemoryRegistry) leaveVolume(node string, uid types.UID, record *agentv1.MountRecord, since uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.agents[node]
	if e == nil || e.states[uid] == nil {
		return
	}
	s, target := e.states[uid], record.GetTarget()
	if e.heard(uid) == since || slices.ContainsFunc(s.GetVolumes(), func(m *agentv1.MountRecord) bool { return m.GetTarget() == target }) {
		e.states[uid] = withVolume(s, target, record)
	}
}

// dropVolume takes over that a volume is gone. Nobody but us makes it come back.
func (r *InMemoryRegistry) dropVolume(node string, uid types.UID, target string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.agents[node]; e != nil && e.states[uid] != nil {
		e.states[uid] = withVolume(e.states[uid], target, nil)
	}
}

// withVolume is a state with another record for a target; none when it is nil.
func withVolume(s *agentv1.SandboxState, target string, record *agentv1.MountRecord) *agentv1.SandboxState {
	s = proto.CloneOf(s)
	s.Volumes = slices.DeleteFunc(s.Volumes, func(m *agentv1.MountRecord) bool { return m.GetTarget() == target })
	if record != nil {
		s.Volumes = append(s.Volumes, record)
	}
	return s
}

// nodeOf is a node whose inventory lists the sandbox; empty when none does.
func (r *InMemoryRegistry) nodeOf(uid types.UID) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.located[uid]
}

// isPlacedOn says whether a sandbox is to be on a node.
func (r *InMemoryRegistry) isPlacedOn(uid types.UID, node string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.sandboxes[uid]
	return p != nil && p.node == node
}

// mayBeOn says whether a sandbox is on a node, or may be, as nothing tells where it is.
func (r *InMemoryRegistry) mayBeOn(uid types.UID, node string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	located, placed := r.located[uid], r.sandboxes[uid]
	return located == node || placed != nil && placed.node == node || located == "" && placed == nil
}

// place notes that a sandbox is on a node: it was decided now, or the store says so.
func (r *InMemoryRegistry) place(uid types.UID, p placement) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.placeLocked(uid, p)
}

func (r *InMemoryRegistry) placeLocked(uid types.UID, p placement) {
	if old := r.sandboxes[uid]; old != nil {
		if *old == p {
			return
		}
		r.unplaceLocked(uid)
	}
	r.sandboxes[uid] = &p
	r.inSubGroup[p.subGroup]++
	if r.byNode[p.node] == nil {
		r.byNode[p.node] = map[types.UID]*placement{}
	}
	r.byNode[p.node][uid] = &p
	if e := r.agents[p.node]; e != nil {
		r.account(e, &p, 1)
		e.reload()
	}
}

func (r *InMemoryRegistry) isPlaced(uid types.UID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sandboxes[uid] != nil
}

// unplace forgets where a sandbox is: it is gone, it is over, or its reservation is undone.
func (r *InMemoryRegistry) unplace(uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unplaceLocked(uid)
}

func (r *InMemoryRegistry) unplaceLocked(uid types.UID) {
	p := r.sandboxes[uid]
	if p == nil {
		return
	}
	delete(r.sandboxes, uid)
	if r.inSubGroup[p.subGroup]--; r.inSubGroup[p.subGroup] == 0 {
		delete(r.inSubGroup, p.subGroup)
	}
	if delete(r.byNode[p.node], uid); len(r.byNode[p.node]) == 0 {
		delete(r.byNode, p.node)
	}
	if e := r.agents[p.node]; e != nil {
		r.account(e, p, -1)
		e.reload()
	}
}

// account adds a placement to, or with sign -1 takes it off, what its node has.
func (r *InMemoryRegistry) account(e *agentEntry, p *placement, sign int64) {
	e.sandboxes += sign
	e.cpuMilli += sign * p.requests.CPUMilli
	e.memoryBytes += sign * p.requests.MemoryBytes
	for _, m := range e.members {
		if m.index.subGroup == p.subGroup {
			m.placed += int(sign)
			m.domain.placed += int(sign)
		}
	}
	if p.image == "" {
		return
	}
	e.images[p.image] += int(sign)
	if e.images[p.image] > 0 {
		addNode(r.images, p.image, e)
		return
	}
	delete(e.images, p.image)
	removeNode(r.images, p.image, e.agent.Node)
}

// reload moves an agent in every index to where its load now belongs.
func (e *agentEntry) reload() {
	e.load = e.loadNow()
	for _, m := range e.members {
		m.domain.fix(m)
	}
}

// loadNow is how full the node is, from 0 to 1: by what is scarcest of the bounds it has, and by the number of sandboxes
// where that has none, as sandboxes need not request anything.
func (e *agentEntry) loadNow() float64 {
	c, load := e.agent.Capacity, 0.0
	if c.Sandboxes == 0 {
		load = float64(e.sandboxes) / float64(e.sandboxes+16)
	}
	for _, x := range [...][2]int64{{e.sandboxes, c.Sandboxes}, {e.cpuMilli, c.CPUMilli}, {e.memoryBytes, c.MemoryBytes}} {
		if x[1] > 0 {
			load = max(load, float64(x[0])/float64(x[1]))
		}
	}
	return load
}

// fits says whether the node has room for what is asked.
func (e *agentEntry) fits(q Requests) bool {
	c := e.agent.Capacity
	return (c.Sandboxes == 0 || e.sandboxes < c.Sandboxes) &&
		(c.CPUMilli == 0 || e.cpuMilli+q.CPUMilli <= c.CPUMilli) &&
		(c.MemoryBytes == 0 || e.memoryBytes+q.MemoryBytes <= c.MemoryBytes)
}

func addNode(index map[string]map[string]*agentEntry, key string, e *agentEntry) {
	if index[key] == nil {
		index[key] = map[string]*agentEntry{}
	}
	index[key][e.agent.Node] = e
}

func removeNode(index map[string]map[string]*agentEntry, key, node string) {
	delete(index[key], node)
	if len(index[key]) == 0 {
		delete(index, key)
	}
}
