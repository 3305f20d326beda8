package scheduler

import (
	"strings"
	"testing"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
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

// A volume that a node says is mounted and offline is Failed, with an Event, and stays: it is detached and attached when
// somebody says so, and Mounted again when it is back.
func TestAnOfflineVolume(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", nil)
	w.add("a", local("/v", "r1"))
	w.rowIs("a", "/v", v1alpha1.VolumeMounted)
	offline := func(reason, message string) {
		w.agent().change(uid, func(s *agentv1.SandboxState) {
			for _, m := range s.GetVolumes() {
				m.Reason, m.Message = reason, message
			}
		})
	}
	offline("VOLUME_OFFLINE", "the disk is gone")
	w.rowIs("a", "/v", v1alpha1.VolumeFailed)
	row := w.row("a", "/v")
	if row.Reason != "VOLUME_OFFLINE" || !strings.Contains(row.Message, "the disk is gone") || !strings.Contains(row.Message, "detach") || row.NextRetryTime != nil {
		t.Errorf("row %+v", row)
	}
	attaches := w.agent().count("attach")
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Labels = map[string]string{"looked": "at"} })
	offline("", "")
	w.rowIs("a", "/v", v1alpha1.VolumeMounted)
	if row := w.row("a", "/v"); row.Reason != "" || row.Message != "" {
		t.Errorf("row %+v", row)
	}
	offline("VOLUME_OFFLINE", "the disk is gone again")
	w.rowIs("a", "/v", v1alpha1.VolumeFailed)
	w.remove("a", "/v", "r2", true)
	w.noEntry("a", "/v")
	w.noRow("a", "/v")
	if n := w.agent().count("attach"); n != attaches {
		t.Errorf("it was attached %d times more", n-attaches)
	}
}
