package claims_test

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// What is tested here is a set, or its Namespace, that is not any more what it was when the pool was made.

func withClaims(s *agentsv1alpha1.SandboxSet) {
	s.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Resources: corev1.VolumeResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}}}}
	s.Spec.Template.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
}

// A retention policy is no revision, so the pool stays; what the set says counts for what is claimed or removed from then on.
func TestASetsRetentionPolicyCountsForItsPool(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 2, withClaims)
	w.ready(set)
	first := w.pool(set)
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) {
		s.PersistentVolumeClaimRetentionPolicy = &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: v1alpha1.RetentionRetain, WhenScaled: v1alpha1.RetentionRetain}
	})
	w.ready(set)
	claim := w.claim("mine", "pool", nil)
	w.phase("mine", agentsv1alpha1.ClaimCompleted)
	taken := w.of(claim)[0]
	if !slices.ContainsFunc(first, func(sb *v1alpha1.Sandbox) bool { return sb.UID == taken.UID }) {
		t.Errorf("%s was not of the pool", taken.Name)
	}
	if p := taken.Spec.PersistentVolumeClaimRetentionPolicy; p.Deleted() != v1alpha1.RetentionRetain || p.Scaled() != v1alpha1.RetentionRetain {
		t.Errorf("the claimed one has %+v", p)
	}
	w.ready(set)
	old := w.pool(set)[slices.IndexFunc(w.pool(set), func(sb *v1alpha1.Sandbox) bool { return sb.Spec.PersistentVolumeClaimRetentionPolicy == nil })]
	must(w.theirs.Sandboxes().UpdateSpec(t.Context(), store.KeyOf(old), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
		o.Finalizers = []string{"test/kept"}
		return nil
	}))
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = 0 })
	w.eventually("it is removed", func() bool {
		all := w.sandboxes()
		i := slices.IndexFunc(all, func(sb *v1alpha1.Sandbox) bool { return sb.UID == old.UID })
		return all[i].DeletionTimestamp != nil && all[i].Spec.PersistentVolumeClaimRetentionPolicy.Deleted() == v1alpha1.RetentionRetain
	})
}

// A claim that needs what the set has by now is given nothing that was made before, and the pool is as it was.
func TestAClaimIsGivenNothingOfAnOlderRevisionThatDoesNotSuit(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	pv := w.pv("shared", nil)
	set := w.set("pool", 2, func(s *agentsv1alpha1.SandboxSet) {
		s.Spec.Runtimes = nil
		s.Spec.UpdateStrategy.MaxUnavailable = ptr.To(intstr.FromInt32(0)) // the old ones stay
	})
	w.ready(set)
	first := w.pool(set)
	asks := mounts(agentsv1alpha1.DynamicVolumeMount{PVName: pv, MountPath: "/data"})
	w.claim("early", "pool", asks)
	if st := w.phase("early", agentsv1alpha1.ClaimFailed); st.Conditions[0].Reason != "FEATURE_DISABLED" {
		t.Errorf("%+v", st)
	}
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) {
		s.Runtimes = []agentsv1alpha1.Runtime{{Name: agentsv1alpha1.RuntimeCSI}}
	})
	claim := w.claim("late", "pool", asks)
	w.phase("late", agentsv1alpha1.ClaimCompleted)
	if got := w.of(claim); len(got) != 1 || !slices.Contains(got[0].Spec.Runtimes, agentsv1alpha1.RuntimeCSI) {
		t.Errorf("it was given %+v", got)
	}
	// One without volumes takes what there is.
	claim = w.claim("plain", "pool", nil)
	w.phase("plain", agentsv1alpha1.ClaimCompleted)
	if got := w.of(claim)[0]; !slices.ContainsFunc(first, func(sb *v1alpha1.Sandbox) bool { return sb.UID == got.UID }) {
		t.Errorf("it was given %s", got.Name)
	}
}

// A sandbox that the API server does not let a claim have is passed over.
func TestASandboxThatAClaimIsRefusedIsPassedOver(t *testing.T) {
	w := newWorld(t)
	const every = "*"
	var refused atomic.Value
	refused.Store("")
	w.start(func(config *rest.Config) {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(r *http.Request) (*http.Response, error) {
				_, name, is := strings.Cut(r.URL.Path, w.namespace+"/sandboxes/")
				if is && r.Method == http.MethodPatch && (refused.Load() == name || refused.Load() == every) {
					return &http.Response{StatusCode: http.StatusForbidden, Header: http.Header{"Content-Type": {"application/json"}}, Request: r,
						Body: io.NopCloser(strings.NewReader(`{"kind":"Status","apiVersion":"v1","status":"Failure","code":403,"reason":"Forbidden","message":"not this one"}`))}, nil
				}
				return next.RoundTrip(r)
			})
		})
	})
	set := w.set("pool", 2, nil)
	w.ready(set)
	pool := w.pool(set)
	slices.SortStableFunc(pool, func(a, b *v1alpha1.Sandbox) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	refused.Store(pool[0].Name)
	for _, name := range []string{"one", "two"} {
		claim := w.claim(name, "pool", nil)
		w.phase(name, agentsv1alpha1.ClaimCompleted)
		if got := w.of(claim); len(got) != 1 || got[0].UID == pool[0].UID {
			t.Errorf("%s was given %+v", name, got)
		}
		w.ready(set)
	}
	// Where all are refused and none is made, that is what the claim says.
	refused.Store(every)
	w.claim("three", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) { s.CreateOnNoStock = ptr.To(false) })
	w.eventually("it says so", func() bool {
		for _, c := range w.claimStatus("three").Conditions {
			if strings.Contains(c.Message, "not this one") {
				return true
			}
		}
		return false
	})
	refused.Store("")
	w.eventually("it is given that", func() bool {
		w.clock.Step(time.Second)
		return w.claimStatus("three").Phase == agentsv1alpha1.ClaimCompleted
	})
}

// A Namespace that becomes a tenant's, or another's: what is of nobody is made the tenant's with the claim, what is another's is
// given to nobody, and replaced.
func TestThePoolOfANamespaceThatGetsAnotherTenant(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 2, func(s *agentsv1alpha1.SandboxSet) { s.Spec.UpdateStrategy.MaxUnavailable = ptr.To(intstr.FromInt32(2)) })
	w.ready(set)
	first := w.pool(set)
	w.mu.Lock()
	w.tenant = "alice"
	w.mu.Unlock()
	claim := w.claim("mine", "pool", nil)
	w.phase("mine", agentsv1alpha1.ClaimCompleted)
	got := w.of(claim)[0]
	if got.Spec.TenantID != "alice" || !slices.ContainsFunc(first, func(sb *v1alpha1.Sandbox) bool { return sb.UID == got.UID }) {
		t.Errorf("it was given %s of %q", got.Name, got.Spec.TenantID)
	}
	w.ready(set)
	// As its Namespace's policy makes them.
	bobs := must(w.theirs.Sandboxes().Create(t.Context(), func() *v1alpha1.Sandbox {
		sb := w.pool(set)[0].DeepCopy()
		sb.ObjectMeta = metav1.ObjectMeta{Namespace: sb.Namespace, Name: "pool-of-bob", Labels: sb.Labels, OwnerReferences: sb.OwnerReferences}
		sb.Spec.TenantID = "bob"
		return sb
	}()))
	w.eventually("it is replaced", func() bool {
		return !slices.ContainsFunc(w.sandboxes(), func(sb *v1alpha1.Sandbox) bool { return sb.UID == bobs.UID })
	})
	w.ready(set)
}

// A sandbox whose label somebody takes away, as to look into it, is made up for.
func TestASandboxThatIsTakenOutOfThePoolIsMadeUpFor(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 2, nil)
	w.ready(set)
	out := w.pool(set)[0]
	must(w.theirs.Sandboxes().UpdateSpec(t.Context(), store.KeyOf(out), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
		delete(o.Labels, agentsv1alpha1.LabelSandboxSet)
		return nil
	}))
	w.eventually("there is another", func() bool {
		n := 0
		for _, sb := range w.sandboxes() {
			if sb.Labels[agentsv1alpha1.LabelSandboxSet] == "pool" {
				n++
			}
		}
		return n == 2
	})
	w.eventually("it is let be", func() bool {
		return slices.ContainsFunc(w.sandboxes(), func(sb *v1alpha1.Sandbox) bool { return sb.UID == out.UID && sb.DeletionTimestamp == nil })
	})
}
