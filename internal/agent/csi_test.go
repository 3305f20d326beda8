package agent_test

import (
	"bytes"
	"context"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	csiv1 "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/csidriver/csidrivertest"
	"github.com/flux-sandbox/flux-sandbox/internal/pods/podstest"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/csi"
)

// csiNode is an agent that may call a driver, which has volumes of that size.
const csiSize = 32 << 20

func newCSINode(t *testing.T, volumes ...string) (*agenttest.Node, *csidrivertest.Driver) {
	t.Helper()
	d := csidrivertest.New(t)
	n := agenttest.New(t, callsDriver(t, d))
	for _, v := range volumes {
		d.Create(t, v, csiSize)
	}
	return n, d
}

// callsDriver lets an agent call the driver.
func callsDriver(t *testing.T, d *csidrivertest.Driver) func(*agent.Config) {
	return func(c *agent.Config) {
		src, err := csi.New(csi.Config{Dir: filepath.Join(c.RunDir, "csi"), Drivers: []csi.Driver{{Name: csidrivertest.Name, Socket: d.Socket, NodeLocal: true}}})
		must(t, err)
		c.Sources[v1alpha1.VolumeTypePV] = src
	}
}

func csiVolume(handle, target string) agenttest.Volume {
	return agenttest.Volume{Target: target, CSI: &agentv1.CSISource{Driver: csidrivertest.Name, VolumeHandle: handle, AccessMode: "ReadWriteOnce", PersistentVolume: "pv-" + handle}}
}

// published are the driver's mounts on the node.
func published(t *testing.T, n *agenttest.Node) int {
	t.Helper()
	data, err := os.ReadFile("/proc/thread-self/mountinfo")
	must(t, err)
	return strings.Count(string(data), filepath.Join(n.RunDir(), "csi")+"/")
}

func released(t *testing.T, n *agenttest.Node) {
	t.Helper()
	agenttest.Eventually(t, "the volumes are unpublished", func() bool { return published(t, n) == 0 && len(n.Inventory(t).GetPrepared()) == 0 })
}

func TestVolumeOfACSIDriver(t *testing.T) {
	n, d := newCSINode(t, "v")
	one, two := n.Run(t, agenttest.Sandbox{Tenant: "t1"}), n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	var users sync.WaitGroup
	for _, sb := range []*agenttest.Sandbox{one, two} {
		for _, target := range []string{"/a", "/b"} {
			users.Go(func() {
				if _, err := sb.TryAttach(t.Context(), csiVolume("v", target)); err != nil {
					t.Error(err)
				}
			})
		}
	}
	users.Wait()
	record := one.State(t).GetVolumes()[0]
	if record.GetPath() != "Direct" || record.GetLimitEnforcement() != "None" || record.GetCapacityBytes() <= 0 {
		t.Errorf("record %v", record)
	}
	readOnly := csiVolume("v", "/ro")
	readOnly.ReadOnly, readOnly.SubPath = true, "sub"
	one.Shell(t, "mkdir /a/sub && echo hello > /a/sub/f")
	two.Attach(t, readOnly)
	if got := two.Shell(t, "cat /ro/f; ! touch /ro/g 2>/dev/null"); got != "hello\n" {
		t.Errorf("the second sandbox reads %q", got)
	}
	one.Shell(t, "! dd if=/dev/zero of=/a/big bs=1M count=64 2>/dev/null && rm /a/big")

	// Neither the agent's restart nor that of the driver touches what is mounted.
	d.Stop()
	n.Restart(t)
	if r, err := one.TryAttach(t.Context(), csiVolume("v", "/a")); err != nil || !r.GetAlreadyMounted() {
		t.Errorf("again, without the driver: %v, %v", r, err)
	}
	one.Attach(t, csiVolume("v", "/c"))
	d.Serve(t)
	if n := d.Calls("NodePublishVolume"); n != 1 {
		t.Errorf("published %d times", n)
	}
	one.Delete(t)
	if published(t, n) != 1 || d.Calls("NodeUnpublishVolume") != 0 {
		t.Error("it was unpublished while the other sandbox has it")
	}
	two.Delete(t)
	released(t, n)

	// The data is there for the next.
	three := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	three.Attach(t, csiVolume("v", "/data"))
	three.Shell(t, "grep -q hello /data/sub/f")
	three.Delete(t)
	released(t, n)
}

// A Pod's container has the volume before its first instruction, at every start, and it is published once for all of them.
func TestVolumeOfACSIDriverInAPod(t *testing.T) {
	d := csidrivertest.New(t)
	n := newPodNode(t, callsDriver(t, d))
	d.Create(t, "v", csiSize)
	pod := n.env.Named(podstest.Pod{})
	sb := n.sandboxOf(pod, "main")
	v := csiVolume("v", "/data")
	v.AtCreate = true
	if r := sb.Attach(t, v); r.GetPhase() != "Prepared" || r.GetPath() != "Direct" {
		t.Errorf("record %v", r)
	}
	pod.Run(t)
	c := pod.Start(t, podstest.Container{Command: []string{"sh", "-c", "echo run >> /data/runs"}})
	for i := range 3 {
		if i > 0 {
			c.Again(t)
		}
		if code := c.Wait(t); code != 0 {
			t.Fatalf("start %d: exit code %d", i, code)
		}
	}
	c.Command = []string{"sh", "-c", `test "$(cat /data/runs)" = "$(printf 'run\nrun\nrun')" && exec sleep 3600`}
	c.Again(t)
	agenttest.Eventually(t, "it runs", func() bool { return sb.State(t).GetPhase() == "Running" })
	if v := sb.State(t).GetVolumes()[0]; v.GetPhase() != "Mounted" || v.GetAttached() != "BeforeStart" {
		t.Errorf("volume %v", v)
	}
	if n := d.Calls("NodePublishVolume"); n != 1 {
		t.Errorf("published %d times", n)
	}
	if r := sb.Detach(t, "/data", false); r.GetResult() != agentv1.DetachResponse_DETACHED {
		t.Errorf("detach: %v", r)
	}
	released(t, n.Node)
}

func TestUsageOfAVolumeOfACSIDriver(t *testing.T) {
	d := csidrivertest.New(t)
	d.Create(t, "v", csiSize)
	n, registry := usageNode(t, callsDriver(t, d))
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, csiVolume("v", "/data"))
	got := scrape(t, registry)
	if size := got["/data size_bytes"]; size < csiSize/2 || size > csiSize || got["/data inodes"] <= 0 || got["flux_agent_volumes_usage_unknown"] != 0 {
		t.Errorf("%v", got)
	}
	if _, ok := got["/data written_bytes_total"]; !ok {
		t.Errorf("no traffic of its device: %v", got)
	}
	sb.Delete(t)
	released(t, n)
}

// A secret gets to the driver, and is in no file of the agent and in no line of its log.
func TestSecretsOfACSIVolumeAreKeptNowhere(t *testing.T) {
	const canary = "canary-41d7"
	d := csidrivertest.New(t)
	d.Create(t, "v", csiSize)
	var log bytes.Buffer
	n := agenttest.New(t, func(c *agent.Config) {
		callsDriver(t, d)(c)
		c.Log = slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	var told atomic.Value
	d.On("NodePublishVolume", func(_ context.Context, r any, next func() (any, error)) (any, error) {
		told.Store(r.(*csiv1.NodePublishVolumeRequest).GetSecrets()["password"])
		return next()
	})
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	v := csiVolume("v", "/data")
	v.CSI.Secrets = map[string]string{"password": canary}
	sb.Attach(t, v)
	if told.Load() != canary {
		t.Errorf("the driver was told %v", told.Load())
	}
	must(t, filepath.WalkDir(n.RunDir(), func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && e.Name() == "mount":
			return fs.SkipDir
		case e.Type().IsRegular():
			if data, err := os.ReadFile(path); err != nil || bytes.Contains(data, []byte(canary)) {
				t.Errorf("%s has it (%v)", path, err)
			}
		}
		return nil
	}))
	n.Restart(t)
	other := csiVolume("v", "/other") // what is published needs no secrets
	sb.Attach(t, other)
	sb.Delete(t)
	released(t, n)
	n.Stop(t)
	if strings.Contains(log.String(), canary) {
		t.Error("the log has it")
	}
}

func TestCSIVolumesThatCannotBe(t *testing.T) {
	n, d := newCSINode(t, "v")
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	foreign := csiVolume("v", "/data")
	foreign.CSI.Driver = "foreign.example.com"
	_, err := sb.TryAttach(t.Context(), foreign)
	wantFault(t, err, errdefs.ErrPermissionDenied, "SOURCE_DENIED")
	unnamed := csiVolume("v", "/data")
	unnamed.CSI.PersistentVolume = ""
	_, err = sb.TryAttach(t.Context(), unnamed)
	wantFault(t, err, errdefs.ErrInvalidArgument, "INVALID_SOURCE")
	_, err = sb.TryAttach(t.Context(), csiVolume("missing", "/data"))
	wantFault(t, err, errdefs.ErrFailedPrecondition, "DRIVER_REFUSED")
	d.Stop()
	_, err = sb.TryAttach(t.Context(), csiVolume("v", "/data"))
	wantFault(t, err, errdefs.ErrUnavailable, "DRIVER_UNAVAILABLE")
	d.Serve(t)
	sb.Attach(t, csiVolume("v", "/data"))
	small := csiVolume("v", "/small")
	small.Size = 1 << 20
	_, err = sb.TryAttach(t.Context(), small)
	wantFault(t, err, errdefs.ErrFailedPrecondition, "LIMIT_NOT_ENFORCEABLE")
	sb.Delete(t)
	released(t, n)
	plain := agenttest.New(t, nil).Run(t, agenttest.Sandbox{Tenant: "t1"})
	_, err = plain.TryAttach(t.Context(), csiVolume("v", "/data"))
	wantFault(t, err, errdefs.ErrFailedPrecondition, "VOLUME_TYPE_UNAVAILABLE")
}

// A driver that hangs in publish and then in unpublish delays nobody else, and nothing that it may have done is forgotten,
// also not by an agent that starts anew.
func TestCSIDriverThatHangs(t *testing.T) {
	n, d := newCSINode(t, "stuck", "well")
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	hang, free := make(chan struct{}), sync.Once{}
	defer free.Do(func() { close(hang) })
	begun := make(chan struct{})
	var once sync.Once
	d.On("NodePublishVolume", func(_ context.Context, r any, next func() (any, error)) (any, error) {
		answer, err := next()
		if r.(*csiv1.NodePublishVolumeRequest).GetVolumeId() == "stuck" {
			once.Do(func() { close(begun) })
			<-hang
		}
		return answer, err
	})
	d.On("NodeUnpublishVolume", func(_ context.Context, r any, next func() (any, error)) (any, error) {
		if r.(*csiv1.NodeUnpublishVolumeRequest).GetVolumeId() == "stuck" {
			return nil, status.Error(codes.Aborted, "at work")
		}
		return next()
	})
	ctx, giveUp := context.WithCancel(t.Context())
	answered := make(chan error, 1)
	go func() {
		_, err := sb.TryAttach(ctx, csiVolume("stuck", "/stuck"))
		answered <- err
	}()
	<-begun
	sb.Attach(t, csiVolume("well", "/well"))
	giveUp()
	if err := <-answered; err == nil {
		t.Error("the volume that hangs was attached")
	}
	n.Restart(t) // in the middle of the call
	sb.Shell(t, "touch /well/f")
	sb.Detach(t, "/well", false)
	agenttest.Eventually(t, "the other volume is unpublished", func() bool { return published(t, n) == 1 })
	free.Do(func() { close(hang) })
	d.On("NodePublishVolume", nil)
	d.On("NodeUnpublishVolume", nil)
	released(t, n)
	sb.Attach(t, csiVolume("stuck", "/stuck"))
	sb.Delete(t)
	released(t, n)
}
