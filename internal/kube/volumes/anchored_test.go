package volumes_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/anchors"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// anchored are Volumes with anchors, with the rights of the controller; drivers are those that the agents call.
func (r *real) anchored(drivers ...string) *volumes.Volumes {
	r.t.Helper()
	client := kubernetes.NewForConfigOrDie(r.server.As("controller"))
	a, err := anchors.New(anchors.Options{Client: client, Image: "flux-sandbox:test", Grace: time.Millisecond})
	r.must(err)
	v, err := volumes.New(client, volumes.Options{DirectDrivers: append(drivers, directDriver), Anchors: a})
	r.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		v.Run(ctx)
	}()
	r.t.Cleanup(func() {
		cancel()
		<-ended
	})
	<-v.Synced()
	r.t.Cleanup(func() { // other tests have the same server
		for _, ref := range v.Held() {
			if err := v.LetGo(context.Background(), ref, func() bool { return true }); err != nil {
				r.t.Error(err)
			}
		}
	})
	return v
}

// class makes a StorageClass, whose volumes wait for their first consumer.
func (r *real) class(name, path string) {
	r.t.Helper()
	waits := storagev1.VolumeBindingWaitForFirstConsumer
	c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: r.namespace + "-" + name}, Provisioner: directDriver, VolumeBindingMode: &waits}
	if path != "" {
		c.Annotations = map[string]string{v1alpha1.AnnotationPath: path}
	}
	_, err := r.admin.StorageV1().StorageClasses().Create(r.t.Context(), c, metav1.CreateOptions{})
	r.must(err)
}

// unbound makes a claim of a class.
func (r *real) unbound(name, class string, mode corev1.PersistentVolumeAccessMode) scheduler.Wish {
	r.t.Helper()
	class = r.namespace + "-" + class
	_, err := r.admin.CoreV1().PersistentVolumeClaims(r.namespace).Create(r.t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{mode}, StorageClassName: &class,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}},
	}, metav1.CreateOptions{})
	r.must(err)
	return scheduler.Wish{
		Sandbox:     &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "s", UID: "sandbox-uid"}},
		Volume:      &v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: name, Mode: v1alpha1.VolumeModeReadWrite},
		TopologyKey: topologyKey,
	}
}

// bindTo plays the volume's controllers: the claim gets a volume of a driver, or a local one where that is empty.
func (r *real) bindTo(name, driver string) {
	r.t.Helper()
	claims := r.admin.CoreV1().PersistentVolumeClaims(r.namespace)
	c, err := claims.Get(r.t.Context(), name, metav1.GetOptions{})
	r.must(err)
	pv := r.namespace + "-" + name
	source := corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: "handle-" + name}}
	var where *corev1.VolumeNodeAffinity
	if driver == "" {
		source = corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: "/mnt/" + pv}}
		where = affinity(corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
			{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{"n1"}}}})
	}
	_, err = r.admin.CoreV1().PersistentVolumes().Create(r.t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: pv},
		Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: source, NodeAffinity: where,
			AccessModes: c.Spec.AccessModes, StorageClassName: *c.Spec.StorageClassName,
			ClaimRef: &corev1.ObjectReference{Namespace: r.namespace, Name: name, UID: c.UID},
			Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		},
	}, metav1.CreateOptions{})
	r.must(err)
	c.Spec.VolumeName = pv
	c, err = claims.Update(r.t.Context(), c, metav1.UpdateOptions{})
	r.must(err)
	c.Status.Phase = corev1.ClaimBound
	_, err = claims.UpdateStatus(r.t.Context(), c, metav1.UpdateOptions{})
	r.must(err)
}

func (r *real) anchorsOf(claim string) []corev1.Pod {
	r.t.Helper()
	list, err := r.admin.CoreV1().Pods(r.namespace).List(r.t.Context(), metav1.ListOptions{LabelSelector: v1alpha1.LabelAnchor + "=" + claim})
	r.must(err)
	return list.Items
}

// runAnchor plays scheduler and kubelet, and returns the Pod.
func (r *real) runAnchor(claim string) corev1.Pod {
	r.t.Helper()
	var pod corev1.Pod
	testenv.Eventually(r.t, 30*time.Second, "an anchor is made", func() bool {
		all := r.anchorsOf(claim)
		if len(all) > 0 {
			pod = all[0]
		}
		return len(all) == 1
	})
	c, err := r.admin.CoreV1().PersistentVolumeClaims(r.namespace).Get(r.t.Context(), claim, metav1.GetOptions{})
	r.must(err)
	if !slices.Contains(c.Finalizers, v1alpha1.FinalizerInUse) {
		r.t.Error("the claim has an anchor and is not held")
	}
	pod.Status.Phase = corev1.PodRunning
	_, err = r.admin.CoreV1().Pods(r.namespace).UpdateStatus(r.t.Context(), &pod, metav1.UpdateOptions{})
	r.must(err)
	return pod
}

type resolution struct {
	volume *scheduler.ResolvedVolume
	err    error
}

func (r *real) resolve(v *volumes.Volumes, w scheduler.Wish) <-chan resolution {
	done := make(chan resolution, 1)
	go func() {
		got, err := v.Resolve(r.t.Context(), w, "n1")
		done <- resolution{got, err}
	}()
	return done
}

func (r *real) serviceAccount() {
	r.t.Helper()
	_, err := r.admin.CoreV1().ServiceAccounts(r.namespace).Create(r.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	r.must(err)
}

func TestWhatKubeletMounts(t *testing.T) {
	r := startReal(t, "anchored")
	r.serviceAccount()
	r.class("plain", "")
	r.class("by-anchor", "anchor")
	v := r.anchored()
	for name, tt := range map[string]struct {
		class, driver string
		mode          corev1.PersistentVolumeAccessMode
		reason        string // of the path
		sandbox       string
	}{
		"foreign-driver": {class: "plain", driver: "foreign.example.com", mode: corev1.ReadWriteOnce, reason: "driver"},
		"by-annotation":  {class: "by-anchor", driver: directDriver, mode: corev1.ReadWriteMany, reason: "StorageClass"},
		"local":          {class: "by-anchor", mode: corev1.ReadWriteOnce, reason: "StorageClass"},
		"one-pods":       {class: "plain", driver: directDriver, mode: corev1.ReadWriteOncePod, reason: "ReadWriteOncePod", sandbox: "sandbox-uid"},
	} {
		w := r.unbound(name, tt.class, tt.mode)
		r.bindTo(name, tt.driver)
		testenv.Eventually(t, 30*time.Second, "the claim is known", func() bool {
			at, err := v.Locate(w)
			return err == nil && at.VolumeKey != ""
		})
		done := r.resolve(v, w)
		pod := r.runAnchor(name)
		got := <-done
		r.must(got.err)
		if got.volume.Path != v1alpha1.VolumePathAnchor || !strings.Contains(got.volume.PathReason, tt.reason) || got.volume.PVCName != name {
			t.Errorf("%s: %+v", name, got.volume)
		}
		var request agentv1.AttachRequest
		got.volume.SetSource(&request)
		source := request.GetAnchor()
		plugin, handle, key := "kubernetes.io/csi", "handle-"+name, volume.CSIKey(tt.driver, "handle-"+name)
		if tt.driver == "" {
			plugin, handle, key = "kubernetes.io/local-volume", "", volume.AnchorKey(r.namespace+"-"+name)
		}
		if source.GetPodUid() != string(pod.UID) || source.GetPvName() != r.namespace+"-"+name || source.GetPlugin() != plugin ||
			source.GetDriver() != tt.driver || source.GetVolumeHandle() != handle || source.GetClaim() != name {
			t.Errorf("%s: source %v", name, source)
		}
		if got.volume.VolumeKey != key {
			t.Errorf("%s: key %s, which is %s on the node", name, got.volume.VolumeKey, key)
		}
		if _, about := v.About(scheduler.VolumeRef{Type: v1alpha1.VolumeTypePV, Source: source.GetPvName()}); about != key {
			t.Errorf("%s: key %s by the volume's name", name, about)
		}
		if got := pod.Annotations[v1alpha1.AnnotationAnchorSandbox]; got != tt.sandbox {
			t.Errorf("%s: for sandbox %q", name, got)
		}
		// Held until the anchor is gone, which is after nobody used it for a while.
		ref := scheduler.VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: r.namespace, Source: name}
		nobody := func(string) bool { return false }
		if left, err := v.Anchor(t.Context(), ref, map[string]types.UID{"n1": "uid-1"}, nobody); err != nil || !left {
			t.Errorf("%s: left %t, %v", name, left, err)
		}
		testenv.Eventually(t, 30*time.Second, "the anchor is gone", func() bool {
			left, err := v.Anchor(t.Context(), ref, nil, nobody)
			r.must(err)
			return !left
		})
		if !v.IsHeld(ref) {
			t.Errorf("%s: not held any more", name)
		}
		r.must(v.LetGo(t.Context(), ref, func() bool { return true }))
	}
}

// csiDriver makes what a driver says of itself.
func (r *real) csiDriver(name string, attachRequired *bool) {
	r.t.Helper()
	_, err := r.admin.StorageV1().CSIDrivers().Create(r.t.Context(), &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: storagev1.CSIDriverSpec{AttachRequired: attachRequired}}, metav1.CreateOptions{})
	r.must(err)
}

// A driver whose volumes have to be attached to nodes is kubelet's, also where the operator lists it for the agents.
func TestADirectDriverThatNeedsAttach(t *testing.T) {
	const attaches, says, publishes = "attaches.example.com", "says-nothing.example.com", "publishes.example.com"
	r := startReal(t, "attach-required")
	r.serviceAccount()
	r.class("immediate", "")
	r.csiDriver(attaches, ptr.To(true))
	r.csiDriver(says, nil) // which the API server takes for a yes
	r.csiDriver(publishes, ptr.To(false))
	v := r.anchored(attaches, says, publishes)
	resolved := func(name, driver string) *scheduler.ResolvedVolume {
		t.Helper()
		w := r.unbound(name, "immediate", corev1.ReadWriteOnce)
		r.bindTo(name, driver)
		testenv.Eventually(t, 30*time.Second, "the claim is known", func() bool {
			at, err := v.Locate(w)
			return err == nil && at.VolumeKey != ""
		})
		done := r.resolve(v, w)
		if driver != publishes {
			r.runAnchor(name)
		}
		got := <-done
		r.must(got.err)
		return got.volume
	}
	for name, driver := range map[string]string{"attaches": attaches, "says-nothing": says} {
		if got := resolved(name, driver); got.Path != v1alpha1.VolumePathAnchor || !strings.Contains(got.PathReason, "attachRequired") {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if got := resolved("publishes", publishes); got.Path != v1alpha1.VolumePathDirect || got.PathReason != "" {
		t.Errorf("publishes: %+v", got)
	}
	// An anchor for which the agent found nothing is not given out again.
	w := r.unbound("lost", "immediate", corev1.ReadWriteOnce)
	r.bindTo("lost", attaches)
	testenv.Eventually(t, 30*time.Second, "the claim is known", func() bool {
		at, err := v.Locate(w)
		return err == nil && at.VolumeKey != ""
	})
	done := r.resolve(v, w)
	pod := r.runAnchor("lost")
	got := <-done
	r.must(got.err)
	got.volume.Unusable(t.Context())
	testenv.Eventually(t, 30*time.Second, "its anchor is ended", func() bool {
		now, err := r.admin.CoreV1().Pods(r.namespace).Get(t.Context(), pod.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err) || err == nil && now.DeletionTimestamp != nil
	})
}

// Without anchors it is refused, and told why.
func TestADirectDriverThatNeedsAttachWithoutAnchors(t *testing.T) {
	v, _ := start(t, append(pair(func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
		pv.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: directDriver, VolumeHandle: "h"}}
	}), &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: directDriver}, Spec: storagev1.CSIDriverSpec{AttachRequired: ptr.To(true)}})...)
	_, err := v.Resolve(t.Context(), wish(v1alpha1.VolumeTypePVC, "data", nil), "n1")
	if fault.ReasonOf(err) != fault.VolumeTypeOff || !strings.Contains(err.Error(), "attachRequired") || !fault.IsPermanent(err) {
		t.Errorf("error %v", err)
	}
}

func TestAClaimIsBoundForItsFirstSandbox(t *testing.T) {
	r := startReal(t, "first-consumer")
	r.serviceAccount()
	r.class("waits", "")
	v := r.anchored()
	w := r.unbound("data", "waits", corev1.ReadWriteOnce)
	testenv.Eventually(t, 30*time.Second, "the claim is known", func() bool { _, err := v.Locate(w); return err == nil })
	if at, err := v.Locate(w); err != nil || at.Reach != nil || at.VolumeKey != "" {
		t.Errorf("location %+v, %v: any node will do", at, err)
	}
	done := r.resolve(v, w)
	testenv.Eventually(t, 30*time.Second, "an anchor is made", func() bool { return len(r.anchorsOf("data")) == 1 })
	r.bindTo("data", directDriver)
	r.runAnchor("data")
	got := <-done
	r.must(got.err)
	if got.volume.Path != v1alpha1.VolumePathDirect || got.volume.PVName != r.namespace+"-data" {
		t.Errorf("%+v", got.volume)
	}
	// The anchor has done its work, whoever uses the volume.
	ref := scheduler.VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: r.namespace, Source: "data"}
	testenv.Eventually(t, 30*time.Second, "the anchor is gone", func() bool {
		left, err := v.Anchor(t.Context(), ref, map[string]types.UID{"n1": "uid-1"}, func(string) bool { return true })
		r.must(err)
		return !left
	})
}

// The node that was chosen for a claim is gone before it made the volume: another is chosen.
func TestAClaimOfANodeThatIsGone(t *testing.T) {
	r := startReal(t, "node-gone")
	r.serviceAccount()
	r.class("node-gone-waits", "")
	w := r.unbound("data", "node-gone-waits", corev1.ReadWriteOnce)
	choose := func(node string) {
		t.Helper()
		_, err := r.admin.CoreV1().PersistentVolumeClaims(r.namespace).Patch(t.Context(), "data", types.MergePatchType,
			fmt.Appendf(nil, `{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":%q,"kept":"yes"}}}`, node), metav1.PatchOptions{})
		r.must(err)
	}
	_, err := r.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-gone-other"}}, metav1.CreateOptions{})
	r.must(err)
	v := r.anchored()
	choose("node-gone-other")
	if _, err := v.Resolve(t.Context(), w, "n1"); fault.ReasonOf(err) != fault.VolumeNotBound || !strings.Contains(err.Error(), "node-gone-other") {
		t.Errorf("of another node: %v", err)
	}
	if all := r.anchorsOf("data"); len(all) != 0 {
		t.Errorf("%d anchors", len(all))
	}
	r.must(r.admin.CoreV1().Nodes().Delete(t.Context(), "node-gone-other", metav1.DeleteOptions{}))
	done := r.resolve(v, w)
	testenv.Eventually(t, 30*time.Second, "an anchor is made", func() bool { return len(r.anchorsOf("data")) == 1 })
	claim, err := r.admin.CoreV1().PersistentVolumeClaims(r.namespace).Get(t.Context(), "data", metav1.GetOptions{})
	r.must(err)
	r.bindTo("data", directDriver)
	r.runAnchor("data")
	r.must((<-done).err)
	if node, there := claim.Annotations["volume.kubernetes.io/selected-node"]; there || claim.Annotations["kept"] != "yes" {
		t.Errorf("selected is %q, annotations are %v", node, claim.Annotations)
	}
}

// A volume that nobody has claimed is claimed in the sandbox's namespace, as kubelet mounts claims.
func TestAVolumeThatNobodyHasClaimed(t *testing.T) {
	r := startReal(t, "unclaimed")
	r.serviceAccount()
	v := r.anchored()
	volumes := r.admin.CoreV1().PersistentVolumes()
	pv, err := volumes.Create(t.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: r.namespace},
		Spec: corev1.PersistentVolumeSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{Server: "s", Path: "/"}},
			Capacity:               corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}}, metav1.CreateOptions{})
	r.must(err)
	w := scheduler.Wish{
		Sandbox:     &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: "s", UID: "sandbox-uid"}},
		Volume:      &v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePV, Source: r.namespace, Mode: v1alpha1.VolumeModeReadWrite},
		TopologyKey: topologyKey,
	}
	done := r.resolve(v, w)
	claims := r.admin.CoreV1().PersistentVolumeClaims(r.namespace)
	var claim *corev1.PersistentVolumeClaim
	testenv.Eventually(t, 30*time.Second, "a claim is made", func() bool {
		claim, err = claims.Get(t.Context(), "flux-"+r.namespace, metav1.GetOptions{})
		return err == nil
	})
	if claim.Spec.VolumeName != r.namespace || *claim.Spec.StorageClassName != "" {
		t.Errorf("claim %+v", claim.Spec)
	}
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: r.namespace, Name: claim.Name, UID: claim.UID}
	_, err = volumes.Update(t.Context(), pv, metav1.UpdateOptions{})
	r.must(err)
	claim.Status.Phase = corev1.ClaimBound
	_, err = claims.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{})
	r.must(err)
	r.runAnchor("flux-" + r.namespace)
	got := <-done
	r.must(got.err)
	var request agentv1.AttachRequest
	got.volume.SetSource(&request)
	if source := request.GetAnchor(); got.volume.PVCName != "flux-"+r.namespace || source.GetPlugin() != "kubernetes.io/nfs" || source.GetClaim() != "flux-"+r.namespace || source.GetDriver() != "" {
		t.Errorf("%+v, source %v", got.volume, source)
	}
}
