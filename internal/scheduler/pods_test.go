package scheduler

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// podWorld is a world with Pods.
func podWorld(t *testing.T) *world {
	w := emptyWorld(t)
	w.pods, w.claims = newFakePods(), newFakeClaims()
	w.group("default", nil)
	w.addAgent("n1", nil)
	w.start()
	return w
}

func owned(sb *v1alpha1.Sandbox) {
	sb.Spec.Image = ""
	sb.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "busybox"}}}}
}

func ofPod(name string, uid types.UID) func(*v1alpha1.Sandbox) {
	return func(sb *v1alpha1.Sandbox) {
		sb.Spec.Image = ""
		sb.Spec.PodRef = &v1alpha1.PodReference{Name: name, UID: uid}
	}
}

// pod waits for a Pod other than the given one and returns its UID.
func (w *world) pod(name string, other types.UID) types.UID {
	w.t.Helper()
	w.eventually("Pod "+name, func() bool { p := w.pods.get(name); return p != nil && p.UID != other })
	return w.pods.get(name).UID
}

// schedule gives a Pod a node, as kube-scheduler does.
func (w *world) schedule(name, node string) {
	w.pods.change(name, func(p *Pod) { p.Node = node })
}

// podStarts has a Pod's container run, as kubelet does, the agent's hook being first.
func (w *world) podStarts(name string) {
	w.t.Helper()
	p := w.pods.get(name)
	w.agents[p.Node].podRuns(string(p.UID), true)
	w.pods.change(name, func(p *Pod) { p.Phase, p.Running, p.ContainerID = corev1.PodRunning, true, "c-"+string(p.UID) })
}

// podRunning makes a Pod run on n1 from the beginning.
func (w *world) podRunning(name string) {
	w.t.Helper()
	w.pod(name, "")
	w.schedule(name, "n1")
	w.podStarts(name)
}

func TestATemplateIsOnePodOfTheSandboxsName(t *testing.T) {
	w := podWorld(t)
	uid := w.create("a", func(sb *v1alpha1.Sandbox) {
		owned(sb)
		sb.Finalizers = nil
		sb.Spec.VolumeMounts = []v1alpha1.VolumeMount{{Source: "/data/pub", Target: "/pub", Mode: "ro"}}
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
	})
	pod := w.pod("a", "")
	w.eventually("pending", func() bool { return w.get("a").Status.Phase == v1alpha1.SandboxPending })
	w.pods.change("a", func(p *Pod) { p.Reason, p.Message = "Unschedulable", "0/1 nodes are available" })
	w.eventually("unschedulable is shown", func() bool { return w.get("a").Status.Reason == "Unschedulable" })
	if sb := w.get("a"); !slices.Contains(sb.Finalizers, v1alpha1.FinalizerVolumes) || sb.Status.Node != "" || meta.IsStatusConditionTrue(sb.Status.Conditions, v1alpha1.ConditionScheduled) {
		t.Errorf("sandbox %+v", sb)
	}
	if w.agent().total() != 0 {
		t.Error("the agent was asked before the Pod had a node")
	}
	w.pods.change("a", func(p *Pod) { p.Reason, p.Message, p.Node = "", "", "n1" })
	w.rowIs("a", "/data", v1alpha1.VolumePending)
	w.eventually("prepared", func() bool {
		return w.row("a", "/data").Reason == ReasonWaitingForContainer && w.row("a", "/pub").Reason == ReasonWaitingForContainer
	})
	w.agent().with(func() {
		for _, in := range w.agent().attaches {
			p := in.GetWorkload().GetPod()
			if in.GetWhen() != agentv1.When_AT_CREATE || p.GetNamespace() != "default" || p.GetName() != "a" || p.GetUid() != string(pod) || p.GetContainer() != "main" ||
				in.GetCommand().GetSandboxUid() != uid || in.GetTenantId() != "t-1" {
				t.Errorf("request %v", in)
			}
		}
		if n := len(w.agent().attaches); n != 2 {
			t.Errorf("%d attaches", n)
		}
	})
	w.podStarts("a")
	w.phase("a", v1alpha1.SandboxRunning)
	if row := w.rowIs("a", "/data", v1alpha1.VolumeMounted); row.Attached != v1alpha1.AttachedBeforeStart {
		t.Errorf("row %+v", row)
	}
	w.eventually("ready", func() bool {
		return meta.IsStatusConditionTrue(w.get("a").Status.Conditions, v1alpha1.ConditionReady)
	})
	st := w.get("a").Status
	if st.Node != "n1" || st.ContainerID != "c-"+string(pod) || st.VolumesReady != "2/2" || !meta.IsStatusConditionTrue(st.Conditions, v1alpha1.ConditionScheduled) {
		t.Errorf("status %+v", st)
	}
	if w.s.registry.isPlaced(types.UID(uid)) {
		t.Error("a Pod takes capacity of the container scheduler")
	}
	w.agent().with(func() {
		if calls := w.agent().calls; slices.Contains(calls, "create") || slices.Contains(calls, "start") {
			t.Errorf("calls %v", calls)
		}
	})
	w.events.mu.Lock()
	defer w.events.mu.Unlock()
	if !slices.Contains(w.events.seen, "a Normal VolumeAttached") {
		t.Errorf("events %v", w.events.seen)
	}
}

func TestVolumesComeAndGoWhileAPodRuns(t *testing.T) {
	w := podWorld(t)
	pod := w.pods.foreign("web-0")
	uid := w.create("a", ofPod("web-0", ""))
	w.podRunning("web-0")
	w.phase("a", v1alpha1.SandboxRunning)
	if ref := w.get("a").Spec.PodRef; ref.UID != pod {
		t.Errorf("podRef %+v", ref)
	}
	w.add("a", local("/data", "r-1"))
	if row := w.rowIs("a", "/data", v1alpha1.VolumeMounted); row.Attached != v1alpha1.AttachedLive || row.RequestID != "r-1" {
		t.Errorf("row %+v", row)
	}
	w.agent().with(func() {
		in := w.agent().attaches[0]
		if in.GetWhen() != agentv1.When_NOW || in.GetWorkload().GetPod().GetUid() != string(pod) {
			t.Errorf("request %v", in)
		}
	})
	// The container crashes and comes again: the agent does that alone.
	w.agent().podRuns(string(pod), false)
	w.eventually("waits", func() bool { return w.row("a", "/data").Reason == ReasonWaitingForContainer })
	w.agent().podRuns(string(pod), true)
	if row := w.rowIs("a", "/data", v1alpha1.VolumeMounted); row.Attached != v1alpha1.AttachedBeforeStart {
		t.Errorf("row %+v", row)
	}
	if n := w.agent().count("attach /data"); n != 1 {
		t.Errorf("%d attaches", n)
	}
	// At rest nothing is written.
	w.look("a")
	spec, status, calls := w.store.spec.Load(), w.store.status.Load(), w.agent().total()
	for range 5 {
		w.clock.Step(10 * time.Minute)
		w.look("a")
	}
	if w.store.spec.Load() != spec || w.store.status.Load() != status || w.agent().total() != calls {
		t.Errorf("at rest: %d writes of spec, %d of status, %d calls", w.store.spec.Load()-spec, w.store.status.Load()-status, w.agent().total()-calls)
	}
	w.remove("a", "/data", "r-2", false)
	w.noEntry("a", "/data")
	w.noRow("a", "/data")
	w.agent().with(func() {
		if in := w.agent().detaches[0]; in.GetWorkload().GetPod().GetUid() != string(pod) {
			t.Errorf("request %v", in)
		}
	})
	// The Pod stays when the sandbox goes.
	w.delete("a")
	w.eventually("gone", func() bool { return w.get("a") == nil })
	if creates, deletes := w.pods.count(); creates != 0 || deletes != 0 || w.pods.get("web-0") == nil {
		t.Errorf("%d creates, %d deletes", creates, deletes)
	}
	if w.agent().count("delete") != 1 || len(w.agent().has()) != 0 {
		t.Errorf("the agent has %v", w.agent().has())
	}
	w.eventually("forgotten", func() bool {
		w.pods.mu.Lock()
		defer w.pods.mu.Unlock()
		return w.pods.forgot[types.UID(uid)]
	})
}

// What the API server says of the container may be late: an attach that finds it not running waits for its start.
func TestAnAttachIntoAContainerThatDoesNotRunAfterAll(t *testing.T) {
	w := podWorld(t)
	w.pods.foreign("web-0")
	w.create("a", ofPod("web-0", ""))
	w.podRunning("web-0")
	w.phase("a", v1alpha1.SandboxRunning)
	w.agent().podRuns("pod-1", false) // the agent has no record of it, so it tells nobody
	w.add("a", local("/data", "r-1"))
	w.eventually("prepared", func() bool { r := w.row("a", "/data"); return r != nil && r.Reason == ReasonWaitingForContainer })
	if w.row("a", "/data").Phase != v1alpha1.VolumePending || w.agent().count("attach /data") != 2 {
		t.Errorf("row %+v", w.row("a", "/data"))
	}
	w.agent().podRuns("pod-1", true)
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
}

// The agent attaches when a container starts; should it not, it is asked to.
func TestAPreparedVolumeThatDoesNotComeIsAskedFor(t *testing.T) {
	w := podWorld(t)
	uid := w.create("a", func(sb *v1alpha1.Sandbox) {
		owned(sb)
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
	})
	pod := w.pod("a", "")
	w.schedule("a", "n1")
	w.eventually("prepared", func() bool { r := w.row("a", "/data"); return r != nil && r.Reason == ReasonWaitingForContainer })
	w.agent().with(func() { w.agent().running[string(pod)] = true })
	w.agent().change(uid, func(s *agentv1.SandboxState) { s.Phase = stateRunning })
	w.pods.change("a", func(p *Pod) { p.Phase, p.Running = corev1.PodRunning, true })
	w.phase("a", v1alpha1.SandboxRunning)
	w.agent().with(func() { w.agent().sandboxes[uid].Volumes = nil }) // so that the fake attaches anew
	w.within(settleAfter/2, "asked for", func() bool { return w.row("a", "/data").Phase == v1alpha1.VolumeMounted })
}

func TestADeletedPodIsRebuiltUnderTheSameSandbox(t *testing.T) {
	for _, node := range []string{"n1", "n2"} {
		t.Run(node, func(t *testing.T) {
			w := podWorld(t)
			w.addAgent("n2", nil)
			uid := w.create("a", func(sb *v1alpha1.Sandbox) {
				owned(sb)
				sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
			})
			w.podRunning("a")
			w.rowIs("a", "/data", v1alpha1.VolumeMounted)
			first := w.pods.get("a").UID
			w.pods.change("a", func(p *Pod) { p.Deleting = true })
			w.eventually("terminating is shown", func() bool { return w.get("a").Status.Reason == reasonPodTerminating })
			w.agent().podRuns(string(first), false)
			w.pods.gone("a")
			second := w.pod("a", first)
			w.eventually("the first Pod's volume is released", func() bool { return w.agent().count("detach /data") == 1 })
			w.schedule("a", node)
			w.eventually("prepared for the second", func() bool {
				r := w.row("a", "/data")
				return r != nil && r.Phase == v1alpha1.VolumePending && r.Reason == ReasonWaitingForContainer
			})
			w.podStarts("a")
			w.phase("a", v1alpha1.SandboxRunning)
			w.rowIs("a", "/data", v1alpha1.VolumeMounted)
			if w.get("a").Status.Node != node || w.get("a").UID != types.UID(uid) {
				t.Errorf("status %+v", w.get("a").Status)
			}
			w.agents[node].with(func() {
				last := w.agents[node].attaches[len(w.agents[node].attaches)-1]
				if last.GetWorkload().GetPod().GetUid() != string(second) {
					t.Errorf("request %v", last)
				}
			})
			if w.agent().count("delete") != 0 {
				t.Error("the sandbox was deleted on a node to which it may come back")
			}
			if creates, _ := w.pods.count(); creates != 2 {
				t.Errorf("%d creates", creates)
			}
		})
	}
}

// A Pod is rebuilt on its node before the agent has noticed that the first is gone.
func TestARebuiltPodDoesNotGetTheFormerOnesRecords(t *testing.T) {
	w := podWorld(t)
	w.create("a", func(sb *v1alpha1.Sandbox) {
		owned(sb)
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
	})
	w.podRunning("a")
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	first := w.pods.get("a").UID
	w.agent().with(func() { w.agent().faults["detach"] = []error{errTransient} })
	w.pods.gone("a")
	second := w.pod("a", first)
	w.eventually("first try", func() bool { return w.agent().count("detach /data") >= 1 })
	w.schedule("a", "n1")
	w.podStarts("a")
	w.within(time.Second, "attached to the second", func() bool {
		mounted := false
		w.agent().with(func() {
			for _, s := range w.agent().sandboxes {
				mounted = s.GetWorkload().GetPod().GetUid() == string(second) && len(s.GetVolumes()) == 1 && s.GetVolumes()[0].GetPhase() == recordMounted
			}
		})
		return mounted
	})
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.agent().with(func() {
		for _, in := range w.agent().detaches {
			if in.GetWorkload().GetPod().GetUid() != string(first) {
				t.Errorf("request %v", in)
			}
		}
	})
}

// An agent that has not noticed yet that the former Pod is gone is waited for, and the volume has not failed.
func TestTheFormerPodsEndIsWaitedFor(t *testing.T) {
	w := podWorld(t)
	w.agent().with(func() {
		later := fault.New(errdefs.ErrUnavailable, fault.OperationPending, "the sandbox is still Pod x")
		gone := fault.New(errdefs.ErrFailedPrecondition, fault.PodGone, "the Pod is gone")
		w.agent().faults["attach /data"] = []error{later, gone, later, later, later}
	})
	w.create("a", func(sb *v1alpha1.Sandbox) {
		owned(sb)
		v := local("/data", "r-1")
		v.OnFailure = v1alpha1.OnFailureRemove
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{v}
	})
	w.pod("a", "")
	w.schedule("a", "n1")
	begun := w.clock.Now()
	w.within(time.Second, "prepared", func() bool { r := w.row("a", "/data"); return r != nil && r.Reason == ReasonWaitingForContainer })
	if w.entry("a", "/data") == nil {
		t.Error("the entry went")
	}
	if took := w.clock.Since(begun); took < 10*time.Second {
		t.Errorf("5 refusals in %s: they are not waited for", took)
	}
}

func TestPauseDeletesThePodAndResumeRebuildsIt(t *testing.T) {
	w := podWorld(t)
	w.create("a", func(sb *v1alpha1.Sandbox) {
		owned(sb)
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
	})
	w.podRunning("a")
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	first := w.pods.get("a").UID
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = true })
	w.eventually("deleted", func() bool { return w.pods.get("a") == nil })
	w.agent().podRuns(string(first), false)
	w.phase("a", v1alpha1.SandboxPaused)
	w.rowIs("a", "/data", v1alpha1.VolumePending)
	w.eventually("no node", func() bool { return w.get("a").Status.Node == "" })
	w.look("a")
	if creates, deletes := w.pods.count(); creates != 1 || deletes != 1 {
		t.Errorf("%d creates, %d deletes", creates, deletes)
	}
	w.paused("a")
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = false })
	w.pod("a", first)
	w.schedule("a", "n1")
	w.podStarts("a")
	w.phase("a", v1alpha1.SandboxRunning)
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
}

// A Pod that is deleted may have failed by that: its processes were killed. That is not how the sandbox ends.
func TestADeletedPodHasNotFailed(t *testing.T) {
	for name, paused := range map[string]bool{"paused": true, "deleted by hand": false} {
		t.Run(name, func(t *testing.T) {
			w := podWorld(t)
			w.pods.lingers = true
			w.create("a", func(sb *v1alpha1.Sandbox) {
				owned(sb)
				sb.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
			})
			w.podRunning("a")
			w.phase("a", v1alpha1.SandboxRunning)
			first := w.pods.get("a").UID
			if paused {
				w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = true })
				w.eventually("deleted", func() bool { return w.pods.get("a").Deleting })
			}
			w.pods.change("a", func(p *Pod) { p.Deleting, p.Phase, p.Running, p.Reason = true, corev1.PodFailed, false, "Error" })
			w.phase("a", v1alpha1.SandboxPending)
			w.pods.gone("a")
			if !paused {
				w.pod("a", first)
				return
			}
			w.phase("a", v1alpha1.SandboxPaused)
			if st := w.get("a").Status; st.Reason != "" {
				t.Errorf("status %+v", st)
			}
		})
	}
}

// The Pod goes first, so that its processes end while their volumes are there.
func TestDeletingASandboxDeletesItsPodFirst(t *testing.T) {
	w := podWorld(t)
	w.pods.lingers = true
	w.create("a", func(sb *v1alpha1.Sandbox) {
		owned(sb)
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
	})
	w.podRunning("a")
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.delete("a")
	w.phase("a", v1alpha1.SandboxTerminating)
	w.eventually("the Pod is deleted", func() bool { return w.pods.get("a").Deleting })
	w.look("a")
	if w.agent().count("delete") != 0 || w.get("a") == nil {
		t.Error("the agent was asked to detach while the Pod runs")
	}
	w.pods.gone("a")
	w.eventually("gone", func() bool { return w.get("a") == nil })
	if w.agent().count("delete") != 1 {
		t.Errorf("calls %v", w.agent().calls)
	}
	if creates, deletes := w.pods.count(); creates != 1 || deletes != 1 {
		t.Errorf("%d creates, %d deletes", creates, deletes)
	}
}

func TestAPodOfTheNameThatIsSomebodyElsesIsLeftAlone(t *testing.T) {
	w := podWorld(t)
	foreign := w.pods.foreign("a")
	w.create("a", owned)
	w.eventually("refused", func() bool { return w.get("a").Status.Reason == string(fault.PodNameTaken) })
	if st := w.get("a").Status; st.Phase != v1alpha1.SandboxPending || st.Node != "" {
		t.Errorf("status %+v", st)
	}
	w.pods.gone("a")
	w.within(time.Second, "made", func() bool { return w.pods.get("a") != nil && w.pods.get("a").UID != foreign })
	w.schedule("a", "n1")
	w.podStarts("a")
	w.phase("a", v1alpha1.SandboxRunning)
	if st := w.get("a").Status; st.Reason != "" {
		t.Errorf("status %+v", st)
	}
}

func TestAnAdoptedPodThatIsGone(t *testing.T) {
	for name, successor := range map[string]bool{"gone": false, "a successor is not followed": true} {
		t.Run(name, func(t *testing.T) {
			w := podWorld(t)
			pod := w.pods.foreign("web-0")
			w.create("a", ofPod("web-0", pod))
			w.podRunning("web-0")
			w.add("a", local("/data", "r-1"))
			w.rowIs("a", "/data", v1alpha1.VolumeMounted)
			w.agent().podGone(string(pod))
			w.pods.gone("web-0")
			if successor {
				w.pods.foreign("web-0")
			}
			w.phase("a", v1alpha1.SandboxFailed)
			w.rowIs("a", "/data", v1alpha1.VolumePending)
			if st := w.get("a").Status; st.Reason != string(fault.PodGone) {
				t.Errorf("status %+v", st)
			}
			attaches := w.agent().count("attach /data")
			w.clock.Step(time.Hour)
			w.look("a")
			if creates, deletes := w.pods.count(); creates != 0 || deletes != 0 || w.agent().count("attach /data") != attaches {
				t.Errorf("%d creates, %d deletes", creates, deletes)
			}
			w.delete("a")
			w.eventually("gone", func() bool { return w.get("a") == nil })
			if _, deletes := w.pods.count(); deletes != 0 {
				t.Error("a Pod that is somebody else's was deleted")
			}
		})
	}
}

func TestAPodThatIsNotThereYet(t *testing.T) {
	w := podWorld(t)
	w.create("a", ofPod("later", ""))
	w.eventually("waits", func() bool { return w.get("a").Status.Reason == string(fault.PodNotFound) })
	// One that is on its way out is not meant: the next of a StatefulSet has the same name.
	w.pods.mu.Lock()
	w.pods.put("later")
	w.pods.pods["later"].Deleting = true
	w.pods.mu.Unlock()
	w.look("a")
	if ref := w.get("a").Spec.PodRef; ref.UID != "" {
		t.Errorf("podRef %+v", ref)
	}
	w.pods.gone("later")
	pod := w.pods.foreign("later")
	w.eventually("adopted", func() bool { return w.get("a").Spec.PodRef.UID == pod })
	// One that is named by its UID has been there.
	w.create("b", ofPod("never", "some-uid"))
	w.phase("b", v1alpha1.SandboxFailed)
}

func TestHowAPodEnds(t *testing.T) {
	for _, c := range []struct {
		name    string
		policy  corev1.RestartPolicy
		phase   corev1.PodPhase
		want    v1alpha1.SandboxPhase
		rebuilt bool
	}{
		{"completed", corev1.RestartPolicyNever, corev1.PodSucceeded, v1alpha1.SandboxSucceeded, false},
		{"failed", corev1.RestartPolicyOnFailure, corev1.PodFailed, v1alpha1.SandboxFailed, false},
		{"evicted", corev1.RestartPolicyAlways, corev1.PodFailed, "", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := podWorld(t)
			w.create("a", func(sb *v1alpha1.Sandbox) {
				owned(sb)
				sb.Spec.Template.Spec.RestartPolicy = c.policy
				sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
			})
			w.podRunning("a")
			w.rowIs("a", "/data", v1alpha1.VolumeMounted)
			first := w.pods.get("a").UID
			w.agent().podRuns(string(first), false)
			w.pods.change("a", func(p *Pod) { p.Phase, p.Running, p.Reason, p.Message = c.phase, false, "Why", "because" })
			if c.rebuilt {
				w.eventually("deleted", func() bool { _, deletes := w.pods.count(); return deletes == 1 })
				w.look("a")
				if w.pods.get("a") != nil {
					t.Error("it is rebuilt at once")
				}
				w.within(firstRetry/2, "rebuilt", func() bool { return w.pods.get("a") != nil })
				return
			}
			w.phase("a", c.want)
			w.rowIs("a", "/data", v1alpha1.VolumePending)
			w.eventually("released", func() bool { return w.agent().count("detach /data") == 1 })
			if st := w.get("a").Status; st.Reason != "Why" || st.Message != "because" {
				t.Errorf("status %+v", st)
			}
			w.pods.gone("a")
			w.look("a")
			if creates, _ := w.pods.count(); creates != 1 {
				t.Error("what is over was made again")
			}
		})
	}
}

func TestNodesThatCannotAttachToPods(t *testing.T) {
	for _, c := range []struct {
		name, node string
		reason     fault.Reason
	}{{"no agent", "n9", fault.NoAgent}, {"an old agent", "old", fault.VersionSkew}} {
		t.Run(c.name, func(t *testing.T) {
			w := podWorld(t)
			old := w.addAgent("old", nil, CapabilityDynamicVolumes)
			w.eventually("connected", func() bool { return w.s.registry.agent("old").connected })
			w.create("a", func(sb *v1alpha1.Sandbox) {
				owned(sb)
				sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
			})
			pod := w.pod("a", "")
			w.schedule("a", c.node)
			row := w.rowIs("a", "/data", v1alpha1.VolumeFailed)
			if row.Reason != string(c.reason) || row.NextRetryTime != nil {
				t.Errorf("row %+v", row)
			}
			w.look("a")
			if old.total() != 0 {
				t.Errorf("calls %v", old.calls)
			}
			// The agent comes, or is updated.
			f := old
			if c.node == "n9" {
				f = w.addAgent("n9", nil)
			} else {
				old.with(func() { old.capabilities = append(old.capabilities, agentv1.CapabilityPods); old.cut() })
			}
			f.podRuns(string(pod), true)
			w.within(firstReconnect, "attached", func() bool { r := w.row("a", "/data"); return r != nil && r.Phase == v1alpha1.VolumeMounted })
		})
	}
}

func TestASandboxOfANodeWithoutAnAgentCanBeDeleted(t *testing.T) {
	w := podWorld(t)
	w.pods.foreign("web-0")
	w.create("a", ofPod("web-0", ""))
	w.schedule("web-0", "n9")
	w.eventually("node", func() bool { return w.get("a").Status.Node == "n9" })
	w.delete("a")
	w.eventually("gone", func() bool { return w.get("a") == nil })
}

// An agent that is away may have volumes in a Pod that runs: the sandbox waits for it.
func TestDeletingWaitsForTheAgentWhileThePodIsThere(t *testing.T) {
	w := podWorld(t)
	w.pods.foreign("web-0")
	w.create("a", ofPod("web-0", ""))
	w.podRunning("web-0")
	w.add("a", local("/data", "r-1"))
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.agent().setDown(true)
	w.eventually("away", func() bool { return !w.s.registry.agent("n1").connected })
	w.delete("a")
	w.eventually("says why", func() bool { return w.get("a").Status.Reason == string(fault.AgentUnavailable) })
	w.agent().setDown(false)
	w.within(firstReconnect, "gone", func() bool { return w.get("a") == nil })
	if len(w.agent().has()) != 0 {
		t.Errorf("the agent has %v", w.agent().has())
	}
}

func TestTheGateOfTheGroupHoldsForPods(t *testing.T) {
	w := podWorld(t)
	w.gate(false)
	w.pods.foreign("web-0")
	w.create("a", ofPod("web-0", ""))
	w.podRunning("web-0")
	w.phase("a", v1alpha1.SandboxRunning)
	w.add("a", local("/data", "r-1"))
	if row := w.rowIs("a", "/data", v1alpha1.VolumeFailed); row.Reason != string(fault.FeatureDisabled) {
		t.Errorf("row %+v", row)
	}
	w.gate(true)
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	// Off again: what is attached stays, over a restart of the container too.
	w.gate(false)
	w.agent().podRuns("pod-1", false)
	w.eventually("waits", func() bool { return w.row("a", "/data").Reason == ReasonWaitingForContainer })
	w.agent().podRuns("pod-1", true)
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
}

func TestANewLeaderFindsPodsAsTheyAre(t *testing.T) {
	w := podWorld(t)
	w.create("a", func(sb *v1alpha1.Sandbox) {
		owned(sb)
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
	})
	w.podRunning("a")
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.halt()
	w.pods.mu.Lock()
	w.pods.unknown = true
	w.pods.mu.Unlock()
	status := w.store.status.Load()
	w.start()
	w.look("a")
	w.pods.mu.Lock()
	w.pods.unknown = false
	w.pods.told("a")
	w.pods.mu.Unlock()
	w.look("a")
	if creates, _ := w.pods.count(); creates != 1 || w.store.status.Load() != status || w.agent().count("attach /data") != 1 || w.agent().count("delete") != 0 {
		t.Errorf("%d creates, %d writes of status, calls %v", creates, w.store.status.Load()-status, w.agent().calls)
	}
}

func TestWithoutKubernetesThereAreNoPods(t *testing.T) {
	w := newWorld(t)
	w.create("a", owned)
	w.eventually("says why", func() bool { return w.get("a").Status.Reason == string(fault.PodsUnavailable) })
	w.delete("a")
	w.eventually("gone", func() bool { return w.get("a") == nil })
}

// A template whose images or resources were changed: the Pod that runs gets them, and the status says when it runs with them.
// A sandbox of a SandboxSet brings its gate along: the runtime csi, or none, whatever its group says.
func TestASandboxOfASetHasTheSetsGate(t *testing.T) {
	w := podWorld(t)
	w.gate(false)
	ofSet := func(name string, runtimes ...string) {
		t.Helper()
		w.create(name, func(sb *v1alpha1.Sandbox) {
			owned(sb)
			sb.Labels = map[string]string{agentsv1alpha1.LabelSandboxSet: "pool"}
			sb.Spec.Runtimes = runtimes
			sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
		})
		w.podRunning(name)
	}
	ofSet("with", v1alpha1.RuntimeCSI)
	w.rowIs("with", "/data", v1alpha1.VolumeMounted)
	w.gate(true)
	ofSet("without")
	if row := w.rowIs("without", "/data", v1alpha1.VolumeFailed); row.Reason != string(fault.FeatureDisabled) || !strings.Contains(row.Message, "SandboxSet default/pool: add the runtime csi") {
		t.Errorf("row %+v", row)
	}
}

func TestAPodIsUpdatedInPlace(t *testing.T) {
	w := podWorld(t)
	w.create("a", func(sb *v1alpha1.Sandbox) {
		owned(sb)
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
	})
	w.podRunning("a")
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	updated := func(reason string) {
		t.Helper()
		w.eventually("Updated is "+reason, func() bool {
			c := meta.FindStatusCondition(w.get("a").Status.Conditions, v1alpha1.ConditionUpdated)
			return c != nil && c.Reason == reason && (c.Status == metav1.ConditionTrue) == (reason == "Updated")
		})
	}
	if c := meta.FindStatusCondition(w.get("a").Status.Conditions, v1alpha1.ConditionUpdated); c != nil {
		t.Errorf("condition %+v of a template that was not changed", c)
	}
	w.pods.mu.Lock()
	w.pods.refuse = fault.New(errdefs.ErrFailedPrecondition, fault.PodRefused, "no such QoS")
	w.pods.mu.Unlock()
	w.pods.change("a", func(p *Pod) { p.Outdated = true })
	updated(string(fault.PodRefused))
	w.look("a")
	if w.pods.updates != 1 {
		t.Errorf("%d tries at once", w.pods.updates)
	}
	w.pods.mu.Lock()
	w.pods.refuse = nil
	w.pods.mu.Unlock()
	w.within(firstRetry, "updated", func() bool { return w.pods.get("a").Updated })
	updated("Restarting")
	w.happened("a Normal PodUpdated")
	// Its container is restarted: the agent brings the volume back by itself.
	uid := string(w.pods.get("a").UID)
	w.agent().podRuns(uid, false)
	w.eventually("waits", func() bool { return w.row("a", "/data").Reason == ReasonWaitingForContainer })
	w.agent().podRuns(uid, true)
	w.pods.change("a", func(p *Pod) { p.Updating, p.ContainerID, p.Restarts = "", "c-2", 1 })
	updated("Updated")
	if row := w.rowIs("a", "/data", v1alpha1.VolumeMounted); row.Attached != v1alpha1.AttachedBeforeStart {
		t.Errorf("row %+v", row)
	}
	if creates, deletes := w.pods.count(); creates != 1 || deletes != 0 || w.pods.updates != 2 {
		t.Errorf("%d creates, %d deletes, %d updates", creates, deletes, w.pods.updates)
	}
	if st := w.get("a").Status; st.Reason != "" || !meta.IsStatusConditionTrue(st.Conditions, v1alpha1.ConditionReady) {
		t.Errorf("status %+v", st)
	}
}

// A new leader that has not read the Pods yet does not say of a template that was changed meanwhile that it has seen it: a claim
// would take that for an update in place that is done.
func TestAGenerationIsNotObservedWithoutItsPod(t *testing.T) {
	w := podWorld(t)
	w.create("a", owned)
	w.podRunning("a")
	observed := func() bool { return w.get("a").Status.ObservedGeneration == w.get("a").Generation }
	w.eventually("it is ready", func() bool {
		return observed() && meta.IsStatusConditionTrue(w.get("a").Status.Conditions, v1alpha1.ConditionReady)
	})
	w.halt()
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Template.Spec.Containers[0].Image = "busybox:2" })
	w.pods.mu.Lock()
	w.pods.unknown = true
	w.pods.mu.Unlock()
	w.start()
	w.look("a")
	if observed() {
		t.Errorf("status %+v of a Pod that nobody has looked at", w.get("a").Status)
	}
	w.pods.mu.Lock()
	w.pods.unknown = false
	w.pods.pods["a"].Outdated = true
	w.pods.told("a")
	w.pods.mu.Unlock()
	w.eventually("the update is told of", func() bool {
		return observed() && meta.FindStatusCondition(w.get("a").Status.Conditions, v1alpha1.ConditionUpdated) != nil
	})
}

func TestAPodThatTheAPIServerRefuses(t *testing.T) {
	w := podWorld(t)
	// It quotes what it refuses, and takes no condition with more than 32 KiB.
	w.pods.refuse = fault.New(errdefs.ErrFailedPrecondition, fault.PodRefused, "%s is not valid", strings.Repeat("x", 40<<10))
	w.create("a", owned)
	w.eventually("says why", func() bool { return w.get("a").Status.Reason == string(fault.PodRefused) })
	st := w.get("a").Status
	if c := meta.FindStatusCondition(st.Conditions, v1alpha1.ConditionReady); len(st.Message) > 4<<10 || !strings.HasSuffix(st.Message, " is not valid") || c == nil || len(c.Message) > 4<<10 {
		t.Errorf("%d bytes: %s; condition %+v", len(st.Message), st.Message, c)
	}
	w.pods.mu.Lock()
	w.pods.refuse = nil
	w.pods.mu.Unlock()
	w.within(firstRetry, "made", func() bool { return w.pods.get("a") != nil })
}
