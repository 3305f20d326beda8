package agent_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
)

// lines is how many lines a file has.
func lines(name string) int {
	b, _ := os.ReadFile(name)
	return strings.Count(string(b), "\n")
}

// recorder is a process that needs its volume at the first instruction: it ends at once without it.
var recorder = []string{"sh", "-c", "echo run >>/data/runs || exit 9; exec sleep 3600"}

func TestProcessThatEndsWhileContainerdIsAwayGetsItsVolumesBack(t *testing.T) {
	env := containerstest.New(t)
	n := agenttest.NewOn(t, env, nil)
	source := n.Dir(t, "t1", "data")
	sb := n.Create(t, agenttest.Sandbox{Tenant: "t1", Command: recorder})
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data"})
	sb.Start(t)
	runs := filepath.Join(source, "runs")
	agenttest.Eventually(t, "the first run", func() bool { return lines(runs) == 1 })
	pid := sb.PID(t)
	env.KillContainerd(t)
	must(t, syscall.Kill(pid, syscall.SIGKILL))
	env.RestartContainerd(t)
	agenttest.Eventually(t, "the second run, with the volume", func() bool { return lines(runs) == 2 })
	agenttest.Eventually(t, "the inventory says so", func() bool {
		st := sb.State(t)
		return st.GetPhase() == "Running" && st.GetRestarts() == 1 && len(st.GetVolumes()) == 1 && st.GetVolumes()[0].GetPhase() == "Mounted"
	})
}

func TestRestartPolicyNeverIsKeptWhileContainerdIsAway(t *testing.T) {
	env := containerstest.New(t)
	n := agenttest.NewOn(t, env, nil)
	source := n.Dir(t, "t1", "data")
	sb := n.Create(t, agenttest.Sandbox{Tenant: "t1", Command: recorder, Restart: v1alpha1.RestartNever})
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data"})
	sb.Start(t)
	runs := filepath.Join(source, "runs")
	agenttest.Eventually(t, "the run", func() bool { return lines(runs) == 1 })
	pid := sb.PID(t)
	env.KillContainerd(t)
	must(t, syscall.Kill(pid, syscall.SIGKILL))
	env.RestartContainerd(t)
	agenttest.Eventually(t, "it is over", func() bool {
		st := sb.State(t)
		return st.GetPhase() == "Stopped" && st.ExitCode != nil && len(st.GetVolumes()) == 0
	})
	if lines(runs) != 1 {
		t.Error("it was started again")
	}
}

// A volume whose source is gone keeps the process from being restarted, and can be removed: then it runs again.
func TestVolumeThatCannotComeBackCanBeRemoved(t *testing.T) {
	n := agenttest.New(t, nil)
	good, bad := n.Dir(t, "t1", "good"), n.Dir(t, "t1", "bad")
	sb := n.Create(t, agenttest.Sandbox{Tenant: "t1", Command: recorder})
	sb.Attach(t, agenttest.Volume{Source: good, Target: "/data"})
	sb.Attach(t, agenttest.Volume{Source: bad, Target: "/bad"})
	sb.Start(t)
	runs := filepath.Join(good, "runs")
	agenttest.Eventually(t, "the first run", func() bool { return lines(runs) == 1 })
	must(t, os.RemoveAll(bad))
	must(t, syscall.Kill(sb.PID(t), syscall.SIGKILL))
	agenttest.Eventually(t, "the restart fails and says why", func() bool {
		st := sb.State(t)
		return st.GetPhase() == "Restarting" && st.GetReason() == "SOURCE_NOT_FOUND" && strings.Contains(st.GetMessage(), "/bad")
	})
	if lines(runs) != 1 {
		t.Fatal("it was started without its volume")
	}
	if r := sb.Detach(t, "/bad", false); r.GetResult() != agentv1.DetachResponse_DETACHED {
		t.Errorf("detach: %v", r)
	}
	agenttest.Eventually(t, "it runs again", func() bool { return lines(runs) == 2 })
}

func TestCreateAgainKeepsTheSandboxWhateverTheTemplateSays(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Shell(t, "echo kept > /tmp/file")
	sb.Stop(t)
	sb.Memory = 64 << 20 // the group's template has changed
	sb.CreateAgain(t)
	sb.Start(t)
	if got := sb.Shell(t, "cat /tmp/file"); got != "kept\n" {
		t.Errorf("the root filesystem has %q", got)
	}
}

func TestVolumesThatWaitAreTheTenantsOwn(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Prepare(agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data", AtCreate: true})
	other := *sb
	other.Tenant = "t2"
	err := other.TryCreate(t.Context())
	wantFault(t, err, errdefs.ErrPermissionDenied, "TENANT_MISMATCH")
	sb.Delete(t)
}

func TestSandboxIsNotStartedBeforeItsVolumes(t *testing.T) {
	n := agenttest.New(t, nil)
	source := n.Dir(t, "t1", "data")
	sb := n.Prepare(agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data", AtCreate: true})
	must(t, os.RemoveAll(source))
	if err := sb.TryCreate(t.Context()); !errdefs.IsNotFound(err) {
		t.Errorf("create with a source that is gone: %v", err)
	}
	if err := sb.TryStart(t.Context()); err == nil {
		t.Error("it was started without its volume")
	}
	must(t, os.MkdirAll(source, 0o755))
	sb.CreateAgain(t)
	sb.Start(t)
	sb.Shell(t, "touch /data/x")
}
