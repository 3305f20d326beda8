package scheduler

import (
	"context"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/embedded"
)

// world is a store, agents and a scheduler, with a clock that the test moves.
type world struct {
	t        *testing.T
	clock    *clocktesting.FakeClock
	store    *countingStore
	agents   map[string]*fakeAgent
	follow   *fakeAgents
	s        *Scheduler
	events   *events
	resolver Resolver
	keeper   *fakeKeeper
	registry *prometheus.Registry
	stop     func()
	epoch    int64
	pods     *fakePods
	claims   *fakeClaims
	dead     []string // nodes that are dead when a scheduler starts
}

// fakeAgents are agents that the test adds and removes.
type fakeAgents struct {
	events chan AgentEvent
	dead   sync.Map // by node
}

func (f *fakeAgents) Dead(node string) bool {
	_, dead := f.dead.Load(node)
	return dead
}

func (f *fakeAgents) Follow(ctx context.Context) iter.Seq[AgentEvent] {
	return func(yield func(AgentEvent) bool) {
		for {
			select {
			case <-ctx.Done():
				return
			case e := <-f.events:
				if !yield(e) {
					return
				}
			}
		}
	}
}

type events struct {
	mu   sync.Mutex // guards seen
	seen []string
}

func (e *events) Event(sb *v1alpha1.Sandbox, eventType, reason, _ string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seen = append(e.seen, sb.Name+" "+eventType+" "+reason)
}

// countingStore counts the writes, and can have something happen just before one.
type countingStore struct {
	*embedded.Store
	spec, status atomic.Int64
	// late are those of them that need not be durable.
	late atomic.Int64
	hook atomic.Pointer[func(write string) error]
}

func (c *countingStore) Sandboxes() store.Sandboxes { return countingSandboxes{c.Store.Sandboxes(), c} }

type countingSandboxes struct {
	store.Sandboxes
	c *countingStore
}

func (c countingSandboxes) before(write string) error {
	if hook := c.c.hook.Load(); hook != nil {
		return (*hook)(write)
	}
	return nil
}

func (c countingSandboxes) UpdateSpec(ctx context.Context, key store.Key, pre store.Preconditions, change func(*v1alpha1.Sandbox) error) (*v1alpha1.Sandbox, error) {
	c.c.spec.Add(1)
	if err := c.before("spec"); err != nil {
		return nil, err
	}
	return c.Sandboxes.UpdateSpec(ctx, key, pre, change)
}

func (c countingSandboxes) UpdateStatus(ctx context.Context, key store.Key, pre store.Preconditions, change func(*v1alpha1.Sandbox) error) (*v1alpha1.Sandbox, error) {
	c.c.status.Add(1)
	if err := c.before("status"); err != nil {
		return nil, err
	}
	return c.Sandboxes.UpdateStatus(ctx, key, pre, change)
}

func (c countingSandboxes) UpdateSpecLate(ctx context.Context, key store.Key, pre store.Preconditions, change func(*v1alpha1.Sandbox) error) (*v1alpha1.Sandbox, error) {
	c.c.spec.Add(1)
	c.c.late.Add(1)
	if err := c.before("spec"); err != nil {
		return nil, err
	}
	return store.UpdateSpecLate(ctx, c.Sandboxes, key, pre, change)
}

func (c countingSandboxes) UpdateStatusLate(ctx context.Context, key store.Key, pre store.Preconditions, change func(*v1alpha1.Sandbox) error) (*v1alpha1.Sandbox, error) {
	c.c.status.Add(1)
	c.c.late.Add(1)
	if err := c.before("status"); err != nil {
		return nil, err
	}
	return store.UpdateStatusLate(ctx, c.Sandboxes, key, pre, change)
}

// newWorld has one agent, "n1", a group "default" whose gate is on, and a scheduler that is ready.
func newWorld(t *testing.T) *world {
	w := emptyWorld(t)
	w.group("default", nil)
	w.addAgent("n1", nil)
	w.start()
	return w
}

func emptyWorld(t *testing.T) *world {
	t.Helper()
	clock := clocktesting.NewFakeClock(time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC))
	db, err := embedded.Open(filepath.Join(t.TempDir(), "state.db"), embedded.Options{})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, clock: clock, store: &countingStore{Store: db}, agents: map[string]*fakeAgent{}, events: &events{}}
	t.Cleanup(func() {
		w.halt()
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// start runs a scheduler, a new leader each time.
func (w *world) start() {
	w.t.Helper()
	w.epoch++
	w.follow = &fakeAgents{events: make(chan AgentEvent, 100)}
	for _, node := range w.dead {
		w.follow.dead.Store(node, true)
	}
	for _, f := range w.agents {
		w.follow.events <- AgentEvent{Type: AgentAdded, Agent: Agent{Node: f.node, Client: f}}
	}
	w.follow.events <- AgentEvent{Type: AgentsSynced}
	w.registry = prometheus.NewRegistry()
	s, err := New(Config{
		Store: w.store, Agents: w.follow, Clock: w.clock, Epoch: w.epoch, LeaseUID: "lease", Events: w.events,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), Registerer: w.registry, Resolver: w.resolver, Keeper: w.keeper.orNil(), Pods: w.pods.orNil(), Claims: w.claims.orNil(),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.run(s)
	w.eventually("ready", func() bool { return s.isReady() })
}

func (w *world) run(s *Scheduler) {
	w.s = s
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	w.stop = func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("Run: %v", err)
		}
	}
}

var noPreconditions store.Preconditions

// halt ends the scheduler as a crash would: nothing is written on the way out.
func (w *world) halt() {
	if w.stop != nil {
		w.stop()
		w.stop = nil
	}
	for _, f := range w.agents {
		f.with(f.cut)
	}
}

func (w *world) addAgent(node string, labels map[string]string, capabilities ...string) *fakeAgent {
	f := newFakeAgent(node, func() *timestamppb.Timestamp { return timestamppb.New(w.clock.Now()) })
	if capabilities != nil {
		f.capabilities = capabilities // before it is announced: its first inventory says them
	}
	w.agents[node] = f
	if w.follow != nil {
		w.follow.events <- AgentEvent{Type: AgentAdded, Agent: Agent{Node: node, Labels: labels, Client: f}}
	}
	return f
}

func (w *world) agent() *fakeAgent { return w.agents["n1"] }

// eventually waits until something holds. The clock stands still.
func (w *world) eventually(what string, holds func() bool) {
	w.t.Helper()
	w.poll(what, holds, func() {})
}

// within moves the clock until something holds.
func (w *world) within(step time.Duration, what string, holds func() bool) {
	w.t.Helper()
	w.poll(what, holds, func() { w.clock.Step(step) })
}

func (w *world) poll(what string, holds func() bool, between func()) {
	w.t.Helper()
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-deadline:
			w.t.Fatalf("waited in vain: %s\n%s", what, w.dump())
		case <-tick.C:
			between()
		}
	}
}

func (w *world) dump() string {
	out := ""
	page, err := w.store.Sandboxes().List(context.Background(), store.ListOptions{})
	if err != nil {
		return err.Error()
	}
	for _, sb := range page.Items {
		out += fmt.Sprintf("%s gen %d: %+v\nspec: %+v\n", sb.Name, sb.Generation, sb.Status, sb.Spec.DynamicVolumes)
	}
	for node, f := range w.agents {
		f.with(func() { out += fmt.Sprintf("agent %s: %v\n", node, f.calls) })
	}
	return out
}

// look has a sandbox looked at once more, and waits until that is over.
func (w *world) look(name string) {
	w.t.Helper()
	q := w.s.queue
	key := item{key: store.Key{Namespace: "default", Name: name}}
	for range 2 { // the first may be merged into a look that has begun
		q.add(key)
		w.eventually("a look at "+name, func() bool {
			q.mu.Lock()
			defer q.mu.Unlock()
			_, dirty := q.dirty[key]
			_, taken := q.taken[key]
			return !dirty && !taken
		})
	}
}

func (w *world) group(name string, alter func(*v1alpha1.SandboxGroup)) {
	w.t.Helper()
	g := &v1alpha1.SandboxGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	g.Spec.FeatureGates.DynamicVolumeMount = true
	if alter != nil {
		alter(g)
	}
	if _, err := w.store.Groups().Create(context.Background(), g); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) changeGroup(name string, alter func(*v1alpha1.SandboxGroup)) {
	w.t.Helper()
	if _, err := w.store.Groups().UpdateSpec(context.Background(), store.Key{Namespace: "default", Name: name}, store.Preconditions{},
		func(g *v1alpha1.SandboxGroup) error { alter(g); return nil }); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) gate(on bool) {
	w.t.Helper()
	w.changeGroup("default", func(g *v1alpha1.SandboxGroup) { g.Spec.FeatureGates.DynamicVolumeMount = on })
	w.eventually("gate", func() bool {
		r := w.s.Runtime(SubSandboxGroupKey{"default", "default", "default"})
		return r != nil && r.settings().gate == on
	})
}

// create makes a sandbox and returns its UID.
func (w *world) create(name string, alter func(*v1alpha1.Sandbox)) string {
	w.t.Helper()
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Finalizers: []string{v1alpha1.FinalizerVolumes}}}
	sb.Spec.TenantID, sb.Spec.Image = "t-1", "busybox"
	if alter != nil {
		alter(sb)
	}
	sb, err := w.store.Store.Sandboxes().Create(context.Background(), sb)
	if err != nil {
		w.t.Fatal(err)
	}
	return string(sb.UID)
}

// running makes a sandbox and waits until it runs.
func (w *world) running(name string, alter func(*v1alpha1.Sandbox)) string {
	w.t.Helper()
	uid := w.create(name, alter)
	w.phase(name, v1alpha1.SandboxRunning)
	return uid
}

func (w *world) get(name string) *v1alpha1.Sandbox {
	sb, err := w.store.Sandboxes().Get(context.Background(), store.Key{Namespace: "default", Name: name})
	if err != nil {
		return nil
	}
	return sb
}

// change alters a sandbox's spec as a client would.
func (w *world) change(name string, alter func(*v1alpha1.Sandbox)) {
	w.t.Helper()
	if _, err := w.store.Store.Sandboxes().UpdateSpec(context.Background(), store.Key{Namespace: "default", Name: name}, store.Preconditions{},
		func(sb *v1alpha1.Sandbox) error { alter(sb); return nil }); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) delete(name string) {
	w.t.Helper()
	if err := w.store.Store.Sandboxes().Delete(context.Background(), store.Key{Namespace: "default", Name: name}, store.Preconditions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) phase(name string, phase v1alpha1.SandboxPhase) {
	w.t.Helper()
	w.eventually(name+" is "+string(phase), func() bool { sb := w.get(name); return sb != nil && sb.Status.Phase == phase })
}

// row is the row of a target, nil when there is none.
func (w *world) row(name, target string) *v1alpha1.VolumeStatus {
	sb := w.get(name)
	if sb == nil {
		return nil
	}
	for i := range sb.Status.Volumes {
		if sb.Status.Volumes[i].Target == target {
			return &sb.Status.Volumes[i]
		}
	}
	return nil
}

// rowIs waits until the row of a target is in a phase, and returns it.
func (w *world) rowIs(name, target string, phase v1alpha1.VolumePhase) *v1alpha1.VolumeStatus {
	w.t.Helper()
	w.eventually(fmt.Sprintf("row %s of %s is %s", target, name, phase), func() bool {
		r := w.row(name, target)
		return r != nil && r.Phase == phase
	})
	return w.row(name, target)
}

func (w *world) noRow(name, target string) {
	w.t.Helper()
	w.eventually("no row "+target, func() bool { return w.row(name, target) == nil })
}

// entry is the entry of a target, nil when there is none.
func (w *world) entry(name, target string) *v1alpha1.DynamicVolume {
	sb := w.get(name)
	for i := range sb.Spec.DynamicVolumes {
		if sb.Spec.DynamicVolumes[i].Target == target {
			return &sb.Spec.DynamicVolumes[i]
		}
	}
	return nil
}

func (w *world) noEntry(name, target string) {
	w.t.Helper()
	w.eventually("no entry "+target, func() bool { return w.entry(name, target) == nil })
}

func local(target, request string) v1alpha1.DynamicVolume {
	return v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypeLocal, Source: "/data/a", Target: target, RequestID: request}
}

// add adds an entry.
func (w *world) add(name string, v v1alpha1.DynamicVolume) {
	w.t.Helper()
	w.change(name, func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = append(sb.Spec.DynamicVolumes, v) })
}

// drop deletes an entry by hand.
func (w *world) drop(name, target string) {
	w.t.Helper()
	w.change(name, func(sb *v1alpha1.Sandbox) {
		var rest []v1alpha1.DynamicVolume
		for _, v := range sb.Spec.DynamicVolumes {
			if v.Target != target {
				rest = append(rest, v)
			}
		}
		sb.Spec.DynamicVolumes = rest
	})
}

// remove asks for a detach, as the RPC does.
func (w *world) remove(name, target, request string, force bool) {
	w.t.Helper()
	w.change(name, func(sb *v1alpha1.Sandbox) {
		for i := range sb.Spec.DynamicVolumes {
			if sb.Spec.DynamicVolumes[i].Target == target {
				sb.Spec.DynamicVolumes[i].Detach = &v1alpha1.DetachRequest{Force: force, RequestID: request}
			}
		}
	})
}

func holder() []*agentv1.Holder {
	return []*agentv1.Holder{{Pid: 42, Command: "python", Kind: "cwd"}}
}
