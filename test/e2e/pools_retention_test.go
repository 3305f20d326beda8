package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// retained makes a StorageClass whose volumes outlive their claims. At the test's end they go all the same.
func (c *cluster) retained() (class string) {
	c.t.Helper()
	class = c.namespace
	_, err := c.client.StorageV1().StorageClasses().Create(c.t.Context(), &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: class},
		Provisioner: "local.csi.sandbox.flux.io", VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
		ReclaimPolicy: ptr.To(corev1.PersistentVolumeReclaimRetain)}, metav1.CreateOptions{})
	must(c.t, err)
	c.t.Cleanup(func() {
		ctx := context.Background()
		defer func() {
			if err := c.client.StorageV1().StorageClasses().Delete(ctx, class, metav1.DeleteOptions{}); err != nil {
				c.t.Error(err)
			}
		}()
		c.wait("the volumes of the class are gone", func() (bool, string) {
			list, err := c.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
			if err != nil {
				return false, err.Error()
			}
			var left []string
			for _, pv := range list.Items {
				if pv.Spec.StorageClassName != class {
					continue
				}
				left = append(left, pv.Name+" "+string(pv.Status.Phase))
				if pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
					_, err := c.client.CoreV1().PersistentVolumes().Patch(ctx, pv.Name, types.MergePatchType,
						[]byte(`{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`), metav1.PatchOptions{})
					left = append(left, fmt.Sprint(err))
				}
			}
			return len(left) == 0, strings.Join(left, ", ")
		})
	})
	return class
}

// removed waits until a set has scaled down by one, and is the name of the sandbox that went, with its Pod.
func (c *cluster) removed(set string, before []string) (name string) {
	c.t.Helper()
	c.whole(set, len(before)-1)
	c.wait("a sandbox of "+set+" goes", func() (bool, string) {
		now := c.poolOf(set)
		i := slices.IndexFunc(before, func(name string) bool { return !slices.Contains(now, name) })
		if i >= 0 {
			name = before[i]
		}
		return i >= 0, fmt.Sprint(before, now)
	})
	c.gone(name)
	return name
}

// gone waits until a sandbox and its Pod are gone.
func (c *cluster) gone(name string) {
	c.t.Helper()
	c.wait("sandbox "+name+" is gone", func() (bool, string) {
		sb, pod := c.get(name), c.podUID(name)
		return sb == nil && pod == "", fmt.Sprint(sb != nil, pod)
	})
}

func (c *cluster) claimGoes(name string) {
	c.t.Helper()
	c.wait("claim "+name+" goes", func() (bool, string) { return !c.hasClaim(name), "it is there" })
}

// claimStays fails unless a claim is bound, and nobody's who takes it along.
func (c *cluster) claimStays(name string) {
	c.t.Helper()
	claim, err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Get(c.t.Context(), name, metav1.GetOptions{})
	must(c.t, err)
	if claim.DeletionTimestamp != nil || claim.Status.Phase != corev1.ClaimBound || len(claim.OwnerReferences) != 0 {
		c.t.Errorf("claim %s: deleted %v, %s, owners %+v", name, claim.DeletionTimestamp, claim.Status.Phase, claim.OwnerReferences)
	}
}

// Two sets that differ in what they keep: when scaled, or when deleted. And a class that keeps what no claim has any more.
func TestWhatPoolsKeep(t *testing.T) {
	c := pools(t)
	class := c.retained()
	t.Cleanup(func() { // before the volumes go
		for _, args := range [][]string{{"delete", "pod,sbc,sbs,sandbox", "--all"}, {"delete", "pvc", "--all", "--wait=false"}} {
			if out, err := c.clean(args...); err != nil {
				t.Error(out)
			}
		}
	})
	c.pool("kept", 2, class, "  persistentVolumeClaimRetentionPolicy: {whenDeleted: Retain, whenScaled: Delete}\n")
	c.pool("dropped", 2, "standard", "  persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete, whenScaled: Retain}\n")
	kept, dropped := c.poolOf("kept"), c.poolOf("dropped")
	volumes := map[string]string{}
	for _, name := range kept {
		c.sh(name, "hostname > /data/evidence && sync")
		volumes[name] = c.volumeOf("agent-data-" + name)
	}

	// Scaled down.
	c.patch(sandboxSets, "kept", `{"spec":{"replicas":1}}`)
	c.patch(sandboxSets, "dropped", `{"spec":{"replicas":1}}`)
	c.claimStays("agent-data-" + c.removed("dropped", dropped))
	left := c.removed("kept", kept)
	c.claimGoes("agent-data-" + left)

	// The claim has gone and its volume, of a class with reclaimPolicy Retain, has not: with its data, it serves the next claim.
	c.wait("the volume is released", func() (bool, string) {
		pv, err := c.client.CoreV1().PersistentVolumes().Get(t.Context(), volumes[left], metav1.GetOptions{})
		must(t, err)
		return pv.Status.Phase == corev1.VolumeReleased, string(pv.Status.Phase)
	})
	_, err := c.client.CoreV1().PersistentVolumes().Patch(t.Context(), volumes[left], types.MergePatchType, []byte(`{"spec":{"claimRef":null}}`), metav1.PatchOptions{})
	must(t, err)
	c.claimOf("again", class, "32Mi", func(p *corev1.PersistentVolumeClaim) { p.Spec.VolumeName = volumes[left] })
	c.podWith("reader", nil, "again")
	if got := c.sh("reader", "cat /data/evidence"); got != left {
		t.Errorf("the volume of %s has evidence of %q", left, got)
	}

	// A claim is deleted, or goes by itself.
	c.take("of-kept", "kept", "")
	c.take("of-dropped", "dropped", "")
	c.take("passing", "dropped", ", ttlAfterCompleted: 1s")
	ofKept := c.over("of-kept", agentsv1alpha1.ClaimCompleted).Status.SandboxNames[0]
	ofDropped := c.over("of-dropped", agentsv1alpha1.ClaimCompleted).Status.SandboxNames[0]
	passed := ""
	c.wait("the claim passes", func() (bool, string) {
		u, err := c.dynamic.Resource(sandboxClaims).Namespace(c.namespace).Get(t.Context(), "passing", metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(u, err)
	})
	if given := c.names("get", "sandbox", "-l", agentsv1alpha1.LabelClaimName+"=passing"); len(given) != 1 {
		t.Fatalf("of a claim that passed there is %v", given)
	} else {
		passed = given[0]
	}
	if out, err := c.kubectl("delete", "sbc", "of-kept", "of-dropped"); err != nil {
		t.Fatal(out)
	}
	c.claimGoes("agent-data-" + ofDropped)
	for _, name := range []string{ofKept, ofDropped} {
		c.gone(name)
	}
	c.claimStays("agent-data-" + ofKept)

	// The sets are deleted: nothing of what was claimed goes with them.
	c.whole("kept", 1)
	c.whole("dropped", 1)
	lastKept, lastDropped := c.poolOf("kept")[0], c.poolOf("dropped")[0]
	pod := c.podUID(passed)
	if out, err := c.kubectl("delete", "sbs", "kept", "dropped"); err != nil {
		t.Fatal(out)
	}
	c.claimGoes("agent-data-" + lastDropped)
	for _, name := range []string{lastKept, lastDropped} {
		c.gone(name)
	}
	c.claimStays("agent-data-" + lastKept)
	if sb := c.get(passed); sb == nil || len(sb.OwnerReferences) != 0 || sb.Status.Phase != v1alpha1.SandboxRunning || c.podUID(passed) != pod || !c.hasClaim("agent-data-"+passed) {
		t.Errorf("the sandbox of the claim that passed is %+v", sb)
	}
}
