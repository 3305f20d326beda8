package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// apiClient uses a server as its users do.
type apiClient struct {
	*program
	m *machine.Machine
}

func ref(name string) *sandboxv1.SandboxRef {
	return &sandboxv1.SandboxRef{Namespace: "default", Name: name}
}

// create makes a sandbox, waits until it runs, and returns its UID.
func (c *apiClient) create(name string) string {
	sb, err := c.m.Sandboxes.CreateSandbox(c.Context(), &sandboxv1.CreateSandboxRequest{Wait: true, Sandbox: &sandboxv1.Sandbox{
		Name: name, Spec: &sandboxv1.SandboxSpec{TenantId: "t1", Image: machine.Image, Command: []string{"sleep", "3600"}}}})
	c.must(err)
	if sb.GetStatus().GetPhase() != "Running" {
		c.Fatalf("sandbox %s is %s: %s", name, sb.GetStatus().GetPhase(), sb.GetStatus().GetMessage())
	}
	return sb.GetUid()
}

func (c *apiClient) remove(name string) {
	_, err := c.m.Sandboxes.DeleteSandbox(c.Context(), &sandboxv1.DeleteSandboxRequest{Sandbox: ref(name), Wait: true})
	c.must(err)
}

func (c *apiClient) attach(name string, v *sandboxv1.DynamicVolume) {
	_, err := c.m.Volumes.AddSandVolume(c.Context(), &sandboxv1.AddSandVolumeRequest{Sandbox: ref(name), Volume: v})
	c.must(err)
}

func (c *apiClient) detach(name, target string) {
	r, err := c.m.Volumes.RemoveSandVolume(c.Context(), &sandboxv1.RemoveSandVolumeRequest{Sandbox: ref(name), Target: target})
	c.must(err)
	if r.GetResult() != sandboxv1.RemoveSandVolumeResponse_DETACHED {
		c.Fatalf("detach answered %v", r)
	}
}

// init is the host's PID of a process of the sandbox.
func (c *apiClient) init(uid string) int {
	for _, pattern := range []string{"/sys/fs/cgroup/pids/*/", "/sys/fs/cgroup/*/"} {
		files, err := filepath.Glob(pattern + uid + "/cgroup.procs")
		c.must(err)
		for _, f := range files {
			if b, err := os.ReadFile(f); err == nil {
				if words := strings.Fields(string(b)); len(words) > 0 {
					pid, err := strconv.Atoi(words[0])
					c.must(err)
					return pid
				}
			}
		}
	}
	c.Fatalf("no process of sandbox %s", uid)
	return 0
}

// pairs attaches a volume to a sandbox and detaches it, n times. The file in it must be visible in the sandbox when the
// answer comes, and gone when the detach has been answered.
func (c *apiClient) pairs(name, uid string, n int) (attach, detach samples) {
	source := c.m.TenantDir(c, "t1", "data")
	c.must(os.WriteFile(filepath.Join(source, "visible"), nil, 0o644))
	return c.pairsOf(name, uid, &sandboxv1.DynamicVolume{VolumeType: "local", Source: source, Target: "/bench"}, "visible", n)
}

// pairsOf is pairs of a volume in which there is a file.
func (c *apiClient) pairsOf(name, uid string, v *sandboxv1.DynamicVolume, file string, n int) (attach, detach samples) {
	seen := fmt.Sprintf("/proc/%d/root%s/%s", c.init(uid), v.Target, file)
	for range n {
		attach.add(func() {
			c.attach(name, v)
			if _, err := os.Stat(seen); err != nil {
				c.Fatal("answered, but not visible in the sandbox: ", err)
			}
		})
		detach.add(func() { c.detach(name, v.Target) })
		if _, err := os.Stat(seen); err == nil {
			c.Fatal("detached, but still visible in the sandbox")
		}
	}
	return attach, detach
}

// apiBudget is the limit for an attach through the API until it is visible.
const apiBudget = 3 * time.Millisecond

func benchAPI(p *program, r *report, s sizes) {
	m := machine.New(p, false)
	c := &apiClient{program: p, m: m}
	uid := c.create("one")
	c.pairs("one", uid, 20) // to warm up
	synced, err := syncedWrite(filepath.Join(m.Dir, "state"), s.apiPairs)
	p.must(err)
	attach, detach := c.pairs("one", uid, s.apiPairs)
	r.times("API: attach, until visible in the sandbox", attach, "write and fdatasync", synced)
	r.times("API: detach", detach, "write and fdatasync", synced)
	figure := attach.median()
	r.budget("attach until visible in the sandbox, through gRPC, standalone", "p50 ≤ 3 ms", span(figure), figure <= apiBudget)
	c.namedVolumes(r, s, uid, attach)
}

// namedVolumes measures volumes of the built-in CSI driver: one that is published for another user already, and one that
// each attach publishes and each detach has unpublished.
func (c *apiClient) namedVolumes(r *report, s sizes, uid string, local samples) {
	_, err := c.m.Named.CreateVolume(c.Context(), &sandboxv1.CreateVolumeRequest{Name: "bench", TenantId: "t1", Size: "64Mi"})
	c.must(err)
	v := func(target string) *sandboxv1.DynamicVolume {
		return &sandboxv1.DynamicVolume{VolumeType: "pvc", Source: "bench", Target: target}
	}
	c.attach("one", v("/kept"))
	c.must(os.WriteFile(fmt.Sprintf("/proc/%d/root/kept/visible", c.init(uid)), nil, 0o644))
	attach, detach := c.pairsOf("one", uid, v("/named"), "visible", s.apiPairs)
	r.times("API: attach of a named volume that is published", attach, "a directory", local)
	r.times("API: detach of it", detach, "", nil)
	r.budget("attach of a published PVC, standalone", "p50 ≤ 3 ms", span(attach.median()), attach.median() <= apiBudget)
	c.detach("one", "/kept")
	first, last := c.pairsOf("one", uid, v("/named"), "visible", max(s.apiPairs/10, 5))
	r.times("API: attach of a named volume, published for it", first, "published before", attach)
	r.times("API: detach of its last user, the release goes on", last, "", nil)
	_, err = c.m.Named.DeleteVolume(c.Context(), &sandboxv1.DeleteVolumeRequest{Name: "bench"})
	c.must(err)
}

// inParallel calls f for 0 ≤ i < n, a few at a time. A fatal error of f ends the part once all have ended.
func (c *apiClient) inParallel(n int, f func(c *apiClient, i int)) {
	var wg sync.WaitGroup
	next := make(chan int)
	var mu sync.Mutex // guards errs
	var errs []error
	for range 4 {
		wg.Go(func() {
			mine := &program{name: c.name, ctx: c.ctx}
			for i := range next {
				mine.try(func() { f(&apiClient{program: mine, m: c.m}, i) })
			}
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, mine.errs...)
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	if len(errs) > 0 {
		c.Fatal(errs[0])
	}
}

// freeAddress is a TCP address of this machine that nobody listens on.
func freeAddress(p *program) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	p.must(err)
	defer l.Close()
	return l.Addr().String()
}
