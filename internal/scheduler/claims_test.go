package scheduler

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// withClaim is a sandbox with a claim template and a dynamic volume.
func withClaim(sb *v1alpha1.Sandbox) {
	owned(sb)
	sb.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}}}
	sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
}

// bound waits until the condition VolumeClaimsBound has a reason, and returns it.
func (w *world) bound(name, reason string) metav1.Condition {
	w.t.Helper()
	var c *metav1.Condition
	w.eventually("VolumeClaimsBound of "+name+" is "+reason, func() bool {
		sb := w.get(name)
		c = meta.FindStatusCondition(sb.Status.Conditions, v1alpha1.ConditionVolumeClaimsBound)
		return c != nil && c.Reason == reason
	})
	if (c.Status == metav1.ConditionTrue) != (reason == ReasonClaimsBound) || c.Message == "" {
		w.t.Errorf("condition %+v", c)
	}
	return *c
}

func (w *world) happened(event string) {
	w.t.Helper()
	w.eventually("Event "+event, func() bool {
		w.events.mu.Lock()
		defer w.events.mu.Unlock()
		return slices.Contains(w.events.seen, event)
	})
}

func (w *world) bind(sandbox, claim string) {
	w.claims.change(sandbox, claim, func(c *Claim) *Claim { c.Phase = corev1.ClaimBound; return c })
}

func TestClaimsAreMadeBeforeThePod(t *testing.T) {
	w := podWorld(t)
	w.claims.refuse = fault.New(errdefs.ErrFailedPrecondition, fault.ClaimRefused, "exceeded quota: q, requested: persistentvolumeclaims=1")
	w.create("a", withClaim)
	c := w.bound("a", string(fault.ClaimRefused))
	if st := w.get("a").Status; !strings.Contains(c.Message, "exceeded quota: q") || st.Phase != v1alpha1.SandboxPending || st.Reason != string(fault.ClaimRefused) || st.Message != c.Message {
		t.Errorf("condition %+v, status %+v", c, st)
	}
	w.happened("a Warning CLAIM_REFUSED")
	if creates, _ := w.pods.count(); creates != 0 {
		t.Error("a Pod was made without its claims")
	}
	w.claims.with(func() { w.claims.refuse = nil })
	w.within(firstRetry, "made", func() bool { return w.pods.get("a") != nil })
	w.happened("a Normal VolumeClaimCreated")
	w.bound("a", ReasonClaimPending)
	// What Kubernetes' scheduler says of it names no claim.
	w.pods.change("a", func(p *Pod) {
		p.Reason, p.Message = corev1.PodReasonUnschedulable, "pod has unbound immediate PersistentVolumeClaims"
	})
	w.eventually("the message names the claim", func() bool {
		return w.get("a").Status.Message == "pod has unbound immediate PersistentVolumeClaims; claim data-a is not bound yet; its Events say why"
	})
	w.bind("a", "data-a")
	w.bound("a", ReasonClaimsBound)
	w.happened("a Normal VolumeClaimsBound")
	w.podRunning("a")
	w.phase("a", v1alpha1.SandboxRunning)
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	// At rest nothing is asked or written.
	w.look("a")
	status := w.store.status.Load()
	for range 3 {
		w.clock.Step(10 * time.Minute)
		w.look("a")
	}
	w.claims.with(func() {
		if n := w.claims.ensures; n != 2 || w.store.status.Load() != status {
			t.Errorf("%d times ensured, %d writes of status at rest", n, w.store.status.Load()-status)
		}
	})
}

// The same claims are under every Pod of a sandbox, and go only with it.
func TestALostPodGetsTheSameClaims(t *testing.T) {
	for name, lose := range map[string]func(*world, types.UID){
		"deleted": func(w *world, _ types.UID) { w.pods.gone("a") },
		"evicted": func(w *world, _ types.UID) {
			w.pods.change("a", func(p *Pod) { p.Phase, p.Running, p.Reason = corev1.PodFailed, false, "Evicted" })
		},
		"evicted, and its process not to be started again": func(w *world, _ types.UID) {
			w.pods.change("a", func(p *Pod) { p.Phase, p.Running, p.Reason, p.Disrupted = corev1.PodFailed, false, "Evicted", true })
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := podWorld(t)
			uid := w.create("a", func(sb *v1alpha1.Sandbox) {
				withClaim(sb)
				if strings.Contains(name, "not to be") {
					sb.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
				}
			})
			w.podRunning("a")
			w.bind("a", "data-a")
			w.phase("a", v1alpha1.SandboxRunning)
			w.rowIs("a", "/data", v1alpha1.VolumeMounted)
			first := w.pods.get("a").UID
			w.agent().podRuns(string(first), false)
			lose(w, first)
			w.within(firstRetry/2, "made again", func() bool { p := w.pods.get("a"); return p != nil && p.UID != first })
			w.phase("a", v1alpha1.SandboxPending)
			w.schedule("a", "n1")
			w.podStarts("a")
			w.phase("a", v1alpha1.SandboxRunning)
			w.rowIs("a", "/data", v1alpha1.VolumeMounted)
			w.bound("a", ReasonClaimsBound)
			if w.get("a").UID != types.UID(uid) {
				t.Error("it is another sandbox")
			}
			if name == "deleted" {
				w.happened("a Warning PodLost")
			} else {
				w.happened("a Warning Evicted")
			}
			w.claims.with(func() {
				if len(w.claims.claims) != 1 {
					t.Errorf("claims %v", w.claims.claims)
				}
			})
		})
	}
}

// A node that is known to be dead lets no Pod end in its time, so it is taken away; an unreachable one does not.
func TestThePodOfADeadNode(t *testing.T) {
	w := podWorld(t)
	w.pods.lingers = true
	w.addAgent("n2", nil)
	w.create("a", withClaim)
	w.podRunning("a")
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	first := w.pods.get("a").UID
	w.agent().setDown(true)
	w.eventually("away", func() bool { return !w.s.registry.agent("n1").connected })
	w.pods.change("a", func(p *Pod) { p.Deleting = true })
	w.eventually("terminating", func() bool { return w.get("a").Status.Reason == reasonPodTerminating })
	w.clock.Step(time.Hour)
	w.look("a")
	if w.pods.get("a") == nil {
		t.Fatal("the Pod of a node that cannot be reached was taken away")
	}
	w.follow.dead.Store("n1", true)
	w.follow.events <- AgentEvent{Type: NodeDied, Agent: Agent{Node: "n1"}}
	w.within(time.Second, "made again", func() bool { p := w.pods.get("a"); return p != nil && p.UID != first })
	w.happened("a Warning NODE_DEAD")
	w.rowIs("a", "/data", v1alpha1.VolumePending)
	w.schedule("a", "n2")
	w.podStarts("a")
	w.phase("a", v1alpha1.SandboxRunning)
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	if st := w.get("a").Status; st.Node != "n2" || st.Reason != "" {
		t.Errorf("status %+v", st)
	}
	if w.pods.kills != 1 {
		t.Errorf("%d kills", w.pods.kills)
	}
}

// A Pod that is lost again and again is made later and later, at most every five minutes, until one ran for a while.
func TestLostPodsBackOff(t *testing.T) {
	w := podWorld(t)
	w.create("a", withClaim)
	wait := func(last types.UID) (types.UID, time.Duration) {
		since := w.clock.Now()
		w.within(500*time.Millisecond, "made", func() bool { p := w.pods.get("a"); return p != nil && p.UID != last })
		return w.pods.get("a").UID, w.clock.Since(since)
	}
	uid, _ := wait("")
	for n, want := range []time.Duration{0, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second} {
		w.schedule("a", "n1")
		w.podStarts("a")
		w.eventually("runs", func() bool {
			st := w.get("a").Status
			return st.Phase == v1alpha1.SandboxRunning && st.ContainerID == "c-"+string(uid)
		})
		w.pods.gone("a")
		if want > 0 {
			w.eventually("says why", func() bool { return w.get("a").Status.Reason == reasonPodBackOff })
		}
		var took time.Duration
		if uid, took = wait(uid); took < want {
			t.Errorf("after loss %d the Pod is made after %s; want %s", n+1, took, want)
		}
	}
	for n := int32(20); n < 23; n++ {
		if d := retryDelay(n); d != lastRetry {
			t.Errorf("delay %s", d)
		}
	}
	w.schedule("a", "n1")
	w.podStarts("a")
	w.eventually("runs", func() bool {
		st := w.get("a").Status
		return st.Phase == v1alpha1.SandboxRunning && st.ContainerID == "c-"+string(uid)
	})
	w.clock.Step(steadyAfter)
	w.pods.change("a", func(p *Pod) { p.Restarts++ })
	w.eventually("a pass has the new time", func() bool { return w.get("a").Status.Restarts > 0 })
	w.pods.gone("a")
	w.pod("a", uid) // the clock stands still: at once
	if w.get("a").Status.Reason == reasonPodBackOff {
		t.Error("what ran for long counts with the losses before it")
	}
}

func TestAClaimThatIsDeletedUnderASandbox(t *testing.T) {
	w := podWorld(t)
	w.create("a", withClaim)
	w.podRunning("a")
	w.bind("a", "data-a")
	w.bound("a", ReasonClaimsBound)
	w.claims.change("a", "data-a", func(c *Claim) *Claim { c.Deleting = true; return c })
	w.bound("a", ReasonClaimTerminating)
	w.happened("a Warning ClaimTerminating")
	if !meta.IsStatusConditionTrue(w.get("a").Status.Conditions, v1alpha1.ConditionReady) {
		t.Error("the sandbox runs on")
	}
	// The Pod ends, and the claim with it: the next one gets a new claim, and that is said.
	ensures := 0
	w.claims.with(func() { ensures = w.claims.ensures })
	w.claims.change("a", "data-a", func(*Claim) *Claim { return nil })
	w.bound("a", ReasonClaimLost)
	w.happened("a Warning ClaimLost")
	w.look("a")
	w.claims.with(func() {
		if w.claims.ensures != ensures {
			t.Error("a claim was replaced under the Pod that runs")
		}
	})
	first := w.pods.get("a").UID
	w.pods.gone("a")
	w.pod("a", first)
	w.bound("a", ReasonClaimPending)
	// Before the Pod runs a claim is made again at once.
	w.claims.change("a", "data-a", func(*Claim) *Claim { return nil })
	w.within(confirmAfter/2, "made again", func() bool {
		there := false
		w.claims.with(func() { there = w.claims.claims["data-a"] != nil })
		return there
	})
	w.claims.change("a", "data-a", func(c *Claim) *Claim { c.Phase = corev1.ClaimLost; return c })
	w.bound("a", ReasonClaimVolumeLost)
}

func TestPauseKeepsTheClaims(t *testing.T) {
	w := podWorld(t)
	w.create("a", withClaim)
	w.podRunning("a")
	w.bind("a", "data-a")
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	first := w.pods.get("a").UID
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = true })
	w.agent().podRuns(string(first), false)
	w.phase("a", v1alpha1.SandboxPaused)
	w.bound("a", ReasonClaimsBound)
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = false })
	w.pod("a", first) // at once: nothing was lost
	w.schedule("a", "n1")
	w.podStarts("a")
	w.phase("a", v1alpha1.SandboxRunning)
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.events.mu.Lock()
	defer w.events.mu.Unlock()
	if slices.Contains(w.events.seen, "a Warning PodLost") {
		t.Errorf("events %v", w.events.seen)
	}
}

// claimedWorld has a sandbox a that runs, with its claim data-a bound.
func claimedWorld(t *testing.T) *world {
	t.Helper()
	w := podWorld(t)
	w.create("a", withClaim)
	w.podRunning("a")
	w.bind("a", "data-a")
	w.phase("a", v1alpha1.SandboxRunning)
	return w
}

// The retention policy can be changed, and is carried out before the sandbox goes.
func TestTheRetentionPolicyIsCarriedOut(t *testing.T) {
	w := claimedWorld(t)
	kept := func() (kept bool) {
		w.claims.with(func() { kept = w.claims.claims["data-a"].Kept })
		return kept
	}
	if kept() {
		t.Error("it is kept by default")
	}
	w.change("a", func(sb *v1alpha1.Sandbox) {
		sb.Spec.PersistentVolumeClaimRetentionPolicy = &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: v1alpha1.RetentionRetain}
	})
	w.eventually("kept", kept)
	// An adopted one is left as it is.
	w.look("a")
	w.clock.Step(time.Minute)
	ensures := 0
	w.claims.with(func() { ensures = w.claims.ensures })
	w.claims.change("a", "data-a", func(c *Claim) *Claim { c.Adopted = true; return c })
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.PersistentVolumeClaimRetentionPolicy = nil })
	w.look("a")
	w.claims.with(func() {
		if w.claims.ensures != ensures {
			t.Error("an adopted claim was touched")
		}
		w.claims.unsettled = fault.New(errdefs.ErrUnavailable, fault.AuthUnavailable, "no answer")
	})
	w.delete("a")
	w.eventually("says why", func() bool { return w.get("a").Status.Reason == string(fault.AuthUnavailable) })
	if w.get("a") == nil {
		t.Fatal("the sandbox went before its claims were settled")
	}
	w.claims.with(func() { w.claims.unsettled = nil })
	w.within(firstRetry, "gone", func() bool { return w.get("a") == nil })
	w.claims.with(func() {
		if w.claims.settles != 2 {
			t.Errorf("%d times settled", w.claims.settles)
		}
	})
}

// One that is changed while the sandbox goes is carried out, too, be it in the middle of that.
func TestARetentionPolicyThatIsChangedLate(t *testing.T) {
	w := claimedWorld(t)
	once := sync.OnceFunc(func() {
		w.change("a", func(sb *v1alpha1.Sandbox) {
			sb.Spec.PersistentVolumeClaimRetentionPolicy = &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: v1alpha1.RetentionRetain}
		})
	})
	w.claims.with(func() { w.claims.settling = once })
	w.delete("a")
	w.within(2*firstRetry, "gone", func() bool { return w.get("a") == nil })
	w.claims.with(func() {
		if !slices.Equal(w.claims.policies, []v1alpha1.RetentionPolicy{v1alpha1.RetentionDelete, v1alpha1.RetentionRetain}) {
			t.Errorf("settled as of %v", w.claims.policies)
		}
	})
}
