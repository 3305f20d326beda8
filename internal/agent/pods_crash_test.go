//go:build failpoint

package agent_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/pods/podstest"
)

// The agent is killed at every step of an attach in the hook. The container starts all the same, and the next agent leaves
// it with its volume, once.
func TestPodHookThatIsCutOffAnywhere(t *testing.T) {
	n := newPodNode(t)
	for _, step := range []string{"tree", "attributes", "journal-intent", mount.StepTargetResolve, mount.StepTargetMkdir, mount.StepMove, mount.StepVerify, "journal-mounted"} {
		for _, moment := range []string{"before", "after"} {
			point := "attach/" + step + "/" + moment
			t.Run(strings.ReplaceAll(point, "/", "-"), func(t *testing.T) { podHookIsCutOffAt(t, n, point) })
		}
	}
}

func podHookIsCutOffAt(t *testing.T, n *podNode, point string) {
	pod := n.env.Named(podstest.Pod{})
	sb := n.sandboxOf(pod, "main")
	source := seeded(t, n.Dir(t, "t1", "data"))
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data", AtCreate: true})
	n.Stop(t)
	cmd, ready := n.childCommand(t)
	cmd.Env = append(cmd.Env, failpoint.Env+"="+point+"=kill")
	awaitChild(t, cmd, ready)
	pod.Run(t)
	c := pod.Start(t, podstest.Container{})
	if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("the agent ended with %v", err)
	}
	n.Start(t)
	n.connected(t)
	agenttest.Eventually(t, "the volume is there", func() bool {
		st := sb.State(t)
		return st.GetContainerId() == c.ID && len(st.GetVolumes()) == 1 && st.GetVolumes()[0].GetPhase() == "Mounted"
	})
	record := sb.State(t).GetVolumes()[0]
	if m, ok := mountAt(t, c.PID(t), "/data"); !ok || m.UniqueID != record.GetMountId() {
		t.Errorf("the kernel shows %+v, the record is %v", m, record)
	}
	c.Exec(t, "cat /data/seed && echo x > /data/"+filepath.Base(t.Name())+" && test $(grep -c ' /data ' /proc/self/mountinfo) = 1")
	sb.Delete(t)
	if _, ok := mountAt(t, c.PID(t), "/data"); ok {
		t.Error("it is still there")
	}
	pod.Remove(t)
}
