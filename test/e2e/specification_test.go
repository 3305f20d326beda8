package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity/capacitytest"
)

// The specification's Sandbox (0006, "CR YAML"), with a name and nothing else added.
const specified = `
apiVersion: sandbox.flux.io/v1alpha1
kind: Sandbox
metadata:
  name: specified
spec:
  volumeMounts:
  - source: /agent/public/models
    target: /sandbox/public
    mode: ro
  dynamicVolumes:
  - volumeType: pvc
    source: user-001-data
    target: /sandbox/workspace
    mode: rw
    sizeLimit: 50Gi
    tenantId: t-10086
`

// The specification's manifest works as it is written: its claim is bound to a local PersistentVolume on a mounted image no
// larger than the sizeLimit (design, section 7), its image comes from the group.
func TestTheSpecificationsSandbox(t *testing.T) {
	c := open(t, func(c *cluster) { c.tenant = "t-10086" })
	models := "/agent/public/models"
	if _, err := os.Stat("/agent"); err == nil {
		t.Fatal("/agent exists on this machine, and is somebody else's")
	}
	must(t, os.MkdirAll(models, 0o755))
	t.Cleanup(func() { _ = os.RemoveAll("/agent") })
	must(t, os.WriteFile(filepath.Join(models, "weights"), []byte("w"), 0o644))
	c.patch(groups, "default", `{"spec":{"subGroups":[{"name":"default","template":{"image":"ubuntu:latest","command":["sh","-c","`+ticking+`"]}}]}}`)

	mounted := capacitytest.Mount(t, 50<<30)
	nodes, err := c.client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("50Gi")}
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: c.namespace}, Spec: corev1.PersistentVolumeSpec{
		Capacity: size, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource:        corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: mounted}},
		NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{nodes.Items[0].Name}}}}}}},
	}}
	_, err = c.client.CoreV1().PersistentVolumes().Create(t.Context(), pv, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		if err := c.client.CoreV1().PersistentVolumes().Delete(context.Background(), pv.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	manifest := filepath.Join(t.TempDir(), "sandbox.yaml")
	must(t, os.WriteFile(manifest, []byte(specified), 0o600))
	if out, err := c.kubectl("apply", "-f", manifest); err != nil {
		t.Fatal(out)
	}
	// The claim comes after the sandbox, which waits for it and says so.
	none := ""
	_, err = c.client.CoreV1().PersistentVolumeClaims(c.namespace).Create(t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "user-001-data"},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: pv.Spec.AccessModes, StorageClassName: &none, VolumeName: pv.Name,
			Resources: corev1.VolumeResourceRequirements{Requests: size}}}, metav1.CreateOptions{})
	must(t, err)

	sb := c.phase("specified", v1alpha1.SandboxRunning)
	p := c.process(sb)
	row := c.row("specified", "/sandbox/workspace", v1alpha1.VolumeMounted)
	if row.PVCName != "user-001-data" || row.PVName != pv.Name || row.LimitEnforcement != v1alpha1.LimitCapacity || row.Attached != v1alpha1.AttachedBeforeStart ||
		row.CapacityBytes == 0 || row.CapacityBytes > 50<<30 {
		t.Errorf("row %+v", row)
	}
	if read(t, p.path("sandbox/public/weights")) != "w" {
		t.Error("the models are not there")
	}
	must(t, os.WriteFile(p.path("sandbox/workspace/result"), []byte("r"), 0o644))
	if read(t, filepath.Join(mounted, "result")) != "r" {
		t.Error("what the sandbox writes is not in the volume")
	}
	if line := p.mountAt(t, "/sandbox/workspace"); !strings.Contains(line, " ext4 ") {
		t.Errorf("mountinfo: %s", line)
	}
	c.volumes("specified")
	c.noRow("specified", "/sandbox/workspace")
	uninterrupted(t, p)
	c.deleteAll(t.Context()) // before the volume's filesystem goes
}
