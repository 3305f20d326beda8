package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	testclock "k8s.io/utils/clock/testing"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/pods"
	"github.com/flux-sandbox/flux-sandbox/internal/pods/podstest"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// hanging is a source of which the directories named slow give no tree until it is let go. It has no way for trees
// without waiting.
type hanging struct {
	volume.Source
	let chan struct{}

	mu   sync.Mutex // guards slow
	slow map[string]bool
}

func (h *hanging) Resolve(ctx context.Context, r *volume.Request) (string, error) {
	key, err := h.Source.Resolve(ctx, r)
	if filepath.Base(r.Source) == "slow" {
		h.mu.Lock()
		h.slow[key] = true
		h.mu.Unlock()
	}
	return key, err
}

func (h *hanging) Tree(ctx context.Context, p volume.Prepared, subPath string) (*mount.Tree, error) {
	h.mu.Lock()
	slow := h.slow[p.Key]
	h.mu.Unlock()
	if slow {
		select {
		case <-h.let:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return h.Source.Tree(ctx, p, subPath)
}

// A volume whose source hangs delays the start of its container for the time of the hook and no longer; the others are
// there, and it comes later.
func TestPodWithASourceThatHangs(t *testing.T) {
	h := &hanging{let: make(chan struct{}), slow: map[string]bool{}}
	n := newPodNode(t, func(c *agent.Config) {
		h.Source = c.Sources[v1alpha1.VolumeTypeLocal]
		c.Sources[v1alpha1.VolumeTypeLocal] = h
	})
	pod := n.env.Named(podstest.Pod{})
	sb := n.sandboxOf(pod, "main")
	sb.Attach(t, agenttest.Volume{Source: seeded(t, n.Dir(t, "t1", "data")), Target: "/data", AtCreate: true})
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "slow"), Target: "/slow", AtCreate: true})
	pod.Run(t)
	c := pod.Start(t, podstest.Container{Command: []string{"sh", "-c", "cat /data/seed && exec sleep 3600"}})
	volumes := func() map[string]*agentv1.MountRecord {
		out := map[string]*agentv1.MountRecord{}
		for _, v := range sb.State(t).GetVolumes() {
			out[v.GetTarget()] = v
		}
		return out
	}
	if v := volumes(); v["/data"].GetAttached() != "BeforeStart" || v["/slow"].GetPhase() != "Prepared" {
		t.Errorf("when it was started: %v", v)
	}
	if !n.pods.Connected() {
		t.Error("the plugin was too slow for containerd")
	}
	close(h.let)
	agenttest.Eventually(t, "the other volume comes", func() bool { return volumes()["/slow"].GetPhase() == "Mounted" })
	if v := volumes()["/slow"]; v.GetAttached() != "AfterStart" {
		t.Errorf("it came %s", v.GetAttached())
	}
	c.Exec(t, "touch /slow/x && cat /data/seed")
}

func TestPodTargetOnASharedMountIsRefused(t *testing.T) {
	n := newPodNode(t)
	shared := filepath.Join(n.env.Dir, "shared")
	must(t, os.MkdirAll(shared, 0o755))
	must(t, unix.Mount("tmpfs", shared, "tmpfs", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(shared, unix.MNT_DETACH)) })
	must(t, unix.Mount("", shared, "", unix.MS_SHARED, ""))
	pod := n.env.Run(t, podstest.Pod{Privileged: true})
	c := pod.Start(t, podstest.Container{Shared: map[string]string{"/shared": shared}})
	sb := n.sandboxOf(pod, "main")
	for _, target := range []string{"/shared", "/shared/below"} {
		_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: target})
		wantFault(t, err, errdefs.ErrFailedPrecondition, "TARGET_SHARED")
		if m, ok := mountAt(t, c.PID(t), "/shared/below"); ok {
			t.Errorf("mounted: %+v", m)
		}
	}
	if entries, err := os.ReadDir(shared); err != nil || len(entries) != 0 {
		t.Errorf("the host's directory has %v, %v", entries, err)
	}
}

// otherFacts says of every container what is not so.
type otherFacts struct {
	agent.Pods
	change func(*pods.Facts)
}

func (o otherFacts) Find(ctx context.Context, ref pods.Ref) (pods.Container, error) {
	c, err := o.Pods.Find(ctx, ref)
	o.change(&c.Facts)
	return c, err
}

func TestPodOfAnotherRuntimeIsRefused(t *testing.T) {
	n := newPodNode(t, func(c *agent.Config) {
		c.Pods = otherFacts{c.Pods, func(f *pods.Facts) { f.Runtime = "io.containerd.runsc.v1" }}
	})
	pod := n.env.Run(t, podstest.Pod{})
	pod.Start(t, podstest.Container{})
	_, err := n.sandboxOf(pod, "main").TryAttach(t.Context(), agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"})
	wantFault(t, err, errdefs.ErrFailedPrecondition, "RUNTIME_UNSUPPORTED")
}

// A volume would come without the mapping of the Pod's users, whatever the operator allows. (What such a container's
// specification looks like is tested in internal/pods.)
func TestPodWithAUserNamespaceIsRefused(t *testing.T) {
	n := newPodNode(t, func(c *agent.Config) {
		c.PrivilegedPods = true
		c.Pods = otherFacts{c.Pods, func(f *pods.Facts) { f.UserNamespace = true }}
	})
	pod := n.env.Run(t, podstest.Pod{})
	c := pod.Start(t, podstest.Container{})
	_, err := n.sandboxOf(pod, "main").TryAttach(t.Context(), agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"})
	wantFault(t, err, errdefs.ErrFailedPrecondition, "POD_USER_NAMESPACE")
	if m, ok := mountAt(t, c.PID(t), "/data"); ok {
		t.Errorf("mounted: %+v", m)
	}
}

func TestPodThatIsPrivilegedWhereTheOperatorAllowsIt(t *testing.T) {
	n := newPodNode(t, func(c *agent.Config) { c.PrivilegedPods = true })
	pod := n.env.Run(t, podstest.Pod{HostPID: true})
	c := pod.Start(t, podstest.Container{Capabilities: []string{"SYS_ADMIN"}})
	n.sandboxOf(pod, "main").Attach(t, agenttest.Volume{Source: seeded(t, n.Dir(t, "t1", "data")), Target: "/data"})
	c.Exec(t, "cat /data/seed")
}

func TestPodsAreRefusedWhereTheyAreOff(t *testing.T) {
	n := agenttest.New(t, nil)
	for _, c := range n.Inventory(t).GetCapabilities() {
		if c == agentv1.CapabilityPods {
			t.Error("the inventory promises Pods")
		}
	}
	sb := n.Prepare(agenttest.Sandbox{Tenant: "t1", Pod: &agentv1.PodWorkload{Namespace: "default", Name: "p", Uid: "u", Container: "main"}})
	_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data", AtCreate: true})
	wantFault(t, err, errdefs.ErrFailedPrecondition, "FEATURE_DISABLED")
}

// A sandbox's deletion waits for half a minute for its Pod's processes, then detaches what they use.
func TestPodSandboxIsDeletedAlthoughItsVolumeIsBusy(t *testing.T) {
	clock := testclock.NewFakeClock(time.Now())
	n := newPodNode(t, func(c *agent.Config) { c.Clock = clock })
	pod := n.env.Named(podstest.Pod{})
	sb := n.sandboxOf(pod, "main")
	source := seeded(t, n.Dir(t, "t1", "data"))
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data", AtCreate: true})
	pod.Run(t)
	c := pod.Start(t, podstest.Container{Command: []string{"sh", "-c", "cd /data && touch here && exec sleep 3600"}})
	agenttest.Eventually(t, "the process is in it", func() bool { _, err := os.Stat(filepath.Join(source, "here")); return err == nil })
	began := clock.Now()
	done := make(chan error, 1)
	go func() { done <- sb.TryDelete(t.Context()) }()
	agenttest.Eventually(t, "the sandbox is deleted", func() bool {
		select {
		case err := <-done:
			must(t, err)
			return true
		default:
		}
		if _, ok := mountAt(t, c.PID(t), "/data"); !ok && clock.Since(began) < 30*time.Second {
			t.Fatal("it was detached at once")
		}
		clock.Step(time.Second)
		return false
	})
	if _, ok := mountAt(t, c.PID(t), "/data"); ok {
		t.Error("it is still there")
	}
	if got := c.Exec(t, "echo goes on"); got != "goes on\n" {
		t.Errorf("the container says %q", got)
	}
}

// An agent that is killed at any moment loses nothing: what was mounted stays, what it missed is attached late.
func TestPodAfterTheAgentWasKilled(t *testing.T) {
	n := newPodNode(t)
	pod := n.env.Named(podstest.Pod{})
	sb := n.sandboxOf(pod, "main")
	source := seeded(t, n.Dir(t, "t1", "data"))
	n.Stop(t)
	kill := n.startChild(t)
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data", AtCreate: true})
	pod.Run(t)
	c := pod.Start(t, podstest.Container{Command: []string{"sh", "-c", "cat /data/seed && exec sleep 3600"}})
	mounted := sb.State(t).GetVolumes()[0]
	if mounted.GetAttached() != "BeforeStart" {
		t.Errorf("attached %v", mounted)
	}
	kill()
	kill = n.startChild(t)
	if again := sb.State(t).GetVolumes()[0]; again.GetMountId() != mounted.GetMountId() || again.GetPhase() != "Mounted" || again.GetAttached() != "BeforeStart" {
		t.Errorf("was %v, is %v", mounted, again)
	}
	if m, ok := mountAt(t, c.PID(t), "/data"); !ok || m.UniqueID != mounted.GetMountId() {
		t.Errorf("the kernel shows %+v", m)
	}
	kill()
	c.Kill(t)
	c.Command = []string{"sleep", "3600"}
	c.Again(t)
	kill = n.startChild(t)
	attachedAfterStart(t, sb, c)
	kill()
	n.Start(t)
	attachedAfterStart(t, sb, c)
}

// Many sandboxes at once: attaches, detaches and restarts of containers, and in the end everything as it is asked for.
func TestPodsAtOnce(t *testing.T) {
	n := newPodNode(t)
	const count = 4
	var all sync.WaitGroup
	for i := range count {
		pod := n.env.Run(t, podstest.Pod{})
		sb := n.sandboxOf(pod, "main")
		source := seeded(t, n.Dir(t, "t1", "data"+strconv.Itoa(i)))
		sb.Attach(t, agenttest.Volume{Source: source, Target: "/data", AtCreate: true})
		c := pod.Start(t, podstest.Container{Command: needsData})
		all.Go(func() {
			for range 4 {
				if code := c.Wait(t); code != 0 {
					t.Errorf("exit code %d", code)
				}
				if err := c.TryAgain(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
		all.Go(func() {
			for range 20 {
				// It may run or not: both are well, and nothing of it may disturb the other volume.
				if _, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: n.Shared(t, "s"), ReadOnly: true, Target: "/also", AtCreate: true}); err != nil && !errdefs.IsFailedPrecondition(err) {
					t.Error(err)
				}
				if _, err := sb.TryDetach(t.Context(), "/also", true); err != nil && !errdefs.IsFailedPrecondition(err) {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	for i := range count {
		if got := lines(filepath.Join(n.Data, "tenants/t1/data"+strconv.Itoa(i), "runs")); got < 4 {
			t.Errorf("%d runs with the volume", got)
		}
	}
}

// readings counts how often the agent reads a container.
type readings struct {
	agent.Pods
	n *atomic.Int32
}

func (r readings) Find(ctx context.Context, ref pods.Ref) (pods.Container, error) {
	r.n.Add(1)
	return r.Pods.Find(ctx, ref)
}

// Volumes that come at once for a Pod that the agent does not know cost containerd one question, not one each.
func TestVolumesThatComeAtOnceReadTheirPodOnce(t *testing.T) {
	var n atomic.Int32
	node := newPodNode(t, func(c *agent.Config) { c.Pods = readings{c.Pods, &n} })
	pod := node.env.Run(t, podstest.Pod{})
	c := pod.Start(t, podstest.Container{})
	sb := node.sandboxOf(pod, "main")
	source := seeded(t, node.Dir(t, "t1", "data"))
	var attaching sync.WaitGroup
	for i := range 8 {
		attaching.Go(func() { sb.Attach(t, agenttest.Volume{Source: source, Target: "/data" + strconv.Itoa(i)}) })
	}
	attaching.Wait()
	if n.Load() != 1 {
		t.Errorf("the container was read %d times", n.Load())
	}
	c.Exec(t, "cat /data0/seed /data7/seed")
}
