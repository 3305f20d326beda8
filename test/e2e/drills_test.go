package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// kill kills the processes of a program of ours with SIGKILL: those that kubelet runs, by the Pods' cgroups.
func (c *cluster) kill(program string) {
	c.t.Helper()
	killed := 0
	dirs, err := filepath.Glob("/proc/[0-9]*")
	must(c.t, err)
	for _, dir := range dirs {
		exe, _ := os.ReadFile(dir + "/cmdline")
		cgroup, _ := os.ReadFile(dir + "/cgroup")
		if name, _, _ := strings.Cut(string(exe), "\x00"); name != "/"+program || !strings.Contains(string(cgroup), "kubepods") {
			continue
		}
		var pid int
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
		c.t.Fatalf("there is no process of %s", program)
	}
}

// systemReady waits until every Pod of ours is ready.
func (c *cluster) systemReady() {
	c.t.Helper()
	c.wait("our Pods are ready", func() (bool, string) {
		pods, err := c.client.CoreV1().Pods(system).List(context.Background(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name"})
		if err != nil {
			return false, err.Error()
		}
		ready := 0
		for _, p := range pods.Items {
			for _, condition := range p.Status.Conditions {
				if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue && p.DeletionTimestamp == nil {
					ready++
				}
			}
		}
		return ready == len(pods.Items) && ready > 2, fmt.Sprint(ready, " of ", len(pods.Items), " are")
	})
}

// fleet is some sandboxes, each with a process that must not be interrupted.
type fleet struct {
	c         *cluster
	processes map[string]process
}

func (c *cluster) fleet(n int) *fleet {
	c.t.Helper()
	for i := range n {
		c.sandbox(fmt.Sprint("f", i), ticking, func(sb *v1alpha1.Sandbox) {
			sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local(c.dir("first"), "/first")}
		})
	}
	f := &fleet{c: c, processes: map[string]process{}}
	for i := range n {
		name := fmt.Sprint("f", i)
		f.processes[name] = c.process(c.phase(name, v1alpha1.SandboxRunning))
	}
	return f
}

// whole fails unless every sandbox runs, uninterrupted, with exactly these volumes, in the API server's and in the kernel's
// view.
func (f *fleet) whole(targets ...string) {
	f.c.t.Helper()
	f.c.wait("every sandbox is as it should be", func() (bool, string) {
		for name := range f.processes {
			sb := f.c.get(name)
			if sb == nil || sb.Status.Phase != v1alpha1.SandboxRunning || len(sb.Status.Volumes) != len(targets) {
				return false, fmt.Sprintf("%s: %+v", name, sb)
			}
			for _, v := range sb.Status.Volumes {
				if v.Phase != v1alpha1.VolumeMounted {
					return false, fmt.Sprintf("%s: %s is %s: %s", name, v.Target, v.Phase, v.Message)
				}
			}
		}
		return true, ""
	})
	for name, p := range f.processes {
		uninterrupted(f.c.t, p)
		mounts := 0
		for line := range strings.Lines(read(f.c.t, fmt.Sprintf("/proc/%d/mountinfo", p.pid))) {
			if strings.Contains(line, "flux-localcluster/volumes") {
				mounts++
			}
		}
		if mounts != len(targets) {
			f.c.t.Errorf("%s has %d mounts of volumes, want %d", name, mounts, len(targets))
		}
		for _, target := range targets {
			if p.mountAt(f.c.t, target) == "" {
				f.c.t.Errorf("%s has nothing at %s", name, target)
			}
		}
	}
}

// add writes an entry into every sandbox, at once.
func (f *fleet) add(target string) {
	f.c.t.Helper()
	source := f.c.dir("of" + strings.ReplaceAll(target, "/", "-"))
	for name := range f.processes {
		f.c.volumes(name, append(f.c.get(name).Spec.DynamicVolumes, local(source, target))...)
	}
}

func TestControllerKilledDuringAttaches(t *testing.T) {
	c := open(t)
	f := c.fleet(10)
	f.add("/second")
	f.add("/third")
	c.kill("flux-sandbox-controller") // both replicas
	f.whole("/first", "/second", "/third")
	c.systemReady()
}

func TestAgentKilledDuringAttaches(t *testing.T) {
	c := open(t)
	f := c.fleet(5)
	f.add("/second")
	c.kill("flux-sandbox-agent")
	f.whole("/first", "/second")
	c.systemReady()
}

func TestAgentsPodIsReplacedDuringAttaches(t *testing.T) {
	c := open(t)
	f := c.fleet(5)
	f.add("/second")
	must(t, c.client.CoreV1().Pods(system).DeleteCollection(t.Context(), metav1.DeleteOptions{},
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=flux-sandbox-agent"}))
	f.add("/third")
	f.whole("/first", "/second", "/third")
	c.systemReady()
}

// controllers are the addresses of the controllers' metrics.
func (c *cluster) controllers() []string {
	c.t.Helper()
	pods, err := c.client.CoreV1().Pods(system).List(c.t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=flux-sandbox-controller"})
	must(c.t, err)
	var addresses []string
	for _, p := range pods.Items {
		addresses = append(addresses, "http://"+p.Status.PodIP+":9464/metrics")
	}
	return addresses
}

// httpGet is what an address answers. Anything but 200 is an error.
func httpGet(address string) (string, error) {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get(address)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, text)
	}
	return string(text), err
}

// leading is how many of the controllers say that they lead; -1 if one cannot be asked.
func leading(controllers []string) (n int) {
	for _, address := range controllers {
		text, err := httpGet(address)
		_, value, found := strings.Cut(text, "\nflux_controller_leading ") // not the line of its help
		if err != nil || !found {
			return -1
		}
		if strings.HasPrefix(value, "1\n") {
			n++
		}
	}
	return n
}

// The API server is away for longer than the lease: sandboxes and reads of the API go on; afterwards everything works.
func TestAPIServerAway(t *testing.T) {
	c := open(t)
	user := c.caller("user", "flux-sandbox-user")
	f := c.fleet(2)
	client := sandboxv1.NewSandboxServiceClient(user.conn)
	get := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		got, err := client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Sandbox: &sandboxv1.SandboxRef{Namespace: c.namespace, Name: "f0"}})
		if err == nil && got.GetStatus().GetPhase() != "Running" {
			err = fmt.Errorf("it is %s", got.GetStatus().GetPhase())
		}
		return err
	}
	must(t, get())
	leaders := c.controllers()
	lease, err := c.client.CoordinationV1().Leases(system).Get(t.Context(), "flux-sandbox-controller", metav1.GetOptions{})
	must(t, err)
	term := time.Duration(*lease.Spec.LeaseDurationSeconds) * time.Second
	c.component("stop", "kube-apiserver")
	stopped := time.Now()
	back := sync.OnceFunc(func() { c.component("start", "kube-apiserver") })
	defer back()
	if err := get(); err != nil { // who calls, and what they may do, is remembered for seconds
		t.Errorf("a read while the API server is away: %v", err)
	}
	c.wait("the lease is over, and nobody leads", func() (bool, string) {
		n := leading(leaders)
		return n == 0 && time.Since(stopped) > term, fmt.Sprintf("%d lead, after %s of %s", n, time.Since(stopped), term)
	})
	if err := get(); err != nil {
		t.Errorf("a read after the lease is over: %v", err)
	}
	for _, p := range f.processes {
		uninterrupted(t, p)
	}
	back()
	c.wait("the API server is back", func() (bool, string) {
		_, err := c.client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		return err == nil, fmt.Sprint(err)
	})
	f.add("/second")
	f.whole("/first", "/second")
	c.wait("reads work", func() (bool, string) { err := get(); return err == nil, fmt.Sprint(err) })
	c.systemReady()
}

func TestContainerdAndKubeletRestarted(t *testing.T) {
	c := open(t)
	f := c.fleet(3)
	for _, component := range []string{"containerd", "kubelet"} {
		c.component("stop", component)
		f.add("/during-" + component)
		c.component("start", component)
	}
	f.whole("/first", "/during-containerd", "/during-kubelet")
	c.systemReady()
}

func TestDeletedDuringAttaches(t *testing.T) {
	c := open(t)
	c.fleet(5).add("/second")
	c.deleteAll(t.Context())
}

// A controller of an older build, which knows neither dynamicVolumes nor their rows, writes status all the while, as it
// does: it reads the object into its own struct, changes a condition, and patches what differs.
func TestOldWriterLosesNothing(t *testing.T) {
	c := open(t)
	f := c.fleet(1)
	ctx, stop := context.WithCancel(t.Context())
	var writer sync.WaitGroup
	var writes, erased atomic.Int32
	// What an old build knows of a status. It reads the object, and writes that back.
	type oldStatus struct {
		Phase string `json:"phase,omitempty"`
		Node  string `json:"node,omitempty"`
	}
	api := c.dynamic.Resource(sandboxes).Namespace(c.namespace)
	writer.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{"old/writer": fmt.Sprint(i)}}})
			if _, err := api.Patch(ctx, "f0", types.MergePatchType, patch, metav1.PatchOptions{}); err == nil {
				writes.Add(1)
			}
			o, err := api.Get(ctx, "f0", metav1.GetOptions{})
			if err != nil {
				continue
			}
			known, _ := json.Marshal(o.Object["status"])
			var old oldStatus
			var status map[string]any
			_ = json.Unmarshal(known, &old)
			known, _ = json.Marshal(old)
			_ = json.Unmarshal(known, &status)
			o.Object["status"] = status
			if _, err := api.UpdateStatus(ctx, o, metav1.UpdateOptions{}); err == nil {
				erased.Add(1)
			}
		}
	})
	const enough, most = 10, 25
	targets := []string{"/first"}
	for len(targets) < most && (len(targets) <= 5 || writes.Load() < enough || erased.Load() < enough) {
		target := fmt.Sprint("/v", len(targets))
		f.add(target)
		c.row("f0", target, v1alpha1.VolumeMounted)
		targets = append(targets, target)
	}
	stop()
	writer.Wait()
	if writes.Load() < enough || erased.Load() < enough {
		t.Errorf("the old writer wrote %d times only, the status %d times", writes.Load(), erased.Load())
	}
	f.whole(targets...)
}

// Whoever is nobody gets nothing from the controller, nor from an agent.
func TestStrangers(t *testing.T) {
	c := open(t)
	c.running("s", "exec sleep 1000", nil)
	list := func(a *caller) string {
		_, err := a.fluxctl("volume", "ls", "s")
		if err == nil {
			return "let in"
		}
		out, _ := a.fluxctl("volume", "ls", "s")
		return out
	}
	nobody := c.caller("nobody", "")
	for who, try := range map[string]struct{ out, want string }{
		"without a token":             {list(c.callerWith("")), "UNAUTHENTICATED"},
		"with a token made up":        {list(c.callerWith("abc.def.ghi")), "UNAUTHENTICATED"},
		"with another audience":       {list(c.callerWith(c.token("nobody", "somebody-else"))), "UNAUTHENTICATED"},
		"with the API server's token": {list(c.callerWith(c.token("nobody", ""))), "UNAUTHENTICATED"},
		"without a right":             {list(nobody), "FORBIDDEN"},
	} {
		if !strings.Contains(try.out, try.want) {
			t.Errorf("%s: %s", who, try.out)
		}
	}
	// An agent asked by a stranger: over TLS without a certificate, and in clear.
	node, err := c.client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	address := node.Items[0].Status.Addresses[0].Address + ":9470"
	for _, args := range [][]string{
		{"--address", "tls://" + address, "--ca-file", nobody.caFile, "--token-file", nobody.tokenFile},
		{"--address", "tls://" + address, "--ca-file", nobody.caFile, "--server-name", serverName},
	} {
		out, err := exec.CommandContext(t.Context(), os.Getenv(fluxctlEnv), append(args, "doctor")...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "no connection") {
			t.Errorf("an agent answered a stranger (%v): %s", err, out)
		}
	}
	// An agent's own credentials tried on the API server: it may do what every ServiceAccount may, and nothing else.
	may := func(namespace, account string) string {
		out, err := c.kubectl("auth", "can-i", "--list", "--no-headers", "--as=system:serviceaccount:"+namespace+":"+account,
			"--as-group=system:serviceaccounts", "--as-group=system:authenticated")
		must(t, err)
		return out
	}
	if agent, nobody := may(system, "flux-sandbox-agent"), may(c.namespace, "nobody"); agent != nobody {
		t.Errorf("the agents' ServiceAccount may\n%s\nand one without a role\n%s", agent, nobody)
	}
}
