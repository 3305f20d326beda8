package scheduler

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// fakeKeeper holds claims in memory. It outlives the schedulers, as finalizers do.
type fakeKeeper struct {
	mu     sync.Mutex // guards all below
	held   map[VolumeRef]bool
	calls  []string
	faults []error
	// late says how many attaches an agent had got when a volume was held.
	late func() int
	// anchors are the nodes for which there is something of a volume beside its being held; anchored those that were last
	// said to need that, made those that ever were without having it.
	anchors, anchored map[VolumeRef][]string
	made              []string
}

func (k *fakeKeeper) orNil() Keeper {
	if k == nil {
		return nil
	}
	return k
}

func (k *fakeKeeper) Hold(_ context.Context, ref VolumeRef) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held[ref] {
		return nil
	}
	if len(k.faults) > 0 {
		err := k.faults[0]
		k.faults = k.faults[1:]
		return err
	}
	k.held[ref] = true
	call := "hold " + ref.Source
	if k.late != nil {
		call = fmt.Sprintf("%s after %d attaches", call, k.late())
	}
	k.calls = append(k.calls, call)
	return nil
}

func (k *fakeKeeper) LetGo(_ context.Context, ref VolumeRef, unused func() bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.held[ref] || !unused() {
		return nil
	}
	delete(k.held, ref)
	k.calls = append(k.calls, "let go "+ref.Source)
	return nil
}

func (k *fakeKeeper) Anchor(_ context.Context, ref VolumeRef, nodes map[string]types.UID, may func(string) bool) (bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	need := slices.Sorted(maps.Keys(nodes))
	for _, n := range need {
		if !slices.Contains(k.anchors[ref], n) {
			k.made = append(k.made, n)
		}
	}
	for _, n := range k.anchors[ref] {
		if may(n) && !slices.Contains(need, n) {
			need = append(need, n+" maybe")
		}
	}
	if k.anchored == nil {
		k.anchored = map[VolumeRef][]string{}
	}
	k.anchored[ref] = need
	return len(k.anchors[ref]) > 0, nil
}

func (k *fakeKeeper) IsHeld(ref VolumeRef) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.held[ref]
}

func (k *fakeKeeper) Held() []VolumeRef {
	k.mu.Lock()
	defer k.mu.Unlock()
	var all []VolumeRef
	for ref := range k.held {
		all = append(all, ref)
	}
	return all
}

// About knows the names that the resolver "claims" gives.
func (k *fakeKeeper) About(ref VolumeRef) (VolumeRef, string) {
	if claim, ok := strings.CutPrefix(ref.Source, "pv-"); ok && ref.Type == v1alpha1.VolumeTypePV {
		return VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: "default", Source: claim}, "pvc/" + claim
	}
	return VolumeRef{Type: v1alpha1.VolumeTypePV, Source: "pv-" + ref.Source}, "pvc/" + ref.Source
}

func (k *fakeKeeper) did() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.calls)
}

func ofClaim(name, target string) v1alpha1.DynamicVolume {
	return v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: name, Target: target}
}

func claimed(name string) VolumeRef {
	return VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: "default", Source: name}
}

func holdWorld(t *testing.T) (*world, *fakeKeeper) {
	w := emptyWorld(t)
	w.resolver, w.keeper = claims{}, &fakeKeeper{held: map[VolumeRef]bool{}}
	w.group("default", nil)
	w.addAgent("n1", nil)
	w.start()
	return w, w.keeper
}

// did waits until the Keeper has been called so, and then looks at every sandbox once more for it to be called no further.
func (w *world) did(want ...string) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("the keeper was called: %v", want), func() bool { return slices.Equal(w.keeper.did(), want) })
	for _, key := range w.s.cache.all() {
		w.look(key.Name)
	}
	w.eventually("nothing is to do", func() bool {
		w.s.queue.mu.Lock()
		defer w.s.queue.mu.Unlock()
		return len(w.s.queue.dirty)+len(w.s.queue.taken) == 0
	})
	if got := w.keeper.did(); !slices.Equal(got, want) {
		w.t.Errorf("the keeper was called: %v, want %v", got, want)
	}
}

func TestAVolumeIsHeldFromBeforeItsFirstAttachUntilItsLastUserIsGone(t *testing.T) {
	w, k := holdWorld(t)
	k.late = func() int { return w.agent().count("attach /data") + w.agent().count("attach /more") }
	w.running("a", nil)
	w.running("b", nil)
	w.did()
	w.add("a", ofClaim("c", "/data"))
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.add("a", ofClaim("c", "/more"))
	w.rowIs("a", "/more", v1alpha1.VolumeMounted)
	w.add("b", ofClaim("c", "/data"))
	w.rowIs("b", "/data", v1alpha1.VolumeMounted)
	held := "hold c after 0 attaches"
	w.did(held)
	w.remove("a", "/data", "r-1", false)
	w.noRow("a", "/data")
	w.delete("a")
	w.eventually("a is gone", func() bool { return w.get("a") == nil })
	w.did(held)
	// Removed by hand, and busy.
	w.agent().with(func() { w.agent().busy["/data"] = holder() })
	w.drop("b", "/data")
	w.rowIs("b", "/data", v1alpha1.VolumeDetaching)
	w.did(held)
	w.agent().with(func() { w.agent().busy["/data"] = nil })
	w.within(time.Second, "detached", func() bool { return w.row("b", "/data") == nil })
	w.did(held, "let go c")
	w.add("b", ofClaim("c", "/data"))
	w.rowIs("b", "/data", v1alpha1.VolumeMounted)
	w.delete("b")
	w.eventually("b is gone", func() bool { return w.get("b") == nil })
	w.did(held, "let go c", "hold c after 3 attaches", "let go c")
}

func TestAVolumeIsHeldUntilItsNodeHasReleasedIt(t *testing.T) {
	w, k := holdWorld(t)
	w.running("a", nil)
	w.add("a", ofClaim("c", "/data"))
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	_, key := k.About(claimed("c"))
	node := w.agent()
	node.prepares(key, true)
	w.eventually("that is known", func() bool { return len(w.s.registry.preparedOn(key)) == 1 })
	w.delete("a")
	w.eventually("a is gone", func() bool { return w.get("a") == nil })
	w.did("hold c")
	node.with(node.cut)
	w.within(firstReconnect, "the agent is followed again", func() (again bool) {
		node.with(func() { again = len(node.streams) == 1 })
		return again
	})
	w.did("hold c")
	node.prepares(key, false)
	w.did("hold c", "let go c")
}

// What a volume needs on its nodes stays where the volume is ready, or a sandbox may use it, and the volume is held as long
// as there is something of it.
func TestAVolumeIsAnchoredWhereItIsUsed(t *testing.T) {
	w, k := holdWorld(t)
	ref := claimed("c")
	k.anchors = map[VolumeRef][]string{ref: {"n1", "n2"}}
	needs := func(want ...string) {
		t.Helper()
		w.eventually(fmt.Sprintf("the nodes %v need it", want), func() bool {
			w.s.queue.add(item{volume: ref})
			k.mu.Lock()
			defer k.mu.Unlock()
			return slices.Equal(k.anchored[ref], want)
		})
	}
	w.running("a", nil)
	needs()
	w.add("a", ofClaim("c", "/data"))
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	needs("n1 maybe")
	_, key := k.About(ref)
	w.agent().prepares(key, true)
	needs("n1")
	w.delete("a")
	w.eventually("a is gone", func() bool { return w.get("a") == nil })
	needs("n1 maybe")
	w.agent().prepares(key, false)
	needs()
	w.did("hold c")
	k.mu.Lock()
	k.anchors = nil
	k.mu.Unlock()
	w.s.queue.add(item{volume: ref})
	w.did("hold c", "let go c")
}

// Whoever has a node, or its agent's certificate, can say of every volume that it is ready there, and of every sandbox that it
// is there. With that he must not come by a volume.
func TestANodeThatSaysItHasAVolumeDoesNotGetIt(t *testing.T) {
	w, k := holdWorld(t)
	other := w.addAgent("n2", nil)
	ref := claimed("c")
	_, key := k.About(ref)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{ofClaim("c", "/data")} })
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	on := w.get("a").Status.Node
	if on == "n2" {
		other = w.agents["n1"]
	}
	w.agents[on].prepares(key, true)
	k.mu.Lock()
	k.anchors = map[VolumeRef][]string{ref: {on}}
	k.mu.Unlock()
	other.with(func() {
		other.tell(&agentv1.InventoryUpdate{Node: other.node, Sandboxes: []*agentv1.SandboxState{{Uid: uid, Phase: stateRunning}}})
	})
	other.prepares(key, true)
	w.eventually("both say so", func() bool { return len(w.s.registry.preparedOn(key)) == 2 })
	w.eventually("the volume was looked at", func() bool {
		w.s.queue.add(item{volume: ref})
		k.mu.Lock()
		defer k.mu.Unlock()
		return slices.Equal(k.anchored[ref], []string{on})
	})
	k.mu.Lock()
	defer k.mu.Unlock()
	if slices.Contains(k.made, other.node) {
		t.Errorf("an anchor was made on %s, which no sandbox is on", other.node)
	}
}

func TestNothingIsAttachedThatCannotBeHeld(t *testing.T) {
	w, k := holdWorld(t)
	w.running("a", nil)
	k.faults = []error{fault.New(errdefs.ErrNotFound, fault.ClaimNotFound, "claim default/c is being deleted: use another")}
	w.add("a", ofClaim("c", "/data"))
	row := w.rowIs("a", "/data", v1alpha1.VolumeFailed)
	if row.Reason != string(fault.ClaimNotFound) || !strings.Contains(row.Message, "being deleted") || w.agent().count("attach /data") != 0 {
		t.Errorf("row %+v, %d attaches", row, w.agent().count("attach /data"))
	}
}

func TestAFailedAttachHoldsNothing(t *testing.T) {
	w, _ := holdWorld(t)
	w.running("a", nil)
	w.agent().with(func() { w.agent().faults["attach /data"] = []error{errPermanent} })
	w.add("a", ofClaim("c", "/data"))
	w.rowIs("a", "/data", v1alpha1.VolumeFailed)
	w.did("hold c") // the node may say that it is there after all
	w.clock.Step(settleAfter)
	w.did("hold c", "let go c")
}

func TestWhatIsPausedIsHeld(t *testing.T) {
	w, _ := holdWorld(t)
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{ofClaim("c", "/data")} })
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = true })
	w.phase("a", v1alpha1.SandboxPaused)
	w.rowIs("a", "/data", v1alpha1.VolumePending)
	w.did("hold c")
	w.delete("a")
	w.eventually("a is gone", func() bool { return w.get("a") == nil })
	w.did("hold c", "let go c")
}

// What has ended for good keeps no claim: whoever deletes it need not wait for somebody to delete the sandbox, too.
func TestWhatHasEndedIsNotHeld(t *testing.T) {
	w, _ := holdWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) {
		sb.Spec.RestartPolicy = v1alpha1.RestartNever
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{ofClaim("c", "/data")}
	})
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.did("hold c")
	w.agent().change(uid, func(s *agentv1.SandboxState) {
		s.Phase, s.ExitCode, s.Volumes = stateStopped, proto.Int32(0), nil
	})
	w.phase("a", v1alpha1.SandboxSucceeded)
	w.did("hold c", "let go c")
}

// A new leader finds what its predecessors left, in both directions.
func TestANewLeaderRepairsWhatIsHeld(t *testing.T) {
	w, k := holdWorld(t)
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{ofClaim("c", "/data")} })
	w.did("hold c")
	w.halt()
	k.calls, k.held = nil, map[VolumeRef]bool{claimed("nobody's"): true}
	w.start()
	w.eventually("repaired", func() bool { return k.IsHeld(claimed("c")) && !k.IsHeld(claimed("nobody's")) })
	if got := k.did(); len(got) != 2 {
		t.Errorf("the keeper was called: %v", got)
	}
	// Somebody takes it away by hand, and the watch tells.
	k.mu.Lock()
	k.held, k.calls = map[VolumeRef]bool{}, nil
	k.mu.Unlock()
	w.s.queue.add(item{volume: claimed("c")})
	w.did("hold c")
}

// The leader died after the command, before anything was written, and the entry was taken out of the spec meanwhile: only
// the node knows.
func TestANewLeaderLetsNothingGoThatANodeHas(t *testing.T) {
	w, k := holdWorld(t)
	w.running("a", nil)
	uid := w.get("a").UID
	w.halt()
	k.held[claimed("c")] = true
	w.agent().with(func() {
		s := w.agent().sandboxes[string(uid)]
		s.Volumes = append(s.Volumes, &agentv1.MountRecord{Target: "/data", EntryHash: "unknown", VolumeKey: "pvc/c", Phase: recordMounted})
		w.agent().busy["/data"] = holder()
	})
	w.start()
	w.eventually("its detach is tried", func() bool { return w.agent().count("detach /data") > 0 })
	w.look("a")
	w.did()
	w.agent().with(func() { w.agent().busy["/data"] = nil })
	w.within(time.Second, "let go", func() bool { return !k.IsHeld(claimed("c")) })
}

// The Sandbox is gone by somebody's force, and its node is still to be cleaned up.
func TestWhatAnOrphanHasIsHeld(t *testing.T) {
	w, k := holdWorld(t)
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{ofClaim("c", "/data")} })
	w.agent().with(func() { w.agent().faults["delete"] = []error{errTransient} })
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Finalizers = nil })
	w.delete("a")
	w.eventually("the orphan cannot be removed", func() bool { return w.agent().count("delete") == 1 })
	w.did("hold c")
	w.within(time.Second, "removed", func() bool { return w.agent().count("delete") == 2 })
	w.did("hold c", "let go c")
	if k.IsHeld(claimed("c")) {
		t.Error("held")
	}
}

// An unreachable node may still have what the sandbox of a former leader was about to attach.
func TestWhatANodeThatIsAwayMayHaveIsHeld(t *testing.T) {
	w, k := holdWorld(t)
	w.running("a", nil)
	w.agent().with(func() { w.agent().hang["attach /data"] = true })
	w.add("a", ofClaim("c", "/data"))
	w.eventually("the attach hangs", func() bool { return w.agent().count("attach /data") == 1 })
	w.did("hold c")
	w.halt()
	w.agent().with(func() { w.agent().hang, w.agent().down = map[string]bool{}, true })
	next, err := New(Config{Store: w.store, Agents: StaticAgents{{Node: "n1", Client: w.agent()}}, Clock: w.clock, Epoch: 2, LeaseUID: "lease",
		Resolver: w.resolver, Keeper: k})
	if err != nil {
		t.Fatal(err)
	}
	w.run(next)
	w.within(time.Second, "the agent is given up", next.isReady)
	w.look("a")
	w.did("hold c")
	w.agent().setDown(false)
	w.within(time.Second, "mounted", func() bool { r := w.row("a", "/data"); return r != nil && r.Phase == v1alpha1.VolumeMounted })
	if !k.IsHeld(claimed("c")) {
		t.Error("not held")
	}
}

// A volume that is only prepared for a Pod's container is in use too, and stays so while the Pod is made again.
func TestAVolumeOfAPodIsHeld(t *testing.T) {
	w := emptyWorld(t)
	w.pods, w.resolver, w.keeper = newFakePods(), claims{}, &fakeKeeper{held: map[VolumeRef]bool{}}
	w.pods.lingers = true
	w.group("default", nil)
	w.addAgent("n1", nil)
	w.start()
	w.create("a", func(sb *v1alpha1.Sandbox) {
		owned(sb)
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{ofClaim("c", "/data")}
	})
	first := w.pod("a", "")
	w.schedule("a", "n1")
	w.eventually("prepared", func() bool { r := w.row("a", "/data"); return r != nil && r.Reason == ReasonWaitingForContainer })
	w.did("hold c")
	w.podStarts("a")
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.did("hold c")
	w.agent().podGone(string(first))
	w.pods.gone("a")
	w.pod("a", first)
	w.did("hold c")
	w.schedule("a", "n1")
	w.podStarts("a")
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.did("hold c")
	w.delete("a")
	w.eventually("its Pod is to go", func() bool { return w.pods.get("a").Deleting })
	w.did("hold c")
	w.agent().podGone(string(w.pods.get("a").UID))
	w.pods.gone("a")
	w.eventually("a is gone", func() bool { return w.get("a") == nil })
	w.did("hold c", "let go c")
}

// A Scheduler that has not looked at every sandbox yet does not know who uses what.
func TestNothingIsLetGoBeforeEverySandboxWasLookedAt(t *testing.T) {
	k := &fakeKeeper{held: map[VolumeRef]bool{claimed("c"): true}}
	w := emptyWorld(t)
	s, err := New(Config{Store: w.store, Agents: StaticAgents{}, Clock: w.clock, Epoch: 1, LeaseUID: "l", Keeper: k})
	if err != nil {
		t.Fatal(err)
	}
	one, two := store.Key{Name: "one"}, store.Key{Name: "two"}
	s.settle(t.Context(), claimed("c"))
	s.holds.await([]store.Key{one, two})
	for _, key := range []store.Key{one, two} {
		if s.settle(t.Context(), claimed("c")); !k.IsHeld(claimed("c")) {
			t.Fatalf("let go before %s was looked at", key.Name)
		}
		s.sawUses(key)
	}
	if s.settle(t.Context(), claimed("c")); k.IsHeld(claimed("c")) {
		t.Error("still held, by nobody")
	}
}

// TestExpectedVolumesAreHeldBeforeTheyAreAskedFor: so the attach finds them held; and who does not get them does not keep them.
func TestExpectedVolumesAreHeldBeforeTheyAreAskedFor(t *testing.T) {
	w, k := holdWorld(t)
	w.running("a", nil)
	w.running("b", nil)
	k.late = func() int { return w.agent().count("attach /data") }
	byVolume := v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePV, Source: "pv-c", Target: "/data"}
	local := local("/local", "")
	w.s.Expect(t.Context(), w.get("a"), []v1alpha1.DynamicVolume{byVolume, local})
	w.s.Expect(t.Context(), w.get("b"), []v1alpha1.DynamicVolume{ofClaim("d", "/data")})
	if got := k.did(); !slices.Equal(got, []string{"hold c after 0 attaches", "hold d after 0 attaches"}) {
		t.Fatalf("the keeper was called: %v", got)
	}
	w.add("a", ofClaim("c", "/data"))
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.s.Forgo(w.get("b"))
	w.did("hold c after 0 attaches", "hold d after 0 attaches", "let go d")
	// One that is gone keeps nothing either.
	b := w.get("b")
	w.s.Expect(t.Context(), b, []v1alpha1.DynamicVolume{ofClaim("d", "/data")})
	w.delete("b")
	w.did("hold c after 0 attaches", "hold d after 0 attaches", "let go d", "hold d after 1 attaches", "let go d")
	w.s.Expect(t.Context(), b, []v1alpha1.DynamicVolume{ofClaim("d", "/data")})
	w.did("hold c after 0 attaches", "hold d after 0 attaches", "let go d", "hold d after 1 attaches", "let go d")
}
