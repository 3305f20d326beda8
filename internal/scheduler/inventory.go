package scheduler

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// The waits between two tries to follow an agent's inventory.
const (
	firstReconnect = 100 * time.Millisecond
	lastReconnect  = 5 * time.Second
)

// followAgents keeps one inventory stream to each agent.
func (s *Scheduler) followAgents(ctx context.Context, g *errgroup.Group) error {
	for e := range s.Agents.Follow(ctx) {
		switch e.Type {
		case AgentAdded:
			s.addAgent(ctx, g, e.Agent)
		case AgentRemoved:
			s.removeAgent(e.Agent.Node)
		case NodeDied:
			s.nodeDead(e.Agent.Node)
		case AgentsSynced:
			s.mu.Lock()
			s.agentsSynced = true
			s.mu.Unlock()
			// Nodes that died before were told of nobody.
			for _, node := range s.cache.nodes() {
				if s.Agents.Dead(node) {
					s.nodeDead(node)
				}
			}
			s.checkReady()
		}
	}
	return nil
}

// watch is how an agent's inventory is followed.
type watch struct {
	client agentv1.AgentServiceClient
	cancel context.CancelFunc
	ended  chan struct{}
}

// end ends a watch and waits for that, so that nothing it heard, nor that it ended, comes after what its successor hears.
func (w *watch) end() {
	w.cancel()
	<-w.ended
}

// addAgent takes over an agent that is new, or of which something is. What is new of its node alone leaves its stream be.
func (s *Scheduler) addAgent(ctx context.Context, g *errgroup.Group, a Agent) {
	s.mu.Lock()
	old := s.watches[a.Node]
	s.labels[a.Node] = a.Labels
	if old == nil && !s.isReady() {
		s.awaited[a.Node] = struct{}{}
	}
	topologies := slices.Collect(maps.Values(s.topologies))
	s.mu.Unlock()
	for _, c := range topologies {
		c.Set(a.Node, a.Labels)
	}
	concerned := s.registry.putAgent(a, s.Clock.Now())
	s.lookAtPods(a.Node)
	if old != nil && old.client == a.Client {
		// The sub-groups that it is in, the room that it has and the domain that it is in may be others.
		s.retryUnplaced()
		s.checkSkew()
		s.requeue(a.Node, concerned)
		return
	}
	if old != nil {
		old.end()
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &watch{client: a.Client, cancel: cancel, ended: make(chan struct{})}
	s.mu.Lock()
	s.watches[a.Node] = w
	s.mu.Unlock()
	s.Clock.AfterFunc(agentGrace, func() { s.noLongerAwaited(a.Node) })
	g.Go(func() error {
		defer close(w.ended)
		defer cancel()
		s.watchAgent(ctx, a)
		return nil
	})
}

func (s *Scheduler) removeAgent(node string) {
	s.mu.Lock()
	w := s.watches[node]
	delete(s.watches, node)
	delete(s.labels, node)
	topologies := slices.Collect(maps.Values(s.topologies))
	s.mu.Unlock()
	if w != nil {
		w.end()
	}
	for _, c := range topologies {
		c.Delete(node)
	}
	s.registry.removeAgent(node)
	s.lookAtPods(node)
	s.checkSkew()
	s.noLongerAwaited(node)
	s.settleHeld()
}

// checkSkew has the sandboxes looked at for which dynamic volumes are now off, or on again, by what their agents
// can do.
func (s *Scheduler) checkSkew() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, r := range s.runtimes {
		if skewed := r.settings().engine.skewed(); skewed != r.skewed {
			r.skewed = skewed
			for _, sb := range s.cache.inGroup(store.Key{Namespace: key.Namespace, Name: key.Group}) {
				s.queue.add(item{key: sb})
			}
		}
	}
}

// noLongerAwaited says that ready need not wait for an agent.
func (s *Scheduler) noLongerAwaited(node string) {
	s.mu.Lock()
	delete(s.awaited, node)
	s.mu.Unlock()
	s.checkReady()
}

// checkReady opens placement once every agent was heard or given up.
func (s *Scheduler) checkReady() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.agentsSynced || len(s.awaited) > 0 || s.isReady() {
		return
	}
	close(s.ready)
	for _, r := range s.runtimes {
		r.setSynced(true)
	}
	for key := range s.unplaced {
		s.queue.add(item{key: key})
	}
	clear(s.unplaced)
	s.awaitUses()
}

func (s *Scheduler) isReady() bool {
	select {
	case <-s.ready:
		return true
	default:
		return false
	}
}

// watchAgent follows one agent's inventory until ctx ends.
func (s *Scheduler) watchAgent(ctx context.Context, a Agent) {
	delay := firstReconnect
	told := false // of the present trouble, which is told once
	for ctx.Err() == nil {
		heard, err := s.readInventory(ctx, a)
		s.requeue(a.Node, s.registry.disconnected(a.Node, s.Clock.Now()))
		s.lookAtPods(a.Node)
		if ctx.Err() != nil {
			return
		}
		if heard {
			delay, told = firstReconnect, false
			s.Logger.Warn("lost the agent's inventory", "node", a.Node, "error", err)
		} else if !told && delay == lastReconnect {
			told = true
			s.Logger.Warn("cannot follow the agent's inventory; it is tried again", "node", a.Node, "error", err)
		}
		t := s.Clock.NewTimer(delay)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C():
		}
		delay = min(2*delay, lastReconnect)
	}
}

// readInventory reads one stream to its end, and says whether its full message came.
func (s *Scheduler) readInventory(ctx context.Context, a Agent) (heard bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := a.Client.Inventory(ctx, &agentv1.InventoryRequest{Epoch: s.Epoch, LeaseUid: s.LeaseUID})
	if err != nil {
		return false, fault.FromGRPC(err)
	}
	for {
		u, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return heard, errors.New("the agent ended the stream")
		case err != nil:
			return heard, fault.FromGRPC(err)
		case !heard && !u.GetFull():
			return false, errors.New("the agent's first message does not list everything")
		}
		concerned := s.registry.applyInventory(a.Node, u, s.Clock.Now())
		if u.GetFull() {
			s.Logger.Info("agent is connected", "node", a.Node, "bootID", u.GetBootId(), "instanceID", u.GetInstanceId(),
				"sandboxes", len(u.GetSandboxes()), "mounts", u.GetMountCount(), "capabilities", u.GetCapabilities())
			s.noLongerAwaited(a.Node)
			s.retryUnplaced()
			s.checkSkew()
			s.lookAtPods(a.Node)
		}
		heard = true
		s.requeue(a.Node, concerned)
		if u.GetFull() || slices.ContainsFunc(u.GetPrepared(), (*agentv1.PreparedVolume).GetRemoved) {
			s.settleHeld() // what it released may be let go
		}
	}
}

// requeue has the sandboxes looked at again. One that the store does not know is an orphan of that node.
func (s *Scheduler) requeue(node string, uids []types.UID) {
	for _, uid := range uids {
		if key, ok := s.cache.keyOf(uid); ok {
			s.queue.add(item{key: key})
			if sb := s.cache.get(key); sb != nil && sb.Status.Node == node {
				continue
			}
		}
		if s.registry.state(node, uid) != nil {
			s.queue.add(item{node: node, uid: uid})
		}
	}
}
