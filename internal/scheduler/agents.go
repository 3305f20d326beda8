package scheduler

import (
	"context"
	"iter"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
)

// CapabilityDynamicVolumes is the capability, in an agent's inventory, of attaching volumes to running
// sandboxes. While an agent of a sub-group lacks it, dynamic volumes are off there (design, ruling 13).
const CapabilityDynamicVolumes = agentv1.CapabilityDynamicVolumes

// Capacity bounds what a node may hold. A field that is zero is no bound.
type Capacity struct {
	// Sandboxes is the most sandboxes.
	Sandboxes int64
	// CPUMilli is what the sandboxes' CPU requests may add up to; 1000 is one CPU.
	CPUMilli int64
	// MemoryBytes is what their memory requests may add up to.
	MemoryBytes int64
}

// Agent is a node's agent.
type Agent struct {
	// Node names the node, and with it the agent: there is one on each.
	Node string
	// Labels are the node's labels, for selectors and topology.
	Labels map[string]string
	// Capacity is what the node may hold.
	Capacity Capacity
	// Client reaches the agent. It may be a connection that is not up yet.
	Client agentv1.AgentServiceClient
}

// AgentEventType says what an AgentEvent tells.
type AgentEventType int

// The agent event types.
const (
	// AgentAdded: the agent exists, or its labels, capacity or client are new.
	AgentAdded AgentEventType = iota + 1
	// AgentRemoved: the agent is not to be used any more. Its sandboxes are not placed elsewhere: that it is gone
	// does not say that its node is dead (design, section 8).
	AgentRemoved
	// NodeDied: Agents.Dead is now true of the node. Only Agent.Node is set.
	NodeDied
	// AgentsSynced: every agent that existed at first was told. Only Type is set.
	AgentsSynced
)

// AgentEvent is one step of following the agents.
type AgentEvent struct {
	Type  AgentEventType
	Agent Agent
}

// Agents tells which agents there are. The Scheduler ranges over Follow once.
type Agents interface {
	// Follow yields every agent there is (AgentAdded), AgentsSynced once, then changes, until ctx ends.
	Follow(ctx context.Context) iter.Seq[AgentEvent]
	// Dead says whether a node is known not to run any more, so that its sandboxes may be placed elsewhere. It is a
	// fact of the node's administration, never a guess from silence. A node of which nothing is known yet is not dead.
	Dead(node string) bool
}

// StaticAgents are agents that neither come nor go.
type StaticAgents []Agent

// Dead implements Agents: nobody says of these that they are.
func (s StaticAgents) Dead(string) bool { return false }

// Follow implements Agents.
func (s StaticAgents) Follow(ctx context.Context) iter.Seq[AgentEvent] {
	return func(yield func(AgentEvent) bool) {
		for _, a := range s {
			if !yield(AgentEvent{Type: AgentAdded, Agent: a}) {
				return
			}
		}
		if yield(AgentEvent{Type: AgentsSynced}) {
			<-ctx.Done()
		}
	}
}
