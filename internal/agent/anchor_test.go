package agent_test

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/csidriver/csidrivertest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/anchor"
)

// kubelet is the folder of a kubelet that has one volume, which a driver staged.
type kubelet struct {
	dir, staged string
}

const anchoredHandle = "v"

func newKubelet(t *testing.T) *kubelet {
	t.Helper()
	k := &kubelet{dir: filepath.Join(t.TempDir(), "kubelet")}
	k.staged = filepath.Join(k.dir, "plugins/kubernetes.io/csi", csidrivertest.Name, fmt.Sprintf("%x", sha256.Sum256([]byte(anchoredHandle))), "globalmount")
	must(t, os.MkdirAll(k.staged, 0o755))
	must(t, unix.Mount("disk", k.staged, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(k.staged, unix.MNT_DETACH) })
	return k
}

// publish mounts the volume for a Pod.
func (k *kubelet) publish(t *testing.T, pod string) (path string) {
	t.Helper()
	path = filepath.Join(k.dir, "pods", pod, "volumes/kubernetes.io~csi/pv-v/mount")
	must(t, os.MkdirAll(path, 0o755))
	must(t, unix.Mount(k.staged, path, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

// anchorsIn is the source of volumes of anchors of an agent that has the folder run.
func anchorsIn(run, kubelet string) (volume.Source, error) {
	return anchor.New(anchor.Config{Dir: filepath.Join(run, "guards"), Kubelet: kubelet})
}

// guards are the volumes that the source of a node keeps.
func guards(t *testing.T, n *agenttest.Node) int {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(n.RunDir(), "guards"))
	must(t, err)
	return len(left)
}

// anchored is the volume as an anchor of that UID has it.
func anchored(pod, target string) agenttest.Volume {
	return agenttest.Volume{Target: target, Anchor: &agentv1.AnchorSource{PodUid: pod, PvName: "pv-v", Plugin: "kubernetes.io/csi",
		Driver: csidrivertest.Name, VolumeHandle: anchoredHandle, PodNamespace: "ns", PodName: "anchor", Claim: "data"}}
}

// What kubelet published is attached, through restarts of agent and sandbox and a change of anchors, and given back.
func TestVolumeOfAnAnchor(t *testing.T) {
	d := csidrivertest.New(t)
	d.Create(t, anchoredHandle, csiSize)
	k := newKubelet(t)
	n := agenttest.New(t, func(c *agent.Config) {
		var err error
		c.Sources[v1alpha1.VolumeTypePVC], err = anchorsIn(c.RunDir, k.dir)
		must(t, err)
		callsDriver(t, d)(c)
	})
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	if _, err := sb.TryAttach(t.Context(), anchored("uid-1", "/a")); fault.ReasonOf(err) != fault.AnchorPending {
		t.Errorf("before kubelet published it: %v", err)
	}
	first := k.publish(t, "uid-1")
	if record := sb.Attach(t, anchored("uid-1", "/a")); record.GetPath() != "Anchor" {
		t.Errorf("record %v", record)
	}
	sb.Shell(t, "echo hello > /a/f")
	// By another path it is another preparation: not while this one has users.
	if _, err := sb.TryAttach(t.Context(), csiVolume(anchoredHandle, "/b")); fault.ReasonOf(err) != fault.Conflict {
		t.Errorf("by another path: %v", err)
	}
	k.publish(t, "uid-2")
	must(t, unix.Unmount(first, 0))
	n.Restart(t)
	sb.Attach(t, anchored("uid-2", "/c"))
	if got := sb.Shell(t, "cat /a/f /c/f"); got != "hello\nhello\n" {
		t.Errorf("the sandbox reads %q", got)
	}
	for _, target := range []string{"/a", "/c"} {
		sb.Detach(t, target, false)
	}
	agenttest.Eventually(t, "the volume is given back", func() bool {
		return guards(t, n) == 0 && len(n.Inventory(t).GetPrepared()) == 0
	})
	sb.Attach(t, csiVolume(anchoredHandle, "/b"))
	sb.Detach(t, "/b", false)
	agenttest.Eventually(t, "the volume is released", func() bool { return len(n.Inventory(t).GetPrepared()) == 0 })
}
