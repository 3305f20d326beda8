package agent_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/pods"
	"github.com/flux-sandbox/flux-sandbox/internal/pods/podstest"
)

// podNode is a node whose agent attaches to the Pods of an environment.
type podNode struct {
	*agenttest.Node
	env *podstest.Env
	// pods is what the running agent knows of Pods.
	pods *pods.Runtime
	// nri is the socket that agents started from now on use; allow is PrivilegedPods.
	nri   string
	allow bool
}

func newPodNode(t *testing.T) *podNode {
	t.Helper()
	p := &podNode{env: podstest.Shared(t)}
	p.nri = p.env.NRISocket
	p.Node = agenttest.New(t, func(c *agent.Config) {
		r, err := pods.Open(t.Context(), pods.Config{Address: p.env.Address, NRISocket: p.nri})
		must(t, err)
		t.Cleanup(func() { r.Close() }) // after the agent, which is stopped in an earlier one
		p.pods, c.Pods, c.PrivilegedPods = r, r, p.allow
	})
	p.connected(t)
	return p
}

func (p *podNode) connected(t *testing.T) {
	t.Helper()
	agenttest.Eventually(t, "the plugin is connected", p.pods.Connected)
}

// sandboxOf is the sandbox that is a container of a Pod.
func (p *podNode) sandboxOf(pod *podstest.Pod, container string) *agenttest.Sandbox {
	return p.Prepare(agenttest.Sandbox{Tenant: "t1",
		Pod: &agentv1.PodWorkload{Namespace: "default", Name: pod.Name, Uid: pod.UID, Container: container}})
}

// mountAt is what the kernel shows at a place in the mount namespace of a process.
func mountAt(t *testing.T, pid int, target string) (mount.Info, bool) {
	t.Helper()
	p, err := mount.OpenProcess(pid)
	must(t, err)
	defer p.Close()
	ns, err := mount.Enter(p)
	must(t, err)
	defer ns.Close()
	list, err := ns.Mounts()
	must(t, err)
	for _, m := range list {
		if m.MountPoint == target {
			return m, true
		}
	}
	return mount.Info{}, false
}

func TestPodAttachToARunningContainer(t *testing.T) {
	n := newPodNode(t)
	pod := n.env.Run(t, podstest.Pod{})
	c := pod.Start(t, podstest.Container{})
	other := pod.Start(t, podstest.Container{Name: "other"})
	sb := n.sandboxOf(pod, "main")
	source := n.Dir(t, "t1", "data")
	record := sb.Attach(t, agenttest.Volume{Source: source, Target: "/data"})
	if record.GetPhase() != "Mounted" || record.GetAttached() != "Live" {
		t.Errorf("record %v", record)
	}
	if m, ok := mountAt(t, c.PID(t), "/data"); !ok || m.UniqueID != record.GetMountId() {
		t.Errorf("the kernel shows %+v, the record is %v", m, record)
	}
	if _, ok := mountAt(t, other.PID(t), "/data"); ok {
		t.Error("the other container of the Pod has it too")
	}
	c.Exec(t, "echo hello > /data/greeting")
	if got, err := os.ReadFile(filepath.Join(source, "greeting")); err != nil || string(got) != "hello\n" {
		t.Errorf("the source has %q, %v", got, err)
	}
	st := sb.State(t)
	if st.GetWorkload().GetPod().GetUid() != pod.UID || st.GetContainerId() != c.ID || st.GetPhase() != "Running" || len(st.GetVolumes()) != 1 {
		t.Errorf("state %v", st)
	}
	if r := sb.Detach(t, "/data", false); r.GetResult() != agentv1.DetachResponse_DETACHED || r.GetReleasePending() {
		t.Errorf("detach: %v", r)
	}
	if _, ok := mountAt(t, c.PID(t), "/data"); ok {
		t.Error("it is still there")
	}
	// The Pod is kubelet's: nothing but volumes is done to it.
	for what, err := range map[string]error{"create": sb.TryCreate(t.Context()), "start": sb.TryStart(t.Context())} {
		if !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	pid := c.PID(t)
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data"})
	sb.Delete(t)
	if c.PID(t) != pid {
		t.Error("the container was restarted")
	}
	if _, ok := mountAt(t, pid, "/data"); ok {
		t.Error("the sandbox was deleted, and its Pod still has the volume")
	}
	if u := n.Inventory(t); len(u.GetSandboxes()) != 0 || len(u.GetPrepared()) != 0 {
		t.Errorf("left: %v", u)
	}
	_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: source, Target: "/data"})
	wantFault(t, err, errdefs.ErrFailedPrecondition, "SANDBOX_TERMINATING")
}

func TestPodAttachNowNeedsARunningContainer(t *testing.T) {
	n := newPodNode(t)
	pod := n.env.Named(podstest.Pod{})
	sb := n.sandboxOf(pod, "main")
	v := agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"}
	_, err := sb.TryAttach(t.Context(), v)
	wantFault(t, err, errdefs.ErrFailedPrecondition, "SANDBOX_NOT_RUNNING")
	pod.Run(t)
	c := pod.Start(t, podstest.Container{Command: []string{"true"}})
	c.Wait(t)
	_, err = sb.TryAttach(t.Context(), v)
	wantFault(t, err, errdefs.ErrFailedPrecondition, "SANDBOX_NOT_RUNNING")
	sb.Delete(t)
}
