package claims_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// The controller of sets is tested here beside that of claims, as each is what disturbs the other.

func TestASetIsKeptWhole(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 3, func(s *agentsv1alpha1.SandboxSet) {
		s.Spec.Runtimes = append(s.Spec.Runtimes, agentsv1alpha1.Runtime{Name: agentsv1alpha1.RuntimeAgent})
		withClaims(s)
		s.Spec.PersistentVolumeClaimRetentionPolicy = &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: v1alpha1.RetentionDelete, WhenScaled: v1alpha1.RetentionRetain}
	})
	w.ready(set)
	st := w.setStatus("pool")
	for _, sb := range w.pool(set) {
		if rest, ok := strings.CutPrefix(sb.Name, "pool-"); !ok || len(rest) != 5 || sb.Labels[agentsv1alpha1.LabelSandboxSet] != "pool" ||
			sb.Labels[agentsv1alpha1.LabelRevision] != st.UpdateRevision || !slices.Equal(sb.Spec.Runtimes, []string{"agent-runtime", "csi"}) ||
			len(sb.Spec.VolumeClaimTemplates) != 1 || sb.Spec.PersistentVolumeClaimRetentionPolicy.WhenScaled != v1alpha1.RetentionRetain {
			t.Errorf("sandbox %+v", sb)
		}
	}
	if len(st.UpdateRevision) != 8 || st.Selector != "agents.kruise.io/sandbox-set=pool,!agents.kruise.io/claim-name" || !meta.IsStatusConditionTrue(st.Conditions, agentsv1alpha1.SetReady) ||
		len(st.Runtimes) != 2 || st.Runtimes[0].State != "Enabled" || st.Runtimes[1].State != "Accepted" {
		t.Errorf("status %+v", st)
	}
	// One that is deleted, and one that ended, are made up for.
	all := w.pool(set)
	w.delete(all[0].Name)
	w.ready(set)
	ended := must(w.theirs.Sandboxes().UpdateStatus(t.Context(), w.key(all[1].Name), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
		o.Status.Phase, o.Status.Reason = v1alpha1.SandboxFailed, "PodFailed"
		return nil
	}))
	w.eventually("it is replaced", func() bool {
		return !slices.ContainsFunc(w.sandboxes(), func(sb *v1alpha1.Sandbox) bool { return sb.UID == ended.UID })
	})
	w.ready(set)
	// Scaled down, those that do not run go first, and their claims are what whenScaled says.
	w.hold(func(sb *v1alpha1.Sandbox) bool { return true })
	must(w.theirs.Sandboxes().UpdateStatus(t.Context(), w.key(all[2].Name), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
		o.Status.Phase = v1alpha1.SandboxPending
		return nil
	}))
	must(w.theirs.Sandboxes().UpdateSpec(t.Context(), w.key(all[2].Name), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
		o.Finalizers = []string{"test/kept"}
		return nil
	}))
	// A set's change may be heard of before a Sandbox's that was written earlier: they come by different watches.
	w.eventually("it is known not to run", func() bool { return w.setStatus("pool").AvailableReplicas == 2 })
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = 2 })
	w.eventually("one is removed", func() bool { return len(w.pool(set)) == 2 })
	now := w.sandboxes() // what others hear of it comes later
	gone := now[slices.IndexFunc(now, func(sb *v1alpha1.Sandbox) bool { return sb.Name == all[2].Name })]
	if gone.DeletionTimestamp == nil || gone.Spec.PersistentVolumeClaimRetentionPolicy.WhenDeleted != v1alpha1.RetentionRetain {
		t.Errorf("removed was another than the one that did not run: %+v", gone.ObjectMeta)
	}
}

// A new template replaces what nobody has claimed, within its bound, and nothing else.
func TestANewRevisionRollsThroughThePoolOnly(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 5, func(s *agentsv1alpha1.SandboxSet) { s.Spec.UpdateStrategy.MaxUnavailable = ptr.To(intstr.FromInt32(2)) })
	w.ready(set)
	claim := w.claim("mine", "pool", nil)
	w.phase("mine", agentsv1alpha1.ClaimCompleted)
	w.ready(set)
	claimed := w.of(claim)[0]
	old := w.setStatus("pool").UpdateRevision

	// Never are more than two of the five away.
	ctx, stop := context.WithCancel(t.Context())
	var fewest atomic.Int32
	fewest.Store(5)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		for range w.theirs.Sandboxes().Follow(ctx) {
			n := int32(0)
			page, err := w.theirs.Sandboxes().List(context.Background(), store.ListOptions{Namespace: w.namespace})
			if err != nil {
				return
			}
			for _, sb := range page.Items {
				if metav1.IsControlledBy(sb, set) && sb.DeletionTimestamp == nil && sb.Status.Phase == v1alpha1.SandboxRunning {
					n++
				}
			}
			if n < fewest.Load() {
				fewest.Store(n)
			}
		}
	}()
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) { s.Template.Spec.Containers[0].Image = "alpine" })
	w.eventually("there is another revision", func() bool { r := w.setStatus("pool").UpdateRevision; return r != old })
	w.ready(set)
	stop()
	<-watched
	if n := fewest.Load(); n < 3 {
		t.Errorf("%d of 5 were left in between", n)
	}
	for _, sb := range w.pool(set) {
		if sb.Spec.Template.Spec.Containers[0].Image != "alpine" {
			t.Errorf("%s is of the old revision", sb.Name)
		}
	}
	if now := must(w.theirs.Sandboxes().Get(t.Context(), w.key(claimed.Name))); now.UID != claimed.UID || now.ResourceVersion != claimed.ResourceVersion {
		t.Error("the claimed sandbox was touched")
	}
	// A template that does not work costs no more than the bound.
	w.hold(func(sb *v1alpha1.Sandbox) bool { return sb.Status.Phase == "" })
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) { s.Template.Spec.Containers[0].Image = "broken" })
	w.eventually("two are replaced", func() bool {
		return w.setStatus("pool").UpdatedReplicas == 2 && w.setStatus("pool").AvailableReplicas == 3
	})
	// And mending it brings the set back.
	w.hold(func(*v1alpha1.Sandbox) bool { return false })
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) { s.Template.Spec.Containers[0].Image = "mended" })
	w.ready(set)
	if must(w.theirs.Sandboxes().Get(t.Context(), w.key(claimed.Name))).UID != claimed.UID {
		t.Error("the claimed sandbox is gone")
	}
}

// What is on its way is bounded, and what is told is the first sandbox's trouble.
func TestASetGrowsWithinItsBound(t *testing.T) {
	w := newWorld(t)
	w.hold(func(sb *v1alpha1.Sandbox) bool { return true })
	w.start(nil)
	set := w.set("pool", 6, func(s *agentsv1alpha1.SandboxSet) {
		s.Spec.ScaleStrategy.MaxUnavailable = ptr.To(intstr.FromString("30%"))
	})
	w.eventually("two are made", func() bool { return w.setStatus("pool").Replicas == 2 })
	first := w.pool(set)
	must(w.theirs.Sandboxes().UpdateStatus(t.Context(), store.KeyOf(first[0]), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
		o.Status.Phase, o.Status.Reason, o.Status.Message = v1alpha1.SandboxPending, "POD_REFUSED", "exceeded quota: few"
		return nil
	}))
	w.eventually("it is told", func() bool {
		c := meta.FindStatusCondition(w.setStatus("pool").Conditions, agentsv1alpha1.SetReady)
		return c.Reason == "POD_REFUSED" && c.Message == "0 of 6 sandboxes are available; sandbox "+first[0].Name+": exceeded quota: few"
	})
	if n := len(w.pool(set)); n != 2 {
		t.Errorf("%d are on their way", n)
	}
	w.hold(func(*v1alpha1.Sandbox) bool { return false })
	w.replay()
	w.ready(set)
}

// roundTrip is a function as a http.RoundTripper.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A leader that finds during a pass that another leads makes no sandbox more than the one that it was at, and tells nothing: what it
// knows may be of long ago.
func TestALateLeaderMakesTheSandboxThatItIsAtAndNoMore(t *testing.T) {
	w := newWorld(t)
	const wanted, before = 12, 5
	var posts atomic.Int32
	w.start(func(config *rest.Config) {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(r *http.Request) (*http.Response, error) {
				if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, w.namespace+"/sandboxes") && posts.Add(1) == before {
					w.mu.Lock()
					w.late = fmt.Errorf("another leads: %w", errdefs.ErrConflict)
					w.mu.Unlock()
				}
				return next.RoundTrip(r)
			})
		})
	})
	set := w.set("pool", wanted, nil)
	w.eventually("it has been told some times", func() bool {
		w.clock.Step(time.Second) // which is a pause between two passes
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.asked >= 3
	})
	if n := len(w.pool(set)); n != before || posts.Load() != before {
		t.Errorf("it has made %d sandboxes by %d calls, and was late from the %d. on", n, posts.Load(), before)
	}
	if st := w.setStatus("pool"); st.ObservedGeneration != 0 {
		t.Errorf("it has told %+v", st)
	}
	w.mu.Lock()
	w.late = nil
	w.mu.Unlock()
	w.eventually("it leads again", func() bool {
		w.clock.Step(time.Minute)
		return len(w.pool(set)) > before
	})
	w.ready(set)
}

func TestClaimedSandboxesOutliveTheirSet(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 1, nil)
	w.ready(set)
	claim := w.claim("mine", "pool", nil)
	w.phase("mine", agentsv1alpha1.ClaimCompleted)
	w.ready(set)
	if err := w.pools.Sets().Delete(t.Context(), w.key("pool"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}
	// The garbage collector, which is not here, deletes what is owned by what is gone.
	for _, sb := range w.sandboxes() {
		if owner := metav1.GetControllerOf(sb); (owner.UID == claim.UID) == (owner.UID == set.UID) || owner.UID == claim.UID && len(sb.OwnerReferences) != 1 {
			t.Errorf("owners %+v", sb.OwnerReferences)
		}
	}
	w.claim("late", "pool", nil)
	if st := w.phase("late", agentsv1alpha1.ClaimFailed); st.Conditions[0].Reason != "SET_NOT_FOUND" {
		t.Errorf("%+v", st)
	}
}

// What somebody changed by hand is given to nobody, and said; what is to lose its data is replaced.
func TestWhatIsNotAsItWasMadeIsGivenToNobody(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 3, nil)
	w.ready(set)
	label := func(sb *v1alpha1.Sandbox, value string) {
		t.Helper()
		must(w.theirs.Sandboxes().UpdateSpec(t.Context(), store.KeyOf(sb), store.Preconditions{UID: sb.UID}, func(o *v1alpha1.Sandbox) error {
			delete(o.Labels, agentsv1alpha1.LabelClaimName)
			if value != "" {
				o.Labels[agentsv1alpha1.LabelClaimName] = value
			}
			return nil
		}))
	}
	pool := w.pool(set)
	label(pool[0], "ghost")
	must(w.theirs.Sandboxes().UpdateStatus(t.Context(), store.KeyOf(pool[1]), store.Preconditions{UID: pool[1].UID}, func(o *v1alpha1.Sandbox) error {
		meta.SetStatusCondition(&o.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionVolumeClaimsBound, Status: metav1.ConditionFalse,
			Reason: scheduler.ReasonClaimTerminating, Message: "its claim goes"})
		return nil
	}))
	w.eventually("one is replaced", func() bool {
		all := w.pool(set)
		return len(all) == 3 && !slices.ContainsFunc(all, func(sb *v1alpha1.Sandbox) bool { return sb.UID == pool[1].UID })
	})
	want := "2 of 3 sandboxes are available; sandbox " + pool[0].Name + " has the label agents.kruise.io/claim-name, and no SandboxClaim has it: take the label away, or delete the sandbox"
	w.eventually("the set tells of the other", func() bool {
		c := meta.FindStatusCondition(w.setStatus("pool").Conditions, agentsv1alpha1.SetReady)
		return c != nil && c.Status == metav1.ConditionFalse && c.Reason == "SandboxInUse" && c.Message == want
	})
	w.claim("ghost", "pool", nil)
	if st := w.phase("ghost", agentsv1alpha1.ClaimCompleted); len(st.SandboxNames) != 1 || st.SandboxNames[0] == pool[0].Name {
		t.Errorf("it was given %v", st.SandboxNames)
	}
	label(pool[0], "")
	w.ready(set)
}

// What keeps a sandbox may be told at any length; what sets and claims tell of it fits into a condition.
func TestLongMessages(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	w.hold(func(*v1alpha1.Sandbox) bool { return true })
	set := w.set("pool", 1, nil)
	w.eventually("there is one", func() bool { return len(w.pool(set)) == 1 })
	sb := w.pool(set)[0]
	must(w.theirs.Sandboxes().UpdateStatus(t.Context(), store.KeyOf(sb), store.Preconditions{UID: sb.UID}, func(o *v1alpha1.Sandbox) error {
		o.Status.Phase, o.Status.Reason, o.Status.Message = v1alpha1.SandboxPending, "POD_REFUSED", strings.Repeat("x", 40<<10)+" is not valid"
		return nil
	}))
	w.eventually("the set tells", func() bool {
		c := meta.FindStatusCondition(w.setStatus("pool").Conditions, agentsv1alpha1.SetReady)
		return c != nil && c.Reason == "POD_REFUSED" && strings.HasSuffix(c.Message, " is not valid")
	})
	w.claim("mine", "pool", nil)
	if m := w.reason("mine", "POD_REFUSED"); !strings.HasPrefix(m, "0 of 1 sandboxes are claimed; sandbox "+sb.Name) || !strings.HasSuffix(m, " is not valid") {
		t.Error(m)
	}
}

// What somebody did to a sandbox that nobody had claimed may have left something in it: it is given to nobody, and replaced when
// he has nothing of it any more.
func TestAUsedSandboxIsGivenToNobody(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 1, nil)
	w.ready(set)
	used := w.pool(set)[0]
	data := w.pv("data", nil)
	change := func(change func(*v1alpha1.SandboxSpec)) {
		t.Helper()
		must(w.theirs.Sandboxes().UpdateSpec(t.Context(), store.KeyOf(used), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
			change(&o.Spec)
			return nil
		}))
	}
	change(func(s *v1alpha1.SandboxSpec) {
		s.DynamicVolumes = []v1alpha1.DynamicVolume{{VolumeType: v1alpha1.VolumeTypePV, Source: data, Target: "/data"}}
	})
	w.eventually("the set tells", func() bool {
		st := w.setStatus("pool")
		c := meta.FindStatusCondition(st.Conditions, agentsv1alpha1.SetReady)
		return st.AvailableReplicas == 0 && c.Reason == "SandboxInUse" && strings.HasPrefix(c.Message, "0 of 1 sandboxes are available; sandbox "+used.Name+" is in use, though nobody has claimed it")
	})
	w.claim("mine", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) { s.CreateOnNoStock = ptr.To(false) })
	w.reason("mine", "NO_STOCK")
	change(func(s *v1alpha1.SandboxSpec) { s.DynamicVolumes = nil })
	st := w.phase("mine", agentsv1alpha1.ClaimCompleted)
	if st.SandboxNames[0] == used.Name {
		t.Error("a sandbox that was used was given to a claim")
	}
	w.eventually("it is gone", func() bool {
		w.clock.Step(time.Second) // for the next try, should it have changed meanwhile
		return !slices.ContainsFunc(w.sandboxes(), func(sb *v1alpha1.Sandbox) bool { return sb.UID == used.UID })
	})
	w.ready(set)
}
