package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// podSpec is a Pod of one container that runs a shell script.
func podSpec(script string) corev1.PodSpec {
	return corev1.PodSpec{TerminationGracePeriodSeconds: ptr.To[int64](1), Containers: []corev1.Container{{
		Name: "main", Image: "busybox:latest", Command: []string{"sh", "-c", script}}}}
}

// shell runs a script in a Pod's container.
func (c *cluster) shell(pod, script string) (string, error) {
	return c.kubectl("exec", pod, "-c", "main", "--", "sh", "-c", script)
}

// reads waits until a file of a Pod's container has a content, and is below a real mount.
func (c *cluster) reads(pod, target, file, want string) {
	c.t.Helper()
	c.wait(fmt.Sprintf("%s of %s has %q", file, pod, want), func() (bool, string) {
		out, err := c.shell(pod, fmt.Sprintf("grep ' %s ' /proc/self/mountinfo >/dev/null && [ ! -L %s ] && cat %s", target, target, file))
		return err == nil && out == want, fmt.Sprintf("%s (%v)", out, err)
	})
}

// restarts is how often a Pod's container was restarted.
func (c *cluster) restarts(pod string) int32 {
	p, err := c.client.CoreV1().Pods(c.namespace).Get(context.Background(), pod, metav1.GetOptions{})
	if err != nil || len(p.Status.ContainerStatuses) == 0 {
		return -1
	}
	return p.Status.ContainerStatuses[0].RestartCount
}

// reader is a process whose first instruction reads a volume.
const reader = "cat /data/hello; while [ ! -e /tmp/crash ]; do sleep 0.1; done; exit 1"

// A Sandbox with a template owns a Pod. Its volumes are there before its process begins, also when that crashes and is
// restarted; they come and go while it runs; and a Pod that is deleted is made again, with its volumes.
func TestPodOfATemplate(t *testing.T) {
	c := open(t)
	must(t, os.WriteFile(filepath.Join(c.dir("a"), "hello"), []byte("from a\n"), 0o644))
	must(t, os.WriteFile(filepath.Join(c.dir("b"), "hello"), []byte("from b\n"), 0o644))
	c.create(sandboxes, &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v1alpha1.SandboxSpec{
		Template:       &corev1.PodTemplateSpec{Spec: podSpec(reader)},
		DynamicVolumes: []v1alpha1.DynamicVolume{local(c.data("a"), "/data")}}})
	c.phase("p", v1alpha1.SandboxRunning)
	if row := c.row("p", "/data", v1alpha1.VolumeMounted); row.Attached != v1alpha1.AttachedBeforeStart {
		t.Errorf("row %+v", row)
	}
	log := func(pod, want string) {
		t.Helper()
		c.wait("the log of "+pod+" is "+want, func() (bool, string) {
			out, err := c.kubectl("logs", pod)
			return err == nil && out == want, out
		})
	}
	log("p", "from a\n")

	c.volumes("p", local(c.data("a"), "/data"), local(c.data("b"), "/more"))
	if row := c.row("p", "/more", v1alpha1.VolumeMounted); row.Attached != v1alpha1.AttachedLive {
		t.Errorf("row %+v", row)
	}
	c.reads("p", "/more", "/more/hello", "from b\n")
	if n := c.restarts("p"); n != 0 {
		t.Errorf("the container was restarted %d times by an attach", n)
	}

	// It crashes: at the first instruction of the next start the volumes are there.
	if out, err := c.shell("p", "touch /tmp/crash"); err != nil {
		t.Fatal(out)
	}
	c.wait("the container is restarted", func() (bool, string) { n := c.restarts("p"); return n == 1, fmt.Sprint(n) })
	log("p", "from a\n")
	c.reads("p", "/more", "/more/hello", "from b\n")
	c.volumes("p", local(c.data("a"), "/data"))
	c.noRow("p", "/more")
	if out, err := c.shell("p", "grep ' /more ' /proc/self/mountinfo"); err == nil {
		t.Errorf("it is still mounted: %s", out)
	}

	// Its Pod is deleted, and made again.
	before, err := c.client.CoreV1().Pods(c.namespace).Get(t.Context(), "p", metav1.GetOptions{})
	must(t, err)
	must(t, c.client.CoreV1().Pods(c.namespace).Delete(t.Context(), "p", metav1.DeleteOptions{}))
	c.wait("there is another Pod", func() (bool, string) {
		p, err := c.client.CoreV1().Pods(c.namespace).Get(t.Context(), "p", metav1.GetOptions{})
		return err == nil && p.UID != before.UID, fmt.Sprint(err)
	})
	c.phase("p", v1alpha1.SandboxRunning)
	c.row("p", "/data", v1alpha1.VolumeMounted)
	log("p", "from a\n")
	c.deleteAll(t.Context())
	c.wait("the Pod is gone", func() (bool, string) {
		_, err := c.client.CoreV1().Pods(c.namespace).Get(t.Context(), "p", metav1.GetOptions{})
		return err != nil, "it is there"
	})
}

// A Sandbox with a podRef adopts a Pod of somebody else's, here a Deployment's: it gets volumes like any other, and is never
// deleted.
func TestAdoptedPod(t *testing.T) {
	c := open(t)
	must(t, os.WriteFile(filepath.Join(c.dir("a"), "hello"), []byte("from a\n"), 0o644))
	labels := map[string]string{"app": "web"}
	_, err := c.client.AppsV1().Deployments(c.namespace).Create(t.Context(), &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec:       podSpec("while [ ! -e /tmp/crash ]; do sleep 0.1; done; exit 1")}}}, metav1.CreateOptions{})
	must(t, err)
	pod := ""
	c.wait("the Deployment's Pod runs", func() (bool, string) {
		list, err := c.client.CoreV1().Pods(c.namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil || len(list.Items) == 0 {
			return false, fmt.Sprint(err)
		}
		pod = list.Items[0].Name
		return list.Items[0].Status.Phase == corev1.PodRunning, string(list.Items[0].Status.Phase)
	})
	c.create(sandboxes, &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: v1alpha1.SandboxSpec{
		PodRef: &v1alpha1.PodReference{Name: pod}}})
	c.phase("web", v1alpha1.SandboxRunning)
	c.volumes("web", local(c.data("a"), "/data"))
	if row := c.row("web", "/data", v1alpha1.VolumeMounted); row.Attached != v1alpha1.AttachedLive {
		t.Errorf("row %+v", row)
	}
	c.reads(pod, "/data", "/data/hello", "from a\n")
	if out, err := c.shell(pod, "touch /tmp/crash"); err != nil {
		t.Fatal(out)
	}
	c.wait("the container is restarted", func() (bool, string) { n := c.restarts(pod); return n == 1, fmt.Sprint(n) })
	c.reads(pod, "/data", "/data/hello", "from a\n")
	c.volumes("web")
	c.noRow("web", "/data")
	if out, err := c.shell(pod, "grep ' /data ' /proc/self/mountinfo"); err == nil {
		t.Errorf("it is still mounted: %s", out)
	}
	c.deleteAll(t.Context())
	if n := c.restarts(pod); n != 1 {
		t.Errorf("after the Sandbox was deleted, the Pod has %d restarts", n)
	}
}

// What a volume must not be attached to is refused by name.
func TestPodsThatAreRefused(t *testing.T) {
	c := open(t)
	c.dir("a")
	privileged := podSpec("sleep 1000")
	privileged.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
	_, err := c.client.CoreV1().Pods(c.namespace).Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "root"}, Spec: privileged}, metav1.CreateOptions{})
	must(t, err)
	c.create(sandboxes, &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "root"}, Spec: v1alpha1.SandboxSpec{
		PodRef:         &v1alpha1.PodReference{Name: "root"},
		DynamicVolumes: []v1alpha1.DynamicVolume{local(c.data("a"), "/data")}}})
	if row := c.row("root", "/data", v1alpha1.VolumeFailed); !strings.Contains(row.Reason, "PRIVILEGED") {
		t.Errorf("a privileged Pod: %s %s", row.Reason, row.Message)
	}
	// A template is refused when it is applied.
	manifest := filepath.Join(t.TempDir(), "sandbox.yaml")
	must(t, os.WriteFile(manifest, []byte(`{apiVersion: sandbox.flux.io/v1alpha1, kind: Sandbox, metadata: {name: t}, spec: {
		dynamicVolumes: [{volumeType: local, source: /data, target: /data}],
		template: {spec: {hostPID: true, containers: [{name: main, image: busybox}]}}}}`), 0o600))
	if out, err := c.kubectl("apply", "-f", manifest); err == nil || !strings.Contains(out, "hostPID") {
		t.Errorf("a template with hostPID: %s", out)
	}
}

// A Pod that requires a volume waits for it, here with an agent that is killed meanwhile and a restart policy that forgives
// no failed start.
func TestAPodThatRequiresItsVolumes(t *testing.T) {
	c := open(t)
	must(t, os.WriteFile(filepath.Join(c.dir("a"), "hello"), []byte("from a\n"), 0o644))
	spec := podSpec(reader)
	spec.RestartPolicy = corev1.RestartPolicyNever
	pods := c.client.CoreV1().Pods(c.namespace)
	_, err := pods.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "strict", Annotations: map[string]string{
		v1alpha1.AnnotationContainer: "main", v1alpha1.AnnotationRequiredVolumes: "/data"}}, Spec: spec}, metav1.CreateOptions{})
	must(t, err)
	status := func() string {
		p, err := pods.Get(t.Context(), "strict", metav1.GetOptions{})
		if err != nil || len(p.Status.ContainerStatuses) == 0 {
			return fmt.Sprint(err)
		}
		return fmt.Sprintf("%s, started %v", p.Status.Phase, *p.Status.ContainerStatuses[0].Started)
	}
	c.wait("its image is there", func() (bool, string) {
		events, err := c.kubectl("get", "events", "--field-selector", "involvedObject.name=strict")
		return err == nil && strings.Contains(events, "Created"), events
	})
	c.kill("flux-sandbox-agent")
	if s := status(); s != "Pending, started false" {
		t.Errorf("without its volume the Pod is %s", s)
	}
	c.create(sandboxes, &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "strict"}, Spec: v1alpha1.SandboxSpec{
		PodRef: &v1alpha1.PodReference{Name: "strict"}, DynamicVolumes: []v1alpha1.DynamicVolume{local(c.data("a"), "/data")}}})
	c.phase("strict", v1alpha1.SandboxRunning)
	if row := c.row("strict", "/data", v1alpha1.VolumeMounted); row.Attached != v1alpha1.AttachedBeforeStart {
		t.Errorf("row %+v", row)
	}
	c.wait("it has read its volume", func() (bool, string) {
		out, err := c.kubectl("logs", "strict")
		return err == nil && out == "from a\n", out
	})
	c.systemReady()
}
