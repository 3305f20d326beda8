package churn

import (
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
)

// home is a Namespace in which things happen, and the tenant whose it is.
type home struct{ namespace, tenant string }

// homes are all of them. One tenant has two, and names come again in each, so that whatever confuses Namespaces is seen.
var homes = []home{{"churn-a", "a"}, {"churn-a2", "a"}, {"churn-b", "b"}}

func tenantOf(namespace string) string {
	for _, h := range homes {
		if h.namespace == namespace {
			return h.tenant
		}
	}
	return ""
}

func (w *world) home() string { return homes[w.dice.IntN(len(homes))].namespace }

// drive is a PersistentVolume that sandboxes may ask for.
type drive struct {
	name string
	// tenant and shared are what its labels say; one without is the Namespace's that has it first.
	tenant string
	shared bool
	// node is the only one that it is reached from; empty for all.
	node   string
	driver string
	// meant is the Namespace that asks for it most of the time, as one that is refused has nothing more to show; empty for any.
	meant string
}

// drives are all of them, by name.
var drives = allDrives()

func allDrives() map[string]drive {
	all := map[string]drive{}
	add := func(d drive) { all[d.name] = d }
	for i := range 9 {
		add(drive{name: fmt.Sprint("data-", i), driver: driver, meant: homes[i%len(homes)].namespace})
	}
	for i, tenant := range []string{"a", "a", "b"} {
		add(drive{name: fmt.Sprint("owned-", i), driver: driver, tenant: tenant})
	}
	add(drive{name: "shared-0", driver: driver, tenant: "a", shared: true})
	add(drive{name: "shared-1", driver: driver, shared: true})
	for i := range 3 {
		add(drive{name: fmt.Sprint("near-", i), driver: driver, node: nodeName(i), meant: homes[i%len(homes)].namespace})
	}
	for i := range 6 {
		add(drive{name: fmt.Sprint("far-", i), driver: keptFromAgents, meant: homes[i%len(homes)].namespace})
	}
	for i, tenant := range []string{"a", "b"} {
		add(drive{name: fmt.Sprint("far-owned-", i), driver: keptFromAgents, tenant: tenant})
	}
	return all
}

// serves says whether sandboxes of a Namespace may have it, in that mode, as far as its labels tell.
func (d drive) serves(namespace string, readOnly bool) bool {
	tenant := tenantOf(namespace)
	switch {
	case d.tenant == tenant:
		return true
	case d.shared:
		return readOnly
	}
	return d.tenant == ""
}

// suits says whether somebody of a Namespace who knows what he may have would ask for it.
func (d drive) suits(namespace string) bool {
	return d.serves(namespace, true) && (d.meant == "" || d.meant == namespace)
}

// pickDrive is what somebody of a Namespace asks for: now and then what he may not have.
func (w *world) pickDrive(namespace string) drive {
	blind := w.dice.IntN(8) == 0
	var all []drive
	for _, name := range sorted(maps.Keys(drives)) {
		if d := drives[name]; blind || d.suits(namespace) {
			all = append(all, d)
		}
	}
	return all[w.dice.IntN(len(all))]
}

// mode is how somebody of a Namespace asks for it.
func (w *world) mode(d drive, namespace string) v1alpha1.VolumeMode {
	if w.dice.IntN(2) == 0 || !d.serves(namespace, false) && w.dice.IntN(8) > 0 {
		return v1alpha1.VolumeModeReadOnly
	}
	return v1alpha1.VolumeModeReadWrite
}

// make makes its PersistentVolume.
func (d drive) make(w *world) {
	w.Helper()
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: d.name, Labels: map[string]string{}}, Spec: corev1.PersistentVolumeSpec{
		Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource:        corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: d.driver, VolumeHandle: d.name}},
	}}
	if d.tenant != "" {
		pv.Labels[v1alpha1.LabelTenantID] = d.tenant
	}
	if d.shared {
		pv.Labels[volumes.LabelShared] = "true"
	}
	if d.node != "" {
		pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{d.node}}}}}}}
	}
	must(w.client.CoreV1().PersistentVolumes().Create(w.ctx, pv, metav1.CreateOptions{}))
}
