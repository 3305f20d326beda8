package integration

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// buildAttacker puts the attacker, which needs no libraries, into a directory that a sandbox can attach.
func buildAttacker(t *testing.T, dir string) {
	t.Helper()
	build := exec.Command("go", "build", "-p", "1", "-trimpath", "-o", dir+"/", "./attacker")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the attacker: %v\n%s", err, out)
	}
}

// attack runs the attacker in a sandbox until stop is called.
func attack(t *testing.T, n *agenttest.Node, sb *agenttest.Sandbox, attacks ...string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		// The end of the context ends the process.
		code, err := n.Runtime.Exec(ctx, sb.UID, containers.ExecSpec{Command: append([]string{"/tools/attacker"}, attacks...)}, containers.ExecIO{})
		if ctx.Err() == nil {
			t.Errorf("the attacker ended by itself: code %d, %v", code, err)
		}
	})
	stop = func() {
		cancel()
		wg.Wait()
	}
	t.Cleanup(stop)
	return stop
}

// placeOf looks a mount up in the sandbox, as the kernel has it.
func placeOf(t *testing.T, ns *mount.Namespace, r *agentv1.MountRecord) (mount.Info, bool) {
	t.Helper()
	info, there, err := ns.Find(mount.Identity{UniqueID: r.GetMountId(), MountID: int(r.GetMountId()), Device: r.GetDev(), Root: r.GetRoot()})
	must(t, err)
	return info, there
}

// enterSandbox is a look into a sandbox's mount namespace that is closed with the test.
func enterSandbox(t *testing.T, sb *agenttest.Sandbox) *mount.Namespace {
	t.Helper()
	p, err := mount.OpenProcess(sb.PID(t))
	must(t, err)
	defer p.Close()
	ns, err := mount.Enter(p)
	must(t, err)
	t.Cleanup(func() { ns.Close() })
	return ns
}

// Processes of the sandbox exchange the target's parents for each other and for symlinks, and the target for symlinks and
// nothing, while a volume comes and goes. Whatever they do, it lands on the target, as far as they let it be, or nowhere.
func TestTargetUnderAttack(t *testing.T) {
	n := agenttest.New(t, nil)
	source, tools := n.Dir(t, "t1", "data"), n.Shared(t, "tools")
	buildAttacker(t, tools)
	must(t, os.WriteFile(filepath.Join(source, "precious"), []byte("content"), 0o644))
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, agenttest.Volume{Source: tools, Target: "/tools", ReadOnly: true})
	// /a/b/v is the target. Where it lies after an exchange is known. The symlinks lead to /decoy, where directories of
	// the same names wait: a volume there was led astray.
	sb.Shell(t, `mkdir -p /a/b/v /x/b/v /decoy/b/v /decoy/v && ln -s /decoy /a/link && ln -s /decoy /x/link && ln -s /decoy /rootlink`)
	const target = "/a/b/v"
	honest := map[string]bool{}
	for _, parent := range []string{"/a", "/x", "/rootlink"} {
		honest[parent+"/b/v"], honest[parent+"/link/v"] = true, true
	}
	ns := enterSandbox(t, sb)
	before, err := ns.Mounts()
	must(t, err)

	stop := attack(t, n, sb, "exchange:/a:/x", "exchange:/a:/rootlink", "exchange:/a/b:/a/link", "relink:/a/b/v:/decoy/v", "flap:/x/b/v")
	rounds := testenv.Long(2000, 20000)
	attached, outcomes := 0, map[string]int{}
	var last *agentv1.MountRecord
	for i := range rounds {
		r, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: source, Target: target})
		outcomes[string(fault.ReasonOf(err))]++
		if err == nil {
			attached++
			last = r.GetRecord()
			info, there := placeOf(t, ns, last)
			if !there || !honest[info.MountPoint] {
				t.Fatalf("round %d: attached, and the kernel has it at %q (there: %v)", i, info.MountPoint, there)
			}
			if i%100 == 0 {
				onlyIn(t, ns, last)
			}
		} else if k := fault.KindOf(fault.ReasonOf(err)); errors.Is(k, errdefs.ErrInternal) {
			t.Fatalf("round %d: %v", i, err)
		}
		detachInTheEnd(t, sb, target)
		if err == nil {
			if info, there := placeOf(t, ns, last); there {
				t.Fatalf("round %d: detached, and the kernel has it at %q", i, info.MountPoint)
			}
		}
	}
	stop()
	t.Logf("%d of %d attaches succeeded; refusals by reason: %v", attached, rounds, outcomes)
	if attached < rounds/50 || attached == rounds {
		t.Errorf("%d of %d succeeded: the attack, or the defence, did nothing", attached, rounds)
	}

	// Nothing is left, anywhere.
	after, err := ns.Mounts()
	must(t, err)
	if len(after) != len(before) {
		t.Errorf("the sandbox has %d mounts, had %d: %+v", len(after), len(before), after)
	}
	if last != nil {
		refs, err := mount.Holding(t.Context(), mount.Match{Device: last.GetDev(), Root: last.GetRoot()})
		if err != nil || len(refs) != 0 {
			t.Errorf("namespaces that have the source: %+v, %v", refs, err)
		}
	}
	entries, err := os.ReadDir(source)
	if content, _ := os.ReadFile(filepath.Join(source, "precious")); err != nil || len(entries) != 1 || string(content) != "content" {
		t.Errorf("the source has %v (%q), %v", entries, content, err)
	}
	if v := sb.State(t).GetVolumes(); len(v) != 1 {
		t.Errorf("the agent records %v", v)
	}
	// Nothing is stuck.
	sb.Shell(t, "rm -rf /a /x /rootlink")
	r := sb.Attach(t, agenttest.Volume{Source: source, Target: target})
	if info, there := placeOf(t, ns, r); !there || info.MountPoint != target {
		t.Errorf("the next attach put it at %+v", info)
	}
	sb.Detach(t, target, false)
	sb.Detach(t, "/tools", true)
	agenttest.Eventually(t, "the sources are released", func() bool { return len(n.Inventory(t).GetPrepared()) == 0 })
}

// onlyIn checks that of all mount namespaces of the machine, the sandbox's alone has the volume, once.
func onlyIn(t *testing.T, ns *mount.Namespace, r *agentv1.MountRecord) {
	t.Helper()
	refs, err := mount.Holding(t.Context(), mount.Match{Device: r.GetDev(), Root: r.GetRoot()})
	must(t, err)
	if len(refs) != 1 || refs[0].ID != ns.ID() || len(refs[0].Mounts) != 1 {
		t.Fatalf("the volume is in the namespaces %+v, want once in %d", refs, ns.ID())
	}
}

// detachInTheEnd repeats a detach while directories around the mount move too fast for it. That the volume is in use is no
// excuse: the attackers do not use it.
func detachInTheEnd(t *testing.T, sb *agenttest.Sandbox, target string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		r, err := sb.TryDetach(ctx, target, false)
		if err == nil && r.GetResult() != agentv1.DetachResponse_BUSY {
			return
		}
		if err != nil && !errdefs.IsAborted(err) {
			t.Fatal("detach:", err)
		}
	}
}
