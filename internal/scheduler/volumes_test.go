package scheduler

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

var (
	errTransient = fault.New(errdefs.ErrUnavailable, fault.RateLimited, "later")
	errPermanent = fault.New(errdefs.ErrPermissionDenied, fault.SourceDenied, "not below an allowed root")
)

func TestAttachToARunningSandbox(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", nil)
	spec, status := w.store.spec.Load(), w.store.status.Load()
	w.add("a", local("/data", "r-1"))
	row := w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	sb := w.get("a")
	entry := local("/data", "r-1")
	if row.RequestID != "r-1" || row.EntryHash != volume.EntryHash(&entry) || row.OperationID == "" || row.Attached != v1alpha1.AttachedLive ||
		row.Path != v1alpha1.VolumePathLocal || row.TenantID != "t-1" || row.Mode != v1alpha1.VolumeModeReadWrite || row.Topology != "" ||
		row.ObservedGeneration != sb.Generation {
		t.Errorf("row %+v", row)
	}
	if sb.Status.VolumesReady != "1/1" || sb.Status.ObservedGeneration != sb.Generation {
		t.Errorf("status %+v", sb.Status)
	}
	if got := w.agent().targets(uid); !slices.Equal(got, []string{"/data"}) {
		t.Errorf("mounted: %v", got)
	}
	w.look("a")
	// The client's write of the spec goes past the counter: the scheduler's part is one write of status.
	if n := w.store.status.Load() - status; n != 1 || w.store.spec.Load() != spec {
		t.Errorf("%d writes of status, %d of spec", n, w.store.spec.Load()-spec)
	}
	w.agent().with(func() {
		in := w.agent().attaches[0]
		c := in.GetCommand()
		if c.GetEpoch() != w.epoch || c.GetLeaseUid() != "lease" || c.GetSandboxUid() != uid || c.GetGeneration() != sb.Generation || c.GetOperationId() != row.OperationID {
			t.Errorf("command %v", c)
		}
		if in.GetLocal().GetPath() != "/data/a" || in.GetTenantId() != "t-1" || in.GetWhen() != agentv1.When_NOW || in.GetKind() != "Dynamic" {
			t.Errorf("request %v", in)
		}
	})
	if n := w.sample("sandbox_dynamic_volume_count", prometheus.Labels{"group": "default", "sub_group": "default", "volume_type": "local"}); n != 1 {
		t.Errorf("gauge %v", n)
	}
}

func TestNothingIsWrittenAtRest(t *testing.T) {
	w := newWorld(t)
	w.running("a", func(sb *v1alpha1.Sandbox) {
		sb.Spec.VolumeMounts = []v1alpha1.VolumeMount{{Source: "/data/pub", Target: "/pub", Mode: "ro"}}
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")}
	})
	w.look("a")
	spec, status, calls := w.store.spec.Load(), w.store.status.Load(), w.agent().total()
	for range 10 {
		w.clock.Step(10 * time.Minute)
		w.look("a")
	}
	if w.store.spec.Load() != spec || w.store.status.Load() != status || w.agent().total() != calls {
		t.Errorf("at rest: %d writes of spec, %d of status, %d calls", w.store.spec.Load()-spec, w.store.status.Load()-status, w.agent().total()-calls)
	}
}

// Somebody who writes the status as he knows it, without the rows, takes nothing away for longer than it takes to see it.
// What he adds, a condition, stays.
func TestAStatusThatSomebodyElseWroteIsWrittenAgain(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")} })
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.look("a")
	before, calls := w.get("a").Status, w.agent().total()
	foreign := metav1.Condition{Type: "example.com/Seen", Status: metav1.ConditionTrue, Reason: "Seen", LastTransitionTime: metav1.NewTime(w.clock.Now())}
	for range 3 {
		if _, err := w.store.Store.Sandboxes().UpdateStatus(t.Context(), store.Key{Namespace: "default", Name: "a"}, store.Preconditions{}, func(sb *v1alpha1.Sandbox) error {
			sb.Status = v1alpha1.SandboxStatus{Phase: v1alpha1.SandboxPending, Node: "elsewhere", Conditions: []metav1.Condition{foreign}}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		w.agent().change(uid, func(*agentv1.SandboxState) {}) // it tells of a sandbox that is not its own, by that status
		w.eventually("the status is as it was", func() bool {
			now := w.get("a").Status
			conditions := now.Conditions
			now.Conditions = before.Conditions
			return equality.Semantic.DeepEqual(now, before) && meta.FindStatusCondition(conditions, foreign.Type) != nil && len(conditions) == len(before.Conditions)+1
		})
	}
	w.look("a")
	writes := w.store.status.Load()
	w.look("a")
	if w.store.status.Load() != writes || w.agent().total() != calls {
		t.Errorf("%d writes of the status at rest, %d calls", w.store.status.Load()-writes, w.agent().total()-calls)
	}
}

func TestVolumesThatAreAskedForTogetherCostOneWrite(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	writes := w.store.status.Load()
	w.change("a", func(sb *v1alpha1.Sandbox) {
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/one", ""), local("/two", ""), local("/three", "")}
	})
	w.eventually("all are mounted", func() bool { return w.get("a").Status.VolumesReady == "3/3" })
	if n := w.store.status.Load() - writes; n != 1 {
		t.Errorf("%d writes of status for three volumes", n)
	}
	// One that takes longer is not waited for.
	w.agent().with(func() { w.agent().hang["attach /slow"] = true })
	w.change("a", func(sb *v1alpha1.Sandbox) {
		sb.Spec.DynamicVolumes = append(sb.Spec.DynamicVolumes, local("/slow", ""), local("/four", ""))
	})
	w.eventually("one is attached, the other hangs", func() bool { return w.agent().count("attach /four") == 1 && w.agent().count("attach /slow") == 1 })
	w.look("a")
	if n := w.store.status.Load() - writes; n != 1 {
		t.Errorf("%d writes of status while an attach is in flight that has just begun", n)
	}
	w.clock.Step(gatherFor)
	w.rowIs("a", "/four", v1alpha1.VolumeMounted)
}

func TestASlowAttachIsShown(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	w.agent().with(func() { w.agent().hang["attach /slow"] = true })
	w.add("a", local("/slow", "r-1"))
	w.eventually("the attach hangs", func() bool { return w.agent().count("attach /slow") == 1 })
	w.look("a")
	if w.row("a", "/slow") != nil {
		t.Fatal("an attach is shown before it is slow")
	}
	w.clock.Step(slowAfter)
	row := w.rowIs("a", "/slow", v1alpha1.VolumeAttaching)
	if row.OperationID == "" {
		t.Error("no operation id")
	}
	// It delays neither another target nor another sandbox.
	w.add("a", local("/fast", "r-2"))
	w.rowIs("a", "/fast", v1alpha1.VolumeMounted)
	w.running("b", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "")} })
	// When it is given up, it is a transient failure.
	w.clock.Step(volumeTimeout)
	row = w.rowIs("a", "/slow", v1alpha1.VolumeFailed)
	if row.Reason != string(fault.DeadlineExceeded) || row.NextRetryTime == nil {
		t.Errorf("row %+v", row)
	}
}

func TestAHungAttachCanBeRemoved(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	w.agent().with(func() { w.agent().hang["attach /slow"] = true })
	w.add("a", local("/slow", "r-1"))
	w.eventually("the attach hangs", func() bool { return w.agent().count("attach /slow") == 1 })
	w.remove("a", "/slow", "r-2", false)
	w.noEntry("a", "/slow")
	w.noRow("a", "/slow")
}

func TestFailureIsKept(t *testing.T) {
	for _, c := range []struct {
		name  string
		err   error
		retry bool
	}{
		{"transient", errTransient, true},
		{"permanent", errPermanent, false},
		{"not ours to keep", fault.New(errdefs.ErrFailedPrecondition, fault.SandboxNotRunning, "it restarts"), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			w.running("a", nil)
			w.agent().with(func() { w.agent().faults["attach /data"] = []error{c.err, c.err} })
			w.add("a", local("/data", "r-1"))
			row := w.rowIs("a", "/data", v1alpha1.VolumeFailed)
			if row.Reason != string(fault.ReasonOf(c.err)) || row.Message != c.err.Error() || row.Attempts != 1 || row.RequestID != "r-1" {
				t.Errorf("row %+v", row)
			}
			if (row.NextRetryTime != nil) != c.retry {
				t.Fatalf("next retry %v", row.NextRetryTime)
			}
			if !c.retry {
				w.clock.Step(time.Hour)
				w.look("a")
				if n := w.agent().count("attach /data"); n != 1 {
					t.Errorf("%d attaches", n)
				}
				return
			}
			w.clock.Step(firstRetry - time.Millisecond)
			w.look("a")
			if n := w.agent().count("attach /data"); n != 1 {
				t.Fatalf("%d attaches before it was time", n)
			}
			w.clock.Step(time.Millisecond)
			w.eventually("second failure", func() bool { return w.row("a", "/data").Attempts == 2 })
			w.clock.Step(2*firstRetry - time.Millisecond)
			w.look("a")
			if n := w.agent().count("attach /data"); n != 2 {
				t.Fatalf("%d attaches: the wait did not grow", n)
			}
			w.within(time.Second, "mounted", func() bool { return w.row("a", "/data").Phase == v1alpha1.VolumeMounted })
			if row := w.row("a", "/data"); row.Attempts != 0 || row.Reason != "" || row.NextRetryTime != nil {
				t.Errorf("row %+v", row)
			}
			// One operation, one id, through all its attempts.
			ids := map[string]bool{}
			w.agent().with(func() {
				for i, call := range w.agent().calls {
					if call == "attach /data" {
						ids[w.agent().commands[i].GetOperationId()] = true
					}
				}
			})
			if len(ids) != 1 {
				t.Errorf("%d operation ids", len(ids))
			}
		})
	}
}

func TestAPermanentFailureIsTriedAgainWhenTheEntryChanges(t *testing.T) {
	for name, change := range map[string]func(*v1alpha1.DynamicVolume){
		"the request comes again": func(v *v1alpha1.DynamicVolume) { v.RequestID = "r-2" },
		"forceMount":              func(v *v1alpha1.DynamicVolume) { v.ForceMount = true },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.running("a", nil)
			w.agent().with(func() { w.agent().faults["attach /data"] = []error{errPermanent} })
			w.add("a", local("/data", "r-1"))
			w.rowIs("a", "/data", v1alpha1.VolumeFailed)
			w.change("a", func(sb *v1alpha1.Sandbox) { change(&sb.Spec.DynamicVolumes[0]) })
			row := w.rowIs("a", "/data", v1alpha1.VolumeMounted)
			if row.RequestID != w.entry("a", "/data").RequestID || row.ForceMount != w.entry("a", "/data").ForceMount {
				t.Errorf("row %+v", row)
			}
		})
	}
}

func TestFailureRemovesTheEntry(t *testing.T) {
	for name, err := range map[string]error{"transient": errTransient, "permanent": errPermanent} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.running("a", nil)
			w.agent().with(func() { w.agent().faults["attach /data"] = []error{err} })
			v := local("/data", "r-1")
			v.OnFailure = v1alpha1.OnFailureRemove
			w.add("a", v)
			w.noEntry("a", "/data")
			row := w.row("a", "/data")
			if row == nil || row.Phase != v1alpha1.VolumeFailed || row.Reason != string(fault.ReasonOf(err)) || row.RequestID != "r-1" {
				t.Fatalf("row %+v", row)
			}
			w.clock.Step(keepFailed - time.Second)
			w.look("a")
			if w.row("a", "/data") == nil {
				t.Fatal("the row is gone before 5 min")
			}
			if n := w.agent().count("attach /data"); n != 1 {
				t.Errorf("%d attaches", n)
			}
			w.clock.Step(time.Second)
			w.noRow("a", "/data")
		})
	}
}

// What was mounted once stays in the spec: its request succeeded, and a sandbox that is resumed counts on it.
func TestWhatWasMountedIsNotRemovedByALaterFailure(t *testing.T) {
	for name, err := range map[string]error{"transient": errTransient, "permanent": errPermanent} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.running("a", nil)
			v := local("/data", "r-1")
			v.OnFailure = v1alpha1.OnFailureRemove
			w.add("a", v)
			w.rowIs("a", "/data", v1alpha1.VolumeMounted)
			w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = true })
			w.phase("a", v1alpha1.SandboxPaused)
			w.halt()
			w.start() // another leader, which knows what the status says
			w.agent().with(func() { w.agent().faults["attach /data"] = []error{err} })
			w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = false })
			row := w.rowIs("a", "/data", v1alpha1.VolumeFailed)
			if row.Reason != string(fault.ReasonOf(err)) || (row.NextRetryTime != nil) != (name == "transient") {
				t.Errorf("row %+v", row)
			}
			w.look("a")
			sb := w.get("a")
			if len(sb.Spec.DynamicVolumes) != 1 {
				t.Fatal("the entry is gone")
			}
			if sb.Status.Phase != v1alpha1.SandboxPending || sb.Status.Reason != row.Reason {
				t.Errorf("the sandbox is %s, %s", sb.Status.Phase, sb.Status.Reason)
			}
			if name == "transient" {
				w.within(firstRetry, "mounted", func() bool { return w.row("a", "/data").Phase == v1alpha1.VolumeMounted })
			}
		})
	}
}

func TestARemovedEntryCanBeAddedAgain(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	w.agent().with(func() { w.agent().faults["attach /data"] = []error{errPermanent} })
	v := local("/data", "") // by hand: no request id tells the two apart
	v.OnFailure = v1alpha1.OnFailureRemove
	w.add("a", v)
	w.noEntry("a", "/data")
	w.look("a")
	w.add("a", v)
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
}

func TestInvalidEntryFailsWithoutACall(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	v := local("/etc/x", "r-1")
	w.add("a", v)
	row := w.rowIs("a", "/etc/x", v1alpha1.VolumeFailed)
	if row.Reason != string(fault.TargetDenied) || w.agent().count("attach /etc/x") != 0 {
		t.Errorf("row %+v", row)
	}
	v = v1alpha1.DynamicVolume{VolumeType: "nfs4", Source: "x", Target: "/n"} // of a newer build
	w.add("a", v)
	if row := w.rowIs("a", "/n", v1alpha1.VolumeFailed); row.Reason != string(fault.InvalidVolumeType) || row.VolumeType != "nfs4" {
		t.Errorf("row %+v", row)
	}
	w.add("a", v1alpha1.DynamicVolume{VolumeType: "pvc", Source: "claim", Target: "/p"})
	if row := w.rowIs("a", "/p", v1alpha1.VolumeFailed); row.Reason != string(fault.VolumeTypeOff) {
		t.Errorf("row %+v", row)
	}
	w.add("a", local("/etc/x/y", "r-2"))
	w.rowIs("a", "/etc/x/y", v1alpha1.VolumeFailed)
}

func TestGate(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/one", "r-1")} })
	w.gate(false)
	w.look("a")
	if row := w.row("a", "/one"); row.Phase != v1alpha1.VolumeMounted {
		t.Errorf("what is attached does not stay: %+v", row)
	}
	w.add("a", local("/two", "r-2"))
	if row := w.rowIs("a", "/two", v1alpha1.VolumeFailed); row.Reason != string(fault.FeatureDisabled) || row.RequestID != "r-2" || row.NextRetryTime != nil {
		t.Errorf("row %+v", row)
	}
	// A mount that the agent lost is repaired: it was there before.
	w.agent().with(func() { w.agent().drop(uid, "/one"); w.agent().changed(uid) })
	w.eventually("repaired", func() bool { return slices.Equal(w.agent().targets(uid), []string{"/one"}) })
	w.remove("a", "/one", "r-3", false)
	w.noEntry("a", "/one")
	w.gate(true)
	w.rowIs("a", "/two", v1alpha1.VolumeMounted)
}

func TestGateOffAtCreation(t *testing.T) {
	w := newWorld(t)
	w.gate(false)
	w.running("a", func(sb *v1alpha1.Sandbox) {
		sb.Spec.VolumeMounts = []v1alpha1.VolumeMount{{Source: "/data/pub", Target: "/pub"}}
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/one", "r-1")}
	})
	if r := w.row("a", "/one"); r.Phase != v1alpha1.VolumeFailed || r.Reason != string(fault.FeatureDisabled) {
		t.Errorf("row %+v", r)
	}
	if r := w.row("a", "/pub"); r.Phase != v1alpha1.VolumeMounted || r.Attached != v1alpha1.AttachedBeforeStart {
		t.Errorf("row %+v", r)
	}
	if got := w.get("a").Status.VolumesReady; got != "1/2" {
		t.Errorf("volumesReady %s", got)
	}
}

func TestVersionSkew(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	w.addAgent("n2", nil, "run")
	w.eventually("both agents", func() bool { return w.s.registry.agent("n2").connected })
	w.add("a", local("/data", "r-1"))
	if row := w.rowIs("a", "/data", v1alpha1.VolumeFailed); row.Reason != string(fault.VersionSkew) {
		t.Errorf("row %+v", row)
	}
	w.follow.events <- AgentEvent{Type: AgentRemoved, Agent: Agent{Node: "n2"}}
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
}

func TestDetach(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
	w.remove("a", "/data", "r-2", false)
	w.noEntry("a", "/data")
	w.noRow("a", "/data")
	if got := w.agent().targets(uid); len(got) != 0 {
		t.Errorf("mounted: %v", got)
	}
	w.eventually("observed", func() bool { sb := w.get("a"); return sb.Status.ObservedGeneration == sb.Generation })
}

func TestDetachBusyThenForced(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
	w.agent().with(func() { w.agent().busy["/data"] = holder(); w.agent().lazy["/data"] = true })
	for _, request := range []string{"r-2", "r-3", "r-3"} { // the same request again is asked again
		calls := w.agent().count("detach /data")
		w.remove("a", "/data", request, false)
		w.eventually("refused", func() bool { e := w.entry("a", "/data"); return e != nil && e.Detach == nil })
		row := w.row("a", "/data")
		if row.Phase != v1alpha1.VolumeMounted || row.Reason != string(fault.Busy) || row.DetachState != v1alpha1.DetachBusy || row.RequestID != request ||
			len(row.Holders) != 1 || row.Holders[0] != (v1alpha1.VolumeHolder{PID: 42, Command: "python", Kind: "cwd"}) || !strings.Contains(row.Message, "python (PID 42") {
			t.Errorf("row %+v", row)
		}
		if w.agent().count("detach /data") != calls+1 {
			t.Errorf("%d calls for one request", w.agent().count("detach /data")-calls)
		}
		w.look("a")
		if after := w.row("a", "/data"); after.RequestID != request || after.DetachState != v1alpha1.DetachBusy {
			t.Errorf("the answer does not stay: %+v", after)
		}
	}
	w.remove("a", "/data", "r-4", true)
	w.noEntry("a", "/data")
	row := w.row("a", "/data")
	if row == nil || row.Phase != v1alpha1.VolumeDetaching || row.DetachState != v1alpha1.DetachLazy || row.RequestID != "r-4" {
		t.Fatalf("row %+v", row)
	}
	// The same target again waits until what is left is gone.
	w.add("a", local("/data", "r-5"))
	if row := w.rowIs("a", "/data", v1alpha1.VolumePending); row.Reason != string(fault.TargetInUse) {
		t.Errorf("row %+v", row)
	}
	w.agent().with(func() { w.agent().drop(uid, "/data"); w.agent().changed(uid) })
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
}

func TestAMountInTheMiddleOfADetachMayStay(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
	phase := func(phase string) {
		w.agent().change(uid, func(s *agentv1.SandboxState) { s.Volumes[0].Phase = phase })
		w.eventually("heard", func() bool { return w.s.registry.state("n1", w.get("a").UID).GetVolumes()[0].GetPhase() == phase })
		w.look("a")
	}
	phase(recordDetaching) // an inventory message from the middle of a detach that ends busy
	if row := w.row("a", "/data"); row.Phase != v1alpha1.VolumeMounted || w.agent().count("detach /data") != 0 {
		t.Errorf("row %+v", row)
	}
	phase(recordMounted)
	phase(recordDetaching) // and one that nobody ends
	w.within(time.Second, "mounted anew", func() bool { return w.agent().count("attach /data") == 2 })
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
}

// The inventory and the answers to commands come by two ways. A message from the middle of an attach takes nothing away from its
// answer, be it heard before or after that, and the agent is not asked again.
func TestAMessageFromTheMiddleOfAnAttach(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", nil)
	phase := func() string {
		v := w.s.registry.state("n1", w.get("a").UID).GetVolumes()
		if len(v) == 0 {
			return ""
		}
		return v[0].GetPhase()
	}
	w.agent().with(func() {
		w.agent().begun = func() { w.eventually("the message is heard", func() bool { return phase() == recordAttaching }) }
	})
	w.add("a", local("/data", "r-1"))
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.agent().with(func() { w.agent().begun = nil })
	tell := func(phase string) {
		w.agent().change(uid, func(s *agentv1.SandboxState) { s.Volumes[0].Phase = phase })
	}
	tell(recordMounted)
	tell(recordAttaching)
	w.eventually("the late message is heard", func() bool { return phase() == recordAttaching })
	w.look("a")
	if row := w.row("a", "/data"); row.Phase != v1alpha1.VolumeMounted || w.agent().count("attach /data") != 1 {
		t.Errorf("row %+v after %d calls", row, w.agent().count("attach /data"))
	}
	// One that nothing follows is of another attach, which nobody waits for: the agent is asked.
	w.within(2*confirmAfter, "asked again", func() bool { return w.agent().count("attach /data") == 2 })
}

func TestDetachReleasePending(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
	w.agent().with(func() { w.agent().release["/data"] = true })
	w.remove("a", "/data", "r-2", false)
	w.noEntry("a", "/data")
	if row := w.row("a", "/data"); row == nil || row.DetachState != v1alpha1.DetachReleasePending || row.RequestID != "r-2" {
		t.Fatalf("row %+v", row)
	}
	w.agent().with(func() { w.agent().drop(uid, "/data"); w.agent().changed(uid) })
	w.noRow("a", "/data")
}

func TestTheRowOfARefusedDetachIsWrittenBeforeTheSpec(t *testing.T) {
	w := newWorld(t)
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
	w.agent().with(func() { w.agent().busy["/data"] = holder() })
	// The scheduler dies between the two writes.
	refuse := func(write string) error {
		if write == "spec" {
			return errors.New("the disk is gone")
		}
		return nil
	}
	w.store.hook.Store(&refuse)
	w.remove("a", "/data", "r-2", false)
	w.eventually("answered", func() bool { return w.row("a", "/data").RequestID == "r-2" })
	if w.entry("a", "/data").Detach == nil {
		t.Fatal("the request is gone before its answer")
	}
	w.halt()
	w.store.hook.Store(nil)
	w.agent().with(func() { delete(w.agent().busy, "/data") })
	w.start()
	// The next one does not ask again: the request was answered.
	w.eventually("cleared", func() bool { return w.entry("a", "/data").Detach == nil })
	if row := w.row("a", "/data"); row.RequestID != "r-2" || row.Phase != v1alpha1.VolumeMounted {
		t.Errorf("row %+v", row)
	}
	if n := w.agent().count("detach /data"); n != 1 {
		t.Errorf("%d detaches", n)
	}
}

func TestEntryDeletedByHand(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
	w.agent().with(func() { w.agent().busy["/data"] = holder() })
	w.drop("a", "/data")
	row := w.rowIs("a", "/data", v1alpha1.VolumeDetaching)
	if row.Reason != string(fault.Busy) || row.DetachState != v1alpha1.DetachBusy || len(row.Holders) != 1 || row.NextRetryTime == nil {
		t.Errorf("row %+v", row)
	}
	w.look("a")
	if n := w.agent().count("detach /data"); n != 1 {
		t.Errorf("%d detaches without waiting", n)
	}
	w.agent().with(func() { delete(w.agent().busy, "/data") })
	w.within(time.Second, "gone", func() bool { return w.row("a", "/data") == nil })
	if got := w.agent().targets(uid); len(got) != 0 {
		t.Errorf("mounted: %v", got)
	}
}

func TestAnotherVolumeAtTheSameTarget(t *testing.T) {
	w := newWorld(t)
	w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
	w.agent().with(func() { w.agent().busy["/data"] = holder() })
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes[0] = local("/data", "r-2") })
	row := w.rowIs("a", "/data", v1alpha1.VolumePending)
	again := local("/data", "r-2")
	if row.EntryHash != volume.EntryHash(&again) {
		t.Errorf("row %+v", row)
	}
	if w.agent().count("attach /data") != 1 {
		t.Error("attached onto the old one")
	}
	w.agent().with(func() { delete(w.agent().busy, "/data") })
	w.within(time.Second, "mounted", func() bool {
		r := w.row("a", "/data")
		return r.Phase == v1alpha1.VolumeMounted && r.RequestID == "r-2"
	})
}

func TestDrift(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
	t.Run("the agent forgot a mount", func(t *testing.T) {
		w.agent().with(func() { w.agent().drop(uid, "/data"); w.agent().changed(uid) })
		w.eventually("repaired", func() bool { return slices.Equal(w.agent().targets(uid), []string{"/data"}) })
	})
	t.Run("a mount failed", func(t *testing.T) {
		w.agent().with(func() {
			w.agent().drop(uid, "/data")
			w.agent().sandboxes[uid].Volumes = []*agentv1.MountRecord{{Target: "/extra", EntryHash: "x", Phase: recordFailed, Reason: "VOLUME_GONE"}}
			w.agent().changed(uid)
		})
		w.eventually("repaired", func() bool {
			return slices.Equal(w.agent().targets(uid), []string{"/data"}) && w.agent().count("detach /extra") == 1
		})
	})
	t.Run("the agent has one too many", func(t *testing.T) {
		w.agent().change(uid, func(s *agentv1.SandboxState) {
			s.Volumes = append(s.Volumes, &agentv1.MountRecord{Target: "/more", EntryHash: "y", Phase: recordMounted})
		})
		w.eventually("detached", func() bool { return slices.Equal(w.agent().targets(uid), []string{"/data"}) })
		w.noRow("a", "/more")
	})
	t.Run("the agent has a sandbox too many", func(t *testing.T) {
		w.agent().change("no-such-uid", func(*agentv1.SandboxState) {})
		w.eventually("deleted", func() bool { return slices.Equal(w.agent().has(), []string{uid}) })
	})
	t.Run("the agent forgot the sandbox", func(t *testing.T) {
		w.agent().with(func() { delete(w.agent().sandboxes, uid); w.agent().changed(uid) })
		w.eventually("made again", func() bool {
			return w.agent().phase(uid) == stateRunning && slices.Equal(w.agent().targets(uid), []string{"/data"})
		})
		w.phase("a", v1alpha1.SandboxRunning)
	})
	if row := w.row("a", "/data"); row.Phase != v1alpha1.VolumeMounted {
		t.Errorf("row %+v", row)
	}
}

func TestAgentAway(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
	w.addAgent("n2", nil)
	w.agent().setDown(true)
	w.eventually("lost", func() bool { return !w.s.registry.agent("n1").connected })
	w.add("a", local("/keep", "r-2"))
	gone := local("/go", "r-3")
	gone.OnFailure = v1alpha1.OnFailureRemove
	w.add("a", gone)
	w.look("a")
	if w.row("a", "/keep") != nil {
		t.Error("an agent that is away for a moment fails an attach")
	}
	w.clock.Step(agentGrace)
	row := w.rowIs("a", "/keep", v1alpha1.VolumeFailed)
	if row.Reason != string(fault.AgentUnavailable) || row.NextRetryTime == nil {
		t.Errorf("row %+v", row)
	}
	w.noEntry("a", "/go")
	sb := w.get("a")
	if sb.Status.Phase != v1alpha1.SandboxRunning || sb.Status.Node != "n1" || w.row("a", "/data").Phase != v1alpha1.VolumeMounted {
		t.Errorf("status %+v", sb.Status)
	}
	w.agent().setDown(false)
	w.within(time.Second, "back", func() bool { return w.row("a", "/keep").Phase == v1alpha1.VolumeMounted })
	if len(w.agents["n2"].has()) != 0 || w.agent().phase(uid) != stateRunning {
		t.Error("the sandbox was placed anew")
	}
}

func TestStaleCommandIsMadeAnew(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	stale := fault.New(errdefs.ErrFailedPrecondition, fault.StaleCommand, "generation 1 is old")
	w.agent().with(func() { w.agent().faults["attach /data"] = []error{stale} })
	v := local("/data", "r-1")
	v.OnFailure = v1alpha1.OnFailureRemove
	w.add("a", v)
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
}

func TestALeaderThatWasFollowedLeavesEntriesAlone(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	stale := fault.New(errdefs.ErrFailedPrecondition, fault.StaleCommand, "epoch 1 is old")
	w.agent().with(func() {
		for range 100 {
			w.agent().faults["attach /data"] = append(w.agent().faults["attach /data"], stale)
		}
	})
	v := local("/data", "r-1")
	v.OnFailure = v1alpha1.OnFailureRemove
	w.add("a", v)
	w.eventually("repeated", func() bool { return w.agent().count("attach /data") == 4 })
	w.look("a")
	if w.entry("a", "/data") == nil || w.agent().count("attach /data") != 4 {
		t.Errorf("%d attaches, entry %v", w.agent().count("attach /data"), w.entry("a", "/data"))
	}
}

func TestConflictingAndFailingWrites(t *testing.T) {
	w := newWorld(t)
	w.running("a", nil)
	left := 3
	hook := func(write string) error {
		if write != "status" || left == 0 {
			return nil
		}
		left--
		return fault.New(errdefs.ErrConflict, fault.Conflict, "changed by others")
	}
	w.store.hook.Store(&hook)
	w.add("a", local("/data", "r-1"))
	w.within(time.Second, "written at last", func() bool { r := w.row("a", "/data"); return r != nil && r.Phase == v1alpha1.VolumeMounted })
	if n := w.agent().count("attach /data"); n != 1 {
		t.Errorf("%d attaches", n)
	}
}

func TestRestartOfTheScheduler(t *testing.T) {
	t.Run("while an attach is in flight", func(t *testing.T) {
		w := newWorld(t)
		uid := w.running("a", nil)
		w.agent().with(func() { w.agent().hang["attach /data"] = true })
		w.add("a", local("/data", "r-1"))
		w.eventually("the attach hangs", func() bool { return w.agent().count("attach /data") == 1 })
		w.halt()
		w.agent().with(func() { delete(w.agent().hang, "attach /data") })
		w.start()
		w.rowIs("a", "/data", v1alpha1.VolumeMounted)
		if got := w.agent().targets(uid); !slices.Equal(got, []string{"/data"}) {
			t.Errorf("mounted: %v", got)
		}
	})
	t.Run("failures are remembered", func(t *testing.T) {
		w := newWorld(t)
		w.running("a", nil)
		w.agent().with(func() {
			w.agent().faults["attach /never"] = []error{errPermanent}
			w.agent().faults["attach /later"] = []error{errTransient, errTransient}
		})
		w.add("a", local("/never", "r-1"))
		w.add("a", local("/later", "r-2"))
		w.rowIs("a", "/never", v1alpha1.VolumeFailed)
		w.rowIs("a", "/later", v1alpha1.VolumeFailed)
		w.halt()
		w.start()
		w.look("a")
		if w.agent().count("attach /never") != 1 || w.agent().count("attach /later") != 1 {
			t.Error("a new leader does not wait")
		}
		w.clock.Step(2 * time.Second)
		w.eventually("second failure", func() bool { return w.row("a", "/later").Attempts == 2 })
		if w.agent().count("attach /never") != 1 {
			t.Error("a permanent failure is tried again")
		}
	})
	t.Run("after the failure, before the entry is removed", func(t *testing.T) {
		w := newWorld(t)
		w.running("a", nil)
		w.agent().with(func() { w.agent().faults["attach /data"] = []error{errPermanent} })
		refuse := func(write string) error {
			if write == "spec" {
				return errors.New("the disk is gone")
			}
			return nil
		}
		w.store.hook.Store(&refuse)
		v := local("/data", "r-1")
		v.OnFailure = v1alpha1.OnFailureRemove
		w.add("a", v)
		w.rowIs("a", "/data", v1alpha1.VolumeFailed)
		w.halt()
		w.store.hook.Store(nil)
		w.start()
		w.noEntry("a", "/data")
		if w.agent().count("attach /data") != 1 || w.row("a", "/data").RequestID != "r-1" {
			t.Error("it was tried again")
		}
	})
	t.Run("after the detach, before the entry is deleted", func(t *testing.T) {
		w := newWorld(t)
		w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
		refuse := func(write string) error { return errors.New("the disk is gone") }
		w.store.hook.Store(&refuse)
		w.remove("a", "/data", "r-2", false)
		w.eventually("detached", func() bool { return w.agent().count("detach /data") == 1 })
		w.halt()
		w.store.hook.Store(nil)
		w.start()
		w.noEntry("a", "/data")
		w.noRow("a", "/data")
	})
}

// What a crash can take back of the late writes is found out again: a mount that status no longer tells of is not made
// twice, and a detach whose entry is in the spec again is repeated and takes it out.
func TestLateWritesAreDerivedAgain(t *testing.T) {
	w := newWorld(t)
	uid := w.running("a", nil)
	w.look("a")
	before, late := w.store.spec.Load()+w.store.status.Load(), w.store.late.Load()
	written := func() (all, lateOnes int64) {
		return w.store.spec.Load() + w.store.status.Load() - before, w.store.late.Load() - late
	}
	// takeBack makes the stored sandbox what it was before, as a crash does.
	takeBack := func(to *v1alpha1.Sandbox) {
		t.Helper()
		w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec = *to.Spec.DeepCopy() })
		if _, err := w.store.Store.Sandboxes().UpdateStatus(t.Context(), store.KeyOf(to), noPreconditions, func(sb *v1alpha1.Sandbox) error {
			sb.Status = *to.Status.DeepCopy()
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	w.agent().with(func() { w.agent().hang["attach /data"] = true })
	w.add("a", local("/data", "r-1"))
	w.eventually("asked to attach", func() bool { return w.agent().count("attach /data") == 1 })
	asked := w.get("a")
	w.halt()
	w.agent().with(func() { delete(w.agent().hang, "attach /data") })
	w.start()
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.look("a")
	if all, late := written(); all != late || all == 0 {
		t.Errorf("of %d writes for an attach %d are late; want all", all, late)
	}
	attaches := w.agent().count("attach /data")

	w.halt()
	takeBack(asked)
	w.start()
	w.rowIs("a", "/data", v1alpha1.VolumeMounted)
	w.look("a")
	if n := w.agent().count("attach /data"); n != attaches {
		t.Errorf("%d attaches after the row was lost; want none", n-attaches)
	}

	before, late = w.store.spec.Load()+w.store.status.Load(), w.store.late.Load()
	w.agent().with(func() { w.agent().hang["detach /data"] = true })
	w.remove("a", "/data", "r-2", false)
	w.eventually("asked to detach", func() bool { return w.agent().count("detach /data") == 1 })
	asked = w.get("a")
	w.halt()
	w.agent().with(func() { delete(w.agent().hang, "detach /data") })
	w.start()
	w.noEntry("a", "/data")
	w.noRow("a", "/data")
	if all, late := written(); all != late || all == 0 {
		t.Errorf("of %d writes for a detach %d are late; want all", all, late)
	}

	w.halt()
	takeBack(asked)
	w.start()
	w.noEntry("a", "/data")
	w.noRow("a", "/data")
	if got := w.agent().targets(uid); len(got) != 0 || w.agent().count("attach /data") != attaches {
		t.Errorf("mounted: %v, after %d attaches", got, w.agent().count("attach /data")-attaches)
	}
}

// Answers must not be forgotten: the rows that the spec follows, and failures, are durable before they are seen.
func TestAnswersAreNotLate(t *testing.T) {
	for name, ask := range map[string]func(*world){
		"busy": func(w *world) {
			w.agent().with(func() { w.agent().busy["/data"] = holder() })
			w.remove("a", "/data", "r-2", false)
			w.eventually("refused", func() bool { e := w.entry("a", "/data"); return e != nil && e.Detach == nil })
		},
		"failed": func(w *world) {
			w.agent().with(func() { w.agent().faults["attach /other"] = []error{errPermanent} })
			w.add("a", local("/other", "r-2"))
			w.rowIs("a", "/other", v1alpha1.VolumeFailed)
		},
		"failed and removed": func(w *world) {
			w.agent().with(func() { w.agent().faults["attach /other"] = []error{errPermanent} })
			v := local("/other", "r-2")
			v.OnFailure = v1alpha1.OnFailureRemove
			w.add("a", v)
			w.noEntry("a", "/other")
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.running("a", func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local("/data", "r-1")} })
			w.look("a")
			late := w.store.late.Load()
			var first string
			hook := func(write string) error {
				if first == "" {
					first = write
					if w.store.late.Load() != late {
						first = "late " + write
					}
				}
				return nil
			}
			w.store.hook.Store(&hook)
			ask(w)
			w.halt()
			if first != "status" {
				t.Errorf("the first write is %q; want a durable one of status", first)
			}
		})
	}
}
