package scheduler

import (
	"testing"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// die takes a node's agent away and, that done, says that the node is dead.
func (w *world) die(node string) {
	w.t.Helper()
	w.agents[node].setDown(true)
	w.eventually("the agent is away", func() bool { return !w.s.registry.agent(node).connected })
	w.follow.dead.Store(node, true)
	w.follow.events <- AgentEvent{Type: AgentRemoved, Agent: Agent{Node: node}}
	w.follow.events <- AgentEvent{Type: NodeDied, Agent: Agent{Node: node}}
}

func TestADeadNodesSandboxesArePlacedElsewhere(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", nil)
	w.add("a", local("/data", "r1"))
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.addAgent("n2", nil)
	w.die("n1")
	w.eventually("it runs on the other node, with its volume", func() bool {
		sb := w.get("a")
		row := w.row("a", "/data")
		return sb.Status.Phase == v1alpha1.SandboxRunning && sb.Status.Node == "n2" && row != nil && row.Phase == v1alpha1.VolumeMounted &&
			w.agents["n2"].phase(uid) == stateRunning
	})
	// The node comes back after all, with what it had.
	w.follow.dead.Delete("n1")
	w.agents["n1"].setDown(false)
	w.follow.events <- AgentEvent{Type: AgentAdded, Agent: Agent{Node: "n1", Client: w.agents["n1"]}}
	w.eventually("what it had is removed", func() bool { return len(w.agents["n1"].has()) == 0 })
	if got := w.agents["n2"].phase(uid); got != stateRunning {
		t.Errorf("the right one is %q", got)
	}
}

func TestAnUnreachableNodeIsNotDead(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	w.addAgent("n2", nil)
	w.agents["n1"].setDown(true)
	w.eventually("the agent is away", func() bool { return !w.s.registry.agent("n1").connected })
	w.clock.Step(agentGrace * 100)
	w.follow.events <- AgentEvent{Type: AgentRemoved, Agent: Agent{Node: "n1"}}
	w.add("a", local("/data", "r1"))
	w.eventually("the new entry says that the agent is away", func() bool {
		row := w.row("a", "/data")
		return row != nil && row.Phase == v1alpha1.VolumeFailed
	})
	if sb := w.get("a"); sb.Status.Node != "n1" || len(w.agents["n2"].has()) > 0 {
		t.Errorf("it was moved: node %s", sb.Status.Node)
	}
}

func TestAProcessThatIsNotToBeStartedAgainIsLostWithItsNode(t *testing.T) {
	w := newWorld(t)
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.RestartPolicy = v1alpha1.RestartNever })
	w.addAgent("n2", nil)
	w.die("n1")
	w.phase("a", v1alpha1.SandboxLost)
	if sb := w.get("a"); sb.Status.Reason != string(fault.NodeDead) || len(w.agents["n2"].has()) > 0 {
		t.Errorf("status %+v, other node %v", sb.Status, w.agents["n2"].has())
	}
}

func TestASandboxOfADeadNodeCanBeDeleted(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	w.agents["n1"].setDown(true)
	w.eventually("the agent is away", func() bool { return !w.s.registry.agent("n1").connected })
	w.delete("a")
	w.phase("a", v1alpha1.SandboxTerminating)
	w.die("n1")
	w.eventually("gone", func() bool { return w.get("a") == nil })
}

// A node that died while no scheduler ran is found at the start.
func TestANodeThatDiedBefore(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	w.halt()
	dead := w.agents["n1"]
	delete(w.agents, "n1")
	dead.setDown(true)
	w.addAgent("n2", nil)
	w.dead = []string{"n1"}
	w.start()
	w.eventually("it runs elsewhere", func() bool {
		sb := w.get("a")
		return sb.Status.Node == "n2" && sb.Status.Phase == v1alpha1.SandboxRunning
	})
}
