package scheduler

import (
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// The placement strategies of a group's schedulingPolicy.
const (
	// StrategySpread takes the emptiest node. The default.
	StrategySpread = "Spread"
	// StrategyPack takes the fullest node that has room.
	StrategyPack = "Pack"
)

// SchedulingWeights weighs the scores of a placement, each from 0 to 100.
type SchedulingWeights = v1alpha1.SchedulingWeights

// DefaultWeights are those of a group that gives none: being near outweighs an even load, and an image that is there
// already a tenth of it.
var DefaultWeights = SchedulingWeights{Load: 10, Topology: 20, VolumeLocality: 20, Image: 1}

const (
	// walk is how many agents of a domain are looked at, in heap order, before the next domain.
	walk = 8
	// near is how many agents are looked at because they have a volume or the image already.
	near = 8
)

// SandboxSchedulerEngine decides on which node a sandbox of one sub-group runs: filter, score, reserve. It
// looks at the best agents of each domain and at those that have the sandbox's volumes or image; only when
// none of them has room at all others.
type SandboxSchedulerEngine struct {
	registry *InMemoryRegistry
	index    *candidateIndex
	weights  SchedulingWeights
	affinity bool
	capacity int
}

// PlacementRequest is what is known of a sandbox that needs a node.
type PlacementRequest struct {
	UID      types.UID
	Requests Requests
	Image    string
	// VolumeDomains are the topology domains near which its volumes are; VolumeKeys their identities on a node.
	VolumeDomains, VolumeKeys []string
	// Reach are, for each volume that not all nodes can use, those that can.
	Reach []*Reach
	// Exclude are nodes that refused it.
	Exclude []string
}

// Placement is a decision. The node's room is reserved until the sandbox is gone, or Undo is called.
type Placement struct {
	Node   string
	Domain string
	Score  int
}

// choice is the best candidate so far.
type choice struct {
	m     *member
	score int
}

// Place chooses a node and reserves its room; the sandbox's own, when it has one. Errors: ErrUnavailable,
// reason NO_AGENT when no agent can be reached that matches; ErrFailedPrecondition, reason UNREACHABLE_VOLUME when none of
// them can use the sandbox's volumes; and ErrResourceExhausted, reason NO_CAPACITY.
func (e *SandboxSchedulerEngine) Place(q *PlacementRequest) (Placement, error) {
	r := e.registry
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.sandboxes[q.UID]; p != nil {
		return Placement{Node: p.node}, nil
	}
	key := e.index.subGroup
	if e.capacity > 0 && r.inSubGroup[key] >= e.capacity {
		return Placement{}, fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity,
			"sub-group %s has all the %d sandboxes that its capacity allows: delete one, or raise it", key, e.capacity)
	}
	best, agents := e.choose(q, walk)
	if best.m == nil && agents > 0 {
		best, _ = e.choose(q, agents)
	}
	if best.m == nil {
		if agents == 0 {
			return Placement{}, fault.New(errdefs.ErrUnavailable, fault.NoAgent,
				"no node agent that sub-group %s may use is connected: start one, or check its nodeSelector", key)
		}
		if !e.reachable(q) {
			return Placement{}, fault.New(errdefs.ErrFailedPrecondition, fault.UnreachableVolume,
				"none of the %d connected nodes of sub-group %s can use the sandbox's volumes (%s): is the agent of their node there, and does the sub-group's nodeSelector allow it?",
				agents, key, q.volumes())
		}
		return Placement{}, fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity,
			"none of the %d nodes of sub-group %s takes the sandbox (CPU %dm, memory %d bytes): free some room, or add nodes",
			agents, key, q.Requests.CPUMilli, q.Requests.MemoryBytes)
	}
	node := best.m.agent.agent.Node
	r.placeLocked(q.UID, placement{node: node, subGroup: key, requests: q.Requests, image: q.Image})
	return Placement{Node: node, Domain: best.m.domain.name, Score: best.score}, nil
}

// Undo gives a reservation back.
func (e *SandboxSchedulerEngine) Undo(uid types.UID) { e.registry.unplace(uid) }

// choose filters and scores, and counts the agents. It looks at no more than limit of each domain's.
func (e *SandboxSchedulerEngine) choose(q *PlacementRequest, limit int) (choice, int) {
	var best choice
	var withVolume, withImage [near]*agentEntry
	volumes := e.gather(&withVolume, e.registry.prepared, q.VolumeKeys...)
	images := 0
	if e.weights.Image != 0 && q.Image != "" {
		images = e.gather(&withImage, e.registry.images, q.Image)
	}
	consider := func(m *member) {
		s := e.score(q, m, slices.Contains(withVolume[:volumes], m.agent), slices.Contains(withImage[:images], m.agent))
		if best.m == nil || s > best.score || s == best.score && m.domain.before(m, best.m) {
			best = choice{m, s}
		}
	}
	agents := 0
	for _, d := range e.index.domains {
		agents += len(d.heap)
	}
	if limit == walk && len(q.Reach) > 0 {
		// Few nodes will do, and mostly they are known by name.
		likely := false
		for _, node := range q.Reach[0].Likely {
			a := e.registry.agents[node]
			if a == nil {
				continue
			}
			likely = true
			if m := a.memberOf(e.index); m != nil && m.pos >= 0 && q.fits(a) {
				consider(m)
			}
		}
		if likely {
			return best, agents
		}
	}
	for _, d := range e.index.domains {
		for _, m := range d.heap[:min(limit, len(d.heap))] {
			if q.fits(m.agent) {
				consider(m)
				break
			}
		}
	}
	for _, list := range [2][]*agentEntry{withVolume[:volumes], withImage[:images]} {
		for _, a := range list {
			if m := a.memberOf(e.index); m != nil && m.pos >= 0 && q.fits(a) {
				consider(m)
			}
		}
	}
	return best, agents
}

// fits says whether an agent may take the sandbox.
func (q *PlacementRequest) fits(a *agentEntry) bool {
	return a.fits(q.Requests) && !slices.Contains(q.Exclude, a.agent.Node) && q.reaches(a)
}

func (q *PlacementRequest) reaches(a *agentEntry) bool {
	for _, r := range q.Reach {
		if !r.Has(a.agent.Node, a.agent.Labels) {
			return false
		}
	}
	return true
}

// reachable says whether any agent can use all volumes, full or not.
func (e *SandboxSchedulerEngine) reachable(q *PlacementRequest) bool {
	for _, d := range e.index.domains {
		if slices.ContainsFunc(d.heap, func(m *member) bool { return q.reaches(m.agent) }) {
			return true
		}
	}
	return false
}

func (q *PlacementRequest) volumes() string {
	names := make([]string, 0, len(q.Reach))
	for _, r := range q.Reach {
		names = append(names, r.Volume)
	}
	return strings.Join(names, ", ")
}

// gather fills into with agents that an index has under one of the keys, and returns how many.
func (e *SandboxSchedulerEngine) gather(into *[near]*agentEntry, index map[string]map[string]*agentEntry, keys ...string) int {
	n := 0
	for _, key := range keys {
		for _, a := range index[key] {
			if n == near {
				return n
			}
			into[n] = a
			n++
		}
	}
	return n
}

func (a *agentEntry) memberOf(x *candidateIndex) *member {
	for _, m := range a.members {
		if m.index == x {
			return m
		}
	}
	return nil
}

// score rates a candidate: each score from 0 to 100, times its weight.
func (e *SandboxSchedulerEngine) score(q *PlacementRequest, m *member, hasVolume, hasImage bool) int {
	w := e.weights
	load := int(100 * m.agent.load)
	if !e.index.pack {
		load = 100 - load
	}
	total := int(w.Load) * load
	switch {
	case len(q.VolumeDomains) > 0:
		if slices.Contains(q.VolumeDomains, m.domain.name) {
			total += int(w.Topology) * 100
		}
	case e.affinity && m.domain.name != "" && m.domain.placed > 0:
		total += int(w.Topology) * 100
	}
	if hasVolume {
		total += int(w.VolumeLocality) * 100
	}
	if hasImage {
		total += int(w.Image) * 100
	}
	return total
}

// skewed says whether an agent of the sub-group lacks the capability of dynamic volumes.
func (e *SandboxSchedulerEngine) skewed() bool {
	e.registry.mu.Lock()
	defer e.registry.mu.Unlock()
	return e.index.lacking > 0
}
