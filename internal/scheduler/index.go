package scheduler

import "slices"

// candidateIndex has the agents that may take sandboxes of one sub-group, by topology domain and, within one,
// ordered by load. It is guarded by its registry's mutex.
type candidateIndex struct {
	subGroup SubSandboxGroupKey
	topology *TopologyDomainCache
	selector map[string]string
	// pack: the fullest comes first, else the emptiest.
	pack    bool
	domains []*domainAgents
	byName  map[string]*domainAgents
	// lacking is the number of agents that said that they cannot do dynamic volumes, also while they are away.
	lacking int
}

// domainAgents are the connected agents of one domain: a binary heap, so that the best is first, and a change
// of load costs a logarithm.
type domainAgents struct {
	name string
	pack bool
	heap []*member
	// members counts those that are not connected, too.
	members int
	// placed is the number of the sub-group's sandboxes in the domain.
	placed int
}

// member is an agent in an index.
type member struct {
	agent  *agentEntry
	index  *candidateIndex
	domain *domainAgents
	// pos is the place in the domain's heap; -1 while the agent is not connected.
	pos int
	// placed is the number of the sub-group's sandboxes on the node.
	placed  int
	lacking bool
}

// setIndex makes the index of a sub-group, in place of the one it had.
func (r *InMemoryRegistry) setIndex(key SubSandboxGroupKey, topology *TopologyDomainCache, selector map[string]string, pack bool) *candidateIndex {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropIndexLocked(key)
	x := &candidateIndex{subGroup: key, topology: topology, selector: selector, pack: pack, byName: map[string]*domainAgents{}}
	r.indexes[key] = x
	for _, e := range r.agents {
		r.enter(x, e)
	}
	return x
}

// dropIndex forgets the index of a sub-group.
func (r *InMemoryRegistry) dropIndex(key SubSandboxGroupKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropIndexLocked(key)
}

func (r *InMemoryRegistry) dropIndexLocked(key SubSandboxGroupKey) {
	old := r.indexes[key]
	if old == nil {
		return
	}
	delete(r.indexes, key)
	for _, e := range r.agents {
		e.members = slices.DeleteFunc(e.members, func(m *member) bool { return m.index == old })
	}
}

// reindexNode takes an agent to its place in every index, after its topology domain changed.
func (r *InMemoryRegistry) reindexNode(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.agents[node]; e != nil {
		r.reindex(e)
	}
}

func (r *InMemoryRegistry) reindex(e *agentEntry) {
	e.leaveAll()
	for _, x := range r.indexes {
		r.enter(x, e)
	}
}

// enter makes an agent a member of an index if its labels match.
func (r *InMemoryRegistry) enter(x *candidateIndex, e *agentEntry) {
	for k, v := range x.selector {
		if have, ok := e.agent.Labels[k]; !ok || have != v {
			return
		}
	}
	name, _ := x.topology.Domain(e.agent.Node)
	d := x.byName[name]
	if d == nil {
		d = &domainAgents{name: name, pack: x.pack}
		x.byName[name] = d
		x.domains = append(x.domains, d)
	}
	m := &member{agent: e, index: x, domain: d, pos: -1}
	for _, p := range r.byNode[e.agent.Node] {
		if p.subGroup == x.subGroup {
			m.placed++
		}
	}
	d.placed += m.placed
	d.members++
	e.members = append(e.members, m)
	if m.lacking = e.synced && !slices.Contains(e.capabilities, CapabilityDynamicVolumes); m.lacking {
		x.lacking++
	}
	if !e.connected {
		return
	}
	m.pos = len(d.heap)
	d.heap = append(d.heap, m)
	d.up(m.pos)
}

// leaveAll takes an agent out of all indexes.
func (e *agentEntry) leaveAll() {
	for _, m := range e.members {
		m.leave()
	}
	e.members = nil
}

func (m *member) leave() {
	x, d := m.index, m.domain
	d.placed -= m.placed
	d.members--
	if m.lacking {
		x.lacking--
	}
	if m.pos >= 0 {
		last := len(d.heap) - 1
		pos := m.pos
		d.swap(pos, last)
		d.heap[last] = nil
		d.heap = d.heap[:last]
		if pos < last {
			d.fix(d.heap[pos])
		}
		m.pos = -1
	}
	if d.members == 0 {
		delete(x.byName, d.name)
		x.domains = slices.DeleteFunc(x.domains, func(o *domainAgents) bool { return o == d })
	}
}

// before says whether a is to be taken before b.
func (d *domainAgents) before(a, b *member) bool {
	if a.agent.load != b.agent.load {
		return (a.agent.load < b.agent.load) != d.pack
	}
	return a.agent.agent.Node < b.agent.agent.Node
}

func (d *domainAgents) fix(m *member) {
	if m.pos >= 0 && !d.up(m.pos) {
		d.down(m.pos)
	}
}

func (d *domainAgents) up(i int) bool {
	moved := false
	for i > 0 {
		parent := (i - 1) / 2
		if !d.before(d.heap[i], d.heap[parent]) {
			break
		}
		d.swap(i, parent)
		i, moved = parent, true
	}
	return moved
}

func (d *domainAgents) down(i int) {
	for {
		best := i
		for _, child := range [...]int{2*i + 1, 2*i + 2} {
			if child < len(d.heap) && d.before(d.heap[child], d.heap[best]) {
				best = child
			}
		}
		if best == i {
			return
		}
		d.swap(i, best)
		i = best
	}
}

func (d *domainAgents) swap(i, j int) {
	d.heap[i], d.heap[j] = d.heap[j], d.heap[i]
	d.heap[i].pos, d.heap[j].pos = i, j
}
