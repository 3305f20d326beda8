package scheduler

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"

	"time"
)

// cluster is a registry with connected agents, and one sub-group's runtime.
type cluster struct {
	t        testing.TB
	registry *InMemoryRegistry
	topology *TopologyDomainCache
	runtime  *SSGRuntime
	next     int
}

func newCluster(t testing.TB, group v1alpha1.SandboxGroupSpec, sub v1alpha1.SubSandboxGroup, agents ...Agent) *cluster {
	c := &cluster{t: t, registry: NewInMemoryRegistry(), topology: NewTopologyDomainCache("")}
	for _, a := range agents {
		c.topology.Set(a.Node, a.Labels)
		c.registry.putAgent(a, time.Time{})
		c.registry.applyInventory(a.Node, &agentv1.InventoryUpdate{Full: true, Capabilities: []string{CapabilityDynamicVolumes}}, time.Time{})
	}
	c.topology.changed = c.registry.reindexNode
	c.runtime = &SSGRuntime{Key: SubSandboxGroupKey{"default", "default", "default"}, Registry: c.registry}
	c.runtime.apply(&group, &sub, c.topology)
	return c
}

func (c *cluster) request() *PlacementRequest {
	c.next++
	return &PlacementRequest{UID: types.UID(fmt.Sprint("uid-", c.next))}
}

// place places a sandbox and returns its node; for a refusal the reason.
func (c *cluster) place(q *PlacementRequest) string {
	p, err := c.runtime.settings().engine.Place(q)
	if err != nil {
		return string(fault.ReasonOf(err))
	}
	return p.Node
}

func node(i int, domain string, capacity Capacity) Agent {
	return Agent{Node: fmt.Sprint("n", i), Labels: map[string]string{v1alpha1.DefaultTopologyKey: domain, "zone": "z1"}, Capacity: capacity}
}

func TestSpreadAndPack(t *testing.T) {
	agents := []Agent{node(0, "d0", Capacity{Sandboxes: 4}), node(1, "d0", Capacity{Sandboxes: 4}), node(2, "d1", Capacity{Sandboxes: 4})}
	for strategy, want := range map[string]map[string]int{
		StrategySpread: {"n0": 2, "n1": 2, "n2": 2},
		StrategyPack:   {"n0": 4, "n1": 2},
	} {
		c := newCluster(t, v1alpha1.SandboxGroupSpec{SchedulingPolicy: v1alpha1.SchedulingPolicy{Strategy: strategy}}, v1alpha1.SubSandboxGroup{}, agents...)
		got := map[string]int{}
		for range 6 {
			got[c.place(c.request())]++
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: %v", strategy, got)
		}
	}
}

func TestPlacementRules(t *testing.T) {
	small, large := Capacity{CPUMilli: 1000, MemoryBytes: 1 << 30}, Capacity{CPUMilli: 8000, MemoryBytes: 8 << 30}
	agents := []Agent{node(0, "d0", small), node(1, "d1", large)}
	t.Run("resources, reserved at once and given back", func(t *testing.T) {
		c := newCluster(t, v1alpha1.SandboxGroupSpec{}, v1alpha1.SubSandboxGroup{}, agents...)
		q := c.request()
		q.Requests = Requests{CPUMilli: 6000}
		if got := c.place(q); got != "n1" {
			t.Errorf("placed on %s", got)
		}
		again := c.request()
		again.Requests = q.Requests
		if got := c.place(again); got != string(fault.NoCapacity) {
			t.Errorf("placed on %s", got)
		}
		c.runtime.Engine.Undo(q.UID)
		if got := c.place(again); got != "n1" {
			t.Errorf("placed on %s", got)
		}
		if got := c.place(again); got != "n1" {
			t.Errorf("placing is not idempotent: %s", got)
		}
	})
	t.Run("who requests nothing is spread all the same", func(t *testing.T) {
		c := newCluster(t, v1alpha1.SandboxGroupSpec{}, v1alpha1.SubSandboxGroup{}, node(0, "", large), node(1, "", large), node(2, "", large))
		got := map[string]int{}
		for range 6 {
			got[c.place(c.request())]++
		}
		if want := map[string]int{"n0": 2, "n1": 2, "n2": 2}; !maps.Equal(got, want) {
			t.Errorf("placed on %v", got)
		}
	})
	t.Run("the only fitting one is found behind many", func(t *testing.T) {
		var many []Agent
		for i := range 50 {
			many = append(many, node(i, "d0", small))
		}
		c := newCluster(t, v1alpha1.SandboxGroupSpec{}, v1alpha1.SubSandboxGroup{}, append(many, node(50, "d0", large))...)
		fill := c.request()
		fill.Requests = Requests{CPUMilli: 7000} // the large one is the fullest now
		if got := c.place(fill); got != "n50" {
			t.Fatalf("placed on %s", got)
		}
		q := c.request()
		q.Requests = Requests{MemoryBytes: 4 << 30}
		if got := c.place(q); got != "n50" {
			t.Errorf("placed on %s", got)
		}
	})
	t.Run("capacity of the sub-group", func(t *testing.T) {
		c := newCluster(t, v1alpha1.SandboxGroupSpec{}, v1alpha1.SubSandboxGroup{Capacity: 1}, agents...)
		c.place(c.request())
		if got := c.place(c.request()); got != string(fault.NoCapacity) {
			t.Errorf("placed on %s", got)
		}
	})
	t.Run("selector", func(t *testing.T) {
		c := newCluster(t, v1alpha1.SandboxGroupSpec{}, v1alpha1.SubSandboxGroup{NodeSelector: map[string]string{"zone": "z2"}}, agents...)
		if got := c.place(c.request()); got != string(fault.NoAgent) {
			t.Errorf("placed on %s", got)
		}
		other := node(2, "d0", Capacity{})
		other.Labels["zone"] = "z2"
		c.registry.putAgent(other, time.Time{})
		if got := c.place(c.request()); got != string(fault.NoAgent) {
			t.Errorf("placed on an agent that is not connected: %s", got)
		}
		c.registry.applyInventory("n2", &agentv1.InventoryUpdate{Full: true}, time.Time{})
		if got := c.place(c.request()); got != "n2" {
			t.Errorf("placed on %s", got)
		}
		c.registry.disconnected("n2", time.Time{})
		if got := c.place(c.request()); got != string(fault.NoAgent) {
			t.Errorf("placed on %s", got)
		}
	})
	t.Run("near the volumes", func(t *testing.T) {
		c := newCluster(t, v1alpha1.SandboxGroupSpec{}, v1alpha1.SubSandboxGroup{}, agents...)
		q := c.request()
		q.VolumeDomains = []string{"d1"}
		if got := c.place(q); got != "n1" {
			t.Errorf("placed on %s", got)
		}
		c.registry.applyInventory("n0", &agentv1.InventoryUpdate{Prepared: []*agentv1.PreparedVolume{{VolumeKey: "v"}}}, time.Time{})
		q = c.request()
		q.VolumeKeys = []string{"v"}
		if got := c.place(q); got != "n0" {
			t.Errorf("placed on %s", got)
		}
	})
	t.Run("near each other", func(t *testing.T) {
		spec := v1alpha1.SandboxGroupSpec{SchedulingPolicy: v1alpha1.SchedulingPolicy{TopologyAffinity: v1alpha1.TopologyAffinity{Enabled: true}}}
		c := newCluster(t, spec, v1alpha1.SubSandboxGroup{}, node(0, "d0", Capacity{}), node(1, "d1", Capacity{}), node(2, "d1", Capacity{}))
		first := c.request()
		first.VolumeDomains = []string{"d1"}
		c.place(first)
		if got := c.place(c.request()); got != "n2" {
			t.Errorf("placed on %s", got)
		}
		// Nodes change their domain.
		c.topology.Set("n0", map[string]string{v1alpha1.DefaultTopologyKey: "d1"})
		if got := c.place(c.request()); got != "n0" {
			t.Errorf("placed on %s", got)
		}
	})
	t.Run("where its image is", func(t *testing.T) {
		spec := v1alpha1.SandboxGroupSpec{SchedulingPolicy: v1alpha1.SchedulingPolicy{Weights: &v1alpha1.SchedulingWeights{Image: 1}}}
		c := newCluster(t, spec, v1alpha1.SubSandboxGroup{}, node(0, "", Capacity{}), node(1, "", Capacity{}))
		for range 2 {
			q := c.request()
			q.Image = "img"
			if got := c.place(q); got != "n0" {
				t.Errorf("placed on %s", got)
			}
		}
	})
	t.Run("not where it was refused", func(t *testing.T) {
		c := newCluster(t, v1alpha1.SandboxGroupSpec{}, v1alpha1.SubSandboxGroup{}, agents...)
		q := c.request()
		q.Exclude = []string{"n0"}
		if got := c.place(q); got != "n1" {
			t.Errorf("placed on %s", got)
		}
	})
}

func TestTopologyCompare(t *testing.T) {
	c := NewTopologyDomainCache("")
	c.Set("n0", map[string]string{v1alpha1.DefaultTopologyKey: "d0"})
	c.Set("n1", nil)
	for _, x := range []struct {
		name    string
		domains []string
		node    string
		stale   bool
		force   bool
		want    v1alpha1.Topology
	}{
		{"same", []string{"d0"}, "n0", false, false, v1alpha1.TopologyMatch},
		{"among several", []string{"d1", "d0"}, "n0", false, false, v1alpha1.TopologyMatch},
		{"other", []string{"d1"}, "n0", false, false, v1alpha1.TopologyMismatch},
		{"other, forced", []string{"d1"}, "n0", false, true, v1alpha1.TopologyForced},
		{"same, forced", []string{"d0"}, "n0", false, true, v1alpha1.TopologyMatch},
		{"volume without", nil, "n0", false, false, v1alpha1.TopologyUnknown},
		{"node without", []string{"d0"}, "n1", false, false, v1alpha1.TopologyUnknown},
		{"no such node", []string{"d0"}, "n2", false, false, v1alpha1.TopologyUnknown},
		{"stale", []string{"d1"}, "n0", true, false, v1alpha1.TopologyUnknown},
	} {
		c.SetStale(x.stale)
		if got := compareTopology(c, x.domains, x.node, x.force); got.result != x.want {
			t.Errorf("%s: %s", x.name, got.result)
		}
	}
	c.SetStale(false)
	c.Delete("n0")
	if _, ok := c.Domain("n0"); ok {
		t.Error("a deleted node has a domain")
	}
}

// claims resolves pvc volumes whose domain is their name.
type claims struct{}

func (claims) Locate(w Wish) (Location, error) {
	return Location{Domains: []string{w.Volume.Source}, VolumeKey: "pvc/" + w.Volume.Source}, nil
}

func (claims) Changes(context.Context) iter.Seq[VolumeRef] { return func(func(VolumeRef) bool) {} }

func (c claims) Resolve(_ context.Context, w Wish, _ string) (*ResolvedVolume, error) {
	at, err := c.Locate(w)
	source := w.Volume.Source
	return &ResolvedVolume{
		Location: at, PVCName: source, PVName: "pv-" + source,
		Path: v1alpha1.VolumePathDirect, PathReason: "the driver is on the list",
		SetSource: func(r *agentv1.AttachRequest) {
			r.Source = &agentv1.AttachRequest_Csi{Csi: &agentv1.CSISource{VolumeHandle: source}}
		},
	}, err
}

func TestCrossTopologyMount(t *testing.T) {
	w := emptyWorld(t)
	w.resolver = claims{}
	w.group("default", nil)
	w.start()
	for i := range 2 {
		w.addAgent(fmt.Sprint("n", i), map[string]string{v1alpha1.DefaultTopologyKey: fmt.Sprint("d", i)})
	}
	w.eventually("agents", func() bool { return w.s.registry.agent("n0").connected && w.s.registry.agent("n1").connected })
	claim := func(domain, target string) v1alpha1.DynamicVolume {
		return v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: domain, Target: target}
	}
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{claim("d1", "/near")} })
	if node := w.get("a").Status.Node; node != "n1" {
		t.Errorf("placed on %s, far from its volume", node)
	}
	row := w.row("a", "/near")
	if row.Topology != v1alpha1.TopologyMatch || row.VolumeDomain != "d1" || row.SandboxDomain != "d1" || row.PVCName != "d1" || row.PVName != "pv-d1" ||
		row.PathReason == "" || row.Path != v1alpha1.VolumePathDirect {
		t.Errorf("row %+v", row)
	}
	w.add("a", claim("d0", "/far"))
	row = w.rowIs("a", "/far", v1alpha1.VolumeFailed)
	if row.Reason != string(fault.CrossTopology) || row.Topology != v1alpha1.TopologyMismatch || row.NextRetryTime != nil || w.agents["n1"].count("attach /far") != 0 {
		t.Errorf("row %+v", row)
	}
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes[1].ForceMount = true })
	row = w.rowIs("a", "/far", v1alpha1.VolumeMounted)
	if row.Topology != v1alpha1.TopologyForced {
		t.Errorf("row %+v", row)
	}
	if got := w.s.Runtime(SubSandboxGroupKey{"default", "default", "default"}).VolMgr.Usage(); got["d1"].Volumes != 2 || len(got) != 1 {
		t.Errorf("usage %v", got)
	}
	if n := w.sample("sandbox_pvc_cross_topology_mount", nil); n != 1 {
		t.Errorf("counter %v", n)
	}
	if !slices.Contains(w.events.seen, "a Warning ForcedAcrossTopology") {
		t.Errorf("events %v", w.events.seen)
	}
}

// What was refused for its topology is judged anew when the node's label changes.
func TestTopologyFollowsTheLabels(t *testing.T) {
	w := emptyWorld(t)
	w.resolver = claims{}
	w.group("default", nil)
	w.start()
	w.addAgent("n1", map[string]string{v1alpha1.DefaultTopologyKey: "d1"})
	w.running("a", nil)
	w.add("a", v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: "d2", Target: "/far"})
	if row := w.rowIs("a", "/far", v1alpha1.VolumeFailed); row.Reason != string(fault.CrossTopology) || row.SandboxDomain != "d1" {
		t.Errorf("row %+v", row)
	}
	moved := func(labels map[string]string) {
		w.follow.events <- AgentEvent{Type: AgentAdded, Agent: Agent{Node: "n1", Labels: labels, Client: w.agents["n1"]}}
	}
	moved(map[string]string{v1alpha1.DefaultTopologyKey: "d1", "other": "label"})
	w.eventually("the other label", func() bool {
		return w.s.registry.agent("n1").Labels["other"] != "" && w.s.registry.agent("n1").connected
	})
	if row := w.row("a", "/far"); row.Phase != v1alpha1.VolumeFailed || row.Attempts != 1 {
		t.Errorf("row %+v", row)
	}
	moved(map[string]string{v1alpha1.DefaultTopologyKey: "d2"})
	w.eventually("a second look", func() bool {
		w.clock.Step(time.Second) // its back-off
		row := w.row("a", "/far")
		return row.Phase == v1alpha1.VolumeMounted && row.Topology == v1alpha1.TopologyMatch && row.SandboxDomain == "d2"
	})
}

func TestPlacementDoesNotAllocate(t *testing.T) {
	c := large(t)
	q := c.request()
	engine := c.runtime.settings().engine
	// The reservation itself is one placement; nothing grows with the agents.
	if n := testing.AllocsPerRun(100, func() {
		if _, err := engine.Place(q); err != nil {
			t.Fatal(err)
		}
		engine.Undo(q.UID)
	}); n > 6 {
		t.Errorf("%v allocations for a placement", n)
	}
}

// large is 10,000 agents in 100 domains, with some load.
func large(t testing.TB) *cluster {
	var agents []Agent
	for i := range 10_000 {
		agents = append(agents, node(i, fmt.Sprint("d", i%100), Capacity{Sandboxes: 100, CPUMilli: 64_000}))
	}
	c := newCluster(t, v1alpha1.SandboxGroupSpec{}, v1alpha1.SubSandboxGroup{}, agents...)
	for range 20_000 {
		q := c.request()
		q.Requests, q.Image = Requests{CPUMilli: int64(500 + c.next%7*100)}, "img"
		c.place(q)
	}
	return c
}

// BenchmarkPlacement is the decision and its reservation, undone again. Budget: 5 µs (design, section 11).
func BenchmarkPlacement(b *testing.B) {
	c := large(b)
	engine := c.runtime.settings().engine
	q := c.request()
	q.Requests, q.Image, q.VolumeDomains = Requests{CPUMilli: 1000}, "img", []string{"d42"}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := engine.Place(q); err != nil {
			b.Fatal(err)
		}
		engine.Undo(q.UID)
	}
}
