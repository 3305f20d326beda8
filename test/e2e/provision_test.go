package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// claimOf makes a claim of a class.
func (c *cluster) claimOf(name, class, size string, changes ...func(*corev1.PersistentVolumeClaim)) {
	c.t.Helper()
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &class,
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}}}}
	for _, change := range changes {
		change(claim)
	}
	_, err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Create(c.t.Context(), claim, metav1.CreateOptions{})
	must(c.t, err)
}

// volumeOf is the name of the PersistentVolume that a claim is bound to; empty while it is not.
func (c *cluster) volumeOf(claim string) string {
	c.t.Helper()
	got, err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Get(c.t.Context(), claim, metav1.GetOptions{})
	must(c.t, err)
	if got.Status.Phase != corev1.ClaimBound {
		return ""
	}
	return got.Spec.VolumeName
}

// podWith makes a Pod with claims at /data (one) or /data/CLAIM, and waits until it runs.
func (c *cluster) podWith(name string, change func(*corev1.PodSpec), claims ...string) {
	c.t.Helper()
	spec := podSpec("while :; do sleep 1; done")
	for _, claim := range claims {
		path := "/data"
		if len(claims) > 1 {
			path += "/" + claim
		}
		spec.Volumes = append(spec.Volumes, corev1.Volume{Name: claim, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}})
		spec.Containers[0].VolumeMounts = append(spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: claim, MountPath: path})
	}
	if change != nil {
		change(&spec)
	}
	_, err := c.client.CoreV1().Pods(c.namespace).Create(c.t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
	must(c.t, err)
	c.wait("Pod "+name+" runs", func() (bool, string) {
		p, err := c.client.CoreV1().Pods(c.namespace).Get(c.t.Context(), name, metav1.GetOptions{})
		must(c.t, err)
		return p.Status.Phase == corev1.PodRunning, fmt.Sprint(p.Status.Phase, " ", p.Status.Conditions)
	})
}

func (c *cluster) deletePod(name string) {
	c.t.Helper()
	must(c.t, c.client.CoreV1().Pods(c.namespace).Delete(c.t.Context(), name, metav1.DeleteOptions{}))
	c.wait("Pod "+name+" is gone", func() (bool, string) {
		_, err := c.client.CoreV1().Pods(c.namespace).Get(c.t.Context(), name, metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
}

// deleteClaim deletes a claim and waits until its volume and its data are gone.
func (c *cluster) deleteClaim(name string) {
	c.t.Helper()
	volume := c.volumeOf(name)
	must(c.t, c.client.CoreV1().PersistentVolumeClaims(c.namespace).Delete(c.t.Context(), name, metav1.DeleteOptions{}))
	c.wait("volume "+volume+" of "+name+" is gone", func() (bool, string) {
		pv, err := c.client.CoreV1().PersistentVolumes().Get(c.t.Context(), volume, metav1.GetOptions{})
		left, _ := filepath.Glob(filepath.Join(poolDir, volume+"*"))
		return apierrors.IsNotFound(err) && len(left) == 0, fmt.Sprint(pv.Status.Phase, " ", left, " ", err)
	})
}

func (c *cluster) sh(pod, script string) string {
	c.t.Helper()
	out, err := c.shell(pod, script)
	if err != nil {
		c.t.Fatalf("%s in %s: %v: %s", script, pod, err, out)
	}
	return strings.TrimSpace(out)
}

// A claim of flux-local waits for its first Pod, is made on that node at its size, and keeps what was written for the next
// Pod, also while the driver is another. When it is deleted nothing is left.
func TestAClaimOfTheBuiltInDriver(t *testing.T) {
	c := open(t)
	c.claimOf("data", "flux-local", "64Mi")
	if v := c.volumeOf("data"); v != "" {
		t.Errorf("it is bound to %s before anybody wants it", v)
	}
	// Not root: the volume is the Pod's by its fsGroup.
	user := func(s *corev1.PodSpec) {
		s.SecurityContext = &corev1.PodSecurityContext{RunAsUser: ptr.To[int64](1000), RunAsGroup: ptr.To[int64](1000), FSGroup: ptr.To[int64](2000)}
	}
	c.podWith("one", user, "data")
	volume := c.volumeOf("data")
	if got := c.sh("one", "echo kept > /data/f && stat -c %g /data && grep -c ' /data ' /proc/self/mountinfo"); got != "2000\n1" {
		t.Errorf("group and mounts of the volume: %q", got)
	}
	var blocks int
	if _, err := fmt.Sscan(c.sh("one", "df -Pk /data | tail -1 | awk '{print $2}'"), &blocks); err != nil || blocks > 64<<10 || blocks < 40<<10 {
		t.Errorf("df shows %d KiB of 64 MiB (%v)", blocks, err)
	}
	if out, err := c.shell("one", "dd if=/dev/zero of=/data/big bs=1M count=80"); err == nil || !strings.Contains(out, "No space left") {
		t.Errorf("writing more than its size: %v %s", err, out)
	}
	c.sh("one", "rm /data/big")
	pv, err := c.client.CoreV1().PersistentVolumes().Get(t.Context(), volume, metav1.GetOptions{})
	must(t, err)
	if pv.Spec.CSI == nil || pv.Spec.CSI.VolumeHandle != volume || pv.Spec.NodeAffinity == nil {
		t.Errorf("the volume is %+v", pv.Spec)
	}

	// Another driver: what is published stays, and what was under way goes on.
	pod := func() corev1.Pod {
		t.Helper()
		list, err := c.client.CoreV1().Pods(system).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=flux-sandbox-csi"})
		must(t, err)
		for _, p := range list.Items {
			if p.DeletionTimestamp == nil {
				return p
			}
		}
		return corev1.Pod{}
	}
	before := pod()
	must(t, c.client.CoreV1().Pods(system).Delete(t.Context(), before.Name, metav1.DeleteOptions{}))
	c.claimOf("meanwhile", "flux-local", "32Mi")
	c.sh("one", "cat /data/f && echo on >> /data/f")
	c.podWith("two", nil, "meanwhile")
	now := pod()
	if now.UID == before.UID || now.UID == "" {
		t.Errorf("the driver was not replaced: %s", now.Name)
	}
	c.wait("the metrics tell of both volumes", func() (bool, string) {
		answer, err := http.Get("http://" + now.Status.PodIP + ":9472/metrics")
		if err != nil {
			return false, err.Error()
		}
		defer answer.Body.Close()
		data, err := io.ReadAll(answer.Body)
		must(t, err)
		for _, line := range []string{"flux_csi_volumes 2", "flux_csi_volumes_unclaimed 0"} {
			if !strings.Contains(string(data), "\n"+line+"\n") {
				return false, "there is no " + line
			}
		}
		return true, ""
	})
	c.deletePod("one")
	c.podWith("three", user, "data")
	if got := c.sh("three", "cat /data/f"); got != "kept\non" {
		t.Errorf("the next Pod sees %q", got)
	}
	if got := c.volumeOf("data"); got != volume {
		t.Errorf("it is bound to %s, was to %s", got, volume)
	}
	for _, name := range []string{"two", "three"} {
		c.deletePod(name)
	}
	c.deleteClaim("data")
	c.deleteClaim("meanwhile")
}

// Ten claims at once, of the class that the specification's examples name.
func TestManyClaimsAtOnce(t *testing.T) {
	c := open(t)
	var names []string
	for i := range 10 {
		names = append(names, fmt.Sprintf("c%d", i))
		c.claimOf(names[i], "standard", "32Mi")
	}
	c.podWith("all", nil, names...)
	c.sh("all", "for c in /data/*; do echo $c > $c/name; done; sync")
	seen := map[string]bool{}
	for _, name := range names {
		seen[c.volumeOf(name)] = true
		if got := c.sh("all", "cat /data/"+name+"/name"); got != "/data/"+name {
			t.Errorf("%s has the content of %s", name, got)
		}
	}
	if len(seen) != len(names) {
		t.Errorf("%d claims have %d volumes", len(names), len(seen))
	}
	c.deletePod("all")
	for _, name := range names {
		c.deleteClaim(name)
	}
}

// A claim that no node has room for says so, and is served once it asks for what there is.
func TestAClaimWithoutRoom(t *testing.T) {
	c := open(t)
	c.claimOf("huge", "flux-local", "1Pi")
	spec := podSpec("sleep 1000")
	spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "huge"}}}}
	_, err := c.client.CoreV1().Pods(c.namespace).Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: spec}, metav1.CreateOptions{})
	must(t, err)
	c.wait("the claim says that there is no room", func() (bool, string) {
		list, err := c.client.CoreV1().Events(c.namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=huge,reason=ProvisioningFailed"})
		must(t, err)
		data, _ := json.Marshal(list.Items)
		return strings.Contains(string(data), "has no room for it, another is looked for") && strings.Contains(string(data), "free space there, or ask for less"), string(data)
	})
	c.deletePod("p")
	must(t, c.client.CoreV1().PersistentVolumeClaims(c.namespace).Delete(context.WithoutCancel(t.Context()), "huge", metav1.DeleteOptions{}))
	if left, err := os.ReadDir(poolDir); err != nil || len(left) != 1 { // its lock
		t.Errorf("the pool has %v (%v)", left, err)
	}
}
