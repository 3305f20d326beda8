package e2e

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// anchorClass makes a class of the built-in driver whose volumes take the anchor path.
func (c *cluster) anchorClass() string {
	c.t.Helper()
	waits, deletes := storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete
	name := c.namespace + "-anchored"
	_, err := c.client.StorageV1().StorageClasses().Create(c.t.Context(), &storagev1.StorageClass{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Annotations: map[string]string{v1alpha1.AnnotationPath: "anchor"}},
		Provisioner: "local.csi.sandbox.flux.io", VolumeBindingMode: &waits, ReclaimPolicy: &deletes}, metav1.CreateOptions{})
	must(c.t, err)
	c.t.Cleanup(func() {
		if err := c.client.StorageV1().StorageClasses().Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			c.t.Error(err)
		}
	})
	return name
}

// anchors are the anchors of a claim.
func (c *cluster) anchors(claim string) []corev1.Pod {
	c.t.Helper()
	list, err := c.client.CoreV1().Pods(c.namespace).List(c.t.Context(), metav1.ListOptions{LabelSelector: v1alpha1.LabelAnchor + "=" + claim})
	must(c.t, err)
	return list.Items
}

func names(pods []corev1.Pod) string {
	var out []string
	for _, p := range pods {
		out = append(out, fmt.Sprint(p.Name, " ", p.Status.Phase, " deleted ", p.DeletionTimestamp))
	}
	return strings.Join(out, ", ")
}

// successor waits until one anchor other than the old ones runs, and is alone.
func (c *cluster) successor(claim string, old ...types.UID) corev1.Pod {
	c.t.Helper()
	var found corev1.Pod
	c.wait("a successor of the anchor", func() (bool, string) {
		all := c.anchors(claim)
		if len(all) == 1 {
			found = all[0]
		}
		return len(all) == 1 && !slices.Contains(old, all[0].UID) && all[0].Status.Phase == corev1.PodRunning && all[0].DeletionTimestamp == nil, names(all)
	})
	return found
}

// A claim whose class asks for the anchor path: kubelet mounts it for an anchor, from which the agent has it, whatever
// becomes of that anchor.
func TestTheAnchorPath(t *testing.T) {
	c := open(t)
	c.claimOf("data", c.anchorClass(), "64Mi")
	entry := v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: "data", Target: "/data"}
	for _, name := range []string{"one", "two"} {
		c.running(name, ticking, nil)
		c.volumes(name, entry)
		row := c.row(name, "/data", v1alpha1.VolumeMounted)
		if row.Path != v1alpha1.VolumePathAnchor || row.PathReason == "" || row.PVCName != "data" || row.PVName == "" {
			t.Errorf("row %+v", row)
		}
	}
	one, two := c.process(c.get("one")), c.process(c.get("two"))
	write(t, one.path("data", "file"), "written by one")
	if got := read(t, two.path("data", "file")); got != "written by one" {
		t.Errorf("the second reads %q", got)
	}
	all := c.anchors("data")
	if len(all) != 1 {
		t.Fatalf("anchors: %s", names(all))
	}
	first := all[0]

	// Deleted: the successor runs before the first is ended.
	must(t, c.client.CoreV1().Pods(c.namespace).Delete(t.Context(), first.Name, metav1.DeleteOptions{}))
	second := c.successor("data", first.UID)
	write(t, one.path("data", "file"), "after the first anchor")
	if got := read(t, two.path("data", "file")); got != "after the first anchor" {
		t.Errorf("the second reads %q", got)
	}
	// Forced: the guard keeps the volume meanwhile.
	must(t, c.client.CoreV1().Pods(c.namespace).Delete(t.Context(), second.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}))
	c.successor("data", first.UID, second.UID)
	write(t, two.path("data", "file"), "after the second anchor")
	c.running("three", ticking, nil)
	c.volumes("three", entry)
	c.row("three", "/data", v1alpha1.VolumeMounted)
	if got := read(t, c.process(c.get("three")).path("data", "file")); got != "after the second anchor" {
		t.Errorf("the third reads %q", got)
	}
	uninterrupted(t, one)
	uninterrupted(t, two)

	// Its finalizer goes after its anchor, and that after its last user.
	c.deleteAll(t.Context())
	c.wait("the anchor goes, and then the finalizer", func() (bool, string) {
		all := c.anchors("data")
		claim, err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Get(t.Context(), "data", metav1.GetOptions{})
		must(t, err)
		held := slices.Contains(claim.Finalizers, v1alpha1.FinalizerInUse)
		if !held && len(all) > 0 {
			t.Errorf("not held any more while there are anchors: %s", names(all))
		}
		return len(all) == 0 && !held, names(all) + fmt.Sprint(claim.Finalizers)
	})
	// The data is there for the next.
	c.running("next", ticking, nil)
	c.volumes("next", entry)
	c.row("next", "/data", v1alpha1.VolumeMounted)
	if got := read(t, c.process(c.get("next")).path("data", "file")); got != "after the second anchor" {
		t.Errorf("the next reads %q", got)
	}
	c.deleteAll(t.Context())
	c.deleteClaim("data")
}

// The anchor is evicted, and the programs of its node are replaced while it is there.
func TestTheAnchorPathWhileTheNodesProgramsAreReplaced(t *testing.T) {
	c := open(t)
	c.claimOf("data", c.anchorClass(), "64Mi")
	c.running("one", ticking, nil)
	entry := v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: "data", Target: "/data"}
	c.volumes("one", entry)
	c.row("one", "/data", v1alpha1.VolumeMounted)
	one := c.process(c.get("one"))
	anchor := c.successor("data")
	c.running("next", ticking, nil)
	next := c.process(c.get("next"))
	for _, trouble := range []struct {
		what string
		do   func()
	}{
		{"the driver is replaced", func() { c.kill("flux-sandbox-csi") }},
		{"the agent is replaced", func() { c.kill("flux-sandbox-agent") }},
		{"the controller is replaced", func() { c.kill("flux-sandbox-controller") }},
		{"kubelet starts again", func() {
			c.component("stop", "kubelet")
			c.component("start", "kubelet")
		}},
		{"the anchor is evicted", func() {
			must(t, c.client.PolicyV1().Evictions(c.namespace).Evict(t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: anchor.Name, Namespace: c.namespace}}))
			anchor = c.successor("data", anchor.UID)
		}},
	} {
		trouble.do()
		c.systemReady()
		write(t, one.path("data", "file"), trouble.what)
		// Who comes now has the same volume.
		c.volumes("next", entry)
		c.row("next", "/data", v1alpha1.VolumeMounted)
		if got := read(t, next.path("data", "file")); got != trouble.what {
			t.Errorf("%s: the next reads %q", trouble.what, got)
		}
		c.volumes("next")
		c.noRow("next", "/data")
	}
	if now := c.successor("data"); now.UID != anchor.UID {
		t.Errorf("the anchor was replaced without need: %s", now.Name)
	}
	uninterrupted(t, one)
	c.deleteAll(t.Context())
	c.deleteClaim("data")
}

// A claim of the direct path that waits for its first consumer is bound by an anchor, which then goes.
func TestAClaimIsBoundByItsFirstSandbox(t *testing.T) {
	c := open(t)
	c.claimOf("data", "flux-local", "64Mi")
	c.running("one", ticking, nil)
	c.volumes("one", v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: "data", Target: "/data"})
	if row := c.row("one", "/data", v1alpha1.VolumeMounted); row.Path != v1alpha1.VolumePathDirect {
		t.Errorf("row %+v", row)
	}
	one := c.process(c.get("one"))
	write(t, one.path("data", "file"), "x")
	c.wait("the anchor goes", func() (bool, string) {
		all := c.anchors("data")
		return len(all) == 0, names(all)
	})
	if read(t, one.path("data", "file")) != "x" {
		t.Error("the data is gone with the anchor")
	}
	c.deleteAll(t.Context())
	c.deleteClaim("data")
}

// A volume that is one Pod's is one sandbox's.
func TestReadWriteOncePod(t *testing.T) {
	c := open(t)
	c.claimOf("data", "flux-local", "64Mi", func(claim *corev1.PersistentVolumeClaim) {
		claim.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
	})
	entry := v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: "data", Target: "/data"}
	for _, name := range []string{"one", "two"} {
		c.running(name, ticking, nil)
	}
	c.volumes("one", entry)
	if row := c.row("one", "/data", v1alpha1.VolumeMounted); row.Path != v1alpha1.VolumePathAnchor {
		t.Errorf("row %+v", row)
	}
	c.volumes("two", entry)
	if row := c.row("two", "/data", v1alpha1.VolumeFailed); row.Reason != "CONFLICT" {
		t.Errorf("row %+v", row)
	}
	c.volumes("one")
	c.noRow("one", "/data")
	c.row("two", "/data", v1alpha1.VolumeMounted)
	c.deleteAll(t.Context())
	c.deleteClaim("data")
}

func write(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o644))
}
