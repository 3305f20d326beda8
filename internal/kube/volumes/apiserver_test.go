package volumes_test

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

// real is an API server with a namespace of the test's own.
type real struct {
	t         *testing.T
	server    *apiserver.Server
	admin     kubernetes.Interface
	namespace string
	// patches counts the controller's.
	patches atomic.Int64
}

var (
	setUp sync.Once
	// started counts the starts by namespace: the API server goes on when the tests are run again.
	started = map[string]int{}
)

func startReal(t *testing.T, namespace string) *real {
	t.Helper()
	if started[namespace]++; started[namespace] > 1 {
		namespace += "-" + strconv.Itoa(started[namespace])
	}
	r := &real{t: t, server: apiserver.Shared(t), namespace: namespace}
	r.admin = kubernetes.NewForConfigOrDie(r.server.Config())
	r.namespaced(namespace)
	setUp.Do(func() {
		r.namespaced("flux-sandbox")
		manifests.Apply(t, r.server.Config(), manifests.Objects(t, "config/kubernetes/rbac.yaml")...)
		_, err := r.admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "controller-of-a-test"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "flux-sandbox-controller"},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "controller"}},
		}, metav1.CreateOptions{})
		r.must(err)
	})
	return r
}

func (r *real) namespaced(name string) {
	r.t.Helper()
	_, err := r.admin.CoreV1().Namespaces().Create(r.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	r.must(err)
}

func (r *real) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(q *http.Request) (*http.Response, error) { return f(q) }

// volumes are Volumes with the rights of the controller, and how to end what they hear.
func (r *real) volumes() (*volumes.Volumes, func()) {
	r.t.Helper()
	config := r.server.As("controller")
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(q *http.Request) (*http.Response, error) {
			if q.Method == http.MethodPatch {
				r.patches.Add(1)
			}
			return next.RoundTrip(q)
		})
	})
	v, err := volumes.New(kubernetes.NewForConfigOrDie(config), volumes.Options{})
	r.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		v.Run(ctx)
	}()
	end := func() {
		cancel()
		<-ended
	}
	r.t.Cleanup(end)
	<-v.Synced()
	return v, end
}

// claim makes a claim with a finalizer of somebody else, bound to a volume as its controller does.
func (r *real) claim(name string) (scheduler.VolumeRef, scheduler.Wish) {
	r.t.Helper()
	pv := r.namespace + "-" + name
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	claims := r.admin.CoreV1().PersistentVolumeClaims(r.namespace)
	c, err := claims.Create(r.t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{"example.com/other"}},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: modes, VolumeName: pv,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}},
	}, metav1.CreateOptions{})
	r.must(err)
	c.Status.Phase = corev1.ClaimBound
	_, err = claims.UpdateStatus(r.t.Context(), c, metav1.UpdateOptions{})
	r.must(err)
	r.volume(pv, &corev1.ObjectReference{Namespace: r.namespace, Name: name, UID: c.UID})
	return scheduler.VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: r.namespace, Source: name}, scheduler.Wish{
		Sandbox:     &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "s"}},
		Volume:      &v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: name, Mode: v1alpha1.VolumeModeReadWrite},
		TopologyKey: topologyKey,
	}
}

func (r *real) volume(name string, claim *corev1.ObjectReference) scheduler.VolumeRef {
	r.t.Helper()
	_, err := r.admin.CoreV1().PersistentVolumes().Create(r.t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/mnt/" + name}},
			AccessModes:            []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, ClaimRef: claim,
			Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		},
	}, metav1.CreateOptions{})
	r.must(err)
	return scheduler.VolumeRef{Type: v1alpha1.VolumeTypePV, Source: name}
}

// meta is an object as the API server has it, nil when it is gone.
func (r *real) meta(ref scheduler.VolumeRef) metav1.Object {
	r.t.Helper()
	var o metav1.Object
	var err error
	if ref.Type == v1alpha1.VolumeTypePVC {
		o, err = r.admin.CoreV1().PersistentVolumeClaims(ref.Namespace).Get(r.t.Context(), ref.Source, metav1.GetOptions{})
	} else {
		o, err = r.admin.CoreV1().PersistentVolumes().Get(r.t.Context(), ref.Source, metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) {
		return nil
	}
	r.must(err)
	return o
}

func (r *real) finalizers(ref scheduler.VolumeRef) []string { return r.meta(ref).GetFinalizers() }

func (r *real) delete(ref scheduler.VolumeRef) {
	r.t.Helper()
	if ref.Type == v1alpha1.VolumeTypePVC {
		r.must(r.admin.CoreV1().PersistentVolumeClaims(ref.Namespace).Delete(r.t.Context(), ref.Source, metav1.DeleteOptions{}))
		return
	}
	r.must(r.admin.CoreV1().PersistentVolumes().Delete(r.t.Context(), ref.Source, metav1.DeleteOptions{}))
}

// others takes all finalizers but ours away, as their owners do (Kubernetes' own protection among them).
func (r *real) others(ref scheduler.VolumeRef) {
	r.t.Helper()
	var left []string
	if slices.Contains(r.finalizers(ref), v1alpha1.FinalizerInUse) {
		left = []string{`"` + v1alpha1.FinalizerInUse + `"`}
	}
	data := []byte(`{"metadata":{"finalizers":[` + strings.Join(left, "") + `]}}`)
	var err error
	if ref.Type == v1alpha1.VolumeTypePVC {
		_, err = r.admin.CoreV1().PersistentVolumeClaims(ref.Namespace).Patch(r.t.Context(), ref.Source, types.MergePatchType, data, metav1.PatchOptions{})
	} else {
		_, err = r.admin.CoreV1().PersistentVolumes().Patch(r.t.Context(), ref.Source, types.MergePatchType, data, metav1.PatchOptions{})
	}
	r.must(err)
}

func inUse() bool  { return false }
func nobody() bool { return true }

// A claim that is deleted while it is in use stays, takes no new user, and goes after the last.
func TestAClaimStaysWhileItIsInUse(t *testing.T) {
	r := startReal(t, "in-use")
	ref, w := r.claim("data")
	v, _ := r.volumes()
	before := r.finalizers(ref)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if err := v.Hold(t.Context(), ref); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if n := r.patches.Load(); n != 1 || !v.IsHeld(ref) {
		t.Errorf("%d patches, held %v", n, v.IsHeld(ref))
	}
	if got := r.finalizers(ref); len(got) != len(before)+1 || !slices.Contains(got, v1alpha1.FinalizerInUse) {
		t.Errorf("finalizers %v, before %v", got, before)
	}
	if _, err := v.Resolve(t.Context(), w, "n1"); err != nil {
		t.Error(err)
	}
	r.others(ref)
	r.delete(ref) // last: once that is known all is, and letting go meets no conflict
	eventually(t, "a new attach is refused", func() bool {
		_, err := v.Resolve(t.Context(), w, "n1")
		return fault.ReasonOf(err) == fault.ClaimNotFound && strings.Contains(err.Error(), "claim "+r.namespace+"/data is being deleted, and goes when the last sandbox that uses it has detached it")
	})
	r.must(v.LetGo(t.Context(), ref, inUse))
	if o := r.meta(ref); o == nil || o.GetDeletionTimestamp() == nil || !v.IsHeld(ref) {
		t.Fatalf("the claim is not Terminating: %v", o)
	}
	r.must(v.LetGo(t.Context(), ref, nobody))
	if o := r.meta(ref); o != nil {
		t.Errorf("the claim is still there: %v", o.GetFinalizers())
	}
	eventually(t, "it is gone", func() bool { return len(v.Held()) == 0 })
	r.must(v.LetGo(t.Context(), ref, nobody))
	if n := r.patches.Load(); n != 2 {
		t.Errorf("%d patches", n)
	}
}

// A leader lets a claim go, and when that comes another leads, for whom it is in use, and the claim's deletion has been asked
// for: it would be gone.
func TestALateEndOfAHoldIsNone(t *testing.T) {
	r := startReal(t, "late-end")
	ref, _ := r.claim("data")
	v, _ := r.volumes()
	r.must(v.Hold(t.Context(), ref))
	asked := 0
	r.must(v.LetGo(t.Context(), ref, func() bool {
		if asked++; asked > 1 {
			return false // whoever looks now knows better
		}
		r.delete(ref)
		return true
	}))
	if asked != 2 || !slices.Contains(r.finalizers(ref), v1alpha1.FinalizerInUse) {
		t.Errorf("asked %d times; finalizers %v", asked, r.finalizers(ref))
	}
	r.must(v.LetGo(t.Context(), ref, nobody))
	if slices.Contains(r.finalizers(ref), v1alpha1.FinalizerInUse) {
		t.Error("still held, by nobody")
	}
	r.others(ref)
}

// What others put on an object stays on it, whenever they do.
func TestOthersFinalizersStay(t *testing.T) {
	r := startReal(t, "others")
	claim, _ := r.claim("data")
	v, _ := r.volumes()
	for _, ref := range []scheduler.VolumeRef{claim, r.volume(r.namespace+"-free", nil)} {
		eventually(t, "it is known", func() bool { return v.Hold(t.Context(), ref) == nil })
		held := r.finalizers(ref)
		if !slices.Contains(held, v1alpha1.FinalizerInUse) {
			t.Errorf("%v: finalizers %v", ref, held)
		}
		data := []byte(`{"metadata":{"finalizers":["example.com/late"]}}`)
		var err error
		if ref.Type == v1alpha1.VolumeTypePVC {
			_, err = r.admin.CoreV1().PersistentVolumeClaims(ref.Namespace).Patch(t.Context(), ref.Source, types.StrategicMergePatchType, data, metav1.PatchOptions{})
		} else {
			_, err = r.admin.CoreV1().PersistentVolumes().Patch(t.Context(), ref.Source, types.StrategicMergePatchType, data, metav1.PatchOptions{})
		}
		r.must(err)
		r.must(v.LetGo(t.Context(), ref, nobody))
		want := slices.DeleteFunc(append(held, "example.com/late"), func(f string) bool { return f == v1alpha1.FinalizerInUse })
		got := r.finalizers(ref)
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%v: finalizers %v, want %v", ref, got, want)
		}
		// At once again, whatever the watch has told by now.
		r.must(v.Hold(t.Context(), ref))
		if !slices.Contains(r.finalizers(ref), v1alpha1.FinalizerInUse) || !v.IsHeld(ref) {
			t.Errorf("%v is not held", ref)
		}
	}
	// Twice it may have been refused first, as the watch had not told of the others' patch.
	if n := r.patches.Load(); n < 6 || n > 8 {
		t.Errorf("%d patches", n)
	}
	// Another process finds them.
	next, _ := r.volumes()
	if held := next.Held(); len(held) != 2 || !slices.Contains(held, claim) {
		t.Errorf("held: %v", held)
	}
	if other, key := next.About(claim); other.Source != r.namespace+"-data" || other.Type != v1alpha1.VolumeTypePV || key == "" {
		t.Errorf("about %v: %v, %q", claim, other, key)
	} else if back, same := next.About(other); back != claim || same != key {
		t.Errorf("about %v: %v, %q", other, back, same)
	}
}

// What the watch has not told of yet is found out by the patch, and is of the object that was meant or of none.
func TestWhatIsHeldIsWhatWasMeant(t *testing.T) {
	r := startReal(t, "meant")
	leaving, _ := r.claim("leaving")
	again, _ := r.claim("again")
	gone, _ := r.claim("gone")
	v, end := r.volumes()
	end()
	r.delete(leaving)
	for _, ref := range []scheduler.VolumeRef{again, gone} {
		r.delete(ref)
		r.others(ref)
	}
	_, err := r.admin.CoreV1().PersistentVolumeClaims(r.namespace).Create(t.Context(), &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "again"},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}}}, metav1.CreateOptions{})
	r.must(err)
	if err := v.Hold(t.Context(), leaving); fault.ReasonOf(err) != fault.ClaimNotFound || !strings.Contains(err.Error(), "being deleted") {
		t.Errorf("a claim that is being deleted: %v", err)
	}
	if err := v.Hold(t.Context(), gone); fault.ReasonOf(err) != fault.ClaimNotFound || !strings.Contains(err.Error(), "does not exist") {
		t.Errorf("a claim that is gone: %v", err)
	}
	if err := v.Hold(t.Context(), again); fault.ReasonOf(err) != fault.Conflict || !strings.Contains(err.Error(), "a later one of its name") {
		t.Errorf("a later claim of the name: %v", err)
	}
	for _, ref := range []scheduler.VolumeRef{leaving, again} {
		if slices.Contains(r.finalizers(ref), v1alpha1.FinalizerInUse) {
			t.Errorf("%v has our finalizer", ref)
		}
	}
}
