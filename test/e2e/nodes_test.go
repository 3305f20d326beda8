package e2e

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

const (
	runDir           = "/run/flux-localcluster"
	containerdSocket = runDir + "/containerd.sock"
	agentAudience    = "sandbox.flux.io/agent"
	// nodeLabel is on every Node of a test, with the test's namespace: groups of the test select by it.
	nodeLabel = "e2e.flux.io/test"
	// nameLabel is on every Node of a test, with its name.
	nameLabel = "e2e.flux.io/name"
	// firstPort is the port of the first further agent, beyond those of the deployed one.
	firstPort = 9480
)

// node is a further node of the cluster: the shipped agent in a process of its own, with everything that tells it from the
// agents of other nodes, and the objects that kubelet and the DaemonSet would make.
type node struct {
	c    *cluster // of the test, or of the part of it that runs
	name string
	// address and port are where its agent serves. The address is the real node's.
	address string
	port    int32
	labels  map[string]string
	cmd     *exec.Cmd // nil while it does not run
	pod     *corev1.Pod
	files   string // of its "Pod": configuration, token, trust bundle, log
	beats   context.CancelFunc
	beat    sync.WaitGroup
}

func (n *node) stateDir() string  { return "/var/lib/flux-localcluster/" + n.name }
func (n *node) runDir() string    { return runDir + "/" + n.name }
func (n *node) namespace() string { return n.name } // of containerd
func (n *node) cgroup() string    { return "flux-localcluster/" + n.name }

// addNodes adds nodes n1, n2 … with these labels, and waits until each runs sandboxes. At the test's end everything of them
// is taken away, after their sandboxes are gone, and they must be empty.
func (c *cluster) addNodes(labels ...map[string]string) {
	c.t.Helper()
	files, address := c.t.TempDir(), c.nodeAddress() // the folder is removed after the nodes
	c.t.Cleanup(c.removeNodes)
	for i, l := range labels {
		n := &node{c: c, name: fmt.Sprintf("%s-n%d", c.namespace, i+1), address: address, port: firstPort + int32(i), beats: func() {},
			labels: map[string]string{nodeLabel: c.namespace}}
		maps.Copy(n.labels, l)
		n.labels[nameLabel] = n.name
		n.files = filepath.Join(files, n.name)
		must(c.t, os.Mkdir(n.files, 0o700))
		c.nodes = append(c.nodes, n)
		n.register()
		must(c.t, os.WriteFile(n.file("agent.yaml"), []byte(n.config()), 0o600))
		must(c.t, os.WriteFile(n.file("token"), []byte(n.token(n.pod, agentAudience)), 0o600))
		must(c.t, os.WriteFile(n.file("ca.crt"), c.caBundle(), 0o600))
		n.start()
	}
	for _, n := range c.nodes {
		n.ready()
		n.endpoint(n.port)
	}
	// One that can be nowhere else runs there.
	for _, n := range c.nodes {
		c.selected(n.only(), nameLabel, n.name, v1alpha1.SchedulingPolicy{})
		c.sandbox(n.only(), "exec sleep 1000", on(n.only()))
	}
	for _, n := range c.nodes {
		if sb := c.phase(n.only(), v1alpha1.SandboxRunning); sb.Status.Node != n.name {
			c.t.Fatalf("%s is on %s", sb.Name, sb.Status.Node)
		}
	}
	c.deleteAll(c.t.Context())
}

// only is the name of the group that places sandboxes on this node alone.
func (n *node) only() string { return "only-" + n.name[strings.LastIndex(n.name, "-")+1:] }

func (n *node) file(name string) string { return filepath.Join(n.files, name) }

// part is the cluster for one part of a test. At its end its sandboxes are gone and all nodes are as they were.
func (c *cluster) part(t *testing.T) *cluster {
	t.Helper()
	p := *c
	p.t, p.before = t, nodeState(t)
	for _, n := range p.nodes {
		n.c = &p
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		if t.Failed() {
			p.dump(ctx)
			for _, n := range p.nodes {
				n.dump()
				n.revive()
			}
		}
		p.deleteAll(ctx)
		for _, n := range p.nodes {
			n.empty()
			n.c = c
		}
		if diff := awaitState(ctx, t, p.before); diff != "" {
			t.Errorf("left on the deployed node:\n%s", diff)
		}
	})
	return &p
}

// config is the agent's configuration: as the deployed agent's, in other places.
func (n *node) config() string {
	service, err := n.c.client.CoreV1().Services(system).Get(n.c.t.Context(), "flux-sandbox-controller", metav1.GetOptions{})
	must(n.c.t, err)
	return fmt.Sprintf(`
node: %s
stateDir: %s
runDir: %s
listen: :%d
metricsListen: 127.0.0.1:%d
controller: %s:9444
controllerName: %s
containerd:
  address: %s
  namespace: %s
  allowPull: true
  registryConfig: /var/lib/flux-localcluster/config/registries
sandboxes:
  cgroupParent: /%s
volumes:
  local:
  - path: %s/tenants/{tenantId}
`, n.name, n.stateDir(), n.runDir(), n.port, n.port+100, service.Spec.ClusterIP, serverName, containerdSocket, n.namespace(), n.cgroup(), volumesDir)
}

// start starts the agent's process.
func (n *node) start() {
	n.c.t.Helper()
	log, err := os.OpenFile(n.file("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(n.c.t, err)
	defer log.Close()
	n.cmd = exec.Command(filepath.Join(filepath.Dir(os.Getenv(fluxctlEnv)), "flux-sandbox-agent"),
		"--config="+n.file("agent.yaml"), "--token="+n.file("token"), "--trust="+n.file("ca.crt"), "--containerd="+containerdSocket)
	n.cmd.Stdout, n.cmd.Stderr = log, log
	must(n.c.t, n.cmd.Start())
}

// ready waits until the agent serves with a certificate.
func (n *node) ready() {
	n.c.t.Helper()
	n.c.wait("the agent of "+n.name+" is ready", func() (bool, string) {
		_, err := httpGet(fmt.Sprintf("http://127.0.0.1:%d/readyz", n.port+100))
		return err == nil, fmt.Sprint(err)
	})
}

// dump logs the end of the agent's log.
func (n *node) dump() {
	lines := strings.Split(read(n.c.t, n.file("log")), "\n")
	n.c.t.Logf("agent of %s:\n%s", n.name, strings.Join(lines[max(0, len(lines)-40):], "\n"))
}

// kill ends the agent's process with SIGKILL. Sandboxes go on.
func (n *node) kill() {
	if n.cmd != nil {
		_ = n.cmd.Process.Kill()
		_ = n.cmd.Wait()
		n.cmd = nil
	}
}

// revive runs an agent that a part which failed has killed, where it was, so that the part's sandboxes can be deleted.
func (n *node) revive() {
	n.endpoint(n.port)
	if n.cmd == nil {
		n.start()
		n.ready()
	}
}

// has are the UIDs of the sandboxes that have a process on the node, by its cgroups.
func (n *node) has() []string {
	n.c.t.Helper()
	var uids []string
	for _, f := range n.cgroups("*") {
		uid := filepath.Base(filepath.Dir(f))
		if data, err := os.ReadFile(f); err == nil && len(data) > 0 && !slices.Contains(uids, uid) {
			uids = append(uids, uid)
		}
	}
	return uids
}

// processesOf are the processes of a sandbox on this node, the oldest first.
func (n *node) processesOf(uid string) []int {
	n.c.t.Helper()
	files := n.cgroups(uid)
	if len(files) == 0 {
		return nil
	}
	return processesIn(n.c.t, files[0])
}

// cgroups are the lists of processes of sandboxes on the node, in every hierarchy.
func (n *node) cgroups(uid string) (files []string) {
	n.c.t.Helper()
	for _, hierarchy := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		found, err := filepath.Glob(hierarchy + n.cgroup() + "/" + uid + "/cgroup.procs")
		must(n.c.t, err)
		files = append(files, found...)
	}
	return files
}

// left is what sandboxes can leave on the node.
func (n *node) left() state {
	s := state{}
	for line := range strings.Lines(read(n.c.t, "/proc/self/mountinfo")) {
		if fields := strings.Fields(line); strings.Contains(line, "/"+n.name+"/") {
			s = append(s, "mount "+fields[4])
		}
	}
	for _, pattern := range []string{
		n.stateDir() + "/sandboxes/*", n.runDir() + "/containers/*", runDir + "/runc/" + n.namespace() + "/*",
		runDir + "/containerd/io.containerd.runtime.v2.task/" + n.namespace() + "/*",
		"/sys/fs/cgroup/" + n.cgroup() + "/*/", "/sys/fs/cgroup/*/" + n.cgroup() + "/*/",
	} {
		found, err := filepath.Glob(pattern)
		must(n.c.t, err)
		for _, f := range found {
			s = append(s, "path "+f)
		}
	}
	return s
}

// deleteNow deletes without a grace period: nobody is there who would end something.
var deleteNow = metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}

// removeNodes takes the nodes away, after the namespace's sandboxes.
func (c *cluster) removeNodes() {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	defer func() { // also where the sandboxes do not go
		for _, n := range c.nodes {
			n.remove(ctx)
		}
	}()
	if c.t.Failed() {
		for _, n := range c.nodes {
			n.dump()
		}
	}
	c.deleteAll(ctx)
}

// empty waits until nothing of sandboxes is on the node.
func (n *node) empty() {
	n.c.t.Helper()
	// What the emptied folders of the runtime are is no leftover: the deployed node has them from its first sandbox on.
	folders := state{"path " + n.runDir() + "/containers/exec", "path " + n.runDir() + "/containers/runc"}
	diff := ""
	if !testenv.Poll(30*time.Second, func() bool {
		diff = folders.diff(append(n.left(), folders...))
		return diff == ""
	}) {
		n.c.t.Errorf("left on node %s:\n%s", n.name, diff)
	}
}

// remove takes the node away. Its sandboxes are gone before.
func (n *node) remove(ctx context.Context) {
	t := n.c.t
	t.Helper()
	failed := func(what string, err error) {
		if err != nil && !apierrors.IsNotFound(err) {
			t.Errorf("remove node %s: %s: %v", n.name, what, err)
		}
	}
	n.empty()
	n.kill()
	n.beats()
	n.beat.Wait()
	failed("endpoint", n.c.client.DiscoveryV1().EndpointSlices(system).Delete(ctx, n.name, deleteNow))
	failed("Pod", n.c.client.CoreV1().Pods(system).Delete(ctx, n.name, deleteNow)) // gone already where its Node was deleted
	failed("Lease", n.c.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Delete(ctx, n.name, deleteNow))
	failed("Node", n.c.client.CoreV1().Nodes().Delete(ctx, n.name, deleteNow))
	failed("containerd", n.clearContainerd(ctx))
	for _, pattern := range []string{"/sys/fs/cgroup/" + n.cgroup(), "/sys/fs/cgroup/*/" + n.cgroup()} {
		dirs, _ := filepath.Glob(pattern)
		for _, dir := range dirs {
			failed("cgroup", os.Remove(dir))
		}
	}
	for _, dir := range []string{n.stateDir(), n.runDir(), runDir + "/runc/" + n.namespace()} {
		failed("folder", os.RemoveAll(dir))
	}
}

// clearContainerd removes the node's namespace of containerd with its images.
func (n *node) clearContainerd(ctx context.Context) error {
	ctx = namespaces.WithNamespace(ctx, n.namespace())
	c, err := client.New(containerdSocket)
	if err != nil {
		return err
	}
	defer c.Close()
	// There are none, unless the test failed.
	containers, err := c.Containers(ctx)
	if err != nil {
		return err
	}
	for _, container := range containers {
		if task, err := container.Task(ctx, nil); err == nil {
			_, _ = task.Delete(ctx, client.WithProcessKill)
		}
		if err := container.Delete(ctx, client.WithSnapshotCleanup); err != nil {
			return err
		}
	}
	list, err := c.ImageService().List(ctx)
	if err != nil {
		return err
	}
	for _, image := range list {
		if err := c.ImageService().Delete(ctx, image.Name, images.SynchronousDelete()); err != nil {
			return err
		}
	}
	if !testenv.Poll(30*time.Second, func() bool {
		err = c.NamespaceService().Delete(ctx, n.namespace())
		return err == nil || errdefs.IsNotFound(err)
	}) {
		return err
	}
	return nil
}
