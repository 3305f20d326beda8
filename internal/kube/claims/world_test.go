package claims_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/claims"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/reconcile"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/sets"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/kube"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

// driver is the CSI driver of the tests' PersistentVolumes.
const driver = "csi.example.com"

// world is an API server with both controllers, which have the rights of config/kubernetes/rbac.yaml and no others, and
// with somebody who plays scheduler and nodes: sandboxes come to run, and their volumes are mounted.
type world struct {
	*testing.T
	namespace string
	admin     kubernetes.Interface
	objects   dynamic.Interface
	// theirs and pools are as another process sees them.
	theirs *kube.Store
	pools  *kube.Pools
	// clock runs, and can be put forward.
	clock *clocktesting.FakeClock
	nodes nodes
	// expected counts the sandboxes whose volumes are to be held, less those that did not get them.
	expected atomic.Int64
	events   *events
	logged   testenv.Log
	// metrics are those of the leader that was started last.
	metrics *prometheus.Registry

	mu sync.Mutex // guards what is below
	// held sandboxes do not come to run; volumes of failing PersistentVolumes cannot be mounted.
	held    func(*v1alpha1.Sandbox) bool
	failing map[string]string
	// late is what the controllers are told when they ask whether they lead still; asked counts how often they were told that.
	late  error
	asked int
	// tenant is that of the Namespace.
	tenant string
}

type nodes map[string]map[string]string

func (n nodes) Labels(node string) (map[string]string, bool) { l, ok := n[node]; return l, ok }

// keeper counts.
type keeper struct{ *world }

func (k keeper) Expect(context.Context, *v1alpha1.Sandbox, []v1alpha1.DynamicVolume) {
	k.expected.Add(1)
}
func (k keeper) Forgo(*v1alpha1.Sandbox) { k.expected.Add(-1) }

// events keeps what was told, "kind name reason: message".
type events struct {
	mu  sync.Mutex
	all []string
}

func (e *events) About(o runtime.Object, _, reason, message string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, fmt.Sprintf("%s %s: %s", o.(metav1.Object).GetName(), reason, message))
}

func (e *events) count(has string) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, one := range e.all {
		if strings.Contains(one, has) {
			n++
		}
	}
	return n
}

var install sync.Once

func newWorld(t *testing.T) *world {
	t.Helper()
	server := apiserver.Shared(t)
	admin := server.Config()
	w := &world{T: t, admin: kubernetes.NewForConfigOrDie(admin), objects: dynamic.NewForConfigOrDie(admin), clock: clocktesting.NewFakeClock(time.Now()),
		nodes: nodes{"n1": {corev1.LabelHostname: "n1"}}, events: &events{}, held: func(*v1alpha1.Sandbox) bool { return false }, failing: map[string]string{}}
	install.Do(func() {
		manifests.Apply(t, admin, manifests.Objects(t, "config/crd/*.yaml")...)
		must(w.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "flux-sandbox"}}, metav1.CreateOptions{}))
		manifests.Apply(t, admin, manifests.Objects(t, "config/kubernetes/rbac.yaml")...)
		must(w.admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "controller-of-a-test"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "flux-sandbox-controller"},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "controller"}},
		}, metav1.CreateOptions{}))
	})
	ns := must(w.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "pools-"}}, metav1.CreateOptions{}))
	w.namespace = ns.Name
	w.theirs, w.pools = w.open(admin)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { w.play(ctx) })
	running.Go(func() {
		const tick = 20 * time.Millisecond
		ticks := time.NewTicker(tick)
		defer ticks.Stop()
		for {
			select {
			case <-ticks.C:
				w.clock.Step(tick)
			case <-ctx.Done():
				return
			}
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return w
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// open opens the store and the pools, as somebody.
func (w *world) open(config *rest.Config) (*kube.Store, *kube.Pools) {
	w.Helper()
	s := must(kube.Open(w.Context(), config, kube.Options{Lease: types.NamespacedName{Namespace: "flux-sandbox", Name: "any"}}))
	p := must(kube.OpenPools(w.Context(), config, nil))
	w.Cleanup(func() { s.Close(); p.Close() })
	return s, p
}

// start runs both controllers as a new leader does, until stop.
func (w *world) start(way func(http *rest.Config)) (stop func()) {
	w.Helper()
	config := apiserver.Shared(w.T).As("controller")
	if way != nil {
		way(config)
	}
	ctx, cancel := context.WithCancel(w.Context())
	s := must(kube.Open(w.Context(), config, kube.Options{}))
	p := must(kube.OpenPools(w.Context(), config, nil))
	v := must(volumes.New(kubernetes.NewForConfigOrDie(config), volumes.Options{DirectDrivers: []string{driver}}))
	out := io.Writer(&w.logged)
	if testing.Verbose() {
		out = io.MultiWriter(out, os.Stderr)
	}
	log := slog.New(slog.NewTextHandler(out, nil))
	fresh := reconcile.NewFresh(func(ctx context.Context) error {
		if err := p.Refresh(ctx); err != nil {
			return err
		}
		return s.Refresh(ctx)
	})
	w.metrics = prometheus.NewRegistry()
	ofSets := sets.New(sets.Options{Sandboxes: s.Sandboxes(), Sets: p.Sets(), Tenant: w.tenantOf, Fresh: fresh, Events: w.events, Clock: w.clock, Leads: w.leads, Log: log, Metrics: w.metrics})
	ofClaims := claims.New(claims.Options{Sandboxes: s.Sandboxes(), Sets: p.Sets(), Claims: p.Claims(), Volumes: v, Keeper: keeper{w}, Nodes: w.nodes,
		Tenant: w.tenantOf, Fresh: fresh, Events: w.events, Clock: w.clock, Log: log, Metrics: w.metrics})
	var running sync.WaitGroup
	running.Go(func() { v.Run(ctx) })
	<-v.Synced()
	running.Go(func() { ofSets.Run(ctx) })
	running.Go(func() { ofClaims.Run(ctx) })
	stop = sync.OnceFunc(func() { cancel(); running.Wait(); s.Close(); p.Close() })
	w.Cleanup(stop)
	return stop
}

func (w *world) tenantOf(context.Context, string) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tenant, nil
}

func (w *world) leads(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.late != nil {
		w.asked++
	}
	return w.late
}

// play is scheduler and nodes.
func (w *world) play(ctx context.Context) {
	for e := range w.theirs.Sandboxes().Follow(ctx) {
		if sb := e.Object; e.Type == store.Changed && sb.Namespace == w.namespace && sb.DeletionTimestamp == nil {
			w.run(ctx, sb)
		}
	}
}

// replay has everybody looked at again, after what is held or fails has changed.
func (w *world) replay() {
	w.Helper()
	for _, sb := range w.sandboxes() {
		w.run(w.Context(), sb)
	}
}

func (w *world) run(ctx context.Context, sb *v1alpha1.Sandbox) {
	_, err := w.theirs.Sandboxes().UpdateStatus(ctx, store.KeyOf(sb), store.Preconditions{UID: sb.UID}, func(o *v1alpha1.Sandbox) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.held(o) || sets.Over(o) {
			return nil
		}
		st := &o.Status
		st.Phase, st.Node = v1alpha1.SandboxRunning, "n1"
		if n := o.Annotations["test/node"]; n != "" {
			st.Node = n
		}
		st.ObservedGeneration = o.Generation
		ready := metav1.ConditionTrue
		st.Volumes = nil
		for _, v := range o.Spec.DynamicVolumes {
			row := v1alpha1.VolumeStatus{Kind: v1alpha1.VolumeKindDynamic, VolumeType: v.VolumeType, Source: v.Source, Target: v.Target, EntryHash: volume.EntryHash(&v),
				Phase: v1alpha1.VolumeMounted, Since: metav1.NewTime(o.CreationTimestamp.Time)}
			if why := w.failing[v.Source]; why != "" {
				row.Phase, row.Reason, row.Message = v1alpha1.VolumeFailed, "TARGET_NOT_EMPTY", why
				ready = metav1.ConditionFalse
			}
			st.Volumes = append(st.Volumes, row)
		}
		meta.SetStatusCondition(&st.Conditions, metav1.Condition{Type: v1alpha1.ConditionReady, Status: ready, Reason: "Played", LastTransitionTime: metav1.NewTime(o.CreationTimestamp.Time)})
		return nil
	})
	if err != nil && !errdefs.IsNotFound(err) && ctx.Err() == nil {
		w.Errorf("play: %v", err)
	}
}

func (w *world) set(name string, replicas int32, alter func(*agentsv1alpha1.SandboxSet)) *agentsv1alpha1.SandboxSet {
	w.Helper()
	set := &agentsv1alpha1.SandboxSet{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}, Spec: agentsv1alpha1.SandboxSetSpec{
		Replicas: replicas, Runtimes: []agentsv1alpha1.Runtime{{Name: agentsv1alpha1.RuntimeCSI}},
		Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "busybox"}}}},
	}}
	if alter != nil {
		alter(set)
	}
	return must(w.pools.Sets().Create(w.Context(), set))
}

// change changes a set's spec.
func (w *world) change(name string, change func(*agentsv1alpha1.SandboxSetSpec)) {
	w.Helper()
	must(w.pools.Sets().UpdateSpec(w.Context(), w.key(name), store.Preconditions{}, func(o *agentsv1alpha1.SandboxSet) error {
		change(&o.Spec)
		return nil
	}))
}

func (w *world) key(name string) store.Key { return store.Key{Namespace: w.namespace, Name: name} }

func (w *world) claim(name, set string, alter func(*agentsv1alpha1.SandboxClaimSpec)) *agentsv1alpha1.SandboxClaim {
	w.Helper()
	c := &agentsv1alpha1.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}, Spec: agentsv1alpha1.SandboxClaimSpec{TemplateName: set}}
	if alter != nil {
		alter(&c.Spec)
	}
	return must(w.pools.Claims().Create(w.Context(), c))
}

func mounts(m ...agentsv1alpha1.DynamicVolumeMount) func(*agentsv1alpha1.SandboxClaimSpec) {
	return func(s *agentsv1alpha1.SandboxClaimSpec) { s.DynamicVolumesMount = m }
}

// pv makes a PersistentVolume that goes with the test.
func (w *world) pv(name string, alter func(*corev1.PersistentVolume)) string {
	w.Helper()
	name = w.namespace + "-" + name
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: name}},
	}}
	if alter != nil {
		alter(pv)
	}
	must(w.admin.CoreV1().PersistentVolumes().Create(w.Context(), pv, metav1.CreateOptions{}))
	w.Cleanup(func() {
		_ = w.admin.CoreV1().PersistentVolumes().Delete(context.Background(), name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))})
	})
	return name
}

// sandboxes are all of the test, as they are at this moment.
func (w *world) sandboxes() []*v1alpha1.Sandbox {
	w.Helper()
	list := must(w.objects.Resource(v1alpha1.GroupVersion.WithResource("sandboxes")).Namespace(w.namespace).List(w.Context(), metav1.ListOptions{}))
	var all []*v1alpha1.Sandbox
	for _, o := range list.Items {
		sb := &v1alpha1.Sandbox{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, sb); err != nil {
			w.Fatal(err)
		}
		all = append(all, sb)
	}
	return all
}

// pool are the sandboxes of a set that nobody has claimed, those of a claim its own.
func (w *world) pool(set *agentsv1alpha1.SandboxSet) []*v1alpha1.Sandbox { return w.of(set) }

func (w *world) of(owner metav1.Object) []*v1alpha1.Sandbox {
	w.Helper()
	return slices.DeleteFunc(w.sandboxes(), func(sb *v1alpha1.Sandbox) bool {
		return !metav1.IsControlledBy(sb, owner) || sb.DeletionTimestamp != nil
	})
}

func (w *world) eventually(what string, holds func() bool) {
	w.Helper()
	testenv.Eventually(w.T, time.Minute, what, holds)
}

func (w *world) setStatus(name string) agentsv1alpha1.SandboxSetStatus {
	w.Helper()
	return must(w.pools.Sets().Get(w.Context(), w.key(name))).Status
}

func (w *world) claimStatus(name string) agentsv1alpha1.SandboxClaimStatus {
	w.Helper()
	return must(w.pools.Claims().Get(w.Context(), w.key(name))).Status
}

// ready waits until a set is whole.
func (w *world) ready(set *agentsv1alpha1.SandboxSet) {
	w.Helper()
	w.eventually("set "+set.Name+" is ready", func() bool {
		s := must(w.pools.Sets().Get(w.Context(), w.key(set.Name)))
		return s.Status.ObservedGeneration == s.Generation && s.Status.AvailableReplicas == s.Spec.Replicas && s.Status.Replicas == s.Spec.Replicas &&
			s.Status.UpdatedAvailableReplicas == s.Spec.Replicas && len(w.pool(set)) == int(s.Spec.Replicas)
	})
}

// phase waits until a claim is in a phase, and returns its status.
func (w *world) phase(name string, phase agentsv1alpha1.SandboxClaimPhase) agentsv1alpha1.SandboxClaimStatus {
	w.Helper()
	if !testenv.Poll(time.Minute, func() bool { return w.claimStatus(name).Phase == phase }) {
		w.Fatalf("claim %s does not become %s: %+v", name, phase, w.claimStatus(name))
	}
	return w.claimStatus(name)
}

// reason waits until the condition Claimed has a reason, and returns its message.
func (w *world) reason(name, reason string) string {
	w.Helper()
	message := ""
	if !testenv.Poll(time.Minute, func() bool {
		c := meta.FindStatusCondition(w.claimStatus(name).Conditions, agentsv1alpha1.ClaimClaimed)
		if c != nil && c.Reason == reason {
			message = c.Message
			return true
		}
		return false
	}) {
		w.Fatalf("claim %s does not say %s: %+v", name, reason, w.claimStatus(name))
	}
	return message
}

func (w *world) hold(held func(*v1alpha1.Sandbox) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.held = held
}

func (w *world) delete(name string) {
	w.Helper()
	if err := w.theirs.Sandboxes().Delete(w.Context(), w.key(name), store.Preconditions{}); err != nil && !apierrors.IsNotFound(err) {
		w.Fatal(err)
	}
}
