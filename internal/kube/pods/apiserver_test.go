package pods_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/pods"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/kube"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

// real is a Pods with the rights that config/kubernetes/rbac.yaml gives the controller, and no others.
type real struct {
	t     *testing.T
	admin kubernetes.Interface
	store *kube.Store
	pods  *pods.Pods
	told  chan store.Key
}

const namespace = "pods-test"

var install sync.Once

func startReal(t *testing.T) *real {
	t.Helper()
	server := apiserver.Shared(t)
	r := &real{t: t, admin: kubernetes.NewForConfigOrDie(server.Config()), told: make(chan store.Key, 1000)}
	install.Do(func() {
		manifests.Apply(t, server.Config(), manifests.Objects(t, "config/crd/*.yaml")...)
		for _, name := range []string{namespace, "flux-sandbox"} {
			must(r.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}))
		}
		manifests.Apply(t, server.Config(), manifests.Objects(t, "config/kubernetes/rbac.yaml")...)
		must(r.admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "controller-of-a-test"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "flux-sandbox-controller"},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "controller"}},
		}, metav1.CreateOptions{}))
	})
	var err error
	if r.store, err = kube.Open(t.Context(), server.Config(), kube.Options{Lease: types.NamespacedName{Namespace: "flux-sandbox", Name: "flux-sandbox-controller"}}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if r.pods, err = pods.New(ctx, kubernetes.NewForConfigOrDie(server.As("controller")), nil); err != nil {
		t.Fatal(err)
	}
	followed := make(chan struct{})
	go func() {
		defer close(followed)
		for key := range r.pods.Follow(ctx) {
			r.told <- key
		}
	}()
	t.Cleanup(func() {
		cancel()
		r.pods.Wait()
		<-followed
		r.store.Close()
	})
	return r
}

func (r *real) get(sb *v1alpha1.Sandbox, what string, holds func(*scheduler.Pod) bool) *scheduler.Pod {
	r.t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		if pod, err := r.pods.Get(sb); err == nil && holds(pod) {
			return pod
		}
		select {
		case <-r.told:
		case <-deadline:
			r.t.Fatalf("waited in vain: %s", what)
		}
	}
}

func (r *real) sandbox(name string, alter func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	r.t.Helper()
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	alter(sb)
	sb, err := r.store.Sandboxes().Create(r.t.Context(), sb)
	if err != nil {
		r.t.Fatal(err)
	}
	return sb
}

func template(sb *v1alpha1.Sandbox) {
	sb.Spec.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "busybox"}}}}
}

// TestPodsOnARealAPIServer plays kubelet by hand, as there is none.
func TestPodsOnARealAPIServer(t *testing.T) {
	r := startReal(t)
	ofNamespace := r.admin.CoreV1().Pods(namespace)
	sb := r.sandbox("a", template)
	if err := r.pods.Create(t.Context(), sb); err != nil {
		t.Fatal(err)
	}
	pod := r.get(sb, "made", there)
	if pod.Phase != corev1.PodPending || pod.Container != "main" || pod.Node != "" {
		t.Errorf("%+v", pod)
	}
	if err := ofNamespace.Bind(t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Target: corev1.ObjectReference{Kind: "Node", Name: "n1"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	r.get(sb, "bound", func(p *scheduler.Pod) bool { return p != nil && p.Node == "n1" })
	live, err := ofNamespace.Get(t.Context(), "a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	live.Status.Phase = corev1.PodRunning
	live.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", ContainerID: "containerd://abc", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	if _, err := ofNamespace.UpdateStatus(t.Context(), live, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if pod = r.get(sb, "runs", func(p *scheduler.Pod) bool { return p != nil && p.Running }); pod.ContainerID != "abc" || pod.Phase != corev1.PodRunning {
		t.Errorf("%+v", pod)
	}

	// Another sandbox adopts it, and one that is not there yet. The UID is filled in as the scheduler does it.
	adopting := r.sandbox("b", func(sb *v1alpha1.Sandbox) { sb.Spec.PodRef = &v1alpha1.PodReference{Name: "a"} })
	later := r.sandbox("c", func(sb *v1alpha1.Sandbox) { sb.Spec.PodRef = &v1alpha1.PodReference{Name: "later"} })
	r.get(later, "not there", absent)
	if got := r.get(adopting, "adopted", there); got.UID != pod.UID || !got.Running {
		t.Errorf("%+v", got)
	}
	if adopting, err = r.store.Sandboxes().UpdateSpec(t.Context(), store.KeyOf(adopting), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
		o.Spec.PodRef.UID = pod.UID
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := r.pods.Delete(t.Context(), adopting, pod.UID); !errdefs.IsPermissionDenied(err) {
		t.Errorf("the Pod of a podRef: %v", err)
	}
	plain := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "later"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Image: "busybox"}}}}
	if _, err := ofNamespace.Create(t.Context(), plain, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	r.get(later, "there", there)

	// A sandbox whose name a Pod of somebody else has.
	taken := r.sandbox("later", template)
	r.get(taken, "none of ours", absent)
	if err := r.pods.Create(t.Context(), taken); fault.ReasonOf(err) != fault.PodNameTaken {
		t.Errorf("a taken name: %v", err)
	}
	// One whose Pod the API server does not take.
	refused := r.sandbox("d", func(sb *v1alpha1.Sandbox) {
		template(sb)
		sb.Spec.Template.Spec.Containers[0].ImagePullPolicy = "Sometimes"
	})
	if err := r.pods.Create(t.Context(), refused); fault.ReasonOf(err) != fault.PodRefused {
		t.Errorf("a Pod that is not valid: %v", err)
	}

	// Deletion is by UID, and takes its time.
	if err := r.pods.Delete(t.Context(), sb, pod.UID); err != nil {
		t.Fatal(err)
	}
	r.get(sb, "deleting", func(p *scheduler.Pod) bool { return p != nil && p.Deleting })
	r.get(adopting, "deleting", func(p *scheduler.Pod) bool { return p != nil && p.Deleting })
	if err := r.pods.Create(t.Context(), sb); !errdefs.IsUnavailable(err) {
		t.Errorf("while the former is going: %v", err)
	}
	if err := ofNamespace.Delete(t.Context(), "a", metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}); err != nil {
		t.Fatal(err)
	}
	r.get(sb, "gone", absent)
	r.get(adopting, "gone", absent)
	if err := r.pods.Create(t.Context(), sb); err != nil {
		t.Fatal(err)
	}
	second := r.get(sb, "made again", there)
	if err := r.pods.Delete(t.Context(), sb, pod.UID); err != nil {
		t.Errorf("the former's UID: %v", err)
	}
	if got, err := r.pods.Read(t.Context(), sb); err != nil || got == nil || got.UID != second.UID || got.Deleting {
		t.Errorf("%+v, %v", got, err)
	}
	owner := metav1.GetControllerOf(must(ofNamespace.Get(t.Context(), "a", metav1.GetOptions{})))
	if owner == nil || owner.UID != sb.UID || !ptr.Deref(owner.BlockOwnerDeletion, false) {
		t.Errorf("owner %+v", owner)
	}
}

// TestPodsAreUpdatedInPlace plays kubelet by hand.
func TestPodsAreUpdatedInPlace(t *testing.T) {
	r := startReal(t)
	ofNamespace := r.admin.CoreV1().Pods(namespace)
	list := func(cpu, memory string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
	}
	sb := r.sandbox("u", func(sb *v1alpha1.Sandbox) {
		template(sb)
		c := &sb.Spec.Template.Spec.Containers[0]
		c.Resources.Limits = list("1", "64Mi")
		sb.Spec.Template.Spec.Containers = append(sb.Spec.Template.Spec.Containers, corev1.Container{Name: "side", Image: "busybox"})
	})
	if err := r.pods.Create(t.Context(), sb); err != nil {
		t.Fatal(err)
	}
	pod := r.get(sb, "made", there)
	if pod.Outdated || pod.Updated || pod.Updating != "" {
		t.Errorf("%+v", pod)
	}
	kubelet := func(ids ...string) {
		live := must(ofNamespace.Get(t.Context(), "u", metav1.GetOptions{}))
		live.Status.Phase, live.Status.ObservedGeneration, live.Status.ContainerStatuses = corev1.PodRunning, live.Generation, nil
		for i, name := range []string{"main", "side"} {
			live.Status.ContainerStatuses = append(live.Status.ContainerStatuses, corev1.ContainerStatus{Name: name, ContainerID: "containerd://" + ids[i], Resources: &corev1.ResourceRequirements{},
				State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}})
		}
		must(ofNamespace.UpdateStatus(t.Context(), live, metav1.UpdateOptions{}))
	}
	if err := ofNamespace.Bind(t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "u"}, Target: corev1.ObjectReference{Kind: "Node", Name: "n1"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// The API server asks the node whether it can.
	node := must(r.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, metav1.CreateOptions{}))
	node.Status.Capacity, node.Status.Allocatable = list("8", "8Gi"), list("8", "8Gi")
	must(r.admin.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{}))
	kubelet("m1", "s1")
	r.get(sb, "runs", func(p *scheduler.Pod) bool { return p != nil && p.Running })
	change := func(alter func(*corev1.Container)) {
		t.Helper()
		var err error
		if sb, err = r.store.Sandboxes().UpdateSpec(t.Context(), store.KeyOf(sb), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
			alter(&o.Spec.Template.Spec.Containers[0])
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if !r.get(sb, "there", there).Outdated {
			t.Error("the Pod is up to date with a template that was changed")
		}
	}

	change(func(c *corev1.Container) { c.Image, c.Resources.Limits = "alpine", list("2", "128Mi") })
	if err := r.pods.Update(t.Context(), sb, pod.UID); err != nil {
		t.Fatal(err)
	}
	r.get(sb, "kubelet has not seen it", func(p *scheduler.Pod) bool { return p.Updated && p.Updating == "NotSeen" && !p.Outdated })
	live := must(ofNamespace.Get(t.Context(), "u", metav1.GetOptions{}))
	main := live.Spec.Containers[0]
	if live.UID != pod.UID || main.Image != "alpine" || live.Spec.Containers[1].Image != "busybox" || main.Resources.Limits.Cpu().String() != "2" ||
		main.Resources.Requests.Cpu().String() != "2" || main.Resources.Limits.Memory().String() != "128Mi" {
		t.Errorf("%+v", live.Spec.Containers)
	}
	kubelet("m1", "s1")
	r.get(sb, "the old container runs", func(p *scheduler.Pod) bool { return p.Updating == "Restarting" })
	kubelet("m2", "s1")
	r.get(sb, "it is done", func(p *scheduler.Pod) bool { return p.Updated && p.Updating == "" && p.ContainerID == "m2" })
	if err := r.pods.Update(t.Context(), sb, pod.UID); err != nil {
		t.Errorf("again: %v", err)
	}

	// Resources alone restart nothing.
	change(func(c *corev1.Container) { c.Resources.Limits = list("1", "128Mi") })
	if err := r.pods.Update(t.Context(), sb, pod.UID); err != nil {
		t.Fatal(err)
	}
	kubelet("m2", "s1")
	r.get(sb, "it is done", func(p *scheduler.Pod) bool { return p.Updated && p.Updating == "" && !p.Outdated })

	// What cannot be is refused in the API server's words, and goes on being outdated.
	change(func(c *corev1.Container) { c.Resources.Requests = list("2", "128Mi") })
	if err := r.pods.Update(t.Context(), sb, pod.UID); fault.ReasonOf(err) != fault.PodRefused || !strings.Contains(err.Error(), "must be less than or equal to cpu limit") {
		t.Errorf("more requested than the limit: %v", err)
	}
	if !r.get(sb, "there", there).Outdated {
		t.Error("it is up to date without having it")
	}
	// The Pod is taken away at once when its node is out of service, and not before. Another Pod's UID takes nothing away.
	if err := r.pods.Kill(t.Context(), sb, "another"); err != nil {
		t.Errorf("another Pod: %v", err)
	}
	if err := r.pods.Kill(t.Context(), sb, pod.UID); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "node n1 is there") {
		t.Errorf("the Pod of a node that runs: %v", err)
	}
	if live := must(ofNamespace.Get(t.Context(), "u", metav1.GetOptions{})); live.DeletionTimestamp != nil {
		t.Error("the Pod of a node that runs was deleted")
	}
	node = must(r.admin.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{}))
	node.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Effect: corev1.TaintEffectNoExecute}}
	must(r.admin.CoreV1().Nodes().Update(t.Context(), node, metav1.UpdateOptions{}))
	if err := r.pods.Kill(t.Context(), sb, pod.UID); err != nil {
		t.Fatal(err)
	}
	r.get(sb, "gone", absent)
	if err := r.pods.Update(t.Context(), sb, "another"); err != nil {
		t.Errorf("another Pod: %v", err)
	}
	foreign := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "f"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "busybox"}}}}
	foreign = must(ofNamespace.Create(t.Context(), foreign, metav1.CreateOptions{}))
	if err := r.pods.Update(t.Context(), r.sandbox("f", template), foreign.UID); !errdefs.IsPermissionDenied(err) {
		t.Errorf("a Pod that is somebody else's: %v", err)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
