//go:build failpoint

package agent_test

import (
	"context"
	"strings"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// The agent is killed while it attaches what a container requires. The start succeeds with the next agent: a Pod whose
// restart policy is Never has no other. The process has its volume at its first instruction, and once.
func TestPodThatRequiresVolumesWhenTheAgentIsKilled(t *testing.T) {
	n := newPodNode(t)
	for _, step := range []string{"journal-intent", mount.StepMove, mount.StepVerify, "journal-mounted"} {
		for _, moment := range []string{"before", "after"} {
			point := "attach/" + step + "/" + moment
			t.Run(strings.ReplaceAll(point, "/", "-"), func(t *testing.T) {
				pod := n.requiring("/data")
				sb := n.sandboxOf(pod, "main")
				sb.Attach(t, agenttest.Volume{Source: seeded(t, n.Dir(t, "t1", "data")), Target: "/data", AtCreate: true})
				n.Stop(t)
				cmd, ready := n.childCommand(t)
				cmd.Env = append(cmd.Env, failpoint.Env+"="+point+"=kill")
				awaitChild(t, cmd, ready)
				pod.Run(t)
				reading := reads
				reading.Command = []string{"sh", "-c", "cat /data/seed && exec sleep 3600"}
				c := pod.Create(t, reading)
				started := make(chan error, 1)
				go func() { started <- c.Run(context.Background()) }()
				if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
					t.Fatalf("the agent ended with %v", err)
				}
				n.Start(t)
				n.connected(t)
				must(t, <-started)
				c.Exec(t, "test $(grep -c ' /data ' /proc/self/mountinfo) = 1")
				record := sb.State(t).GetVolumes()[0]
				if m, ok := mountAt(t, c.PID(t), "/data"); !ok || m.UniqueID != record.GetMountId() || record.GetAttached() != "BeforeStart" {
					t.Errorf("the kernel shows %+v, the record is %v", m, record)
				}
				sb.Delete(t)
				if _, ok := mountAt(t, c.PID(t), "/data"); ok {
					t.Error("it is still there")
				}
				pod.Remove(t)
			})
		}
	}
}
