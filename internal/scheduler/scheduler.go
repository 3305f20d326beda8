package scheduler

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Times of the scheduler. They are choices of this package.
const (
	// agentGrace is how long an agent may be away (it restarts, or is not there yet) before work for it is
	// reported as failed.
	agentGrace = 5 * time.Second
	// restartGrace is how long an ended process is left to the agent's own restart policy.
	restartGrace = 2 * time.Second
	// slowAfter is when an operation in flight is shown in status (a write that the usual path saves).
	slowAfter = 250 * time.Millisecond
	// gatherFor is the longest that rows of a status wait for those of volumes whose attach is in flight: longer than a write
	// to an API server and the attach take together, and shorter than anybody notices.
	gatherFor = 50 * time.Millisecond
	// keepFailed is how long the row of an entry with onFailure Remove stays (contracts, "Volume entry").
	keepFailed = 5 * time.Minute
	// confirmAfter is how long the inventory may take to list a mount that an answer speaks of.
	confirmAfter = time.Second
	// settleAfter is how long an agent may be in the middle of a detach that nobody waits for.
	settleAfter = 5 * time.Second
	// unplacedRetry is when a sandbox that found no node is looked at again even if nothing changed.
	unplacedRetry = 30 * time.Second

	volumeTimeout = 2 * time.Minute
	createTimeout = 10 * time.Minute // it may pull an image
	stopTimeout   = 2 * time.Minute

	defaultWorkers = 8
)

// EventRecorder takes what people should know of. It does not block.
type EventRecorder interface {
	// Event is of type Normal or Warning, with a reason in CamelCase or UPPER_SNAKE_CASE.
	Event(sandbox *v1alpha1.Sandbox, eventType, reason, message string)
}

// The event types.
const (
	EventNormal  = "Normal"
	EventWarning = "Warning"
)

// Config is what a Scheduler is made of.
type Config struct {
	// Store has the sandboxes and groups. Required.
	Store store.Store
	// Agents are the nodes' agents. Required.
	Agents Agents
	// Epoch and LeaseUID fence older leaders (Store.NextEpoch). Required.
	Epoch    int64
	LeaseUID string
	// Clock is the real one when nil.
	Clock clock.WithDelayedExecution
	// Logger is slog's default when nil.
	Logger *slog.Logger
	// Registerer gets the metrics; nil for none.
	Registerer prometheus.Registerer
	// Events gets the events; nil for none.
	Events EventRecorder
	// Resolver makes sources of volumes that live outside of the node; nil where there are none.
	Resolver Resolver
	// Keeper keeps the volumes of Resolver from being deleted; nil where nobody deletes them.
	Keeper Keeper
	// Pods are the Pods of pod-backed sandboxes; nil where there are none.
	Pods Pods
	// Claims are the claims of their volumeClaimTemplates; nil where there are none.
	Claims Claims
	// Workers is how many sandboxes are reconciled at a time; 8 when zero. Commands to agents run beside.
	Workers int
}

// Scheduler reconciles the sandboxes of one installation. There is one that runs, on the leader.
type Scheduler struct {
	Config
	metrics  *metrics
	registry *InMemoryRegistry
	cache    *cache
	queue    *queue[item]
	holds    *holds
	ready    chan struct{}
	// commands are the operations in flight; base is their context.
	commands sync.WaitGroup
	base     context.Context

	mu       sync.Mutex // guards all below
	actors   map[store.Key]*actor
	runtimes map[SubSandboxGroupKey]*SSGRuntime
	// groups has the names of each group's sub-groups, in its order.
	groups     map[store.Key][]string
	topologies map[string]*TopologyDomainCache
	labels     map[string]map[string]string
	// unplaced are sandboxes that found no node.
	unplaced map[store.Key]struct{}
	watches  map[string]*watch
	// awaited are agents that have not told their inventory yet; ready waits for them.
	awaited      map[string]struct{}
	agentsSynced bool
	// withoutGroup serves sandboxes whose group is gone.
	withoutGroup *VolumeManager
}

// item is a unit of work: a sandbox by name; with a node, one that a node has and nobody wants; or a volume that is to be
// held or let go.
type item struct {
	key    store.Key
	uid    types.UID
	node   string
	volume VolumeRef
}

// New makes a Scheduler. It does nothing before Run.
func New(c Config) (*Scheduler, error) {
	if c.Store == nil || c.Agents == nil {
		return nil, errors.New("scheduler: a store and agents are required")
	}
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Workers <= 0 {
		c.Workers = defaultWorkers
	}
	m, err := newMetrics(c.Registerer)
	if err != nil {
		return nil, err
	}
	s := &Scheduler{
		Config:     c,
		metrics:    m,
		registry:   NewInMemoryRegistry(),
		cache:      newCache(),
		queue:      newQueue[item](c.Clock),
		holds:      newHolds(),
		ready:      make(chan struct{}),
		actors:     map[store.Key]*actor{},
		runtimes:   map[SubSandboxGroupKey]*SSGRuntime{},
		groups:     map[store.Key][]string{},
		topologies: map[string]*TopologyDomainCache{},
		labels:     map[string]map[string]string{},
		unplaced:   map[store.Key]struct{}{},
		watches:    map[string]*watch{},
		awaited:    map[string]struct{}{},
	}
	s.withoutGroup = newVolumeManager(nil)
	return s, nil
}

// Ready is closed once the registry is rebuilt: the store was read, and every agent that there was told its
// inventory or did not within 5 s. Nothing is placed before.
func (s *Scheduler) Ready() <-chan struct{} { return s.ready }

// Registry is the scheduler's, for others to look at.
func (s *Scheduler) Registry() *InMemoryRegistry { return s.registry }

// Runtime is the runtime of a sub-group; nil when there is none.
func (s *Scheduler) Runtime(key SubSandboxGroupKey) *SSGRuntime {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.runtimes[key]
}

// Run reconciles until ctx ends, and returns when nothing of it is left: commands in flight are abandoned
// (the agents finish what they began), and the next Run of another Scheduler takes up from what is there. It
// is called once. An error says that the store ended.
func (s *Scheduler) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	s.base = ctx
	groups, sandboxes := make(chan struct{}), make(chan struct{})
	g.Go(func() error { return s.followGroups(ctx, groups) })
	g.Go(func() error {
		if !wait(ctx, groups) {
			return nil
		}
		return s.followSandboxes(ctx, sandboxes)
	})
	g.Go(func() error {
		if !wait(ctx, sandboxes) {
			return nil
		}
		return s.followAgents(ctx, g)
	})
	if s.Pods != nil {
		g.Go(func() error {
			for key := range s.Pods.Follow(ctx) {
				s.queue.add(item{key: key})
			}
			return nil
		})
	}
	if s.Claims != nil {
		g.Go(func() error {
			for key := range s.Claims.Follow(ctx) {
				s.queue.add(item{key: key})
			}
			return nil
		})
	}
	g.Go(func() error { return s.followVolumes(ctx) })
	for range s.Workers {
		g.Go(func() error {
			if !wait(ctx, sandboxes) {
				return nil
			}
			s.work(ctx)
			return nil
		})
	}
	g.Go(func() error {
		<-ctx.Done()
		s.queue.close()
		return nil
	})
	err := g.Wait()
	s.commands.Wait()
	return err
}

func wait(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-ctx.Done():
		return false
	case <-done:
		return true
	}
}

func (s *Scheduler) work(ctx context.Context) {
	for {
		it, ok := s.queue.get()
		if !ok || ctx.Err() != nil {
			return
		}
		switch {
		case it.node != "":
			s.collect(ctx, it)
		case it.volume != (VolumeRef{}):
			s.settle(ctx, it.volume)
		default:
			s.reconcile(ctx, it.key)
		}
		s.queue.done(it)
	}
}

// errStoreClosed says that a Follow ended although nobody asked for it.
var errStoreClosed = errors.New("scheduler: the store stopped telling of changes")

func ended(ctx context.Context) error {
	if ctx.Err() != nil {
		return nil
	}
	return errStoreClosed
}

func (s *Scheduler) followSandboxes(ctx context.Context, synced chan<- struct{}) error {
	for e := range s.Store.Sandboxes().Follow(ctx) {
		switch e.Type {
		case store.Synced:
			close(synced)
		case store.Deleted:
			s.cache.remove(e.Object)
			s.registry.unplace(e.Object.UID)
			if node := s.registry.nodeOf(e.Object.UID); node != "" {
				s.queue.add(item{node: node, uid: e.Object.UID})
			}
			s.queue.add(item{key: store.KeyOf(e.Object)})
			s.retryUnplaced()
		case store.Changed:
			s.cache.put(e.Object)
			s.account(e.Object)
			s.queue.add(item{key: store.KeyOf(e.Object)})
		}
	}
	return ended(ctx)
}

// account notes where the store says a sandbox is, unless that is decided already: the store's word may be older.
// One that is over takes no room.
func (s *Scheduler) account(sb *v1alpha1.Sandbox) {
	switch {
	case podBacked(sb):
		// Kubernetes placed it, and accounts for it.
	case isOver(sb.Status.Phase):
		s.registry.unplace(sb.UID)
	case sb.Status.Node != "" && !s.registry.isPlaced(sb.UID):
		runtime, key := s.runtimeOf(sb)
		var template v1alpha1.SandboxTemplate
		if runtime != nil {
			template = runtime.settings().template
		}
		w := workloadOf(&sb.Spec, &template)
		s.registry.place(sb.UID, placement{node: sb.Status.Node, subGroup: key, requests: w.requests(), image: w.image})
	}
}

func isOver(p v1alpha1.SandboxPhase) bool {
	return p == v1alpha1.SandboxSucceeded || p == v1alpha1.SandboxFailed
}

func (s *Scheduler) retryUnplaced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.unplaced {
		s.queue.add(item{key: key})
	}
	clear(s.unplaced)
}

// runtimeOf is the runtime that serves a sandbox, nil when its group or sub-group does not exist, and the
// sub-group's key.
func (s *Scheduler) runtimeOf(sb *v1alpha1.Sandbox) (*SSGRuntime, SubSandboxGroupKey) {
	key := subGroupOf(sb)
	s.mu.Lock()
	defer s.mu.Unlock()
	if names := s.groups[groupOf(sb)]; key.SubGroup == "" && len(names) > 0 {
		key.SubGroup = names[0]
	}
	return s.runtimes[key], key
}

func (s *Scheduler) event(sb *v1alpha1.Sandbox, eventType, reason, message string) {
	if s.Events != nil {
		s.Events.Event(sb, eventType, reason, message)
	}
}
