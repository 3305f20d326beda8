package scheduler

import (
	"context"
	"fmt"
	"iter"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// onNodes is a volume that some nodes can use, named or not.
func onNodes(named bool, nodes ...string) *Reach {
	r := &Reach{Volume: "PersistentVolume pv", Has: func(node string, _ map[string]string) bool { return strings.Contains(fmt.Sprint(nodes), node) }}
	if named {
		r.Likely = append([]string{"a node that is not there"}, nodes...)
	}
	return r
}

func TestPlacementByReach(t *testing.T) {
	var agents []Agent
	for i := range 40 {
		agents = append(agents, node(i+10, fmt.Sprint("d", i%2), Capacity{Sandboxes: 1}))
	}
	for _, named := range []bool{false, true} {
		c := newCluster(t, v1alpha1.SandboxGroupSpec{}, v1alpha1.SubSandboxGroup{}, agents...)
		for _, x := range []struct {
			name  string
			reach []*Reach
			want  string
		}{
			{"the one node, behind many", []*Reach{onNodes(named, "n42")}, "n42"},
			{"it is full", []*Reach{onNodes(named, "n42")}, string(fault.NoCapacity)},
			{"two volumes, on one node both", []*Reach{onNodes(named, "n30", "n31"), onNodes(named, "n31", "n32")}, "n31"},
			{"two volumes, nowhere both", []*Reach{onNodes(named, "n30"), onNodes(named, "n32")}, string(fault.UnreachableVolume)},
			{"a node that is not ours", []*Reach{onNodes(named, "n99")}, string(fault.UnreachableVolume)},
		} {
			q := c.request()
			q.Reach = x.reach
			if got := c.place(q); got != x.want {
				t.Errorf("named %v, %s: placed on %s, want %s", named, x.name, got, x.want)
			}
		}
		refused := c.request()
		refused.Reach, refused.Exclude = []*Reach{onNodes(named, "n20", "n21")}, []string{"n20"}
		if got := c.place(refused); got != "n21" {
			t.Errorf("named %v: placed on %s, which refused it", named, got)
		}
	}
	// A label is not always the node's name: the labels decide.
	c := newCluster(t, v1alpha1.SandboxGroupSpec{}, v1alpha1.SubSandboxGroup{}, agents...)
	q := c.request()
	q.Reach = []*Reach{{Volume: "v", Likely: []string{"n10"}, Has: func(node string, labels map[string]string) bool { return node == "n17" && labels["zone"] == "z1" }}}
	if got := c.place(q); got != "n17" {
		t.Errorf("placed on %s", got)
	}
}

// disks are volumes that one node each can use; one without a node is not bound.
type disks struct {
	changes chan VolumeRef
	mu      sync.Mutex // guards the fields below
	at      map[string]string
	// unusable counts what was of no use on its node.
	unusable int
}

func (d *disks) put(disk, node string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at[disk] = node
}

// bind is put that is told of.
func (d *disks) bind(disk, node string) {
	d.put(disk, node)
	d.changes <- VolumeRef{Type: v1alpha1.VolumeTypePV, Source: disk}
}

func (d *disks) Changes(ctx context.Context) iter.Seq[VolumeRef] {
	return func(yield func(VolumeRef) bool) {
		for {
			select {
			case <-ctx.Done():
				return
			case ref := <-d.changes:
				if !yield(ref) {
					return
				}
			}
		}
	}
}

func (d *disks) Locate(w Wish) (Location, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	node, ok := d.at[w.Volume.Source]
	switch {
	case !ok:
		return Location{}, fault.New(errdefs.ErrPermissionDenied, fault.SourceDenied, "no")
	case node == "":
		return Location{}, fault.New(errdefs.ErrFailedPrecondition, fault.VolumeNotBound, "not bound")
	}
	return Location{Domains: []string{w.TopologyKey}, Reach: onNodes(true, node)}, nil
}

func (d *disks) Resolve(_ context.Context, w Wish, _ string) (*ResolvedVolume, error) {
	at, err := d.Locate(w)
	at.Domains = nil
	return &ResolvedVolume{Location: at, PVName: "pv-" + w.Volume.Source, Path: v1alpha1.VolumePathLocal, SetSource: func(r *agentv1.AttachRequest) {
		r.Source = &agentv1.AttachRequest_Local{Local: &agentv1.LocalSource{Path: "/mnt/" + w.Volume.Source, PersistentVolume: "pv-" + w.Volume.Source}}
	}, Unusable: func(context.Context) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.unusable++
	}}, err
}

func disk(source, target string) v1alpha1.DynamicVolume {
	return v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePV, Source: source, Target: target}
}

func diskWorld(t *testing.T) (*world, *disks) {
	w, d := emptyWorld(t), &disks{changes: make(chan VolumeRef), at: map[string]string{"far": "n0", "late": ""}}
	w.resolver = d
	w.group("default", nil)
	w.start()
	for i := range 3 {
		w.addAgent(fmt.Sprint("n", i), nil)
	}
	w.eventually("agents", func() bool {
		return w.s.registry.agent("n0").connected && w.s.registry.agent("n1").connected && w.s.registry.agent("n2").connected
	})
	return w, d
}

func TestASandboxIsPlacedWhereItsVolumesAre(t *testing.T) {
	w, d := diskWorld(t)
	d.put("near", "n2")
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{disk("near", "/near")} })
	if node := w.get("a").Status.Node; node != "n2" {
		t.Errorf("placed on %s", node)
	}
	if row := w.row("a", "/near"); row.PVName != "pv-near" || row.Path != v1alpha1.VolumePathLocal {
		t.Errorf("row %+v", row)
	}
	// Nothing forces a node to reach what it cannot.
	far := disk("far", "/far")
	far.ForceMount = true
	w.add("a", far)
	row := w.rowIs("a", "/far", v1alpha1.VolumeFailed)
	if row.Reason != string(fault.UnreachableVolume) || row.NextRetryTime != nil || w.agents["n2"].count("attach /far") != 0 {
		t.Errorf("row %+v", row)
	}
}

func TestAVolumeWithoutAPlaceIsWaitedFor(t *testing.T) {
	w, d := diskWorld(t)
	w.create("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{disk("late", "/late")} })
	w.eventually("the reason", func() bool { return w.get("a").Status.Reason == string(fault.VolumeNotBound) })
	if st := w.get("a").Status; st.Node != "" || st.Phase != v1alpha1.SandboxPending || st.Message == "" {
		t.Errorf("status %+v", st)
	}
	d.put("late", "n1")
	w.within(firstRetry, "running", func() bool { return w.get("a").Status.Phase == v1alpha1.SandboxRunning })
	if node := w.get("a").Status.Node; node != "n1" {
		t.Errorf("placed on %s", node)
	}
	// Added to a sandbox that runs, it is tried again too.
	d.put("later", "")
	w.add("a", disk("later", "/later"))
	if row := w.rowIs("a", "/later", v1alpha1.VolumeFailed); row.Reason != string(fault.VolumeNotBound) || row.NextRetryTime == nil {
		t.Errorf("row %+v", row)
	}
	d.put("later", "n1")
	w.within(firstRetry, "mounted", func() bool { return w.row("a", "/later").Phase == v1alpha1.VolumeMounted })
}

// A change of the volume ends the waiting, whatever the time of the next attempt.
func TestAVolumeThatChangesIsTriedAtOnce(t *testing.T) {
	w, d := diskWorld(t)
	w.create("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{disk("late", "/late")} })
	w.eventually("the reason", func() bool { return w.get("a").Status.Reason == string(fault.VolumeNotBound) })
	d.bind("other", "n1")
	d.bind("late", "n1")
	w.phase("a", v1alpha1.SandboxRunning)

	d.put("later", "")
	w.add("a", disk("later", "/later"))
	w.rowIs("a", "/later", v1alpha1.VolumeFailed)
	w.clock.Step(time.Millisecond) // far from the next attempt
	d.bind("later", "n1")
	w.rowIs("a", "/later", v1alpha1.VolumeMounted)
}

// What nobody waits for keeps no sandbox from a node.
func TestARefusedVolumeDoesNotKeepASandboxFromANode(t *testing.T) {
	w, _ := diskWorld(t)
	w.create("refused", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{disk("none", "/none")} })
	if row := w.rowIs("refused", "/none", v1alpha1.VolumeFailed); row.Reason != string(fault.SourceDenied) || w.get("refused").Status.Node == "" {
		t.Errorf("row %+v", row)
	}
	w.gate(false)
	w.running("off", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{disk("late", "/late")} })
	if row := w.row("off", "/late"); row.Reason != string(fault.FeatureDisabled) {
		t.Errorf("row %+v", row)
	}
}

// What the agent finds to be no good on the node is got anew for the next try.
func TestAVolumeThatIsUnusableOnItsNode(t *testing.T) {
	w, d := diskWorld(t)
	d.put("near", "n2")
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{disk("near", "/first")} })
	unusable := func() int {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.unusable
	}
	f := w.agents["n2"]
	for i, c := range []struct {
		reason fault.Reason
		calls  int
	}{{fault.AnchorLost, 1}, {fault.AnchorPending, 1}, {fault.VolumeOffline, 2}, {fault.DriverFailed, 3}} {
		target := fmt.Sprint("/t", i)
		f.with(func() {
			f.faults["attach "+target] = []error{fault.ToGRPC(fault.New(errdefs.ErrUnavailable, c.reason, "it is no good"))}
		})
		w.add("a", disk("near", target))
		w.rowIs("a", target, v1alpha1.VolumeFailed)
		if n := unusable(); n != c.calls {
			t.Errorf("%s: told %d times, want %d", c.reason, n, c.calls)
		}
		w.clock.Step(firstRetry)
		w.rowIs("a", target, v1alpha1.VolumeMounted)
	}
}
