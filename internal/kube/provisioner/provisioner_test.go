package provisioner

import (
	"errors"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v11/controller"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// noDriver panics when it is called.
type noDriver struct{ csi.ControllerServer }

func volumeOn(nodes ...string) *corev1.PersistentVolume {
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Spec: corev1.PersistentVolumeSpec{NodeAffinity: affinityTo("none"),
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: csidriver.Name, VolumeHandle: "handle"}}}}
	pv.Spec.NodeAffinity.Required.NodeSelectorTerms = nil
	for _, n := range nodes {
		pv.Spec.NodeAffinity.Required.NodeSelectorTerms = append(pv.Spec.NodeAffinity.Required.NodeSelectorTerms, affinityTo(n).Required.NodeSelectorTerms...)
	}
	return pv
}

func open(t *testing.T) *Provisioner {
	t.Helper()
	p, err := New(t.Context(), Config{Client: fake.NewClientset(), Node: "a", Driver: noDriver{}, DomainKey: "domain", Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// What is not wholly this node's is nobody's business here, however it came to be asked about: the driver is not called.
func TestForeignVolumesAreLeftAlone(t *testing.T) {
	p := open(t)
	other := volumeOn("a")
	other.Spec.CSI.Driver = "other.example.com"
	noCSI := volumeOn("a")
	noCSI.Spec.CSI = nil
	inverted := volumeOn("a")
	inverted.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Operator = corev1.NodeSelectorOpNotIn
	two := volumeOn("a")
	two.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values = []string{"a", "b"}
	nowhere := volumeOn("a")
	nowhere.Spec.NodeAffinity = nil
	for name, pv := range map[string]*corev1.PersistentVolume{"another node's": volumeOn("b"), "two nodes'": volumeOn("a", "b"), "two in one term": two,
		"no term": volumeOn(), "no affinity": nowhere, "all but the node": inverted, "another driver's": other, "no CSI": noCSI} {
		var ignored *controller.IgnoredError
		if err := p.Delete(t.Context(), pv); p.ShouldDelete(t.Context(), pv) || !errors.As(err, &ignored) {
			t.Errorf("%s: it is deleted (%v)", name, err)
		}
	}
	if !p.ShouldDelete(t.Context(), volumeOn("a")) {
		t.Error("its own is not deleted")
	}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{selectedNode: "b"}}}
	var ignored *controller.IgnoredError
	_, _, err := p.Provision(t.Context(), controller.ProvisionOptions{PVC: claim, SelectedNode: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b"}}})
	if p.ShouldProvision(t.Context(), claim) || !errors.As(err, &ignored) {
		t.Errorf("another node's claim is served (%v)", err)
	}
}

func TestOfForeignObjectsTheNameIsKept(t *testing.T) {
	p := open(t)
	mine, err := p.strip(volumeOn("a"))
	if err != nil || mine.(*corev1.PersistentVolume).Spec.CSI == nil {
		t.Errorf("its own volume is kept as %v (%v)", mine, err)
	}
	foreign, err := p.strip(volumeOn("b"))
	if pv := foreign.(*corev1.PersistentVolume); err != nil || pv.Name != "v" || pv.Spec.CSI != nil {
		t.Errorf("another node's volume is kept as %v (%v)", foreign, err)
	}
}

func TestUnclaimedVolumesAreCounted(t *testing.T) {
	p := open(t)
	if n := p.Unclaimed([]string{"handle"}); n != 0 {
		t.Errorf("%d are unclaimed before anything is known", n)
	}
	close(p.synced)
	_, volumes, _ := p.informers()
	if err := volumes.GetStore().Add(volumeOn("a")); err != nil {
		t.Fatal(err)
	}
	if n := p.Unclaimed([]string{"handle", "left"}); n != 1 {
		t.Errorf("%d are unclaimed, want 1", n)
	}
}

// A quantity may be more than a number of bytes holds: cut off, it would be a volume of some other size, for which no claim waits.
func TestNoVolumeIsMadeOfAnImpossibleSize(t *testing.T) {
	p := open(t)
	claim := func(request, limit string) *corev1.PersistentVolumeClaim {
		c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{selectedNode: "a"}}}
		c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
		c.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(request)}
		if limit != "" {
			c.Spec.Resources.Limits = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(limit)}
		}
		return c
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	for _, c := range []*corev1.PersistentVolumeClaim{claim("1e30", ""), claim("9223372036854775808", ""), claim("1Gi", "1e25")} {
		_, _, err := p.Provision(t.Context(), controller.ProvisionOptions{PVC: c, SelectedNode: node, StorageClass: &storagev1.StorageClass{}})
		if fault.ReasonOf(err) != fault.InvalidSize || !errdefs.IsOutOfRange(err) {
			t.Errorf("%v: %v", c.Spec.Resources, err)
		}
	}
	r, err := p.request(controller.ProvisionOptions{PVC: claim("1Gi", "2Gi"), SelectedNode: node, StorageClass: &storagev1.StorageClass{}})
	if size := r.GetCapacityRange(); err != nil || size.GetRequiredBytes() != 1<<30 || size.GetLimitBytes() != 2<<30 {
		t.Errorf("%v, %v", size, err)
	}
}
