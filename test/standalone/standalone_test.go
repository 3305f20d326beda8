// Package standalone tests the shipped server as its user has it: as a process, through its API, with the kernel as the
// judge.
package standalone

import (
	"os"
	"path/filepath"
	"testing"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

func TestMain(m *testing.M) { os.Exit(machine.Main(m)) }

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func TestVolumesComeAndGoWhileTheServerIsKilled(t *testing.T) {
	m := machine.New(t, false)
	source := m.TenantDir(t, "t1", "data")
	sb, err := m.Sandboxes.CreateSandbox(t.Context(), &sandboxv1.CreateSandboxRequest{Wait: true, Sandbox: &sandboxv1.Sandbox{
		Name: "one", Spec: &sandboxv1.SandboxSpec{TenantId: "t1", Image: machine.Image, Command: []string{"sleep", "3600"}}}})
	must(t, err)
	if sb.GetStatus().GetPhase() != "Running" {
		t.Fatalf("phase %s: %s", sb.GetStatus().GetPhase(), sb.GetStatus().GetMessage())
	}
	ref := &sandboxv1.SandboxRef{Namespace: "default", Name: "one"}
	added, err := m.Volumes.AddSandVolume(t.Context(), &sandboxv1.AddSandVolumeRequest{Sandbox: ref,
		Volume: &sandboxv1.DynamicVolume{VolumeType: "local", Source: source, Target: "/data"}})
	must(t, err)
	if added.GetVolume().GetPhase() != "Mounted" {
		t.Fatalf("volume %v", added.GetVolume())
	}
	m.Kill(t)
	m.Start(t)
	list, err := m.Volumes.ListSandVolumes(t.Context(), &sandboxv1.ListSandVolumesRequest{Sandbox: ref})
	must(t, err)
	if len(list.GetVolumes()) != 1 || list.GetVolumes()[0].GetPhase() != "Mounted" {
		t.Fatalf("volumes %v", list.GetVolumes())
	}
	removed, err := m.Volumes.RemoveSandVolume(t.Context(), &sandboxv1.RemoveSandVolumeRequest{Sandbox: ref, Target: "/data"})
	must(t, err)
	if removed.GetResult() != sandboxv1.RemoveSandVolumeResponse_DETACHED {
		t.Errorf("result %v", removed.GetResult())
	}
	_, err = m.Sandboxes.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Sandbox: ref, Wait: true})
	must(t, err)
	if _, err := os.Stat(filepath.Join(m.Dir, "state/sandboxes", sb.GetUid())); err == nil {
		t.Error("the sandbox's files are still there")
	}
}
