package claimtemplates_test

import (
	"context"
	"io"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/claimtemplates"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/events"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/pods"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/kube"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

// world is a scheduler on a real API server, with the rights that config/kubernetes/rbac.yaml gives the controller and no
// others. The test plays kube-scheduler, kubelet and the PersistentVolume controller, in a Namespace of its own.
type world struct {
	t         *testing.T
	admin     kubernetes.Interface
	store     *kube.Store
	namespace string
	nodes     *nodes
}

// nodes are agents of which none ever answers, and nodes that die.
type nodes struct {
	events chan scheduler.AgentEvent
	dead   sync.Map
}

func (n *nodes) Dead(node string) bool { _, dead := n.dead.Load(node); return dead }

func (n *nodes) Follow(ctx context.Context) iter.Seq[scheduler.AgentEvent] {
	return func(yield func(scheduler.AgentEvent) bool) {
		if !yield(scheduler.AgentEvent{Type: scheduler.AgentsSynced}) {
			return
		}
		for {
			select {
			case <-ctx.Done():
				return
			case e := <-n.events:
				if !yield(e) {
					return
				}
			}
		}
	}
}

var install sync.Once

func open(t *testing.T) *world {
	t.Helper()
	server := apiserver.Shared(t)
	w := &world{t: t, admin: kubernetes.NewForConfigOrDie(server.Config()), nodes: &nodes{events: make(chan scheduler.AgentEvent, 10)}}
	install.Do(func() {
		manifests.Apply(t, server.Config(), manifests.Objects(t, "config/crd/*.yaml")...)
		must(w.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "flux-sandbox"}}, metav1.CreateOptions{}))
		manifests.Apply(t, server.Config(), manifests.Objects(t, "config/kubernetes/rbac.yaml")...)
		must(w.admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "controller-of-a-test"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "flux-sandbox-controller"},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "controller"}},
		}, metav1.CreateOptions{}))
	})
	w.namespace = must(w.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "claims-"}}, metav1.CreateOptions{})).Name
	var err error
	if w.store, err = kube.Open(t.Context(), server.Config(), kube.Options{Lease: types.NamespacedName{Namespace: "flux-sandbox", Name: "flux-sandbox-controller"}}); err != nil {
		t.Fatal(err)
	}
	client := kubernetes.NewForConfigOrDie(server.As("controller"))
	recorder := must(events.NewRecorder(client, "test"))
	ctx, cancel := context.WithCancel(context.Background())
	podsOf, claims := must(pods.New(ctx, client, nil)), must(claimtemplates.New(ctx, client, nil))
	s := must(scheduler.New(scheduler.Config{Store: w.store, Agents: w.nodes, Epoch: 1, LeaseUID: "test", Events: recorder, Pods: podsOf, Claims: claims,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}))
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		podsOf.Wait()
		claims.Wait()
		recorder.Close()
		w.store.Close()
	})
	return w
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (w *world) eventually(what string, holds func() bool) {
	w.t.Helper()
	testenv.Eventually(w.t, time.Minute, what, holds)
}

// template is a claim template of 1Gi.
func template(name string) corev1.PersistentVolumeClaim {
	return corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"tier": "gold", v1alpha1.LabelSandbox: "somebody"}, Annotations: map[string]string{"note": "kept"}},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: ptr.To("standard"),
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}},
	}
}

// create makes a sandbox whose container mounts a claim at /data.
func (w *world) create(name string, alter func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	w.t.Helper()
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}}
	sb.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "main", Image: "busybox", VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}}},
		Volumes: []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
	}}
	sb.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{template("data")}
	if alter != nil {
		alter(sb)
	}
	return must(w.store.Sandboxes().Create(w.t.Context(), sb))
}

func (w *world) key(name string) store.Key { return store.Key{Namespace: w.namespace, Name: name} }

// sandbox is a sandbox as it is now, nil when there is none.
func (w *world) sandbox(name string) *v1alpha1.Sandbox {
	sb, err := w.store.Sandboxes().Get(w.t.Context(), w.key(name))
	if err != nil {
		return nil
	}
	return sb
}

func (w *world) change(name string, alter func(*v1alpha1.Sandbox)) {
	w.t.Helper()
	must(w.store.Sandboxes().UpdateSpec(w.t.Context(), w.key(name), store.Preconditions{}, func(sb *v1alpha1.Sandbox) error { alter(sb); return nil }))
}

func (w *world) phase(name string, phase v1alpha1.SandboxPhase) {
	w.t.Helper()
	w.eventually(name+" is "+string(phase), func() bool { sb := w.sandbox(name); return sb != nil && sb.Status.Phase == phase })
}

// bound waits until the condition VolumeClaimsBound has a reason.
func (w *world) bound(name, reason string) *metav1.Condition {
	w.t.Helper()
	var c *metav1.Condition
	w.eventually("VolumeClaimsBound of "+name+" is "+reason, func() bool {
		c = meta.FindStatusCondition(w.sandbox(name).Status.Conditions, v1alpha1.ConditionVolumeClaimsBound)
		return c != nil && c.Reason == reason
	})
	return c
}

// happened waits until there is an Event of a sandbox.
func (w *world) happened(sandbox, reason string) {
	w.t.Helper()
	w.eventually("Event "+reason+" of "+sandbox, func() bool {
		list := must(w.admin.CoreV1().Events(w.namespace).List(w.t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + sandbox}))
		return slices.ContainsFunc(list.Items, func(e corev1.Event) bool { return e.Reason == reason })
	})
}

// claim is a claim as it is now, nil when there is none.
func (w *world) claim(name string) *corev1.PersistentVolumeClaim {
	c, err := w.admin.CoreV1().PersistentVolumeClaims(w.namespace).Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	return c
}

// bind is what the PersistentVolume controller does.
func (w *world) bind(name string) types.UID {
	w.t.Helper()
	w.eventually("claim "+name, func() bool { return w.claim(name) != nil })
	c := w.claim(name)
	c.Status.Phase = corev1.ClaimBound
	must(w.admin.CoreV1().PersistentVolumeClaims(w.namespace).UpdateStatus(w.t.Context(), c, metav1.UpdateOptions{}))
	return c.UID
}

// pod waits for a Pod other than the given one.
func (w *world) pod(name string, other types.UID) *corev1.Pod {
	w.t.Helper()
	var pod *corev1.Pod
	w.eventually("Pod "+name, func() bool {
		var err error
		pod, err = w.admin.CoreV1().Pods(w.namespace).Get(w.t.Context(), name, metav1.GetOptions{})
		return err == nil && pod.UID != other
	})
	return pod
}

// run is what kube-scheduler and kubelet do with a new Pod.
func (w *world) run(name, node string, other types.UID) *corev1.Pod {
	w.t.Helper()
	pod := w.pod(name, other)
	if err := w.admin.CoreV1().Pods(w.namespace).Bind(w.t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: name}, Target: corev1.ObjectReference{Kind: "Node", Name: node}}, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	w.status(name, func(s *corev1.PodStatus) {
		s.Phase = corev1.PodRunning
		s.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", ContainerID: "containerd://" + string(pod.UID), State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	})
	w.eventually(name+" runs", func() bool {
		st := w.sandbox(name).Status
		return st.Phase == v1alpha1.SandboxRunning && st.ContainerID == string(pod.UID) && st.Node == node
	})
	return pod
}

func (w *world) status(name string, alter func(*corev1.PodStatus)) {
	w.t.Helper()
	pod := must(w.admin.CoreV1().Pods(w.namespace).Get(w.t.Context(), name, metav1.GetOptions{}))
	alter(&pod.Status)
	must(w.admin.CoreV1().Pods(w.namespace).UpdateStatus(w.t.Context(), pod, metav1.UpdateOptions{}))
}

// end is the end of a Pod that is being deleted, as kubelet confirms it; of any Pod, as if by force.
func (w *world) end(name string) {
	w.t.Helper()
	err := w.admin.CoreV1().Pods(w.namespace).Delete(w.t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))})
	if err != nil && !apierrors.IsNotFound(err) {
		w.t.Fatal(err)
	}
}
