package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
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
	// nri is the socket that agents use which are started from now on, hook theirs for containers that require volumes.
	nri, hook string
	// patience is how long such a container waits; the default when zero.
	patience time.Duration
}

// newPodNode starts a node; change may change the configuration of each of its agents.
func newPodNode(t *testing.T, change ...func(*agent.Config)) *podNode {
	t.Helper()
	p := &podNode{env: podstest.Shared(t)}
	p.nri, p.hook = p.env.NRISocket, filepath.Join(t.TempDir(), "hook.sock")
	var opened []*pods.Runtime
	t.Cleanup(func() { // after the node's own
		for _, r := range opened {
			r.Close()
		}
	})
	p.Node = agenttest.New(t, func(c *agent.Config) {
		r, err := pods.Open(context.Background(), pods.Config{Address: p.env.Address, NRISocket: p.nri,
			HookProgram: containerstest.Shared(t).HookPath, HookSocket: p.hook, HookPatience: p.patience})
		must(t, err)
		opened = append(opened, r)
		p.pods, c.Pods = r, r
		for _, f := range change {
			f(c)
		}
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

// needsData is a container that does nothing but read its volume.
var needsData = []string{"sh", "-c", "cat /data/seed >> /data/runs"}

func seeded(t *testing.T, dir string) string {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(dir, "seed"), []byte("seed\n"), 0o644))
	return dir
}

func TestPodVolumeIsThereAtTheFirstInstructionOfEveryStart(t *testing.T) {
	n := newPodNode(t)
	pod := n.env.Named(podstest.Pod{})
	sb := n.sandboxOf(pod, "main")
	source := seeded(t, n.Dir(t, "t1", "data"))
	// The Pod has a node, and nothing of it exists there yet.
	r := sb.Attach(t, agenttest.Volume{Source: source, Target: "/data", AtCreate: true})
	image := sb.Attach(t, agenttest.Volume{Source: n.Image("t1", "img"), Target: "/img", Size: 16 << 20, AtCreate: true})
	if r.GetPhase() != "Prepared" || image.GetPhase() != "Prepared" {
		t.Errorf("phases %s, %s", r.GetPhase(), image.GetPhase())
	}
	if st := sb.State(t); st.GetRemoved() || len(st.GetVolumes()) != 2 {
		t.Errorf("state %v", st)
	}
	pod.Run(t)
	c := pod.Start(t, podstest.Container{Command: needsData})
	const starts = 5
	for i := range starts {
		if i > 0 {
			c.Again(t)
		}
		if code := c.Wait(t); code != 0 {
			t.Fatalf("start %d: exit code %d", i, code)
		}
	}
	if got := lines(filepath.Join(source, "runs")); got != starts {
		t.Errorf("%d runs", got)
	}
	agenttest.Eventually(t, "the volumes wait for the next start", func() bool {
		st := sb.State(t)
		return st.GetPhase() == "Stopped" && len(st.GetVolumes()) == 2 && st.GetVolumes()[0].GetPhase() == "Prepared" && st.GetVolumes()[1].GetPhase() == "Prepared"
	})
	// Again with one that goes on, to read what the agent says of it.
	c.Command = []string{"sh", "-c", "cat /data/seed && exec sleep 3600"}
	c.Again(t)
	agenttest.Eventually(t, "the state says so", func() bool { return sb.State(t).GetPhase() == "Running" })
	st := sb.State(t)
	if st.GetContainerId() != c.ID {
		t.Errorf("container %s, want %s", st.GetContainerId(), c.ID)
	}
	for _, v := range st.GetVolumes() {
		if v.GetPhase() != "Mounted" || v.GetAttached() != "BeforeStart" {
			t.Errorf("volume %v", v)
		}
		if m, ok := mountAt(t, c.PID(t), v.GetTarget()); !ok || m.UniqueID != v.GetMountId() {
			t.Errorf("the kernel shows %+v at %s, the record says %d", m, v.GetTarget(), v.GetMountId())
		}
	}
	if r := sb.Detach(t, "/data", false); r.GetResult() != agentv1.DetachResponse_DETACHED {
		t.Errorf("detach: %v", r)
	}
	c.Kill(t)
	c.Command = []string{"sh", "-c", "test ! -e /data/seed && test -d /img/lost+found -o -d /img"}
	c.Again(t)
	if code := c.Wait(t); code != 0 {
		t.Errorf("after the detach: exit code %d", code)
	}
}

func TestPodThatIsGoneIsForgotten(t *testing.T) {
	n := newPodNode(t)
	pod := n.env.Run(t, podstest.Pod{})
	c := pod.Start(t, podstest.Container{})
	sb := n.sandboxOf(pod, "main")
	sb.Attach(t, agenttest.Volume{Source: n.Image("t1", "img"), Target: "/img", Size: 16 << 20})
	later := n.Dir(t, "t1", "later")
	c.Kill(t)
	c.RemoveInstance(t)
	agenttest.Eventually(t, "its volume waits", func() bool {
		st := sb.State(t)
		return len(st.GetVolumes()) == 1 && st.GetVolumes()[0].GetPhase() == "Prepared"
	})
	pod.Remove(t)
	agenttest.Eventually(t, "records and sources are gone", func() bool {
		u := n.Inventory(t)
		return len(u.GetSandboxes()) == 0 && len(u.GetPrepared()) == 0
	})
	_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: later, Target: "/data", AtCreate: true})
	wantFault(t, err, errdefs.ErrFailedPrecondition, "POD_GONE")
	// The sandbox's next Pod, as after a pause.
	next := n.env.Named(podstest.Pod{})
	sb.Pod = n.sandboxOf(next, "main").Pod
	sb.Attach(t, agenttest.Volume{Source: seeded(t, later), Target: "/data", AtCreate: true})
	was := sb.Pod
	sb.Pod = n.sandboxOf(n.env.Named(podstest.Pod{}), "main").Pod
	_, err = sb.TryAttach(t.Context(), agenttest.Volume{Source: later, Target: "/data", AtCreate: true})
	wantFault(t, err, errdefs.ErrUnavailable, "OPERATION_PENDING")
	sb.Pod = was
	next.Run(t)
	if code := next.Start(t, podstest.Container{Command: needsData}).Wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	two := n.sandboxOf(next, "main")
	_, err = two.TryAttach(t.Context(), agenttest.Volume{Source: later, Target: "/data", AtCreate: true})
	wantFault(t, err, errdefs.ErrAlreadyExists, "SANDBOX_EXISTS")
}

// A sandbox's Pod is rebuilt while the former one is still there.
func TestPodThatIsRebuilt(t *testing.T) {
	n := newPodNode(t)
	former, next := n.env.Run(t, podstest.Pod{}), n.env.Named(podstest.Pod{})
	old := former.Start(t, podstest.Container{})
	sb := n.sandboxOf(former, "main")
	v := agenttest.Volume{Source: seeded(t, n.Dir(t, "t1", "data")), Target: "/data"}
	sb.Attach(t, v)
	sb.Pod = n.sandboxOf(next, "main").Pod
	v.AtCreate = true
	_, err := sb.TryAttach(t.Context(), v)
	wantFault(t, err, errdefs.ErrUnavailable, "OPERATION_PENDING")
	sb.Detach(t, "/data", false)
	if r := sb.Attach(t, v); r.GetPhase() != "Prepared" {
		t.Errorf("record %v", r)
	}
	old.Kill(t)
	old.Again(t)
	if _, ok := mountAt(t, old.PID(t), "/data"); ok {
		t.Error("the former Pod got the volume")
	}
	next.Run(t)
	if code := next.Start(t, podstest.Container{Command: needsData}).Wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	former.Remove(t)
	if st := sb.State(t); st.GetWorkload().GetPod().GetUid() != next.UID || len(st.GetVolumes()) != 1 {
		t.Errorf("state %v", st)
	}
}

func TestPodContainersThatAreRefused(t *testing.T) {
	n := newPodNode(t)
	source := n.Dir(t, "t1", "data")
	shared := filepath.Join(n.env.Dir, "shared")
	must(t, os.MkdirAll(shared, 0o755))
	for _, tc := range []struct {
		name      string
		pod       podstest.Pod
		container podstest.Container
		reason    string
	}{
		{"CAP_SYS_ADMIN", podstest.Pod{}, podstest.Container{Capabilities: []string{"SYS_ADMIN"}}, "POD_PRIVILEGED"},
		{"privileged", podstest.Pod{Privileged: true}, podstest.Container{Privileged: true}, "POD_PRIVILEGED"},
		{"hostPID", podstest.Pod{HostPID: true}, podstest.Container{}, "POD_PRIVILEGED"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pod := n.env.Named(tc.pod)
			sb := n.sandboxOf(pod, "main")
			sb.Attach(t, agenttest.Volume{Source: source, Target: "/early", AtCreate: true})
			pod.Run(t)
			c := pod.Start(t, tc.container)
			_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: source, Target: "/data"})
			wantFault(t, err, errdefs.ErrFailedPrecondition, tc.reason)
			for _, target := range []string{"/data", "/early"} {
				if _, ok := mountAt(t, c.PID(t), target); ok {
					t.Errorf("%s was mounted", target)
				}
			}
			if st := sb.State(t); st.GetReason() != tc.reason || st.GetVolumes()[0].GetPhase() != "Prepared" {
				t.Errorf("state %v", st)
			}
			sb.Delete(t)
		})
	}
}

func TestPodWithoutAnswerFromThePluginGetsItsVolumesAfterTheStart(t *testing.T) {
	n := newPodNode(t)
	n.Stop(t)
	n.nri = filepath.Join(n.env.Dir, "none.sock")
	n.Start(t)
	pod := n.env.Named(podstest.Pod{})
	sb := n.sandboxOf(pod, "main")
	source := seeded(t, n.Dir(t, "t1", "data"))
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data", AtCreate: true})
	pod.Run(t)
	c := pod.Start(t, podstest.Container{})
	attachedAfterStart(t, sb, c)
}

// attachedAfterStart waits until a Pod's container has its volume, late.
func attachedAfterStart(t *testing.T, sb *agenttest.Sandbox, c *podstest.Container) {
	t.Helper()
	agenttest.Eventually(t, "the volume comes", func() bool {
		st := sb.State(t)
		return st.GetContainerId() == c.ID && len(st.GetVolumes()) == 1 && st.GetVolumes()[0].GetPhase() == "Mounted"
	})
	v := sb.State(t).GetVolumes()[0]
	if v.GetAttached() != "AfterStart" {
		t.Errorf("volume %v", v)
	}
	if m, ok := mountAt(t, c.PID(t), v.GetTarget()); !ok || m.UniqueID != v.GetMountId() {
		t.Errorf("the kernel shows %+v, the record is %v", m, v)
	}
}

func TestPodAfterAnAgentRestart(t *testing.T) {
	n := newPodNode(t)
	stays, restarted, ended, gone := n.env.Named(podstest.Pod{}), n.env.Named(podstest.Pod{}), n.env.Named(podstest.Pod{}), n.env.Named(podstest.Pod{})
	source := seeded(t, n.Dir(t, "t1", "data"))
	sandboxes := map[*podstest.Pod]*agenttest.Sandbox{}
	cs := map[*podstest.Pod]*podstest.Container{}
	for _, pod := range []*podstest.Pod{stays, restarted, ended, gone} {
		sandboxes[pod] = n.sandboxOf(pod, "main")
		sandboxes[pod].Attach(t, agenttest.Volume{Source: source, Target: "/data", AtCreate: true})
		pod.Run(t)
		cs[pod] = pod.Start(t, podstest.Container{})
	}
	before := sandboxes[stays].State(t).GetVolumes()[0]
	n.Stop(t)
	cs[restarted].Kill(t)
	cs[restarted].Again(t)
	cs[ended].Kill(t)
	gone.Remove(t)
	n.Start(t)
	after := sandboxes[stays].State(t)
	if len(after.GetVolumes()) != 1 || after.GetVolumes()[0].GetMountId() != before.GetMountId() || after.GetVolumes()[0].GetPhase() != "Mounted" ||
		after.GetVolumes()[0].GetAttached() != "BeforeStart" || after.GetContainerId() != cs[stays].ID {
		t.Errorf("was %v, is %v", before, after)
	}
	if m, ok := mountAt(t, cs[stays].PID(t), "/data"); !ok || m.UniqueID != before.GetMountId() {
		t.Errorf("the kernel shows %+v", m)
	}
	attachedAfterStart(t, sandboxes[restarted], cs[restarted])
	if st := sandboxes[ended].State(t); st.GetPhase() != "Stopped" || st.GetVolumes()[0].GetPhase() != "Prepared" {
		t.Errorf("the one that ended: %v", st)
	}
	if st := sandboxes[gone].State(t); st != nil {
		t.Errorf("the Pod that is gone: %v", st)
	}
	n.connected(t)
	cs[ended].Command = needsData
	cs[ended].Again(t)
	if code := cs[ended].Wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestPodDetachBusyAndForced(t *testing.T) {
	n := newPodNode(t)
	pod := n.env.Named(podstest.Pod{})
	sb := n.sandboxOf(pod, "main")
	source := seeded(t, n.Dir(t, "t1", "data"))
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data", AtCreate: true})
	pod.Run(t)
	c := pod.Start(t, podstest.Container{Command: []string{"sh", "-c", "cd /data && touch here && exec sleep 3600"}})
	agenttest.Eventually(t, "the process is in it", func() bool {
		_, err := os.Stat(filepath.Join(source, "here"))
		return err == nil
	})
	if r := sb.Detach(t, "/data", false); r.GetResult() != agentv1.DetachResponse_BUSY || len(r.GetHolders()) != 1 || r.GetHolders()[0].GetKind() != "cwd" {
		t.Errorf("detach: %v", r)
	}
	if r := sb.Detach(t, "/data", true); r.GetResult() != agentv1.DetachResponse_LAZY || !r.GetReleasePending() {
		t.Errorf("forced: %v", r)
	}
	if _, ok := mountAt(t, c.PID(t), "/data"); ok {
		t.Error("it is still there")
	}
	c.Kill(t)
	agenttest.Eventually(t, "the source is released", func() bool { return len(n.Inventory(t).GetPrepared()) == 0 })
}
