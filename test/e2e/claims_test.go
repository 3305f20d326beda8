package e2e

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// A claim that is deleted while sandboxes use it stays, Terminating, and serves nobody new, until the last has detached it.
func TestADeletedClaimStaysUntilTheLastDetach(t *testing.T) {
	c := open(t)
	must(t, os.WriteFile(filepath.Join(c.dir("data"), "hello"), []byte("from data"), 0o644))
	none, size := "", corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	pv, err := c.client.CoreV1().PersistentVolumes().Create(t.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: c.namespace},
		Spec: corev1.PersistentVolumeSpec{Capacity: size, AccessModes: modes, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: c.data("data")}}}}, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		if err := c.client.CoreV1().PersistentVolumes().Delete(context.Background(), pv.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	claims := c.client.CoreV1().PersistentVolumeClaims(c.namespace)
	_, err = claims.Create(t.Context(), &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: modes, StorageClassName: &none, VolumeName: pv.Name, Resources: corev1.VolumeResourceRequirements{Requests: size}}}, metav1.CreateOptions{})
	must(t, err)

	entry := v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: "data", Target: "/data"}
	for _, name := range []string{"one", "two"} {
		c.running(name, ticking, nil)
		c.volumes(name, entry)
		c.row(name, "/data", v1alpha1.VolumeMounted)
	}
	must(t, claims.Delete(t.Context(), "data", metav1.DeleteOptions{}))
	terminating := func() {
		t.Helper()
		claim, err := claims.Get(t.Context(), "data", metav1.GetOptions{})
		must(t, err)
		if claim.DeletionTimestamp == nil || !slices.Contains(claim.Finalizers, v1alpha1.FinalizerInUse) {
			t.Fatalf("the claim is not kept: deleted %v, finalizers %v", claim.DeletionTimestamp, claim.Finalizers)
		}
	}
	terminating()
	c.running("three", ticking, nil)
	c.volumes("three", entry)
	if row := c.row("three", "/data", v1alpha1.VolumeFailed); row.Reason != string(fault.ClaimNotFound) {
		t.Errorf("row %+v", row)
	}
	c.volumes("one")
	c.noRow("one", "/data")
	terminating()
	two := c.process(c.get("two"))
	if read(t, two.path("data", "hello")) != "from data" {
		t.Error("the volume is not there any more")
	}
	c.volumes("two")
	c.noRow("two", "/data")
	c.wait("the claim to go", func() (bool, string) {
		_, err := claims.Get(t.Context(), "data", metav1.GetOptions{})
		return apierrors.IsNotFound(err), "claim data"
	})
	uninterrupted(t, two)
}

// A PersistentVolume that nobody has claimed becomes one Namespace's with its first use, whichever path it takes: another
// tenant that names it gets nothing of it.
func TestAFreeVolumeIsOneNamespaces(t *testing.T) {
	mine := open(t)
	theirs := mine.beside()
	name := mine.persistent("free", func(*corev1.PersistentVolume) {})
	for _, c := range []*cluster{mine, theirs} {
		c.running("one", ticking, nil)
	}
	mine.volumes("one", pv(name, "/data"))
	if row := mine.row("one", "/data", v1alpha1.VolumeMounted); row.PVCName != "flux-"+name || row.Path != v1alpha1.VolumePathLocal {
		t.Errorf("row %+v", row)
	}
	theirs.volumes("one", pv(name, "/data"))
	if row := theirs.row("one", "/data", v1alpha1.VolumeFailed); row.Reason != string(fault.SourceDenied) {
		t.Errorf("row %+v", row)
	}
	if p := mine.process(mine.get("one")); read(t, p.path("data", "hello")) != "from free" {
		t.Error("the volume is not there")
	}
	if p := theirs.process(theirs.get("one")); p.mountAt(t, "/data") != "" {
		t.Error("the other tenant has it mounted")
	}
}
