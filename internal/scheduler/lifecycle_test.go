package scheduler

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

func TestBringUp(t *testing.T) {
	w := newWorld(t)
	var nodeFirst bool
	w.agent().with(func() {})
	hook := func(write string) error {
		if write == "status" && w.agent().total() == 0 {
			nodeFirst = true
		}
		return nil
	}
	w.store.hook.Store(&hook)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) {
		sb.Spec.VolumeMounts = []v1alpha1.VolumeMount{{Source: "/data/pub", Target: "/pub", Mode: "ro"}}
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/x", ""), local("/b", "")}
	})
	w.look("a")
	if n := w.store.status.Load(); n != 2 || w.store.spec.Load() != 0 || !nodeFirst {
		t.Errorf("%d writes of status, %d of spec, node first: %v", n, w.store.spec.Load(), nodeFirst)
	}
	w.agent().with(func() {
		calls := w.agent().calls
		if calls[0] != "create" || calls[len(calls)-1] != "start" || len(calls) != 5 {
			t.Errorf("calls %v", calls)
		}
	})
	sb := w.get("a")
	st := sb.Status
	if st.Node != "n1" || st.ContainerID != "c-"+uid || st.VolumesReady != "3/3" || st.StartTime == nil || st.ObservedGeneration != sb.Generation ||
		!meta.IsStatusConditionTrue(st.Conditions, v1alpha1.ConditionReady) || !meta.IsStatusConditionTrue(st.Conditions, v1alpha1.ConditionScheduled) {
		t.Errorf("status %+v", st)
	}
	var order []string
	for _, row := range st.Volumes {
		order = append(order, row.Target)
		if row.Attached != v1alpha1.AttachedBeforeStart {
			t.Errorf("row %+v", row)
		}
	}
	if !slices.Equal(order, []string{"/pub", "/x", "/b"}) {
		t.Errorf("rows %v", order)
	}
}

func TestTheFinalizerComesBeforeTheContainer(t *testing.T) {
	w := newWorld(t)
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Finalizers = nil })
	if f := w.get("a").Finalizers; !slices.Equal(f, []string{v1alpha1.FinalizerVolumes}) {
		t.Errorf("finalizers %v", f)
	}
}

func TestAnInitialVolumeThatFailsKeepsTheSandboxFromStarting(t *testing.T) {
	w := newWorld(t)
	w.agent().with(func() { w.agent().faults["attach /bad"] = []error{errPermanent} })
	w.create("a", func(sb *v1alpha1.Sandbox) {
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/good", ""), local("/bad", "r-1")}
	})
	w.rowIs("a", "/bad", v1alpha1.VolumeFailed)
	w.rowIs("a", "/good", v1alpha1.VolumeMounted)
	sb := w.get("a")
	if sb.Status.Phase != v1alpha1.SandboxPending || sb.Status.Reason != string(fault.SourceDenied) || w.agent().count("start") != 0 {
		t.Errorf("status %+v", sb.Status)
	}
	w.clock.Step(time.Hour)
	w.look("a")
	if w.agent().count("attach /bad") != 1 {
		t.Error("tried again before the spec changed")
	}
	w.drop("a", "/bad")
	w.phase("a", v1alpha1.SandboxRunning)
	if st := w.get("a").Status; st.Reason != "" || st.VolumesReady != "1/1" {
		t.Errorf("status %+v", st)
	}
}

func TestTemplate(t *testing.T) {
	w := emptyWorld(t)
	w.group("default", func(g *v1alpha1.SandboxGroup) {
		g.Spec.SubGroups = []v1alpha1.SubSandboxGroup{{Name: "prefill", Template: v1alpha1.SandboxTemplate{
			Image: "img:1", Command: []string{"serve"}, Args: []string{"--all"},
			Env:       []v1alpha1.EnvVar{{Name: "A", Value: "1"}, {Name: "B", Value: "2"}},
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("2"), "memory": resource.MustParse("1Gi")}},
		}}}
	})
	w.addAgent("n1", nil)
	w.start()
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Image = "" })
	w.running("b", func(sb *v1alpha1.Sandbox) {
		sb.Spec.Image, sb.Spec.Command = "img:2", []string{"sh"}
		sb.Spec.Env = []v1alpha1.EnvVar{{Name: "B", Value: "own"}}
		sb.Spec.Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("500m")}
		sb.Spec.RestartPolicy = v1alpha1.RestartNever
	})
	w.agent().with(func() {
		a, b := w.agent().creates[0], w.agent().creates[1]
		if a.GetImage() != "img:1" || !slices.Equal(a.GetEntrypoint(), []string{"serve"}) || !slices.Equal(a.GetArgs(), []string{"--all"}) ||
			a.GetCpuMilli() != 2000 || a.GetMemoryBytes() != 1<<30 || len(a.GetEnv()) != 2 || a.GetRestartPolicy() != "Always" || a.GetSubGroup() != "prefill" {
			t.Errorf("from the template: %v", a)
		}
		if b.GetImage() != "img:2" || !slices.Equal(b.GetEntrypoint(), []string{"sh"}) || len(b.GetArgs()) != 0 || b.GetCpuMilli() != 500 ||
			b.GetMemoryBytes() != 1<<30 || len(b.GetEnv()) != 2 || b.GetEnv()[1].GetValue() != "own" || b.GetRestartPolicy() != "Never" {
			t.Errorf("own values: %v", b)
		}
	})
}

func TestMissingGroup(t *testing.T) {
	w := newWorld(t)
	w.create("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Group = "other" })
	w.eventually("pending", func() bool { return w.get("a").Status.Reason == string(fault.GroupNotFound) })
	if st := w.get("a").Status; st.Phase != v1alpha1.SandboxPending || meta.IsStatusConditionTrue(st.Conditions, v1alpha1.ConditionScheduled) {
		t.Errorf("status %+v", st)
	}
	w.group("other", nil)
	w.phase("a", v1alpha1.SandboxRunning)
	// A group that goes leaves its sandboxes, and allows nothing new.
	if err := w.store.Groups().Delete(t.Context(), groupOf(w.get("a")), noPreconditions); err != nil {
		t.Fatal(err)
	}
	w.eventually("runtime gone", func() bool { return w.s.Runtime(SubSandboxGroupKey{"default", "other", "default"}) == nil })
	w.add("a", local("/data", "r-1"))
	if row := w.rowIs("a", "/data", v1alpha1.VolumeFailed); row.Reason != string(fault.GroupNotFound) {
		t.Errorf("row %+v", row)
	}
	w.group("other", nil)
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
}

func TestDelete(t *testing.T) {
	w := newWorld(t)
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")} })
	// A hung attach does not keep it from going, and a failing delete is tried again.
	w.agent().with(func() {
		w.agent().hang["attach /slow"] = true
		w.agent().faults["delete"] = []error{errTransient}
	})
	w.add("a", local("/slow", "r-1"))
	w.eventually("the attach hangs", func() bool { return w.agent().count("attach /slow") == 1 })
	w.delete("a")
	w.phase("a", v1alpha1.SandboxTerminating)
	w.within(time.Second, "gone", func() bool { return w.get("a") == nil })
	if has := w.agent().has(); len(has) != 0 {
		t.Errorf("the agent has %v", has)
	}
	w.eventually("forgotten", func() bool {
		w.s.mu.Lock()
		defer w.s.mu.Unlock()
		return len(w.s.actors) == 0
	})
	if n := w.sample("sandbox_dynamic_volume_count", nil); n != 0 {
		t.Errorf("gauge %v", n)
	}
}

func TestAFailedCreateIsTriedAgainAtOnceWhenTheSpecChanges(t *testing.T) {
	w := newWorld(t)
	missing := fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no such image")
	w.agent().with(func() { w.agent().faults["create"] = []error{missing, missing} })
	w.create("a", nil)
	w.eventually("pending", func() bool { return w.get("a").Status.Reason == string(fault.ImageNotFound) })
	w.look("a")
	if n := w.agent().count("create"); n != 1 {
		t.Fatalf("%d creates", n)
	}
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Image = "other" })
	w.eventually("second try", func() bool { return w.agent().count("create") == 2 })
	w.within(time.Second, "third try", func() bool { return w.get("a").Status.Phase == v1alpha1.SandboxRunning })
}

func TestDeleteOfASandboxThatNeverRan(t *testing.T) {
	w := newWorld(t)
	w.create("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Group = "other" })
	w.eventually("pending", func() bool { return w.get("a").Status.Phase == v1alpha1.SandboxPending })
	w.delete("a")
	w.eventually("gone", func() bool { return w.get("a") == nil })
	if w.agent().total() != 0 {
		t.Error("the agent was called")
	}
}

func TestShutdownTime(t *testing.T) {
	w := newWorld(t)
	due := metav1.NewTime(w.clock.Now().Add(time.Hour))
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.ShutdownTime = &due })
	w.clock.Step(time.Hour - time.Second)
	w.look("a")
	if w.get("a").DeletionTimestamp != nil {
		t.Fatal("too early")
	}
	w.within(time.Second, "gone", func() bool { return w.get("a") == nil })
}

func TestPauseAndResume(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = true })
	w.phase("a", v1alpha1.SandboxPaused)
	if row := w.row("a", "/data"); row.Phase != v1alpha1.VolumePending || w.agent().phase(uid) != stateStopped {
		t.Errorf("row %+v", row)
	}
	w.add("a", local("/more", "r-2"))
	w.rowIs("a", "/more", v1alpha1.VolumePending)
	w.remove("a", "/more", "r-3", false)
	w.noEntry("a", "/more")
	w.clock.Step(time.Hour)
	w.look("a")
	if w.agent().phase(uid) != stateStopped {
		t.Error("a paused sandbox was started")
	}
	w.paused("a")
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = false })
	w.phase("a", v1alpha1.SandboxRunning)
	if row := w.row("a", "/data"); row.Phase != v1alpha1.VolumeMounted || row.Attached != v1alpha1.AttachedBeforeStart {
		t.Errorf("row %+v", row)
	}
}

// paused fails unless one Event tells that a sandbox is paused, however often it was looked at.
func (w *world) paused(name string) {
	w.t.Helper()
	w.events.mu.Lock()
	defer w.events.mu.Unlock()
	n := 0
	for _, e := range w.events.seen {
		if e == name+" Normal Paused" {
			n++
		}
	}
	if n != 1 {
		w.t.Errorf("%d Events of the pause: %v", n, w.events.seen)
	}
}

func TestPausedFromTheStart(t *testing.T) {
	w := newWorld(t)
	w.create("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = true })
	w.phase("a", v1alpha1.SandboxPaused)
	if w.get("a").Status.Node != "" || w.agent().total() != 0 {
		t.Error("it was placed")
	}
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = false })
	w.phase("a", v1alpha1.SandboxRunning)
}

func TestTheProcessEnds(t *testing.T) {
	for _, c := range []struct {
		name   string
		policy v1alpha1.RestartPolicy
		code   int32
		want   v1alpha1.SandboxPhase
	}{
		{"never, 0", v1alpha1.RestartNever, 0, v1alpha1.SandboxSucceeded},
		{"never, 3", v1alpha1.RestartNever, 3, v1alpha1.SandboxFailed},
		{"on failure, 0", v1alpha1.RestartOnFailure, 0, v1alpha1.SandboxSucceeded},
		{"on failure, 3", v1alpha1.RestartOnFailure, 3, v1alpha1.SandboxRunning},
		{"always", "", 0, v1alpha1.SandboxRunning},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			uid := w.running("a", func(sb *v1alpha1.Sandbox) {
				sb.Spec.RestartPolicy = c.policy
				sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
			})
			w.agent().change(uid, func(s *agentv1.SandboxState) { s.Phase, s.ExitCode, s.Volumes = stateStopped, proto.Int32(c.code), nil })
			if c.want == v1alpha1.SandboxRunning {
				// Its agent did not restart it, so we do.
				w.within(time.Second, "started again", func() bool { return w.agent().count("start") == 2 && w.agent().phase(uid) == stateRunning })
			}
			w.phase("a", c.want)
			st := w.get("a").Status
			if c.want != v1alpha1.SandboxRunning {
				if st.ExitCode == nil || *st.ExitCode != c.code || st.Volumes[0].Phase != v1alpha1.VolumePending {
					t.Errorf("status %+v", st)
				}
				w.clock.Step(time.Hour)
				w.look("a")
				if w.agent().count("start") != 1 {
					t.Error("it was started again")
				}
			}
		})
	}
}

func TestRestartByTheAgent(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")} })
	w.agent().change(uid, func(s *agentv1.SandboxState) { s.Phase, s.ExitCode, s.Restarts = stateRestarting, proto.Int32(1), 1 })
	w.eventually("shown", func() bool {
		st := w.get("a").Status
		return st.Reason == "Restarting" && strings.Contains(st.Message, "exit code 1 ")
	})
	if st := w.get("a").Status; st.Phase != v1alpha1.SandboxRunning || st.Restarts != 1 || meta.IsStatusConditionTrue(st.Conditions, v1alpha1.ConditionReady) {
		t.Errorf("status %+v", st)
	}
	w.agent().change(uid, func(s *agentv1.SandboxState) {
		s.Volumes[0].Phase, s.Volumes[0].Reason, s.Volumes[0].Message = recordFailed, "SOURCE_NOT_FOUND", "gone"
	})
	w.eventually("pending", func() bool {
		st := w.get("a").Status
		return st.Phase == v1alpha1.SandboxPending && st.Reason == "SOURCE_NOT_FOUND"
	})
	w.agent().change(uid, func(s *agentv1.SandboxState) {
		s.Phase, s.Volumes[0].Phase, s.Volumes[0].Reason = stateRunning, recordMounted, ""
	})
	w.phase("a", v1alpha1.SandboxRunning)
	if w.agent().count("create") != 1 || w.agent().count("start") != 1 {
		t.Error("the scheduler interfered")
	}
}

func TestARunIsNotRepeated(t *testing.T) {
	// The scheduler dies after the start, before status says Running; meanwhile the process ends.
	w := newWorld(t)
	w.agent().with(func() { w.agent().hang["start"] = true })
	uid := w.create("a", func(sb *v1alpha1.Sandbox) { sb.Spec.RestartPolicy = v1alpha1.RestartNever })
	w.eventually("start is called", func() bool { return w.agent().count("start") == 1 })
	w.halt()
	w.agent().with(func() { delete(w.agent().hang, "start") })
	w.agent().change(uid, func(s *agentv1.SandboxState) {
		s.Phase, s.ExitCode, s.StartedAt = stateStopped, proto.Int32(0), w.agent().now()
	})
	w.start()
	w.phase("a", v1alpha1.SandboxSucceeded)
	if w.agent().count("start") != 1 {
		t.Error("it ran twice")
	}
}

func TestRestartOfTheSchedulerAfterPlacement(t *testing.T) {
	w := newWorld(t)
	w.addAgent("n2", nil)
	w.eventually("both agents", func() bool { return w.s.registry.agent("n2").connected })
	for _, f := range w.agents {
		f.with(func() { f.hang["create"] = true })
	}
	w.create("a", nil)
	w.eventually("placed", func() bool { return w.get("a").Status.Node != "" })
	node := w.get("a").Status.Node
	w.halt()
	for _, f := range w.agents {
		f.with(func() { delete(f.hang, "create") })
	}
	w.start()
	w.phase("a", v1alpha1.SandboxRunning)
	if w.get("a").Status.Node != node || len(w.agents["n1"].has())+len(w.agents["n2"].has()) != 1 {
		t.Error("it was made twice")
	}
}

// A node that comes into the status by a write that was given up, ours or that of a leader before us, is the sandbox's: there may
// be something of it. Another is not chosen, nor is that one fought over for ever.
func TestANodeOfAnOpenWriteIsTheSandboxs(t *testing.T) {
	w := newWorld(t)
	w.addAgent("n2", nil)
	w.eventually("both agents", func() bool { return w.s.registry.agent("n2").connected })
	var once sync.Once
	hook := func(write string) (err error) {
		if write == "status" {
			once.Do(func() {
				err = errTransient
				// The second has the scheduler be done with the first when it is heard of.
				for _, message := range []string{"one", "two"} {
					_, failed := w.store.Store.Sandboxes().UpdateStatus(t.Context(), store.Key{Namespace: "default", Name: "a"}, store.Preconditions{}, func(sb *v1alpha1.Sandbox) error {
						sb.Status.Node, sb.Status.Message = "n2", message
						return nil
					})
					err = errors.Join(err, failed)
					w.eventually("the write is heard of", func() bool {
						return w.s.cache.get(store.Key{Namespace: "default", Name: "a"}).Status.Message == message
					})
				}
			})
		}
		return err
	}
	w.store.hook.Store(&hook)
	w.create("a", nil)
	w.phase("a", v1alpha1.SandboxRunning)
	if got := w.get("a").Status.Node; got != "n2" || w.agents["n1"].total() != 0 {
		t.Errorf("it runs on %s, and n1 was called %d times", got, w.agents["n1"].total())
	}
}

func TestASandboxOnTheWrongNodeIsRemovedThere(t *testing.T) {
	w := newWorld(t)
	w.addAgent("n2", nil)
	uid := w.running("a", nil)
	other := w.agents["n2"]
	if w.get("a").Status.Node == "n2" {
		other = w.agents["n1"]
	}
	w.eventually("both agents", func() bool { return w.s.registry.agent("n2").connected })
	other.change(uid, func(*agentv1.SandboxState) {})
	w.eventually("removed", func() bool { return len(other.has()) == 0 })
	if w.agents[w.get("a").Status.Node].phase(uid) != stateRunning {
		t.Error("the right one is gone")
	}
}

func TestAnotherNodeAfterARefusal(t *testing.T) {
	full := fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "no room")
	w := emptyWorld(t)
	w.group("default", func(g *v1alpha1.SandboxGroup) {
		g.Spec.SchedulingPolicy.Weights = &v1alpha1.SchedulingWeights{Load: 1}
	})
	w.addAgent("n1", nil).faults["create"] = []error{full}
	w.addAgent("n2", nil)
	w.start()
	w.running("a", nil)
	if w.get("a").Status.Node != "n2" {
		t.Errorf("node %s", w.get("a").Status.Node)
	}
	// Any other failure may have left something: it stays.
	w.agents["n1"].with(func() { w.agents["n1"].faults["create"] = []error{errTransient} })
	w.create("b", nil)
	w.within(time.Second, "b runs", func() bool { return w.get("b").Status.Phase == v1alpha1.SandboxRunning })
	if w.get("b").Status.Node != "n1" {
		t.Errorf("node %s", w.get("b").Status.Node)
	}
}

func TestNoAgent(t *testing.T) {
	w := emptyWorld(t)
	w.group("default", nil)
	w.start()
	w.create("a", nil)
	w.eventually("pending", func() bool { return w.get("a").Status.Reason == string(fault.NoAgent) })
	w.addAgent("n1", nil)
	w.phase("a", v1alpha1.SandboxRunning)
}

func TestReadyWaitsForInventories(t *testing.T) {
	w := emptyWorld(t)
	w.group("default", nil)
	w.addAgent("n1", nil).down = true
	w.create("a", nil)
	s, err := New(Config{Store: w.store, Agents: StaticAgents{{Node: "n1", Client: w.agent()}}, Clock: w.clock, Epoch: 1, LeaseUID: "l"})
	if err != nil {
		t.Fatal(err)
	}
	w.run(s)
	w.eventually("the agent is awaited", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.agentsSynced && len(s.awaited) == 1
	})
	if s.isReady() {
		t.Fatal("ready without the agent's inventory")
	}
	w.within(time.Second, "ready after the grace", func() bool { return s.isReady() })
	w.agent().setDown(false)
	w.within(time.Second, "runs", func() bool { return w.get("a").Status.Phase == v1alpha1.SandboxRunning })
}
