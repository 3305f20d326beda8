package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// ticking is a process that writes a line every tenth of a second into a file of the sandbox's own, and that is all: a
// restart would begin the file anew.
const ticking = "n=0; while :; do n=$((n+1)); echo $n >> /ticks; sleep 0.1; done"

// uninterrupted fails unless the lines of /ticks count up one by one.
func uninterrupted(t *testing.T, p process) {
	t.Helper()
	if !p.same(t) {
		t.Error("the process was restarted")
		return
	}
	for i, line := range strings.Fields(read(t, p.path("ticks"))) {
		if line != fmt.Sprint(i+1) {
			t.Fatalf("line %d of the process's file is %q: it was restarted", i+1, line)
		}
	}
}

// Volumes are added and removed by every way there is, while the process runs.
func TestVolumesComeAndGoByEveryWay(t *testing.T) {
	c := open(t)
	user := c.caller("user", "flux-sandbox-user")
	must(t, os.WriteFile(filepath.Join(c.dir("a"), "hello"), []byte("from a"), 0o644))
	must(t, os.WriteFile(filepath.Join(c.dir("b"), "hello"), []byte("from b"), 0o644))
	must(t, os.WriteFile(filepath.Join(c.dir("c"), "hello"), []byte("from c"), 0o644))
	sb := c.running("s", ticking, nil)
	p := c.process(sb)

	visible := func(target, want string) {
		t.Helper()
		if line := p.mountAt(t, target); line == "" || strings.Contains(line, "shared:") {
			t.Errorf("in the sandbox, mountinfo has for %s: %q", target, line)
		}
		if info, err := os.Lstat(p.path(target)); err != nil || info.Mode()&os.ModeSymlink != 0 {
			t.Errorf("%s is a link, or not there: %v", target, err)
		}
		if got := read(t, p.path(target, "hello")); got != want {
			t.Errorf("%s has %q, want %q", target, got, want)
		}
	}

	// gRPC: the answer comes when the volume is there.
	volumes := sandboxv1.NewSandboxVolumeServiceClient(user.conn)
	ref := &sandboxv1.SandboxRef{Namespace: c.namespace, Name: "s"}
	added, err := volumes.AddSandVolume(t.Context(), &sandboxv1.AddSandVolumeRequest{Sandbox: ref,
		Volume: &sandboxv1.DynamicVolume{VolumeType: "local", Source: c.data("a"), Target: "/a", Mode: "ro"}})
	must(t, err)
	visible("/a", "from a")
	if !strings.Contains(p.mountAt(t, "/a"), " ro,nosuid,nodev") {
		t.Errorf("attributes of a read-only volume: %s", p.mountAt(t, "/a"))
	}
	if added.GetVolume().GetPhase() != "Mounted" || added.GetAlreadyMounted() {
		t.Errorf("%+v", added)
	}
	// fluxctl
	user.run(t, "volume", "add", "s", "--source", c.data("b"), "--target", "/deep/er/b")
	visible("/deep/er/b", "from b")
	// kubectl
	entries := c.get("s").Spec.DynamicVolumes
	data, err := json.Marshal(map[string]any{"spec": map[string]any{"dynamicVolumes": append(entries, local(c.data("c"), "/c"))}})
	must(t, err)
	if out, err := c.kubectl("patch", "sandbox", "s", "--type=merge", "-p", string(data)); err != nil {
		t.Fatal(out)
	}
	row := c.row("s", "/c", v1alpha1.VolumeMounted)
	visible("/c", "from c")
	if row.Attached != v1alpha1.AttachedLive || row.Path != v1alpha1.VolumePathLocal {
		t.Errorf("row %+v", row)
	}
	if out, err := c.kubectl("get", "sandbox", "s", "-o", "wide"); err != nil || !strings.Contains(out, "3/3") {
		t.Errorf("kubectl get: %v\n%s", err, out)
	}

	// And away: kubectl removes the entry, fluxctl and gRPC ask for it.
	c.volumes("s", c.get("s").Spec.DynamicVolumes[:2]...)
	c.noRow("s", "/c")
	user.run(t, "volume", "rm", "s", "/deep/er/b")
	removed, err := volumes.RemoveSandVolume(t.Context(), &sandboxv1.RemoveSandVolumeRequest{Sandbox: ref, Target: "/a"})
	must(t, err)
	if removed.GetResult() != sandboxv1.RemoveSandVolumeResponse_DETACHED {
		t.Errorf("%+v", removed)
	}
	for _, target := range []string{"/a", "/deep/er/b", "/c"} {
		if line := p.mountAt(t, target); line != "" {
			t.Errorf("%s is still mounted: %s", target, line)
		}
	}
	if entries := c.get("s").Spec.DynamicVolumes; len(entries) > 0 {
		t.Errorf("entries are left: %+v", entries)
	}
	uninterrupted(t, p)
	for _, reason := range []string{"Scheduled", "Started", "VolumeAttached", "VolumeDetached"} {
		c.event("s", reason)
	}
}

// Exec and logs go through the API to the node.
func TestExecAndLogs(t *testing.T) {
	c := open(t)
	user := c.caller("user", "flux-sandbox-user")
	c.running("s", "echo ready; exec sleep 1000", nil)
	if out := user.run(t, "exec", "s", "--", "sh", "-c", "echo $((6*7))"); strings.TrimSpace(out) != "42" {
		t.Errorf("exec printed %q", out)
	}
	c.wait("the log has the line", func() (bool, string) {
		out := user.run(t, "logs", "s")
		return strings.Contains(out, "ready"), out
	})
}

// gateRefuses returns a volume of sandbox s that the gate refuses, beside those that it has. The leader hears of a group and of
// a sandbox by two watches, of which either may be ahead: what is added before it has heard of the gate is attached.
func (c *cluster) gateRefuses(dir string, have ...v1alpha1.DynamicVolume) (refused v1alpha1.DynamicVolume) {
	c.t.Helper()
	source, n := c.dir(dir), 0
	c.wait("the gate refuses a volume", func() (bool, string) {
		n++
		refused = local(source, fmt.Sprintf("/%s%d", dir, n))
		c.volumes("s", append(slices.Clone(have), refused)...)
		var row v1alpha1.VolumeStatus
		c.wait("it is attached or refused", func() (bool, string) {
			for _, row = range c.get("s").Status.Volumes {
				if row.Target == refused.Target {
					return row.Phase == v1alpha1.VolumeMounted || row.Phase == v1alpha1.VolumeFailed, fmt.Sprint(row.Phase)
				}
			}
			return false, "it has no row"
		})
		return row.Phase == v1alpha1.VolumeFailed && row.Reason == string(fault.FeatureDisabled), fmt.Sprint(row.Phase, " ", row.Reason, " ", row.Message)
	})
	return refused
}

func TestTheGate(t *testing.T) {
	c := open(t)
	sb := c.running("s", ticking, func(sb *v1alpha1.Sandbox) {
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{local(c.dir("a"), "/a")}
	})
	p := c.process(sb)
	if c.row("s", "/a", v1alpha1.VolumeMounted).Attached != v1alpha1.AttachedBeforeStart {
		t.Error("an initial volume was attached after the start")
	}
	c.patch(groups, "default", `{"spec":{"featureGates":{"dynamicVolumeMount":false}}}`)
	refused := c.gateRefuses("b", local(c.data("a"), "/a"))
	if p.mountAt(t, "/a") == "" {
		t.Error("what was attached is gone")
	}
	c.patch(groups, "default", `{"spec":{"featureGates":{"dynamicVolumeMount":true}}}`)
	c.row("s", refused.Target, v1alpha1.VolumeMounted)
	c.patch(groups, "default", `{"spec":{"featureGates":null}}`)
	c.gateRefuses("c", local(c.data("a"), "/a"), refused)
	uninterrupted(t, p)
}

// Story 1: a decode worker's KV cache grows until its disk is full; a volume is attached, it goes on there, and is never
// restarted.
func TestStory1KVCacheGrows(t *testing.T) {
	c := open(t)
	user := c.caller("user", "flux-sandbox-user")
	scratch := filepath.Join(volumesDir, "scratch", c.namespace)
	first, second := filepath.Join(scratch, "kv0"), filepath.Join(scratch, "kv1")
	must(t, os.MkdirAll(scratch, 0o755))
	// It writes a megabyte at a time into the directories that it is given by their appearance.
	worker := `i=0; dir=/kv/0; echo start $$
while [ $i -lt 60 ]; do
  if dd if=/dev/zero of=$dir/block$i bs=1M count=1 2>/dev/null; then i=$((i+1)); echo block $i in $dir; continue; fi
  echo full $dir; rm -f $dir/block$i
  while ! grep -q " /kv/1 " /proc/self/mountinfo; do sleep 0.05; done
  dir=/kv/1
done
echo done; exec sleep 1000`
	sb := c.running("decode", worker, func(sb *v1alpha1.Sandbox) {
		v := local(first, "/kv/0")
		v.SizeLimit = "32Mi"
		sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{v}
	})
	p := c.process(sb)
	logs := func(want string) string {
		t.Helper()
		var out string
		c.wait("the log has "+want, func() (bool, string) {
			out = user.run(t, "logs", "decode")
			return strings.Contains(out, want), out
		})
		return out
	}
	logs("full /kv/0") // ENOSPC
	user.run(t, "volume", "add", "decode", "--source", second, "--target", "/kv/1", "--size", "64Mi")
	out := logs("done")
	if strings.Count(out, "start ") != 1 || strings.Count(out, "full ") != 1 || !p.same(t) {
		t.Errorf("it was interrupted:\n%s", out)
	}
	for i := range 60 {
		if strings.Count(out, fmt.Sprintf("block %d in", i+1)) != 1 {
			t.Errorf("block %d was not written once:\n%s", i+1, out)
		}
	}
	// Traffic falls: the volume goes.
	user.run(t, "volume", "rm", "decode", "/kv/1")
	if p.mountAt(t, "/kv/1") != "" || !p.same(t) {
		t.Error("after the removal")
	}
}

// Story 2: public models, static and read-only, for two tenants; a personal volume, dynamic, for one; tenants are apart.
func TestStory2TenantsApart(t *testing.T) {
	one := open(t)
	two := one.beside()
	models := filepath.Join(volumesDir, "models", one.namespace)
	must(t, os.MkdirAll(models, 0o755))
	t.Cleanup(func() { _ = os.RemoveAll(models) })
	must(t, os.WriteFile(filepath.Join(models, "weights"), []byte("w"), 0o644))
	public := func(sb *v1alpha1.Sandbox) {
		sb.Spec.VolumeMounts = []v1alpha1.VolumeMount{{Source: models, Target: "/sandbox/public", Mode: v1alpha1.VolumeModeReadOnly}}
	}
	a := one.running("s", ticking, public)
	b := two.running("s", ticking, public)
	pa, pb := one.process(a), two.process(b)
	if read(t, pa.path("sandbox/public/weights")) != "w" || read(t, pb.path("sandbox/public/weights")) != "w" {
		t.Error("the models are not there")
	}
	if err := os.WriteFile(pa.path("sandbox/public/weights"), []byte("x"), 0o644); err == nil {
		t.Error("the models can be written")
	}
	one.volumes("s", local(one.dir("own"), "/sandbox/workspace"))
	one.row("s", "/sandbox/workspace", v1alpha1.VolumeMounted)
	if pb.mountAt(t, "/sandbox/workspace") != "" {
		t.Error("the other tenant sees it")
	}
	two.volumes("s", local(one.data("own"), "/sandbox/workspace"))
	if row := two.row("s", "/sandbox/workspace", v1alpha1.VolumeFailed); pb.mountAt(t, "/sandbox/workspace") != "" {
		t.Errorf("another tenant's directory: %+v", row)
	}
	// Nor by the API.
	stranger := one.caller("user", "flux-sandbox-user")
	_, err := sandboxv1.NewSandboxVolumeServiceClient(stranger.conn).ListSandVolumes(t.Context(), &sandboxv1.ListSandVolumesRequest{
		Sandbox: &sandboxv1.SandboxRef{Namespace: two.namespace, Name: "s"}})
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("the other tenant's volumes by the API: %v", err)
	}
}

func TestFiftySandboxesAtOnce(t *testing.T) {
	c := open(t)
	const n = 50
	for i := range n {
		c.sandbox(fmt.Sprint("s", i), "exec sleep 1000", func(sb *v1alpha1.Sandbox) {
			for _, v := range []string{"a", "b", "c"} {
				sb.Spec.DynamicVolumes = append(sb.Spec.DynamicVolumes, local(c.dir(v), "/"+v))
			}
		})
	}
	c.wait("all run with their volumes", func() (bool, string) {
		ready := 0
		for _, sb := range c.list() {
			if sb.Status.Phase == v1alpha1.SandboxRunning && sb.Status.VolumesReady == "3/3" {
				ready++
			}
		}
		return ready == n, fmt.Sprint(ready, " do")
	})
	for _, sb := range c.list() {
		p := c.process(&sb)
		for _, target := range []string{"/a", "/b", "/c"} {
			if p.mountAt(t, target) == "" {
				t.Errorf("%s has nothing at %s", sb.Name, target)
			}
		}
	}
}
