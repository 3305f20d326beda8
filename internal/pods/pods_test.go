package pods_test

import (
	"context"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/pods"
	"github.com/flux-sandbox/flux-sandbox/internal/pods/podstest"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(podstest.Main(m.Run)) }

// recorder is a handler that notes what it is told.
type recorder struct {
	mu       sync.Mutex // guards the fields below
	wanted   map[pods.Ref]bool
	starting []pods.Container
	changed  []string
	hold     time.Duration // how long Starting takes
}

func (r *recorder) Wants(ref pods.Ref) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.wanted[ref]
}

func (r *recorder) Starting(ctx context.Context, c pods.Container) {
	r.mu.Lock()
	r.starting = append(r.starting, c)
	hold := r.hold
	r.mu.Unlock()
	if hold > 0 {
		<-ctx.Done() // the budget's end
	}
}

func (r *recorder) Required(pods.Ref, map[string]string) ([]string, error) { return nil, nil }

func (r *recorder) Creating(context.Context, pods.Container, []string) error { return nil }

func (r *recorder) Changed(podUID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.changed = append(r.changed, podUID)
}

func (r *recorder) want(ref pods.Ref) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wanted[ref] = true
}

func (r *recorder) started() []pods.Container {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.starting)
}

func (r *recorder) heardOf(podUID string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Contains(r.changed, podUID)
}

// run runs a Runtime until the test ends, or stop is called.
func run(t *testing.T, env *podstest.Env, h pods.Handler) (r *pods.Runtime, stop func()) {
	t.Helper()
	r, err := pods.Open(t.Context(), pods.Config{Address: env.Address, NRISocket: env.NRISocket})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { r.Run(ctx, h) })
	stop = sync.OnceFunc(func() {
		cancel()
		done.Wait()
		r.Close()
	})
	t.Cleanup(stop)
	return r, stop
}

func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	testenv.Eventually(t, time.Minute, what, condition)
}

func newRecorder() *recorder { return &recorder{wanted: map[pods.Ref]bool{}} }

func TestStartOfAContainerIsToldBeforeItsProcessBegins(t *testing.T) {
	env := podstest.Shared(t)
	h := newRecorder()
	r, _ := run(t, env, h)
	eventually(t, "the plugin is connected", r.Connected)
	pod := env.Run(t, podstest.Pod{})
	ref := pods.Ref{PodUID: pod.UID, Container: "main"}
	h.want(ref)
	c := pod.Start(t, podstest.Container{})
	pod.Start(t, podstest.Container{Name: "other"})
	got := h.started()
	if len(got) != 1 || got[0].Ref != ref || got[0].ID != c.ID || got[0].Started || !got[0].Alive || got[0].PID != c.PID(t) {
		t.Fatalf("told of %+v", got)
	}
	if f := got[0].Facts; f.Runtime != pods.RuntimeRunc || f.SysAdmin || f.HostPID || len(f.Shared) != 0 {
		t.Errorf("facts %+v", f)
	}
	found, err := r.Find(t.Context(), ref)
	if err != nil || found.ID != c.ID || !found.Started {
		t.Errorf("found %+v, %v", found, err)
	}
	if pids := r.Processes(found); !slices.Contains(pids, found.PID) {
		t.Errorf("processes %v without %d", pids, found.PID)
	}
	c.Kill(t)
	if found, err = r.Find(t.Context(), ref); err != nil || found.Alive {
		t.Errorf("found %+v, %v", found, err)
	}
	first := c.ID
	c.Again(t)
	if found, err = r.Find(t.Context(), ref); err != nil || found.ID != c.ID || found.ID == first || !found.Alive {
		t.Errorf("found %+v, %v", found, err)
	}
	pod.Remove(t)
	if _, err := r.Find(t.Context(), ref); !errdefs.IsNotFound(err) {
		t.Errorf("found after the removal: %v", err)
	}
	if there, err := r.Exists(t.Context(), pod.UID); there || err != nil {
		t.Errorf("exists %v, %v", there, err)
	}
	eventually(t, "the end is told", func() bool { return h.heardOf(pod.UID) })
}

// The container need not run for its specification to tell: this machine's runc may not know how to map its mounts.
func TestAUserNamespaceIsSeen(t *testing.T) {
	env := podstest.Shared(t)
	r, _ := run(t, env, newRecorder())
	for _, own := range []bool{true, false} {
		pod := env.Run(t, podstest.Pod{UserNamespace: own})
		c, err := pod.TryStart(t.Context(), podstest.Container{})
		if c.ID == "" {
			t.Fatal(err)
		}
		found, err := r.Find(t.Context(), pods.Ref{PodUID: pod.UID, Container: "main"})
		if err != nil || found.ID != c.ID || found.Facts.UserNamespace != own {
			t.Errorf("with a user namespace %v: %+v, %v", own, found, err)
		}
	}
}

// A hook that takes all of its time does not cost the plugin its connection, nor the container its start.
func TestSlowHookIsNotTooSlowForContainerd(t *testing.T) {
	env := podstest.Shared(t)
	h := newRecorder()
	h.hold = time.Hour
	r, _ := run(t, env, h)
	eventually(t, "the plugin is connected", r.Connected)
	pod := env.Run(t, podstest.Pod{})
	h.want(pods.Ref{PodUID: pod.UID, Container: "main"})
	c := pod.Start(t, podstest.Container{})
	for range 2 {
		c.Kill(t)
		c.Again(t)
	}
	if got := h.started(); len(got) != 3 {
		t.Errorf("told of %d starts", len(got))
	}
	if !r.Connected() {
		t.Error("disconnected")
	}
}

func TestOnePluginOfANodeAtATime(t *testing.T) {
	env := podstest.Shared(t)
	one, two := newRecorder(), newRecorder()
	first, stop := run(t, env, one)
	eventually(t, "the first is connected", first.Connected)
	second, _ := run(t, env, two)
	pod := env.Run(t, podstest.Pod{})
	ref := pods.Ref{PodUID: pod.UID, Container: "main"}
	one.want(ref)
	two.want(ref)
	c := pod.Start(t, podstest.Container{})
	if second.Connected() || len(one.started()) != 1 || len(two.started()) != 0 {
		t.Errorf("second connected %v, told %d and %d starts", second.Connected(), len(one.started()), len(two.started()))
	}
	eventually(t, "the second follows containerd all the same", func() bool { return two.heardOf(pod.UID) })
	stop()
	eventually(t, "the second takes over", second.Connected)
	c.Kill(t)
	c.Again(t)
	if len(two.started()) != 1 {
		t.Errorf("told %d starts", len(two.started()))
	}
}

func TestPluginConnectsAgainAfterContainerdEnded(t *testing.T) {
	env := podstest.New(t)
	h := newRecorder()
	r, _ := run(t, env, h)
	eventually(t, "the plugin is connected", r.Connected)
	pod := env.Run(t, podstest.Pod{})
	ref := pods.Ref{PodUID: pod.UID, Container: "main"}
	h.want(ref)
	c := pod.Start(t, podstest.Container{})
	env.KillContainerd(t)
	eventually(t, "the loss is seen", func() bool { return !r.Connected() })
	env.RestartContainerd(t)
	eventually(t, "the plugin is connected again", r.Connected)
	c.Kill(t)
	c.Again(t)
	if got := h.started(); len(got) != 2 || got[1].ID != c.ID {
		t.Errorf("told of %+v", got)
	}
}

func TestProcessOfAContainerIsToldByItsCgroup(t *testing.T) {
	const id = "0123abcd"
	for text, want := range map[string]bool{
		"0::/kubepods/besteffort/podu/" + id:                                     true,
		"0::/kubepods.slice/kubepods-podu.slice/cri-containerd-" + id + ".scope": true,
		"0::/../../podu/" + id + "/init.scope":                                   true,
		"11:pids:/system.slice:cri-containerd:" + id:                             true,
		"3:name=systemd:/\n2:pids:/k8s.io/" + id + "\n":                          true,
		"0::/kubepods/podu/" + id + "ef":                                         false,
		"0::/kubepods/podu/ef" + id:                                              false,
		"0::/kubepods/pod" + id + "x/other":                                      false,
		"0::/":                                                                   false,
		"":                                                                       false,
	} {
		if got := pods.InCgroup(text, id); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
	if pods.InCgroup("0::/", "") {
		t.Error("no container has every process")
	}
}

func TestTargetOnASharedMount(t *testing.T) {
	f := pods.Facts{Shared: []string{"/shared", "/a/b"}}
	for target, want := range map[string]string{"/shared": "/shared", "/shared/x": "/shared", "/sharedx": "", "/a": "", "/a/b/c": "/a/b", "/data": ""} {
		if got := f.SharedOver(target); got != want {
			t.Errorf("%s: %q, want %q", target, got, want)
		}
	}
	if got := (pods.Facts{Shared: []string{"/"}}).SharedOver("/data"); got != "/" {
		t.Errorf("below /: %q", got)
	}
}
