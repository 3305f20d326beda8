package anchors_test

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/anchors"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

const node = "n1"

// world is an API server on which the test plays scheduler and kubelet.
type world struct {
	t         *testing.T
	server    *apiserver.Server
	admin     kubernetes.Interface
	namespace string
	clock     *clocktesting.FakeClock
	claim     *corev1.PersistentVolumeClaim
	// writes counts what Anchors write.
	writes atomic.Int64
}

// started counts the starts by namespace: the API server goes on when the tests are run again.
var started = map[string]int{}

func start(t *testing.T, namespace string) *world {
	t.Helper()
	if started[namespace]++; started[namespace] > 1 {
		namespace += "-" + strconv.Itoa(started[namespace])
	}
	w := &world{t: t, server: apiserver.Shared(t), namespace: namespace, clock: clocktesting.NewFakeClock(time.Now())}
	w.admin = kubernetes.NewForConfigOrDie(w.server.Config())
	// The strictest there is.
	w.make(w.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace,
		Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}}}, metav1.CreateOptions{}))
	w.make(w.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "flux-sandbox"}}, metav1.CreateOptions{}))
	w.make(w.admin.CoreV1().ServiceAccounts(namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}))
	manifests.Apply(t, w.server.Config(), manifests.Objects(t, "config/kubernetes/rbac.yaml")...)
	w.make(w.admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "controller-of-a-test"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "flux-sandbox-controller"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "controller"}},
	}, metav1.CreateOptions{}))
	var err error
	w.claim, err = w.admin.CoreV1().PersistentVolumeClaims(namespace).Create(t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "data"},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}},
	}, metav1.CreateOptions{})
	w.must(err)
	return w
}

// make is for what may be there from another test.
func (w *world) make(_ any, err error) {
	w.t.Helper()
	if err != nil && !apierrors.IsAlreadyExists(err) {
		w.t.Fatal(err)
	}
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(q *http.Request) (*http.Response, error) { return f(q) }

// anchors are Anchors with the rights of the controller.
func (w *world) anchors() *anchors.Anchors {
	w.t.Helper()
	config := w.server.As("controller")
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(q *http.Request) (*http.Response, error) {
			if q.Method != http.MethodGet {
				w.writes.Add(1)
			}
			return next.RoundTrip(q)
		})
	})
	a, err := anchors.New(anchors.Options{Client: kubernetes.NewForConfigOrDie(config), Image: "flux-sandbox:test", PullSecrets: []string{"of-the-registry"}, Clock: w.clock})
	w.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		a.Run(ctx)
	}()
	w.t.Cleanup(func() {
		cancel()
		<-ended
	})
	w.eventually("the anchors are read", a.HasSynced)
	return a
}

func (w *world) eventually(what string, holds func() bool) {
	w.t.Helper()
	testenv.Eventually(w.t, 30*time.Second, what, holds)
}

func (w *world) pods() []corev1.Pod {
	w.t.Helper()
	list, err := w.admin.CoreV1().Pods(w.namespace).List(w.t.Context(), metav1.ListOptions{LabelSelector: v1alpha1.LabelAnchor})
	w.must(err)
	return list.Items
}

// only waits until there is one Pod, and returns it.
func (w *world) only(what string, is func(corev1.Pod) bool) corev1.Pod {
	w.t.Helper()
	var found corev1.Pod
	w.eventually(what, func() bool {
		all := w.pods()
		if len(all) == 1 {
			found = all[0]
		}
		return len(all) == 1 && is(found)
	})
	return found
}

// bind plays the scheduler, run kubelet.
func (w *world) bind(pod corev1.Pod) {
	w.t.Helper()
	w.must(w.admin.CoreV1().Pods(w.namespace).Bind(w.t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: pod.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: node}}, metav1.CreateOptions{}))
}

func (w *world) run(pod corev1.Pod) {
	w.t.Helper()
	if pod.Spec.NodeName == "" {
		w.bind(pod)
	}
	w.status(pod, func(s *corev1.PodStatus) { s.Phase = corev1.PodRunning })
}

func (w *world) status(pod corev1.Pod, change func(*corev1.PodStatus)) {
	w.t.Helper()
	now, err := w.admin.CoreV1().Pods(w.namespace).Get(w.t.Context(), pod.Name, metav1.GetOptions{})
	w.must(err)
	change(&now.Status)
	_, err = w.admin.CoreV1().Pods(w.namespace).UpdateStatus(w.t.Context(), now, metav1.UpdateOptions{})
	w.must(err)
}

// gone plays kubelet, which has ended a Pod.
func (w *world) gone(pod corev1.Pod) {
	w.t.Helper()
	none := int64(0)
	w.must(w.admin.CoreV1().Pods(w.namespace).Delete(w.t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &none}))
}

func (w *world) want() anchors.Want { return anchors.Want{Claim: w.claim, Node: node} }

type answer struct {
	anchor anchors.Anchor
	err    error
}

func (w *world) ensure(a *anchors.Anchors, want anchors.Want) <-chan answer {
	answers := make(chan answer, 1)
	go func() {
		anchor, err := a.Ensure(w.t.Context(), want)
		answers <- answer{anchor, err}
	}()
	return answers
}

// running has an anchor run.
func (w *world) running(a *anchors.Anchors, want anchors.Want) corev1.Pod {
	w.t.Helper()
	answers := w.ensure(a, want)
	pod := w.only("an anchor", func(corev1.Pod) bool { return true })
	w.run(pod)
	got := <-answers
	w.must(got.err)
	if got.anchor.UID != pod.UID || got.anchor.Name != pod.Name {
		w.t.Errorf("anchor %+v, want %s", got.anchor, pod.Name)
	}
	return pod
}

func (w *world) need(nodes ...string) anchors.Need {
	n := anchors.Need{Namespace: w.namespace, Name: w.claim.Name, Claim: w.claim, Nodes: map[string]types.UID{}, May: func(string) bool { return false }}
	for _, node := range nodes {
		n.Nodes[node] = "uid-1"
	}
	return n
}

func (w *world) settle(a *anchors.Anchors, n anchors.Need) bool {
	w.t.Helper()
	left, err := a.Settle(w.t.Context(), n)
	w.must(err)
	return left
}

func TestAnAnchorIsMadeOnceAndWaitedFor(t *testing.T) {
	w := start(t, "made-once")
	a := w.anchors()
	answers := []<-chan answer{w.ensure(a, w.want()), w.ensure(a, w.want())}
	pod := w.only("an anchor", func(corev1.Pod) bool { return true })
	terms := pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	if pod.Spec.NodeName != "" || len(terms) != 1 || terms[0].MatchFields[0].Values[0] != node {
		t.Errorf("it is pinned by %v, and on %q", terms, pod.Spec.NodeName)
	}
	if len(pod.OwnerReferences) != 1 || pod.OwnerReferences[0].UID != w.claim.UID || pod.Annotations[anchors.AnnotationAbout] == "" || pod.Labels[v1alpha1.LabelAnchor] != "data" {
		t.Errorf("it says of itself %v", pod.ObjectMeta)
	}
	if s := pod.Spec.ImagePullSecrets; len(s) != 1 || s[0].Name != "of-the-registry" {
		t.Errorf("its image is pulled with %v", s)
	}
	if v := pod.Spec.Volumes; len(v) != 1 || v[0].PersistentVolumeClaim == nil || v[0].PersistentVolumeClaim.ClaimName != "data" || len(pod.Spec.Containers[0].VolumeMounts) != 1 {
		t.Errorf("volumes %v", v)
	}
	w.run(pod)
	for _, c := range answers {
		if got := <-c; got.err != nil || got.anchor.UID != pod.UID {
			t.Errorf("%+v", got)
		}
	}
	// Another leader adopts it; nothing is written when all is as it should be.
	before := w.writes.Load()
	other := w.anchors()
	if got := <-w.ensure(other, w.want()); got.err != nil || got.anchor.UID != pod.UID {
		t.Errorf("%+v", got)
	}
	for range 3 {
		if !w.settle(other, w.need(node)) {
			t.Error("nothing is left")
		}
	}
	if n := w.writes.Load() - before; n != 0 {
		t.Errorf("%d writes", n)
	}
	if claims := other.Claims(); !slices.Contains(claims, types.NamespacedName{Namespace: w.namespace, Name: "data"}) {
		t.Errorf("claims %v", claims)
	}
}

func TestWhatIsWrongWithAnAnchorIsTold(t *testing.T) {
	w := start(t, "trouble")
	a := w.anchors()
	answers := w.ensure(a, w.want())
	pod := w.only("an anchor", func(corev1.Pod) bool { return true })
	w.status(pod, func(s *corev1.PodStatus) {
		s.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/1 nodes are available"}}
	})
	w.eventually("it gives up", func() bool {
		w.clock.Step(anchors.DefaultWaitInTrouble + time.Second)
		return len(answers) > 0
	})
	got := <-answers
	if fault.ReasonOf(got.err) != fault.AnchorPending || fault.IsPermanent(got.err) || !strings.Contains(got.err.Error(), "0/1 nodes are available") {
		t.Errorf("%v", got.err)
	}
	// The next finds it running.
	w.run(pod)
	if got := <-w.ensure(a, w.want()); got.err != nil || got.anchor.UID != pod.UID {
		t.Errorf("%+v", got)
	}
}

func TestMakeBeforeBreak(t *testing.T) {
	w := start(t, "make-before-break")
	a := w.anchors()
	first := w.running(a, w.want())
	w.must(w.admin.CoreV1().Pods(w.namespace).Delete(t.Context(), first.Name, metav1.DeleteOptions{}))
	var second corev1.Pod
	w.eventually("a successor", func() bool {
		w.settle(a, w.need(node))
		all := w.pods()
		i := slices.IndexFunc(all, func(p corev1.Pod) bool { return p.UID != first.UID })
		if i >= 0 {
			second = all[i]
		}
		return i >= 0 && len(all) == 2
	})
	// The first ends by itself, and the second stays.
	w.run(second)
	for range 3 {
		w.settle(a, w.need(node))
	}
	if all := w.pods(); len(all) != 2 {
		t.Errorf("%d anchors", len(all))
	}
	w.gone(first)
	w.gone(second) // forced
	var third corev1.Pod
	w.eventually("another successor", func() bool {
		w.settle(a, w.need(node))
		all := w.pods()
		if len(all) == 1 {
			third = all[0]
		}
		return len(all) == 1 && third.UID != second.UID
	})
	// One that was evicted is no anchor any more.
	w.run(third)
	w.status(third, func(s *corev1.PodStatus) { s.Phase, s.Reason = corev1.PodFailed, "Evicted" })
	w.eventually("it is replaced", func() bool {
		w.settle(a, w.need(node))
		return slices.ContainsFunc(w.pods(), func(p corev1.Pod) bool { return p.UID != third.UID })
	})
}

func TestWhatNobodyUsesGoesInTime(t *testing.T) {
	w := start(t, "unused")
	a := w.anchors()
	pod := w.running(a, w.want())
	told := make(chan string, 100)
	a.Follow(func(_, claim string) { told <- claim })
	for range 2 {
		if !w.settle(a, w.need()) {
			t.Error("nothing is left")
		}
	}
	w.clock.Step(anchors.DefaultGrace - time.Second)
	w.settle(a, w.need())
	// Asked for again meanwhile, it is kept the whole time again.
	if got := <-w.ensure(a, w.want()); got.err != nil {
		t.Error(got.err)
	}
	w.clock.Step(time.Second)
	w.settle(a, w.need())
	if now := w.only("the anchor", func(corev1.Pod) bool { return true }); now.DeletionTimestamp != nil {
		t.Error("it is deleted too early")
	}
	for len(told) > 0 {
		<-told
	}
	w.clock.Step(anchors.DefaultGrace)
	<-told // who settles is woken
	// Sandboxes of the node may use it.
	may := w.need()
	may.May = func(n string) bool { return n == node }
	w.settle(a, may)
	w.settle(a, w.need())
	w.clock.Step(anchors.DefaultGrace + time.Second)
	w.settle(a, w.need())
	w.only("it ends", func(p corev1.Pod) bool { return p.DeletionTimestamp != nil && *p.DeletionGracePeriodSeconds == 1 })
	w.gone(pod)
	w.eventually("nothing is left", func() bool { return !w.settle(a, w.need()) })
}

// Who waits for an anchor uses it, whatever the grace time is and however long it takes to run.
func TestWhatIsWaitedForStays(t *testing.T) {
	w := start(t, "waited-for")
	a := w.anchors()
	need := w.need()
	need.Exclusive = true
	answers := w.ensure(a, w.want())
	pod := w.only("an anchor", func(corev1.Pod) bool { return true })
	for range 3 {
		w.settle(a, need)
		w.clock.Step(time.Second)
	}
	w.run(pod)
	if got := <-answers; got.err != nil || got.anchor.UID != pod.UID {
		t.Errorf("%+v", got)
	}
	w.settle(a, need)
	w.only("it goes", func(p corev1.Pod) bool { return p.UID == pod.UID && p.DeletionTimestamp != nil })
}

func TestAClaimThatIsDeletedHasNoSuccessor(t *testing.T) {
	w := start(t, "claim-deleted")
	a := w.anchors()
	pod := w.running(a, w.want())
	now := metav1.Now()
	w.claim.DeletionTimestamp = &now
	w.gone(pod)
	w.eventually("nothing is left", func() bool { return !w.settle(a, w.need(node)) })
	if all := w.pods(); len(all) != 0 {
		t.Errorf("%d anchors", len(all))
	}
}

func TestOnePodsVolumeIsOneSandboxs(t *testing.T) {
	w := start(t, "one-pods")
	a := w.anchors()
	mine := w.want()
	mine.Sandbox = "uid-1"
	first := w.running(a, mine)
	other := w.want()
	other.Sandbox = "uid-2"
	if got := <-w.ensure(a, other); fault.ReasonOf(got.err) != fault.Conflict || !strings.Contains(got.err.Error(), "uid-1") {
		t.Errorf("%v", got.err)
	}
	need := w.need(node)
	need.Exclusive = true
	w.must(w.admin.CoreV1().Pods(w.namespace).Delete(t.Context(), first.Name, metav1.DeleteOptions{}))
	w.eventually("its successor is the same sandbox's", func() bool {
		w.settle(a, need)
		all := w.pods()
		j := slices.IndexFunc(all, func(p corev1.Pod) bool { return p.UID != first.UID })
		return j >= 0 && all[j].Annotations[v1alpha1.AnnotationAnchorSandbox] == "uid-1"
	})
	// Also after a forced deletion, which leaves no predecessor that would tell whose it is.
	for _, p := range w.pods() {
		w.gone(p)
	}
	w.eventually("its successor is the same sandbox's", func() bool {
		w.settle(a, need)
		all := w.pods()
		return len(all) == 1 && all[0].Annotations[v1alpha1.AnnotationAnchorSandbox] == "uid-1"
	})
	// Nobody waits for the grace time.
	need.Nodes = nil
	w.settle(a, need)
	w.eventually("all end", func() bool {
		return !slices.ContainsFunc(w.pods(), func(p corev1.Pod) bool { return p.DeletionTimestamp == nil })
	})
}

func TestARefusalIsTold(t *testing.T) {
	w := start(t, "refused")
	a := w.anchors()
	w.claim.Namespace = "nowhere"
	got := <-w.ensure(a, w.want())
	if fault.ReasonOf(got.err) != fault.PodRefused || fault.IsPermanent(got.err) {
		t.Errorf("%v", got.err)
	}
}

// A Pod that somebody made in the likeness of an anchor is neither used nor deleted, and neither is an anchor of an earlier claim
// of the same name.
func TestWhatIsNoAnchorOfOursIsLeftAlone(t *testing.T) {
	w := start(t, "likeness")
	a := w.anchors()
	ours := w.running(a, w.want())
	likeness := func(change func(*corev1.Pod)) corev1.Pod {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: ours.GenerateName, Labels: ours.Labels, OwnerReferences: ours.OwnerReferences}, Spec: *ours.Spec.DeepCopy()}
		pod.Spec.NodeName = ""
		change(pod)
		made, err := w.admin.CoreV1().Pods(w.namespace).Create(t.Context(), pod, metav1.CreateOptions{})
		w.must(err)
		w.run(*made)
		return *made
	}
	others := []corev1.Pod{
		likeness(func(p *corev1.Pod) { p.OwnerReferences = nil }),
		likeness(func(p *corev1.Pod) { p.Name, p.GenerateName = "mine", "" }),
		likeness(func(p *corev1.Pod) {
			p.Labels = map[string]string{v1alpha1.LabelAnchor: ours.Labels[v1alpha1.LabelAnchor]}
		}),
		likeness(func(p *corev1.Pod) {
			p.OwnerReferences = slices.Clone(p.OwnerReferences)
			p.OwnerReferences[0].UID = "of-an-earlier-claim"
		}),
	}
	w.gone(ours)
	// None of them will do, and a successor is made beside them.
	known := func(p corev1.Pod) bool {
		return slices.ContainsFunc(others, func(o corev1.Pod) bool { return o.UID == p.UID })
	}
	w.eventually("an anchor of ours", func() bool {
		w.settle(a, w.need(node))
		return slices.ContainsFunc(w.pods(), func(p corev1.Pod) bool { return !known(p) })
	})
	w.settle(a, w.need())
	w.clock.Step(anchors.DefaultGrace + time.Second)
	w.eventually("ours goes", func() bool {
		w.settle(a, w.need())
		return !slices.ContainsFunc(w.pods(), func(p corev1.Pod) bool { return !known(p) && p.DeletionTimestamp == nil })
	})
	for _, o := range others {
		if !slices.ContainsFunc(w.pods(), func(p corev1.Pod) bool { return p.UID == o.UID && p.DeletionTimestamp == nil }) {
			t.Errorf("Pod %s of somebody else was deleted", o.Name)
		}
	}
}

// One that runs and has nothing mounted is replaced, and no other one is.
func TestReplaced(t *testing.T) {
	w := start(t, "replaced")
	a := w.anchors()
	first := w.running(a, w.want())
	stranger := anchors.Anchor{Name: first.Name, UID: "another"}
	a.Replace(t.Context(), w.want(), stranger)
	if got := <-w.ensure(a, w.want()); got.err != nil || got.anchor.UID != first.UID {
		t.Fatalf("%+v: the anchor was replaced for another's sake", got)
	}
	a.Replace(t.Context(), w.want(), anchors.Anchor{Name: first.Name, UID: first.UID})
	w.eventually("the anchor is deleted", func() bool {
		all := w.pods()
		return len(all) == 1 && all[0].DeletionTimestamp != nil
	})
	// The next has to wait for its end: with another Pod in between kubelet would go on with what it has.
	answers := w.ensure(a, w.want())
	w.eventually("it is waited", func() bool { return w.clock.HasWaiters() })
	if all := w.pods(); len(all) != 1 {
		t.Errorf("%d anchors", len(all))
	}
	w.clock.Step(anchors.DefaultWaitInTrouble)
	if got := <-answers; fault.ReasonOf(got.err) != fault.AnchorPending || !strings.Contains(got.err.Error(), "anew") {
		t.Errorf("%v", got.err)
	}
	w.gone(first)
	w.eventually("that is known", func() bool {
		return !slices.ContainsFunc(a.Claims(), func(n types.NamespacedName) bool { return n.Namespace == w.namespace })
	})
	if second := w.running(a, w.want()); second.UID == first.UID {
		t.Error("the same anchor")
	}
}

func TestBoundsThatLetNothingThroughAreRefused(t *testing.T) {
	for _, o := range []anchors.Options{{Rate: -1}, {Burst: -1}, {Grace: -time.Second}} {
		o.Client, o.Image = fake.NewClientset(), "i"
		if _, err := anchors.New(o); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
