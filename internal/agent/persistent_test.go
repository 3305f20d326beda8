package agent_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity/capacitytest"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/local"
)

// A mounted image is a PersistentVolume: it is attached, its filesystem is the limit, and it outlives a restart of the agent.
func TestPersistentVolume(t *testing.T) {
	testenv.NeedBinary(t, "mkfs.ext4")
	n := agenttest.New(t, func(c *agent.Config) {
		src, err := local.New(nil, nil, local.PersistentVolumes(c.RunDir))
		must(t, err)
		c.Sources[v1alpha1.VolumeTypeLocal] = src
	})
	const size = 64 << 20
	at := capacitytest.Mount(t, size)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	v := agenttest.Volume{Source: at, PersistentVolume: "pv-1", Target: "/data", Size: size}
	record := sb.Attach(t, v)
	if record.GetLimitEnforcement() != "Capacity" || record.GetCapacityBytes() <= 0 || record.GetCapacityBytes() > size || record.GetPath() != "Local" {
		t.Errorf("record %v", record)
	}
	sb.Shell(t, "echo hello > /data/greeting")
	if got, err := os.ReadFile(filepath.Join(at, "greeting")); err != nil || string(got) != "hello\n" {
		t.Errorf("source has %q, %v", got, err)
	}
	sb.Shell(t, "! dd if=/dev/zero of=/data/big bs=1M count=128 2>/dev/null && rm /data/big")

	n.Restart(t)
	again, err := sb.TryAttach(t.Context(), v)
	if err != nil || !again.GetAlreadyMounted() || again.GetRecord().GetMountId() != record.GetMountId() {
		t.Errorf("after a restart: %v, %v", again, err)
	}
	_, err = sb.TryAttach(t.Context(), agenttest.Volume{Source: at, PersistentVolume: "pv-1", Target: "/small", Size: 1 << 20})
	wantFault(t, err, errdefs.ErrFailedPrecondition, "LIMIT_NOT_ENFORCEABLE")
	_, err = sb.TryAttach(t.Context(), agenttest.Volume{Source: "/etc", PersistentVolume: "pv-2", Target: "/node"})
	wantFault(t, err, errdefs.ErrPermissionDenied, "SOURCE_DENIED")
	_, err = sb.TryAttach(t.Context(), agenttest.Volume{Source: at, PersistentVolume: "no name", Target: "/named"})
	wantFault(t, err, errdefs.ErrInvalidArgument, "INVALID_SOURCE")
	_, err = sb.TryAttach(t.Context(), agenttest.Volume{Source: at, Target: "/unnamed"})
	wantFault(t, err, errdefs.ErrPermissionDenied, "SOURCE_DENIED")

	if r := sb.Detach(t, "/data", false); r.GetResult() != agentv1.DetachResponse_DETACHED {
		t.Errorf("detach answered %v", r)
	}
	sb.Delete(t)
}

func TestPersistentVolumesAreOffByDefault(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: n.Dir(t, "t1", "data"), PersistentVolume: "pv-1", Target: "/data"})
	wantFault(t, err, errdefs.ErrPermissionDenied, "SOURCE_DENIED")
}
