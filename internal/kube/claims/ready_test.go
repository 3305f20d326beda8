package claims_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// What a volume waits for is told before the first attempt to mount it has ended.
func TestAClaimSaysWhatItsVolumesWaitFor(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	pv := w.pv("data", nil)
	w.ready(w.set("pool", 1, nil))
	w.hold(func(*v1alpha1.Sandbox) bool { return true })
	claim := w.claim("mine", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.DynamicVolumesMount = []agentsv1alpha1.DynamicVolumeMount{{PVName: pv, MountPath: "/data"}}
	})
	w.eventually("a sandbox is taken", func() bool { return len(w.of(claim)) == 1 })
	sb := w.of(claim)[0]
	must(w.theirs.Sandboxes().UpdateStatus(t.Context(), store.KeyOf(sb), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
		e := &o.Spec.DynamicVolumes[0]
		o.Status.Volumes = []v1alpha1.VolumeStatus{{Kind: v1alpha1.VolumeKindDynamic, VolumeType: e.VolumeType, Source: e.Source, Target: e.Target, EntryHash: volume.EntryHash(e),
			Phase: v1alpha1.VolumeAttaching, Reason: "VOLUME_NOT_BOUND", Message: "its provisioner is at it", Since: metav1.NewTime(o.CreationTimestamp.Time)}}
		return nil
	}))
	want := "0 of 1 sandboxes are claimed; sandbox " + sb.Name + ": 0 of 1 volumes are mounted; PersistentVolume " + pv + " at /data: its provisioner is at it"
	w.eventually("it is told", func() bool {
		c := meta.FindStatusCondition(w.claimStatus("mine").Conditions, agentsv1alpha1.ClaimClaimed)
		return c != nil && c.Reason == "MountingVolumes" && c.Message == want
	})
}

// A claim that is Completed says what becomes of its sandboxes, whoever leads, and is written for another state or reason only.
func TestACompletedClaimTellsOfItsSandboxes(t *testing.T) {
	w := newWorld(t)
	var writes atomic.Int32
	counted := func(config *rest.Config) {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(r *http.Request) (*http.Response, error) {
				if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, w.namespace+"/sandboxclaims/mine/status") {
					writes.Add(1)
				}
				return next.RoundTrip(r)
			})
		})
	}
	stop := w.start(counted)
	pv := w.pv("data", nil)
	w.ready(w.set("pool", 2, nil))
	w.claim("mine", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.Replicas = ptr.To(int32(2))
		s.DynamicVolumesMount = []agentsv1alpha1.DynamicVolumeMount{{PVName: pv, MountPath: "/data"}}
	})
	given := w.phase("mine", agentsv1alpha1.ClaimCompleted).SandboxNames
	// told waits until the claim says something of its sandboxes, by how many writes since the last.
	told := func(status metav1.ConditionStatus, reason, message string, by int32) {
		t.Helper()
		w.eventually(reason+" is told", func() bool {
			c := meta.FindStatusCondition(w.claimStatus("mine").Conditions, agentsv1alpha1.ClaimSandboxesReady)
			return c != nil && c.Status == status && c.Reason == reason && c.Message == message
		})
		st := w.claimStatus("mine")
		if n := writes.Swap(0); n != by || st.Phase != agentsv1alpha1.ClaimCompleted || st.ClaimedReplicas != 2 || !meta.IsStatusConditionTrue(st.Conditions, agentsv1alpha1.ClaimClaimed) {
			t.Errorf("%s: %d writes, and not %d; %+v", reason, n, by, st)
		}
	}
	const well = "every sandbox that the claim was given is ready"
	writes.Store(0) // how many are needed until then is not asked here; that this is told in the last of them is
	told(metav1.ConditionTrue, "Ready", well, 0)

	// becomes gives a sandbox a state; a reason that is empty is that all is well.
	w.hold(func(*v1alpha1.Sandbox) bool { return true })
	becomes := func(name, reason, message string) {
		t.Helper()
		must(w.theirs.Sandboxes().UpdateStatus(t.Context(), w.key(name), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
			row := &o.Status.Volumes[0]
			row.Phase, row.Reason, row.Message = v1alpha1.VolumeMounted, "", ""
			ready := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Ready"}
			if reason != "" {
				row.Phase, row.Reason, row.Message = v1alpha1.VolumeFailed, reason, message
				ready.Status, ready.Reason = metav1.ConditionFalse, "VolumesNotMounted"
			}
			meta.SetStatusCondition(&o.Status.Conditions, ready)
			return nil
		}))
	}
	says := func(n, name, message string) string {
		return n + " of 2 sandboxes are not ready; sandbox " + name + ": pv " + pv + " at /data: " + message
	}
	becomes(given[1], "VOLUME_OFFLINE", "its disk is gone")
	told(metav1.ConditionFalse, "VOLUME_OFFLINE", says("1", given[1], "its disk is gone"), 1)
	becomes(given[1], "VOLUME_OFFLINE", "its disk is gone, for the second time")
	becomes(given[0], "AGENT_UNAVAILABLE", "the node is away")
	becomes(given[1], "", "")
	told(metav1.ConditionFalse, "AGENT_UNAVAILABLE", says("1", given[0], "the node is away"), 1)
	becomes(given[0], "", "")
	told(metav1.ConditionTrue, "Ready", well, 1)
	// What came while nobody led is told by the next leader, and nothing else is.
	stop()
	becomes(given[0], "VOLUME_OFFLINE", "the server is away")
	w.start(counted)
	told(metav1.ConditionFalse, "VOLUME_OFFLINE", says("1", given[0], "the server is away"), 1)
	becomes(given[0], "", "")
	told(metav1.ConditionTrue, "Ready", well, 1)
	w.delete(given[1])
	told(metav1.ConditionFalse, "SandboxGone", "1 of 2 sandboxes are not ready; sandbox "+given[1]+": it was deleted, and is not replaced once the claim is over", 1)
	if n := w.events.count("mine VOLUME_OFFLINE: 1 of 2 sandboxes are not ready; sandbox "); n != 2 {
		t.Errorf("%d Events tell of the volume", n)
	}
}
