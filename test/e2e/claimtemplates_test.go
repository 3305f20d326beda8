package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// claimSandbox creates a sandbox whose Pod mounts a claim of its own at /data, of the class of the specification's examples.
func (c *cluster) claimSandbox(name string, alter func(*v1alpha1.Sandbox)) {
	c.t.Helper()
	spec := podSpec("while :; do sleep 1; done")
	spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "agent-data", MountPath: "/data"}}
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.SandboxSpec{
		Template: &corev1.PodTemplateSpec{Spec: spec},
		VolumeClaimTemplates: []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "agent-data"}, Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: ptr.To("standard"),
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("64Mi")}}}}}}}
	if alter != nil {
		alter(sb)
	}
	c.create(sandboxes, sb)
}

// podUID is the UID of a Pod; empty when there is none.
func (c *cluster) podUID(name string) types.UID {
	p, err := c.client.CoreV1().Pods(c.namespace).Get(c.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		return ""
	}
	return p.UID
}

// nextPod waits until a sandbox runs in another Pod.
func (c *cluster) nextPod(name string, before types.UID) {
	c.t.Helper()
	c.wait("another Pod "+name+" runs", func() (bool, string) {
		p, err := c.client.CoreV1().Pods(c.namespace).Get(c.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		return p.UID != before && p.Status.Phase == corev1.PodRunning && c.get(name).Status.Phase == v1alpha1.SandboxRunning, string(p.Status.Phase)
	})
}

func (c *cluster) hasClaim(name string) bool {
	_, err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Get(c.t.Context(), name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		c.t.Fatal(err)
	}
	return err == nil
}

// claimCondition waits until the condition VolumeClaimsBound has a reason, and returns its message.
func (c *cluster) claimCondition(name, reason string) string {
	c.t.Helper()
	message := ""
	c.wait("VolumeClaimsBound of "+name+" is "+reason, func() (bool, string) {
		cond := meta.FindStatusCondition(c.get(name).Status.Conditions, v1alpha1.ConditionVolumeClaimsBound)
		if cond == nil {
			return false, "no condition"
		}
		message = cond.Message
		return cond.Reason == reason, cond.Reason + ": " + cond.Message
	})
	return message
}

// What is written to a sandbox's own claim is there in each of its Pods, and a dynamic volume as well: after the Pod is
// deleted, evicted, and paused. By default the claim goes with the sandbox.
func TestClaimTemplates(t *testing.T) {
	c := open(t)
	must(t, os.WriteFile(filepath.Join(c.dir("a"), "hello"), []byte("from a\n"), 0o644))
	c.claimSandbox("s", func(sb *v1alpha1.Sandbox) {
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local(c.data("a"), "/more")}
	})
	c.phase("s", v1alpha1.SandboxRunning)
	c.claimCondition("s", "Bound")
	volume := c.volumeOf("agent-data-s")
	if volume == "" {
		t.Fatal("the claim agent-data-s is not bound")
	}
	out, err := c.shell("s", "df -h /data")
	if fields := strings.Fields(out); err != nil || !strings.HasSuffix(strings.TrimSpace(out), " /data") || len(fields) < 2 {
		t.Errorf("df -h /data: %s (%v)", out, err)
	}
	const evidence = "This data will survive a pod crash!\n"
	if out, err := c.shell("s", "echo 'This data will survive a pod crash!' > /data/evidence.txt && sync"); err != nil {
		t.Fatal(out)
	}
	there := func(how string) {
		t.Helper()
		c.reads("s", "/data", "/data/evidence.txt", evidence)
		c.row("s", "/more", v1alpha1.VolumeMounted)
		c.reads("s", "/more", "/more/hello", "from a\n")
		if now := c.volumeOf("agent-data-s"); now != volume {
			t.Errorf("%s: the claim has PersistentVolume %s; it was %s", how, now, volume)
		}
	}
	there("at first")

	before := c.podUID("s")
	if out, err := c.kubectl("delete", "pod", "s"); err != nil {
		t.Fatal(out)
	}
	c.nextPod("s", before)
	there("deleted")
	c.event("s", "PodLost")

	before = c.podUID("s")
	c.evict("s")
	c.nextPod("s", before)
	there("evicted")

	before = c.podUID("s")
	c.patch(sandboxes, "s", `{"spec":{"paused":true}}`)
	c.phase("s", v1alpha1.SandboxPaused)
	if c.podUID("s") != "" || !c.hasClaim("agent-data-s") {
		t.Errorf("paused: Pod %q, claim there: %v", c.podUID("s"), c.hasClaim("agent-data-s"))
	}
	c.patch(sandboxes, "s", `{"spec":{"paused":false}}`)
	c.nextPod("s", before)
	there("paused and resumed")

	c.deleteAll(t.Context())
	c.wait("the claim goes with its sandbox", func() (bool, string) { return !c.hasClaim("agent-data-s"), "it is there" })
}

// file makes a file of the test's with a content.
func (c *cluster) file(content string) string {
	c.t.Helper()
	name := filepath.Join(c.t.TempDir(), "file")
	must(c.t, os.WriteFile(name, []byte(content), 0o644))
	return name
}

// A claim of the name that somebody else made is not touched, and one that is to be kept stays when its sandbox goes.
func TestClaimTemplatesForeignAndKept(t *testing.T) {
	c := open(t)
	c.claimOf("agent-data-s", "standard", "64Mi")
	c.claimSandbox("s", nil)
	if message := c.claimCondition("s", "CLAIM_NAME_TAKEN"); !strings.Contains(message, "sandbox.flux.io/adopt=s") {
		t.Errorf("message %q", message)
	}
	c.event("s", "CLAIM_NAME_TAKEN")
	if c.podUID("s") != "" {
		t.Error("a Pod was made over it")
	}
	c.deleteAll(t.Context())
	if !c.hasClaim("agent-data-s") {
		t.Error("somebody else's claim went with the sandbox")
	}

	c.claimSandbox("kept", func(sb *v1alpha1.Sandbox) {
		sb.Spec.PersistentVolumeClaimRetentionPolicy = &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: v1alpha1.RetentionRetain}
	})
	c.phase("kept", v1alpha1.SandboxRunning)
	if out, err := c.shell("kept", "echo kept > /data/evidence.txt && sync"); err != nil {
		t.Fatal(out)
	}
	c.deleteAll(t.Context())
	c.wait("the Pod is gone", func() (bool, string) { return c.podUID("kept") == "", "it is there" })
	if !c.hasClaim("agent-data-kept") {
		t.Fatal("the claim went although it was to be kept")
	}
	// The next sandbox of the name gets it when somebody says so, with what is in it.
	if out, err := c.kubectl("label", "pvc", "agent-data-kept", "sandbox.flux.io/adopt=kept"); err != nil {
		t.Fatal(out)
	}
	c.claimSandbox("kept", nil)
	c.phase("kept", v1alpha1.SandboxRunning)
	c.reads("kept", "/data", "/data/evidence.txt", "kept\n")
	c.deleteAll(t.Context())
	c.wait("the Pod is gone", func() (bool, string) { return c.podUID("kept") == "", "it is there" })
	if !c.hasClaim("agent-data-kept") {
		t.Error("an adopted claim went with the sandbox")
	}
	for _, name := range []string{"agent-data-s", "agent-data-kept"} {
		must(t, c.client.CoreV1().PersistentVolumeClaims(c.namespace).Delete(t.Context(), name, metav1.DeleteOptions{}))
	}
}
