package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/pods/podstest"
)

func TestMain(m *testing.M) {
	mount.RunHelperIfAsked()
	runChildIfAsked()
	os.Exit(podstest.Main(func() int { return containerstest.Main(m) }))
}

// wantFault checks an error's kind and reason.
func wantFault(t *testing.T, err, kind error, reason string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want %v, reason %s", kind, reason)
	}
	if !errorsIs(err, kind) || string(fault.ReasonOf(err)) != reason {
		t.Fatalf("error %v (reason %s), want kind %v, reason %s", err, fault.ReasonOf(err), kind, reason)
	}
}

func TestAttachToARunningProcess(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	source := n.Dir(t, "t1", "data")
	pid := sb.PID(t)

	record := sb.Attach(t, agenttest.Volume{Source: source, Target: "/data"})
	if record.GetPhase() != "Mounted" || record.GetAttached() != "Live" {
		t.Errorf("record %v, want Mounted, Live", record)
	}
	m, ok := sb.Mounts(t)["/data"]
	if !ok || m.UniqueID != record.GetMountId() {
		t.Fatalf("the kernel shows %+v at /data, the record says mount %d", m, record.GetMountId())
	}
	sb.Shell(t, "echo hello > /data/greeting")
	if got, err := os.ReadFile(filepath.Join(source, "greeting")); err != nil || string(got) != "hello\n" {
		t.Errorf("source has %q, %v", got, err)
	}
	if sb.PID(t) != pid {
		t.Error("the process was restarted")
	}
	if r := sb.Detach(t, "/data", false); r.GetResult() != agentv1.DetachResponse_DETACHED || r.GetReleasePending() {
		t.Errorf("detach answered %v", r)
	}
	if _, ok := sb.Mounts(t)["/data"]; ok {
		t.Error("the mount is still there")
	}
	if r := sb.Detach(t, "/data", false); r.GetResult() != agentv1.DetachResponse_ABSENT {
		t.Errorf("second detach answered %v", r)
	}
	if _, err := os.Stat(filepath.Join(source, "greeting")); err != nil {
		t.Error("detaching touched the data:", err)
	}
}

func TestSameEntryAgainIsANoOpAndAnotherIsRefused(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	a, b := n.Dir(t, "t1", "a"), n.Dir(t, "t1", "b")
	first := sb.Attach(t, agenttest.Volume{Source: a, Target: "/data"})
	again, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: a, Target: "/data"})
	if err != nil || !again.GetAlreadyMounted() || again.GetRecord().GetMountId() != first.GetMountId() {
		t.Errorf("again: %v, %v", again, err)
	}
	_, err = sb.TryAttach(t.Context(), agenttest.Volume{Source: b, Target: "/data"})
	wantFault(t, err, errdefs.ErrAlreadyExists, "TARGET_IN_USE")
	_, err = sb.TryAttach(t.Context(), agenttest.Volume{Source: b, Target: "/data/below"})
	wantFault(t, err, errdefs.ErrFailedPrecondition, "TARGET_NESTED")
}

func TestVolumesAreThereAtTheFirstInstruction(t *testing.T) {
	n := agenttest.New(t, nil)
	source := n.Dir(t, "t1", "data")
	must(t, os.WriteFile(filepath.Join(source, "seed"), []byte("here"), 0o644))
	sb := n.Create(t, agenttest.Sandbox{Tenant: "t1", Command: []string{"sh", "-c", "cp /data/seed /data/copy; sleep 3600"}})
	if r := sb.Attach(t, agenttest.Volume{Source: source, Target: "/data"}); r.GetAttached() != "BeforeStart" {
		t.Errorf("attached %s", r.GetAttached())
	}
	if _, err := os.Stat(filepath.Join(source, "copy")); err == nil {
		t.Fatal("the process ran before its start")
	}
	sb.Start(t)
	agenttest.Eventually(t, "the process copied the file", func() bool {
		got, err := os.ReadFile(filepath.Join(source, "copy"))
		return err == nil && string(got) == "here"
	})
}

func TestAttachBeforeTheContainerExists(t *testing.T) {
	n := agenttest.New(t, nil)
	source := n.Dir(t, "t1", "data")
	sb := n.Prepare(agenttest.Sandbox{Tenant: "t1", Command: []string{"sh", "-c", "touch /data/ran; sleep 3600"}})
	if r := sb.Attach(t, agenttest.Volume{Source: source, Target: "/data", AtCreate: true}); r.GetPhase() != "Prepared" {
		t.Errorf("phase %s", r.GetPhase())
	}
	sb.CreateAgain(t)
	if _, ok := sb.Mounts(t)["/data"]; !ok {
		t.Fatal("not attached at creation")
	}
	sb.Start(t)
	agenttest.Eventually(t, "the process wrote", func() bool {
		_, err := os.Stat(filepath.Join(source, "ran"))
		return err == nil
	})
}

func TestRestartedProcessHasItsVolumes(t *testing.T) {
	n := agenttest.New(t, nil)
	source := n.Dir(t, "t1", "data")
	must(t, os.WriteFile(filepath.Join(source, "seed"), nil, 0o644))
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1", Command: []string{"sh", "-c",
		"while [ ! -e /data/seed ]; do sleep 0.01; done; echo run >> /data/runs; while [ ! -e /data/end ]; do sleep 0.01; done; rm /data/end; exit 3"}})
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data"})
	runs := func() int {
		b, _ := os.ReadFile(filepath.Join(source, "runs"))
		return strings.Count(string(b), "run")
	}
	agenttest.Eventually(t, "the first run", func() bool { return runs() == 1 })
	must(t, os.WriteFile(filepath.Join(source, "end"), nil, 0o644))
	agenttest.Eventually(t, "the second run sees the volume", func() bool { return runs() == 2 })
	if st := sb.State(t); st.GetRestarts() != 1 || st.GetPhase() != "Running" {
		t.Errorf("state %v", st)
	}
	if len(sb.State(t).GetVolumes()) != 1 {
		t.Errorf("volumes %v", sb.State(t).GetVolumes())
	}
}

func TestSizeLimitedVolume(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	r := sb.Attach(t, agenttest.Volume{Source: n.Image("t1", "scratch"), Target: "/scratch", Size: 32 << 20})
	if r.GetLimitEnforcement() != "Image" {
		t.Errorf("limit %s", r.GetLimitEnforcement())
	}
	out := sb.Exec(t, "sh", "-c", "dd if=/dev/zero of=/scratch/fill bs=1M count=64")
	if out.Code == 0 || !strings.Contains(out.Stderr, "No space left") {
		t.Errorf("dd: %+v", out)
	}
	if own, err := mount.Mounts(); err != nil {
		t.Error(err)
	} else {
		for _, m := range own {
			if m.Device == r.GetDev() {
				t.Errorf("the host has it mounted at %s", m.MountPoint)
			}
		}
	}
	_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: n.Image("t1", "scratch"), Target: "/again", Size: 64 << 20})
	wantFault(t, err, errdefs.ErrFailedPrecondition, "SIZE_MISMATCH")
	sb.Detach(t, "/scratch", false)
}

func TestAgentRestartFindsEverythingAgain(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	dir := sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"})
	image := sb.Attach(t, agenttest.Volume{Source: n.Image("t1", "img"), Target: "/img", Size: 16 << 20})
	pid := sb.PID(t)
	n.Restart(t)
	if sb.PID(t) != pid {
		t.Error("the process was restarted")
	}
	for _, want := range []*agentv1.MountRecord{dir, image} {
		r, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: "/", Target: want.GetTarget(), Hash: "another"})
		_ = r
		if err == nil {
			t.Error("another volume was attached over", want.GetTarget())
		}
		if m := sb.Mounts(t)[want.GetTarget()]; m.UniqueID != want.GetMountId() {
			t.Errorf("%s is mount %d, was %d", want.GetTarget(), m.UniqueID, want.GetMountId())
		}
	}
	if r := sb.Detach(t, "/img", false); r.GetResult() != agentv1.DetachResponse_DETACHED {
		t.Errorf("detach after the restart: %v", r)
	}
	agenttest.Eventually(t, "the image is released", func() bool {
		for _, p := range n.Inventory(t).GetPrepared() {
			if p.GetVolumeKey() == image.GetVolumeKey() {
				return false
			}
		}
		return true
	})
}

func TestBusyVolumeNamesItsHolder(t *testing.T) {
	n := agenttest.New(t, nil)
	// A directory alone would not tell the process whether the volume is on it already.
	must(t, os.WriteFile(filepath.Join(n.Dir(t, "t1", "data"), "seed"), nil, 0o644))
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1", Command: []string{"sh", "-c", "while [ ! -e /data/seed ]; do sleep 0.01; done; cd /data; exec sleep 3600"}})
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"})
	var r *agentv1.DetachResponse
	agenttest.Eventually(t, "the process is in the volume", func() bool {
		r = sb.Detach(t, "/data", false)
		if r.GetResult() == agentv1.DetachResponse_DETACHED {
			sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"})
		}
		return r.GetResult() == agentv1.DetachResponse_BUSY
	})
	if len(r.GetHolders()) != 1 || r.GetHolders()[0].GetCommand() != "sleep" || r.GetHolders()[0].GetKind() != "cwd" {
		t.Errorf("holders %v", r.GetHolders())
	}
	if _, ok := sb.Mounts(t)["/data"]; !ok {
		t.Error("a refused detach took it away")
	}
	if r := sb.Detach(t, "/data", true); r.GetResult() != agentv1.DetachResponse_LAZY || !r.GetReleasePending() {
		t.Errorf("forced: %v", r)
	}
	if _, ok := sb.Mounts(t)["/data"]; ok {
		t.Error("forced, and still in the tree")
	}
}

func TestDeleteLeavesNothing(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"})
	sb.Attach(t, agenttest.Volume{Source: n.Image("t1", "img"), Target: "/img", Size: 16 << 20})
	sb.Delete(t)
	sb.Delete(t) // again is success
	u := n.Inventory(t)
	if len(u.GetSandboxes()) != 0 || len(u.GetPrepared()) != 0 {
		t.Errorf("left: %v %v", u.GetSandboxes(), u.GetPrepared())
	}
	left, err := n.Runtime.Leftovers(t.Context())
	if err != nil || len(left) != 0 {
		t.Errorf("leftovers %v, %v", left, err)
	}
	_, err = sb.TryAttach(t.Context(), agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"})
	if err == nil {
		t.Error("a deleted sandbox got a volume")
	}
}

func TestStaleCommandsAreRefused(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	source := n.Dir(t, "t1", "data")
	sb.Generation = 5
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/data"})
	sb.Generation = 6
	sb.Detach(t, "/data", false)
	sb.Generation = 5
	_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: source, Target: "/data"})
	wantFault(t, err, errdefs.ErrFailedPrecondition, "STALE_COMMAND")
	// Another target has its own order.
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/other"})

	req := sb.AttachRequest(agenttest.Volume{Source: source, Target: "/late"})
	req.Command.Epoch = 0
	_, err = n.Client.Attach(t.Context(), req)
	wantFault(t, fault.FromGRPC(err), errdefs.ErrFailedPrecondition, "STALE_COMMAND")
}

// Whatever a command came to, nothing older follows it, whether the agent was restarted or not.
func TestWhatWasSeenOutlivesTheAgent(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	data := agenttest.Volume{Source: n.Dir(t, "t1", "data")}
	commands := []struct {
		name string
		do   func(target string) error
	}{
		{"attached", func(target string) error {
			data.Target = target
			_, err := sb.TryAttach(t.Context(), data)
			return err
		}},
		{"attached already", func(target string) error {
			data.Target = target
			sb.Generation = 1
			if _, err := sb.TryAttach(t.Context(), data); err != nil {
				return err
			}
			sb.Generation = 7
			r, err := sb.TryAttach(t.Context(), data)
			if !r.GetAlreadyMounted() {
				t.Error("it was not attached already")
			}
			return err
		}},
		{"failed", func(target string) error {
			_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: filepath.Join(n.Data, "tenants/t1/missing"), Target: target})
			wantFault(t, err, errdefs.ErrNotFound, "SOURCE_NOT_FOUND")
			return nil
		}},
		{"nothing to detach", func(target string) error {
			_, err := sb.TryDetach(t.Context(), target, false)
			return err
		}},
		{"detached", func(target string) error {
			data.Target = target
			sb.Generation = 1
			if _, err := sb.TryAttach(t.Context(), data); err != nil {
				return err
			}
			sb.Generation = 7
			_, err := sb.TryDetach(t.Context(), target, false)
			return err
		}},
	}
	target := func(i int) string { return "/t" + strconv.Itoa(i) }
	for i, c := range commands {
		sb.Generation = 7
		if err := c.do(target(i)); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
	}
	for _, restarted := range []bool{false, true} {
		if restarted {
			n.Restart(t)
		}
		sb.Generation = 6
		for i, c := range commands {
			_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: data.Source, Target: target(i), Hash: "older"})
			if string(fault.ReasonOf(err)) != "STALE_COMMAND" {
				t.Errorf("%s (restarted: %v): an older attach: %v", c.name, restarted, err)
			}
			if _, err := sb.TryDetach(t.Context(), target(i), false); string(fault.ReasonOf(err)) != "STALE_COMMAND" {
				t.Errorf("%s (restarted: %v): an older detach: %v", c.name, restarted, err)
			}
		}
	}
	sb.Generation = 7 // not older
	data.Target = target(0)
	if r, err := sb.TryAttach(t.Context(), data); err != nil || !r.GetAlreadyMounted() {
		t.Errorf("the same command again: %v, %v", r, err)
	}
}

func TestPreparingIsBounded(t *testing.T) {
	n := agenttest.New(t, func(c *agent.Config) { c.PrepareRate, c.PrepareBurst = 1e-9, 1 })
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "first"), Target: "/first"})
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "first"), Target: "/again"}) // it is ready and costs nothing
	// Not a deadline, which the agent would hear of too, and could answer before it is over here.
	ctx, cancel := context.WithCancel(t.Context())
	defer time.AfterFunc(200*time.Millisecond, cancel).Stop()
	second := agenttest.Volume{Source: n.Dir(t, "t1", "second"), Target: "/second"}
	if _, err := sb.TryAttach(ctx, second); err == nil || ctx.Err() == nil {
		t.Fatalf("the second source did not wait for its turn: %v", err)
	}
	for _, p := range n.Inventory(t).GetPrepared() {
		if len(p.GetUsers()) != 2 {
			t.Errorf("prepared: %v", p)
		}
	}
	// It waits by itself, and ends with the agent; the next one has a turn again.
	n.Restart(t)
	sb.Attach(t, second)
}

func TestAnotherTenantsDataIsRefused(t *testing.T) {
	n := agenttest.New(t, nil)
	theirs := n.Dir(t, "t2", "secret")
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: theirs, Target: "/data"})
	if !errdefs.IsPermissionDenied(err) {
		t.Fatalf("error %v, want PermissionDenied", err)
	}
	if _, ok := sb.Mounts(t)["/data"]; ok {
		t.Error("it was mounted all the same")
	}
	req := sb.AttachRequest(agenttest.Volume{Source: theirs, Target: "/data"})
	req.TenantId = "t2"
	_, err = n.Client.Attach(t.Context(), req)
	wantFault(t, fault.FromGRPC(err), errdefs.ErrPermissionDenied, "TENANT_MISMATCH")
}
