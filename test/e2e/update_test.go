package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// The template of a sandbox gets more memory, and then another image: its Pod has them without being made again, and the
// container of the new image has its volumes at its first instruction.
func TestPodIsUpdatedInPlace(t *testing.T) {
	c := open(t)
	must(t, os.WriteFile(filepath.Join(c.dir("a"), "hello"), []byte("from a\n"), 0o644))
	spec := podSpec("cat /data/hello; while :; do sleep 1; done")
	limits := func(memory string) {
		spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse(memory)}
	}
	limits("64Mi")
	c.create(sandboxes, &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "u"}, Spec: v1alpha1.SandboxSpec{
		Template: &corev1.PodTemplateSpec{Spec: spec}, DynamicVolumes: []v1alpha1.DynamicVolume{local(c.data("a"), "/data")}}})
	c.phase("u", v1alpha1.SandboxRunning)
	c.row("u", "/data", v1alpha1.VolumeMounted)
	before := c.podUID("u")
	update := func() {
		t.Helper()
		data, err := json.Marshal(map[string]any{"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"containers": spec.Containers}}}})
		must(t, err)
		c.patch(sandboxes, "u", string(data))
	}
	updated := func(what string, holds func(*corev1.Pod) bool) {
		t.Helper()
		c.wait(what, func() (bool, string) {
			p, err := c.client.CoreV1().Pods(c.namespace).Get(t.Context(), "u", metav1.GetOptions{})
			if err != nil {
				return false, err.Error()
			}
			cond := meta.FindStatusCondition(c.get("u").Status.Conditions, v1alpha1.ConditionUpdated)
			return holds(p) && cond != nil && cond.Status == metav1.ConditionTrue, fmt.Sprintf("%+v, %+v", cond, p.Status.ContainerStatuses)
		})
		if c.podUID("u") != before {
			t.Fatal("the Pod was made again")
		}
	}

	limits("128Mi")
	update()
	updated("the memory is there", func(p *corev1.Pod) bool {
		r := p.Status.ContainerStatuses[0].Resources
		return r != nil && r.Limits.Memory().String() == "128Mi"
	})
	out, err := c.shell("u", "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes")
	if err != nil || strings.TrimSpace(out) != fmt.Sprint(128<<20) {
		t.Errorf("the limit is %s (%v)", out, err)
	}
	if n := c.restarts("u"); n != 0 {
		t.Errorf("%d restarts for memory", n)
	}

	spec.Containers[0].Image = "busybox:next"
	update()
	updated("the image is there", func(p *corev1.Pod) bool {
		return p.Status.ContainerStatuses[0].RestartCount == 1 && p.Spec.Containers[0].Image == "busybox:next"
	})
	c.event("u", "PodUpdated")
	c.reads("u", "/data", "/data/hello", "from a\n")
	c.wait("its first instruction has read the volume", func() (bool, string) {
		out, err := c.kubectl("logs", "u")
		return err == nil && out == "from a\n", out
	})
	if row := c.row("u", "/data", v1alpha1.VolumeMounted); row.Attached != v1alpha1.AttachedBeforeStart {
		t.Errorf("row %+v", row)
	}
}
