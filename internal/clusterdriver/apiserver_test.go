package clusterdriver_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func TestAClaimGetsItsVolume(t *testing.T) {
	w := newWorld(t)
	n := w.node("a", map[string]string{domainKey: "pod-a"}).start()
	class := w.class("xfs", func(c *storagev1.StorageClass) {
		c.Parameters = map[string]string{"csi.storage.k8s.io/fstype": "xfs", "allocation": "preallocated", "csi.storage.k8s.io/provisioner-secret-name": "x"}
		c.ReclaimPolicy, c.MountOptions = new(corev1.PersistentVolumeReclaimRetain), []string{"noexec"}
	})
	claim := n.claim("data", class, func(c *corev1.PersistentVolumeClaim) {
		c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
	})
	pv := w.volume(claim)
	n.has(pv)
	image, err := os.Stat(filepath.Join(n.path(""), pv.Name+".img"))
	w.must(err)
	want := corev1.PersistentVolumeSpec{
		Capacity:                      corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(300<<20, resource.BinarySI)}, // XFS needs more than was asked for
		AccessModes:                   claim.Spec.AccessModes,
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		StorageClassName:              class, MountOptions: []string{"noexec"}, VolumeMode: new(corev1.PersistentVolumeFilesystem),
		ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: w.namespace, Name: "data", UID: claim.UID, ResourceVersion: pv.Spec.ClaimRef.ResourceVersion},
		NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: csidriver.TopologyNode, Operator: corev1.NodeSelectorOpIn, Values: []string{n.name}}}}}}},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: csidriver.Name, VolumeHandle: pv.Name, FSType: "xfs"}},
	}
	if got := text(pv.Spec); got != text(want) || image.Size() != 300<<20 {
		t.Errorf("the volume is\n%s\nwant\n%s\nthe image has %d bytes", got, text(want), image.Size())
	}
	if !maps.Equal(pv.Labels, map[string]string{domainKey: "pod-a"}) {
		t.Errorf("labels %v", pv.Labels)
	}
	w.told(claim.UID, "ProvisioningSucceeded", pv.Name)

	// Retain: the data stays when the claim is gone, and when the volume is.
	w.phase(pv, corev1.VolumeReleased)
	w.must(w.admin.CoreV1().PersistentVolumes().Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
	w.gone(pv)
	n.has(pv)
}

func text(spec corev1.PersistentVolumeSpec) string {
	data, err := spec.Marshal()
	if err != nil {
		return err.Error()
	}
	var same corev1.PersistentVolumeSpec
	if err := same.Unmarshal(data); err != nil {
		return err.Error()
	}
	return same.String()
}

// Two provisioners side by side: each makes and deletes what is its node's. A driver says of every volume that it does not
// know that it is gone, so the other node's PersistentVolume would go and leave its data.
func TestEachNodeHasItsOwn(t *testing.T) {
	w := newWorld(t)
	a, b := w.node("a", nil).start(), w.node("b", nil).start()
	class := w.class("c", nil)
	ofA, ofB := w.volume(a.claim("a", class, nil)), w.volume(b.claim("b", class, nil))
	a.has(ofA)
	b.has(ofB)
	a.stop()
	w.phase(ofA, corev1.VolumeReleased)
	w.phase(ofB, corev1.VolumeReleased)
	w.gone(ofB)
	b.has()

	ofA, err := w.admin.CoreV1().PersistentVolumes().Get(t.Context(), ofA.Name, metav1.GetOptions{})
	w.must(err)
	if ofA.DeletionTimestamp != nil {
		t.Error("b deleted a's volume")
	}
	// The policies would not let it, either, once they are in force.
	if !testenv.Poll(patience, func() bool {
		err = b.client().CoreV1().PersistentVolumes().Delete(t.Context(), ofA.Name, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
		return err != nil && strings.Contains(err.Error(), "may touch no PersistentVolume but")
	}) {
		t.Errorf("b's rights reach a's volume: %v", err)
	}
	a.has(ofA)
	a.start()
	w.gone(ofA)
	a.has()
}

func TestWhatCannotBeIsSaid(t *testing.T) {
	w := newWorld(t)
	n := w.node("a", nil).start()
	class := w.class("c", nil)
	for name, c := range map[string]struct {
		change func(*corev1.PersistentVolumeClaim)
		want   string
	}{
		"rwx":   {func(c *corev1.PersistentVolumeClaim) { c.Spec.AccessModes[0] = corev1.ReadWriteMany }, "access mode ReadWriteMany is not possible, as a volume of local.csi.sandbox.flux.io lies on one node: ask for ReadWriteOnce"},
		"rox":   {func(c *corev1.PersistentVolumeClaim) { c.Spec.AccessModes[0] = corev1.ReadOnlyMany }, "access mode ReadOnlyMany is not possible"},
		"block": {func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeMode = new(corev1.PersistentVolumeBlock) }, "volumeMode Block is not possible"},
		"clone": {func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "other"}
		}, "cannot be made from another volume"},
		"selector": {func(c *corev1.PersistentVolumeClaim) {
			c.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
		}, "cannot be selected"},
		"limit": {func(c *corev1.PersistentVolumeClaim) {
			c.Spec.Resources = corev1.VolumeResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}, Limits: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("2Mi")}}
		}, "above the limit of 2097152"},
	} {
		w.told(n.claim(name, class, c.change).UID, "ProvisioningFailed", c.want)
	}
	n.has()
	// A claim that somebody else fills is left alone; the one after it is served.
	group := "example.com"
	filled := n.claim("filled", class, func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: &group, Kind: "Data", Name: "x"}
	})
	pv := w.volume(n.claim("good", class, nil))
	w.until("the filled claim was looked at", func() error {
		w.told(filled.UID, "Provisioning", "")
		return nil
	})
	n.has(pv)
}

// A node without room gives the claim back to the scheduler, and changes nothing else of it.
func TestNoRoom(t *testing.T) {
	w := newWorld(t)
	n := w.node("a", nil).start()
	claim := n.claim("huge", w.class("c", nil), func(c *corev1.PersistentVolumeClaim) {
		c.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("1Pi")
	})
	message := w.told(claim.UID, "ProvisioningFailed", "node "+n.name+" has no room for it, another is looked for")
	if !strings.Contains(message, "are left: free space there, or ask for less") {
		t.Errorf("the Event says %q", message)
	}
	w.until("the claim is given back", func() error {
		now, err := w.admin.CoreV1().PersistentVolumeClaims(w.namespace).Get(t.Context(), "huge", metav1.GetOptions{})
		w.must(err)
		if _, ok := now.Annotations[selectedNode]; ok || now.Annotations["example.com/kept"] != "yes" {
			return fmt.Errorf("annotations %v", now.Annotations)
		}
		return nil
	})
	n.has()
}

func TestManyClaimsAtOnce(t *testing.T) {
	w := newWorld(t)
	a, b := w.node("a", nil).start(), w.node("b", nil).start()
	class := w.class("c", nil)
	var volumes [2][]*corev1.PersistentVolume
	var claims [2][]*corev1.PersistentVolumeClaim
	for i := range 20 {
		n := []*node{a, b}[i%2]
		claims[i%2] = append(claims[i%2], n.claim(fmt.Sprint("c", i), class, nil))
	}
	for i, list := range claims {
		for _, c := range list {
			volumes[i] = append(volumes[i], w.volume(c))
		}
	}
	a.has(volumes[0]...)
	b.has(volumes[1]...)
	for _, pv := range append(volumes[0], volumes[1]...) {
		w.phase(pv, corev1.VolumeReleased)
	}
	for _, pv := range append(volumes[0], volumes[1]...) {
		w.gone(pv)
	}
	a.has()
	b.has()
}

// A volume that is still mounted when it is released is deleted once it is not; so is one whose PersistentVolume was deleted
// before its claim.
func TestDeletedOnceNobodyHasIt(t *testing.T) {
	w := newWorld(t)
	n := w.node("a", nil).start()
	pv := w.volume(n.claim("a", w.class("c", nil), nil))
	w.phase(pv, corev1.VolumeBound)
	target := filepath.Join(w.dir, "target")
	_, err := n.csi().NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: pv.Spec.CSI.VolumeHandle, TargetPath: target,
		VolumeCapability: &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER}}})
	w.must(err)
	unpublish := sync.OnceFunc(func() {
		_, err := n.csi().NodeUnpublishVolume(context.WithoutCancel(t.Context()), &csi.NodeUnpublishVolumeRequest{VolumeId: pv.Spec.CSI.VolumeHandle, TargetPath: target})
		if err != nil {
			t.Error(err)
		}
	})
	defer unpublish()
	w.must(w.admin.CoreV1().PersistentVolumes().Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
	w.phase(pv, corev1.VolumeReleased)
	w.told(pv.UID, "VolumeFailedDelete", "is in use: unpublish it first")
	n.has(pv)
	unpublish()
	w.gone(pv)
	n.has()
}

// Answers that are lost, and an API server that does not take the volume at first, make no second one.
func TestLostAnswers(t *testing.T) {
	w := newWorld(t)
	n := w.node("a", nil)
	var posts atomic.Int64
	n.between = func(answer http.ResponseWriter, q *http.Request, forward http.Handler) {
		if q.Method == http.MethodPost && strings.HasSuffix(q.URL.Path, "/persistentvolumes") {
			switch posts.Add(1) {
			case 1: // the API server is away
				panic(http.ErrAbortHandler)
			case 2: // the answer is lost
				forward.ServeHTTP(httptest.NewRecorder(), q)
				panic(http.ErrAbortHandler)
			}
		}
		forward.ServeHTTP(answer, q)
	}
	n.start()
	claim := n.claim("a", w.class("c", nil), nil)
	pv := w.volume(claim)
	w.told(claim.UID, "ProvisioningSucceeded", pv.Name)
	n.has(pv)
	if posts.Load() != 3 {
		t.Errorf("the volume was written %d times, want 3", posts.Load())
	}
}

// What a volume costs in calls, and that other nodes pay nothing.
func TestCalls(t *testing.T) {
	w := newWorld(t)
	a, b := w.node("a", nil).start(), w.node("b", nil).start()
	class := w.class("c", nil)
	for _, n := range []*node{a, b} { // both know everything
		claim := n.claim("first-"+n.name, class, nil)
		w.told(claim.UID, "ProvisioningSucceeded", w.volume(claim).Name)
		n.calls.forget()
	}
	claim := a.claim("a", class, nil)
	pv := w.volume(claim)
	w.told(claim.UID, "ProvisioningSucceeded", pv.Name)
	w.phase(pv, corev1.VolumeBound)
	w.phase(pv, corev1.VolumeReleased)
	w.gone(pv)
	b.stop()
	a.stop()
	want := map[string]int{"POST persistentvolumes": 1, "POST events": 2, "DELETE " + pv.Name: 1, "PATCH " + pv.Name: 1}
	if got := a.calls.all(); !maps.Equal(got, want) {
		t.Errorf("node a called %v, want %v", got, want)
	}
	if got := b.calls.all(); len(got) > 0 {
		t.Errorf("node b called %v", got)
	}
}

// Kubelet is told the node's topology domain, as the API server knows it at that moment.
func TestKubeletIsToldTheDomain(t *testing.T) {
	w := newWorld(t)
	n := w.node("a", map[string]string{domainKey: "pod-a"}).start()
	info, err := registration.NewRegistrationClient(n.dial(registrationSocket)).GetInfo(t.Context(), &registration.InfoRequest{})
	w.must(err)
	if info.Name != csidriver.Name {
		t.Errorf("registered as %v", info)
	}
	is := func(want map[string]string) {
		t.Helper()
		want[csidriver.TopologyNode] = n.name
		w.until(fmt.Sprint("the topology is ", want), func() error {
			info, err := n.csi().NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
			w.must(err)
			if got := info.GetAccessibleTopology().GetSegments(); !maps.Equal(got, want) {
				return fmt.Errorf("it is %v", got)
			}
			return nil
		})
	}
	is(map[string]string{domainKey: "pod-a"})
	for _, change := range []struct {
		to   string
		want map[string]string
	}{{`"pod-b"`, map[string]string{domainKey: "pod-b"}}, {`null`, map[string]string{}}} {
		_, err := w.admin.CoreV1().Nodes().Patch(t.Context(), n.name, types.MergePatchType,
			fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, domainKey, change.to), metav1.PatchOptions{})
		w.must(err)
		is(change.want)
	}
}

// calls counts the calls of the API server.
type calls struct {
	mu   sync.Mutex // guards seen
	seen map[string]int
}

func (c *calls) add(q *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seen == nil {
		c.seen = map[string]int{}
	}
	c.seen[q.Method+" "+filepath.Base(q.URL.Path)]++
}

func (c *calls) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.seen)
}

func (c *calls) all() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.seen)
}
