package standalone

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// fluxctl runs a command line and returns what it prints, and whether it succeeded.
func fluxctl(t *testing.T, m *machine.Machine, args ...string) (string, bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(m.Bin, "fluxctl"), append([]string{"--address", "unix://" + filepath.Join(m.Dir, "run/flux-sandbox.sock")}, args...)...)
	out, err := cmd.CombinedOutput()
	return string(bytes.TrimSpace(out)), err == nil
}

func ok(t *testing.T, m *machine.Machine, args ...string) string {
	t.Helper()
	out, succeeded := fluxctl(t, m, args...)
	if !succeeded {
		t.Fatalf("fluxctl %s: %s", strings.Join(args, " "), out)
	}
	return out
}

// A volume that is made by name is used by one sandbox after another and by two at once, is full at its size, and outlives
// the server and its sandboxes.
func TestNamedVolume(t *testing.T) {
	m := machine.New(t, false)
	ok(t, m, "volume", "create", "scratch", "--size", "32Mi", "--tenant", "t1")
	for _, name := range []string{"a", "b"} {
		ok(t, m, "run", "--name", name, "--tenant", "t1", "--image", machine.Image, "--", "sleep", "3600")
		ok(t, m, "volume", "add", name, "--type", "pvc", "--source", "scratch", "--target", "/scratch", "--size", "32Mi")
	}
	ok(t, m, "exec", "a", "--", "sh", "-c", "echo hello > /scratch/f; ! dd if=/dev/zero of=/scratch/big bs=1M count=64 2>/dev/null; rm /scratch/big")
	if got := ok(t, m, "exec", "b", "--", "cat", "/scratch/f"); got != "hello" {
		t.Errorf("the second sandbox reads %q", got)
	}
	list, err := m.Volumes.ListSandVolumes(t.Context(), &sandboxv1.ListSandVolumesRequest{Sandbox: &sandboxv1.SandboxRef{Id: "default/a"}})
	must(t, err)
	if v := list.GetVolumes()[0]; v.GetPath() != "Direct" || v.GetLimitEnforcement() != "Capacity" || v.GetCapacityBytes() <= 0 || v.GetPvcName() != "scratch" {
		t.Errorf("volume %v", v)
	}

	ok(t, m, "run", "--name", "c", "--tenant", "t2", "--image", machine.Image, "--", "sleep", "3600")
	for want, args := range map[fault.Reason][]string{
		fault.TenantMismatch:   {"volume", "add", "c", "--type", "pvc", "--source", "scratch", "--target", "/x"},
		fault.ClaimNotFound:    {"volume", "add", "a", "--type", "pvc", "--source", "missing", "--target", "/x"},
		fault.LimitNotEnforced: {"volume", "add", "a", "--type", "pvc", "--source", "scratch", "--target", "/x", "--size", "16Mi"},
		fault.VolumeTypeOff:    {"volume", "add", "a", "--type", "pv", "--source", "scratch", "--target", "/x"},
		fault.Busy:             {"volume", "rm", "scratch"},
	} {
		if out, succeeded := fluxctl(t, m, args...); succeeded || !strings.Contains(out, "["+string(want)+"]") {
			t.Errorf("fluxctl %s: %s; want %s", strings.Join(args, " "), out, want)
		}
	}
	if out := ok(t, m, "volume", "ls"); !strings.Contains(out, "a, b") {
		t.Errorf("listed: %s", out)
	}

	m.Kill(t)
	m.Start(t)
	ok(t, m, "volume", "rm", "a", "/scratch")
	ok(t, m, "rm", "b")
	ok(t, m, "volume", "add", "a", "--type", "pvc", "--source", "scratch", "--target", "/again", "--ro")
	if got := ok(t, m, "exec", "a", "--", "sh", "-c", "cat /again/f; ! touch /again/g 2>/dev/null"); got != "hello" {
		t.Errorf("after all that it has %q", got)
	}
	ok(t, m, "volume", "rm", "a", "/again")
	ok(t, m, "volume", "rm", "scratch")
	if entries, err := os.ReadDir(filepath.Join(m.Dir, "state/volumes")); err != nil || len(entries) != 1 {
		t.Errorf("left in the pool: %v, %v", entries, err)
	}
}

// A sandbox waits for a volume that is made later.
func TestSandboxWaitsForItsNamedVolume(t *testing.T) {
	m := machine.New(t, false)
	_, err := m.Sandboxes.CreateSandbox(t.Context(), &sandboxv1.CreateSandboxRequest{Sandbox: &sandboxv1.Sandbox{Name: "early",
		Spec: &sandboxv1.SandboxSpec{Image: machine.Image, Command: []string{"sleep", "3600"},
			DynamicVolumes: []*sandboxv1.DynamicVolume{{VolumeType: "pvc", Source: "late", Target: "/late"}}}}})
	must(t, err)
	shows := func(what string) {
		t.Helper()
		testenv.Eventually(t, time.Minute, "fluxctl ps shows "+what, func() bool { return strings.Contains(ok(t, m, "ps"), what) })
	}
	shows(string(fault.ClaimNotFound))
	ok(t, m, "volume", "create", "late", "--size", "32Mi")
	shows("Running")
	ok(t, m, "exec", "early", "--", "touch", "/late/f")
	ok(t, m, "rm", "early")
	ok(t, m, "volume", "rm", "late")
}
