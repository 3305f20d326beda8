package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// in is the cluster for a part of the test: what fails, fails that part.
func (c *cluster) in(t *testing.T) *cluster {
	part := *c
	part.t = t
	return &part
}

// pool applies a SandboxSet whose sandboxes have a claim of a class at /data, and waits until it is whole. more is further
// YAML of its spec.
func (c *cluster) pool(name string, replicas int, class, more string) {
	c.t.Helper()
	c.apply(fmt.Sprintf(`
apiVersion: agents.kruise.io/v1alpha1
kind: SandboxSet
metadata: {name: %s}
spec:
  replicas: %d
  runtimes: [{name: csi}]
  volumeClaimTemplates:
  - metadata: {name: agent-data}
    spec: {accessModes: [ReadWriteOnce], storageClassName: %s, resources: {requests: {storage: 32Mi}}}
  template:
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: busybox:latest
        command: [sh, -c, "while :; do sleep 1; done"]
        resources: {limits: {cpu: 100m, memory: 64Mi}}
        volumeMounts: [{name: agent-data, mountPath: /data}]
%s`, name, replicas, class, more))
	c.whole(name, replicas)
}

// whole waits until a set has as many sandboxes as it should, and all can be taken.
func (c *cluster) whole(set string, replicas int) {
	c.t.Helper()
	c.shows(fmt.Sprintf("%s %d %d .*", set, replicas, replicas), "get", "sbs", set, "--no-headers")
}

func (c *cluster) take(name, set, spec string) {
	c.t.Helper()
	c.apply(fmt.Sprintf("apiVersion: agents.kruise.io/v1alpha1\nkind: SandboxClaim\nmetadata: {name: %s}\nspec: {templateName: %s, claimTimeout: 5m%s}\n", name, set, spec))
}

// poolOf are the names of a set's sandboxes that nobody has claimed.
func (c *cluster) poolOf(set string) []string {
	c.t.Helper()
	return c.names("get", "sandbox", "-l", agentsv1alpha1.LabelSandboxSet+"="+set+",!"+agentsv1alpha1.LabelClaimName)
}

// uids are the UIDs of sandboxes and of their Pods.
func (c *cluster) uids(names ...string) (all []types.UID) {
	c.t.Helper()
	for _, name := range names {
		sb := c.get(name)
		if sb == nil {
			c.t.Fatalf("there is no sandbox %s", name)
		}
		all = append(all, sb.UID, c.podUID(name))
	}
	return all
}

// claimsGoFirst has the claims, and what they have of volumes, go at the test's end before what was made until now.
func (c *cluster) claimsGoFirst() {
	c.t.Cleanup(func() {
		if out, err := c.clean("delete", "sbc", "--all"); err != nil {
			c.t.Error(out)
		}
		c.wait("nobody uses the volumes", func() (bool, string) {
			for _, sb := range c.list() {
				if len(sb.Spec.DynamicVolumes) > 0 {
					return false, sb.Name
				}
			}
			return true, ""
		})
	})
}

// evict evicts a Pod, as a drain of its node does.
func (c *cluster) evict(pod string) {
	c.t.Helper()
	if out, err := c.kubectl("create", "--raw", fmt.Sprintf("/api/v1/namespaces/%s/pods/%s/eviction", c.namespace, pod), "-f", c.file(fmt.Sprintf(
		`{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": %q, "namespace": %q}}`, pod, c.namespace))); err != nil {
		c.t.Fatal(out)
	}
}

// killContainer kills the processes of a Pod's container with SIGKILL, and waits until kubelet has started it again.
func (c *cluster) killContainer(pod string) {
	c.t.Helper()
	p, err := c.client.CoreV1().Pods(c.namespace).Get(c.t.Context(), pod, metav1.GetOptions{})
	must(c.t, err)
	was := p.Status.ContainerStatuses[0]
	_, id, _ := strings.Cut(was.ContainerID, "://")
	dirs, err := filepath.Glob("/proc/[0-9]*")
	must(c.t, err)
	killed := 0
	for _, dir := range dirs {
		var pid int
		if cgroup, _ := os.ReadFile(dir + "/cgroup"); id == "" || !strings.Contains(string(cgroup), id) {
			continue
		}
		if _, err := fmt.Sscan(filepath.Base(dir), &pid); err != nil {
			c.t.Fatal(err)
		}
		if err := unix.Kill(pid, unix.SIGKILL); err == nil {
			killed++
		} else if !errors.Is(err, unix.ESRCH) {
			c.t.Fatal(err)
		}
	}
	if killed == 0 {
		c.t.Fatalf("container %q of Pod %s has no process", id, pod)
	}
	c.wait("kubelet has started the container again", func() (bool, string) {
		p, err := c.client.CoreV1().Pods(c.namespace).Get(c.t.Context(), pod, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		now := p.Status.ContainerStatuses[0]
		return now.RestartCount > was.RestartCount && now.State.Running != nil, fmt.Sprintf("%+v", now)
	})
}

// A sandbox is taken from the pool with an update in place and a volume, and keeps its volumes, the claim of its own and the
// one that came later, through all that can happen to its processes and Pods.
func TestAClaimedSandboxKeepsItsVolumes(t *testing.T) {
	c := pools(t)
	c.shared(c.namespace)
	c.claimsGoFirst()
	c.pool("pool", 1, "standard", "")
	name := c.poolOf("pool")[0]
	before, err := c.client.CoreV1().Pods(c.namespace).Get(t.Context(), name, metav1.GetOptions{})
	must(t, err)

	if !t.Run("taken with an update in place", func(t *testing.T) {
		c := c.in(t)
		c.take("mine", "pool", `, inplaceUpdate: {image: "nginx:latest", resources: {limits: {memory: 96Mi}}}, dynamicVolumesMount: [{pvName: `+c.namespace+`, mountPath: /shared}]`)
		// All of it is done when the claim is Completed: nothing below waits.
		if got := c.over("mine", agentsv1alpha1.ClaimCompleted).Status.SandboxNames; len(got) != 1 || got[0] != name {
			t.Fatalf("claimed are %v and not the warm %s", got, name)
		}
		p, err := c.client.CoreV1().Pods(c.namespace).Get(t.Context(), name, metav1.GetOptions{})
		must(t, err)
		was, is := before.Status.ContainerStatuses[0], p.Status.ContainerStatuses[0]
		if p.UID != before.UID || is.RestartCount != 1 || is.State.Running == nil || is.ImageID == was.ImageID || !strings.HasSuffix(is.Image, "nginx:latest") {
			t.Errorf("Pod %s (was %s), container %+v; was %+v", p.UID, before.UID, is, was)
		}
		out, err := c.shell(name, "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes; grep -c ' /shared ' /proc/self/mountinfo; cat /shared/hello")
		if want := fmt.Sprintf("%d\n1\nfrom %s\n", 96<<20, c.namespace); err != nil || out != want {
			t.Errorf("%v: memory, mounts and file are %q; want %q", err, out, want)
		}
		if cond := c.get(name).Status.Volumes; len(cond) != 1 || cond[0].Phase != v1alpha1.VolumeMounted {
			t.Errorf("rows %+v", cond)
		}
	}) {
		return
	}

	c.sh(name, "echo claim > /data/evidence && echo dynamic > /shared/evidence && sync")
	volume := c.volumeOf("agent-data-" + name)
	there := func(c *cluster) {
		c.t.Helper()
		c.row(name, "/shared", v1alpha1.VolumeMounted)
		c.reads(name, "/data", "/data/evidence", "claim\n")
		c.reads(name, "/shared", "/shared/evidence", "dynamic\n")
		if now := c.volumeOf("agent-data-" + name); now != volume {
			c.t.Errorf("the claim has PersistentVolume %s; it was %s", now, volume)
		}
		c.shows("mine Completed pool 1 1 .*", "get", "sbc", "mine", "--no-headers")
	}
	for _, what := range []struct {
		name string
		do   func(c *cluster)
	}{
		{"its process is killed", func(c *cluster) {
			pod := c.podUID(name)
			c.killContainer(name)
			there(c)
			if row := c.row(name, "/shared", v1alpha1.VolumeMounted); c.podUID(name) != pod || row.Attached != v1alpha1.AttachedBeforeStart {
				c.t.Errorf("Pod %s was %s, row %+v", c.podUID(name), pod, row)
			}
		}},
		{"the agent is replaced", func(c *cluster) {
			restarts := c.restarts(name)
			must(c.t, c.client.CoreV1().Pods(system).DeleteCollection(c.t.Context(), metav1.DeleteOptions{},
				metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=flux-sandbox-agent"}))
			c.systemReady()
			there(c)
			if n := c.restarts(name); n != restarts {
				c.t.Errorf("%d restarts, %d before", n, restarts)
			}
		}},
		{"volumes come and go", func(c *cluster) {
			must(c.t, os.WriteFile(filepath.Join(c.dir("a"), "hello"), []byte("from a\n"), 0o644))
			user := c.caller("user", "flux-sandbox-user")
			user.run(c.t, "volume", "add", name, "--source", c.data("a"), "--target", "/a")
			if got := c.sh(name, "cat /a/hello"); got != "from a" {
				c.t.Errorf("/a/hello is %q", got)
			}
			if out := user.run(c.t, "volume", "ls", name); !strings.Contains(out, "/a") || !strings.Contains(out, "/shared") {
				c.t.Error(out)
			}
			user.run(c.t, "volume", "rm", name, "/a")
			if out := c.sh(name, "grep ' /a ' /proc/self/mountinfo || echo gone"); out != "gone" {
				c.t.Error(out)
			}
			if out := user.run(c.t, "volume", "ls", name); strings.Contains(out, "/a ") || !strings.Contains(out, "/shared") {
				c.t.Error(out)
			}
			there(c)
		}},
		{"its Pod is evicted", func(c *cluster) {
			pod := c.podUID(name)
			c.evict(name)
			c.nextPod(name, pod)
			there(c)
			c.event(name, "PodLost")
		}},
		{"it is paused and resumed", func(c *cluster) {
			pod := c.podUID(name)
			c.patch(sandboxes, name, `{"spec":{"paused":true}}`)
			c.phase(name, v1alpha1.SandboxPaused)
			if c.podUID(name) != "" || c.volumeOf("agent-data-"+name) != volume {
				c.t.Errorf("paused it has Pod %q", c.podUID(name))
			}
			c.event(name, "Paused")
			c.patch(sandboxes, name, `{"spec":{"paused":false}}`)
			c.nextPod(name, pod)
			there(c)
		}},
	} {
		if !t.Run(what.name, func(t *testing.T) { what.do(c.in(t)) }) {
			return
		}
	}

	t.Run("its claim is deleted under it", func(t *testing.T) {
		c := c.in(t)
		claim := "agent-data-" + name
		// Whatever keeps the claim there after its Pod, as another Pod that uses it does.
		c.hold(claim, `["test.example.com/hold"]`)
		if out, err := c.kubectl("delete", "pvc", claim, "--wait=false"); err != nil {
			t.Fatal(out)
		}
		if m := c.claimCondition(name, "ClaimTerminating"); !strings.Contains(m, claim+" is being deleted") || !strings.Contains(m, "the next Pod gets a new, empty one") {
			t.Error(m)
		}
		c.event(name, "ClaimTerminating")
		c.reads(name, "/data", "/data/evidence", "claim\n")
		pod := c.podUID(name)
		if out, err := c.kubectl("delete", "pod", name); err != nil {
			t.Fatal(out)
		}
		// Without its Pod the sandbox waits for the claim to go, and says so.
		if m := c.claimCondition(name, "CLAIM_TERMINATING"); !strings.Contains(m, claim+" is being deleted") || !strings.Contains(m, "test.example.com/hold") {
			t.Error(m)
		}
		c.wait("the sandbox says why it has no Pod", func() (bool, string) {
			st := c.get(name).Status
			return st.Phase == v1alpha1.SandboxPending && st.Reason == "CLAIM_TERMINATING", fmt.Sprintf("%s %s: %s", st.Phase, st.Reason, st.Message)
		})
		c.hold(claim, "null")
		c.nextPod(name, pod)
		if out := c.sh(name, "ls /data/evidence 2>&1 || true"); !strings.Contains(out, "No such file") {
			t.Errorf("the new claim has %s", out)
		}
		c.reads(name, "/shared", "/shared/evidence", "dynamic\n")
		c.claimCondition(name, "Bound")
		if now := c.volumeOf(claim); now == volume || now == "" {
			t.Errorf("the new claim has %q, the old one had %s", now, volume)
		}
	})
	c.whole("pool", 1)
}

// hold replaces the finalizers of a claim that are not Kubernetes' own.
func (c *cluster) hold(claim, finalizers string) {
	c.t.Helper()
	if finalizers != "null" {
		finalizers = strings.Replace(finalizers, "[", `["kubernetes.io/pvc-protection",`, 1)
	}
	_, err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Patch(c.t.Context(), claim, types.MergePatchType,
		[]byte(`{"metadata":{"finalizers":`+finalizers+`}}`), metav1.PatchOptions{})
	must(c.t, err)
}
