package scheduler

import (
	"testing"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// An agent that is at another address, as after its Pod was replaced, is followed there; that the old stream ended does not
// count against the new one, in whichever order the two are heard.
func TestAnAgentThatMovesStaysConnected(t *testing.T) {
	w := emptyWorld(t)
	w.group("default", nil)
	w.start()
	for range 100 {
		w.addAgent("n1", nil)
	}
	w.eventually("the last one is followed", func() bool {
		v := w.s.registry.agent("n1")
		return v.Client == w.agents["n1"] && v.connected
	})
	w.running("a", nil)
	if calls := w.agents["n1"].count("create"); calls != 1 {
		t.Errorf("the agent was asked %d times", calls)
	}
}

// A label of a Node is no reason to listen to its agent anew.
func TestALabelLeavesTheStreamBe(t *testing.T) {
	w := emptyWorld(t)
	w.group("default", func(g *v1alpha1.SandboxGroup) {
		g.Spec.SubGroups = []v1alpha1.SubSandboxGroup{{Name: "default", NodeSelector: map[string]string{"for": "us"}}}
	})
	w.start()
	f := w.addAgent("n1", nil)
	w.eventually("the agent", func() bool { return w.s.registry.agent("n1").connected })
	w.create("a", nil)
	w.phase("a", v1alpha1.SandboxPending)
	w.follow.events <- AgentEvent{Type: AgentAdded, Agent: Agent{Node: "n1", Labels: map[string]string{"for": "us"}, Client: f}}
	w.phase("a", v1alpha1.SandboxRunning)
	f.with(func() {
		if len(f.streams) != 1 {
			t.Errorf("%d streams were opened", len(f.streams))
		}
	})
}
