package agents

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// Config says where the agents are.
type Config struct {
	Client kubernetes.Interface
	// Namespace and Service name the Service whose endpoints are the agents.
	Namespace, Service string
	// Credentials are those of a connection to a node's agent. They must refuse an agent of another node.
	Credentials func(node string) (credentials.TransportCredentials, error)
	// Log is slog's default when nil.
	Log *slog.Logger
}

// Agents are the agents of a cluster. Start it once.
type Agents struct {
	config Config
	slices cache.SharedIndexInformer
	nodes  cache.SharedIndexInformer
	synced chan struct{}

	mu        sync.Mutex // guards the fields below
	known     map[string]*peer
	followers map[*follower]struct{}
}

// peer is what is known of one Node that exists.
type peer struct {
	node    *nodeFacts
	address string // empty until an endpoint is seen
	conn    *grpc.ClientConn
	client  agentv1.AgentServiceClient
}

// keepAlive finds a connection whose other side is gone within 15 s: an inventory stream has no other way to notice. The
// agents' server allows such pings (agent.NewServer).
var keepAlive = keepalive.ClientParameters{Time: agentv1.KeepAlive, Timeout: 5 * time.Second, PermitWithoutStream: true}

// reconnect bounds the wait between two tries to connect: an agent that is back is asked soon. gRPC's own default grows to
// two minutes.
var reconnect = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 3 * time.Second},
	MinConnectTimeout: 5 * time.Second,
}

// New makes Agents.
func New(config Config) (*Agents, error) {
	if config.Client == nil || config.Service == "" || config.Credentials == nil {
		return nil, errors.New("agents: a client, a service and credentials are required")
	}
	if config.Log == nil {
		config.Log = slog.Default()
	}
	ofService := informers.NewSharedInformerFactoryWithOptions(config.Client, 0, informers.WithNamespace(config.Namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.LabelSelector = discoveryv1.LabelServiceName + "=" + config.Service
		}))
	all := informers.NewSharedInformerFactory(config.Client, 0)
	a := &Agents{
		config:    config,
		slices:    ofService.Discovery().V1().EndpointSlices().Informer(),
		nodes:     all.Core().V1().Nodes().Informer(),
		synced:    make(chan struct{}),
		known:     map[string]*peer{},
		followers: map[*follower]struct{}{},
	}
	if err := a.nodes.SetTransform(strip); err != nil {
		return nil, fmt.Errorf("agents: %w", err)
	}
	if err := a.slices.AddIndexers(cache.Indexers{byNode: nodesOf}); err != nil {
		return nil, fmt.Errorf("agents: %w", err)
	}
	return a, nil
}

// Run follows the cluster until ctx ends, and closes the connections then.
func (a *Agents) Run(ctx context.Context) error {
	nodes, err := a.nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { a.putNode(o) },
		UpdateFunc: func(_, o any) { a.putNode(o) },
		DeleteFunc: a.deleteNode,
	})
	if err != nil {
		return fmt.Errorf("follow the nodes: %w", err)
	}
	slices, err := a.slices.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { a.putSlice(o) },
		UpdateFunc: func(_, o any) { a.putSlice(o) },
	})
	if err != nil {
		return fmt.Errorf("follow the agents' endpoints: %w", err)
	}
	var informers sync.WaitGroup
	informers.Go(func() { a.nodes.RunWithContext(ctx) })
	informers.Go(func() { a.slices.RunWithContext(ctx) })
	if cache.WaitForCacheSync(ctx.Done(), nodes.HasSynced, slices.HasSynced) {
		a.mu.Lock()
		close(a.synced)
		a.changed(synced)
		a.mu.Unlock()
	}
	<-ctx.Done()
	informers.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.known {
		p.hangUp()
	}
	return nil
}

// Synced is closed when every agent that existed at first is known.
func (a *Agents) Synced() <-chan struct{} { return a.synced }

// Client is the client of a node's agent. Errors: ErrUnavailable, reason NO_AGENT.
func (a *Agents) Client(node string) (agentv1.AgentServiceClient, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if node == "" && len(a.known) == 1 {
		for node = range a.known {
		}
	}
	if p := a.known[node]; p != nil && p.client != nil {
		return p.client, nil
	}
	if node == "" {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "name a node: there are %d agents", len(a.known))
	}
	return nil, fault.New(errdefs.ErrUnavailable, fault.NoAgent,
		"node %s has no agent: is a Pod of the agents' DaemonSet running and ready there?", node)
}

// Dead implements scheduler.Agents: the Node is deleted, or declared out of service.
func (a *Agents) Dead(node string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.isSynced() && a.known[node].dead()
}

// Labels are a node's labels, which the caller does not change; false when there is no such node.
func (a *Agents) Labels(node string) (map[string]string, bool) {
	o, known, err := a.nodes.GetStore().GetByKey(node)
	n, ok := o.(*nodeFacts)
	if err != nil || !known || !ok {
		return nil, false
	}
	return n.Labels, true
}

func (a *Agents) isSynced() bool {
	select {
	case <-a.synced:
		return true
	default:
		return false
	}
}

// dead is Dead once all Nodes are known.
func (p *peer) dead() bool { return p == nil || p.node.OutOfService }

func (a *Agents) putNode(o any) {
	facts, ok := o.(*nodeFacts)
	if !ok {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.known[facts.Name]
	switch {
	case p == nil:
		// Its endpoint may have been there before it, and stays unchanged where a Node is made anew.
		p = &peer{node: facts}
		a.known[facts.Name] = p
		if address := a.addressOf(facts.Name); address != "" {
			a.reach(p, address)
		}
	case p.node.same(facts):
		return
	}
	p.node = facts
	a.changed(facts.Name)
}

func (a *Agents) deleteNode(o any) {
	if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = gone.Obj
	}
	facts, ok := o.(*nodeFacts)
	if !ok {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if p := a.known[facts.Name]; p != nil {
		p.hangUp()
		delete(a.known, facts.Name)
	}
	a.config.Log.Warn("a node was deleted", "node", facts.Name)
	a.changed(facts.Name)
}

// putSlice takes over the addresses of a slice. An endpoint that is not ready keeps the address that it has: the agent is
// asked all the same, as it may serve in a moment. One without a Node is what a deleted Node leaves behind for a while:
// nobody is to be asked there, unless the Node is made anew.
func (a *Agents) putSlice(o any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for node, address := range endpointsOf(o) {
		p := a.known[node]
		if p == nil {
			continue
		}
		if p.address == address && p.conn != nil && p.conn.GetState() != connectivity.TransientFailure {
			continue
		}
		// Also anew at the same address (a new Pod, as with the host's network) where the old connection waits for its next
		// attempt. ClientConn.ResetConnectBackoff would do, but races with the connection's own work (grpc 1.85).
		if a.reach(p, address) {
			a.changed(node)
		}
	}
}

// reach has a node's agent asked at an address from now on, and says whether that can be. The caller holds mu.
func (a *Agents) reach(p *peer, address string) bool {
	if err := a.dial(p, p.node.Name, address); err != nil {
		a.config.Log.Error("cannot make a connection to an agent", "node", p.node.Name, "address", address, "error", err)
		return false
	}
	return true
}

// dial replaces the connection to a node's agent. It comes up by itself, and again when it breaks.
func (a *Agents) dial(p *peer, node, address string) error {
	credentials, err := a.config.Credentials(node)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials),
		grpc.WithKeepaliveParams(keepAlive),
		grpc.WithConnectParams(reconnect),
		grpc.WithStaticStreamWindowSize(agentv1.Window), grpc.WithStaticConnWindowSize(agentv1.Window))
	if err != nil {
		return err
	}
	p.hangUp()
	p.address, p.conn, p.client = address, conn, agentv1.NewAgentServiceClient(conn)
	return nil
}

func (p *peer) hangUp() {
	if p.conn != nil {
		_ = p.conn.Close() // commands in flight fail as Unavailable, and are repeated
		p.conn, p.client = nil, nil
	}
}

// synced, in a follower's queue, stands for the end of what existed at first. No node has that name.
const synced = ""

// follower is one Follow: the nodes of which something changed, and what it was told last of each.
type follower struct {
	changed workqueue.TypedInterface[string]
	told    map[string]told
}

// told is what a follower was told last of a node.
type told struct{ agent, dead bool }

// Follow implements scheduler.Agents.
func (a *Agents) Follow(ctx context.Context) iter.Seq[scheduler.AgentEvent] {
	return func(yield func(scheduler.AgentEvent) bool) {
		f := &follower{changed: workqueue.NewTyped[string](), told: map[string]told{}}
		defer f.changed.ShutDown()
		defer context.AfterFunc(ctx, f.changed.ShutDown)()
		a.mu.Lock()
		for node := range a.known {
			f.changed.Add(node)
		}
		if a.isSynced() {
			f.changed.Add(synced)
		}
		a.followers[f] = struct{}{}
		a.mu.Unlock()
		defer func() {
			a.mu.Lock()
			delete(a.followers, f)
			a.mu.Unlock()
		}()
		for {
			node, over := f.changed.Get()
			if over || ctx.Err() != nil {
				return
			}
			for _, e := range a.eventsOf(f, node) {
				if !yield(e) {
					return
				}
			}
			f.changed.Done(node)
		}
	}
}

// changed has every follower look at a node. The caller holds mu.
func (a *Agents) changed(node string) {
	for f := range a.followers {
		f.changed.Add(node)
	}
}

// eventsOf are what a follower has to be told of one node.
func (a *Agents) eventsOf(f *follower, node string) []scheduler.AgentEvent {
	if node == synced {
		return []scheduler.AgentEvent{{Type: scheduler.AgentsSynced}}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var events []scheduler.AgentEvent
	before, p := f.told[node], a.known[node]
	now := told{dead: a.isSynced() && p.dead()}
	now.agent = !p.dead() && p.client != nil
	about := scheduler.Agent{Node: node}
	if now.agent {
		about = scheduler.Agent{Node: node, Labels: p.node.Labels, Capacity: p.node.Capacity, Client: p.client}
		events = append(events, scheduler.AgentEvent{Type: scheduler.AgentAdded, Agent: about})
	} else if before.agent {
		events = append(events, scheduler.AgentEvent{Type: scheduler.AgentRemoved, Agent: about})
	}
	if now.dead && !before.dead {
		events = append(events, scheduler.AgentEvent{Type: scheduler.NodeDied, Agent: about})
	}
	if f.told[node] = now; p == nil {
		delete(f.told, node)
	}
	return events
}
