package csidriver

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

const size = 32 << 20

// world is a folder with a pool and targets; what a test leaves in the kernel below it fails the test.
type world struct{ dir string }

func newWorld(t testing.TB) world {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedBinary(t, "mkfs.ext4")
	w := world{dir: t.TempDir()}
	t.Cleanup(func() { w.checkKernel(t) })
	return w
}

func (w world) checkKernel(t testing.TB) {
	t.Helper()
	if mounts, err := os.ReadFile("/proc/thread-self/mountinfo"); err != nil || bytes.Contains(mounts, []byte(w.dir)) {
		t.Errorf("a mount is left below %s (%v)", w.dir, err)
	}
	for device, file := range testenv.LoopDevices() {
		if strings.HasPrefix(file, w.dir) {
			t.Errorf("a loop device is left: %s: %s", device, file)
		}
	}
}

func (w world) target(name string) string { return filepath.Join(w.dir, name) }

func (w world) driver(t testing.TB) *Driver {
	t.Helper()
	d, err := New(within(t), Config{Pool: filepath.Join(w.dir, "pool"), Node: "node-1", Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func (w world) files(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(w.dir, "pool"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.Name() != "lock" {
			names = append(names, e.Name())
		}
	}
	return names
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func capability(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
}

var writer = capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)

func create(ctx context.Context, d *Driver, name string, bytes int64) error {
	_, err := d.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{writer},
		CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}})
	return err
}

func remove(ctx context.Context, d *Driver, id string) error {
	_, err := d.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	return err
}

func publish(ctx context.Context, d *Driver, id, target string, readOnly bool) error {
	_, err := d.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id, TargetPath: target, VolumeCapability: writer, Readonly: readOnly})
	return err
}

func unpublish(ctx context.Context, d *Driver, id, target string) error {
	_, err := d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	return err
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want(t testing.TB, err, kind error, reason fault.Reason) {
	t.Helper()
	if !errors.Is(err, kind) || fault.ReasonOf(err) != reason {
		t.Errorf("error %v (%s), want %v, %s", err, fault.ReasonOf(err), kind, reason)
	}
}

func TestVolumeIsFullAtItsSize(t *testing.T) {
	w := newWorld(t)
	d, ctx, target := w.driver(t), within(t), w.target("a")
	must(t, create(ctx, d, "v", size))
	must(t, publish(ctx, d, "v", target, false))
	err := os.WriteFile(filepath.Join(target, "big"), make([]byte, size), 0o600)
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("writing as much as the volume is large: %v, want ENOSPC", err)
	}
	want(t, remove(ctx, d, "v"), errdefs.ErrFailedPrecondition, fault.Busy)
	must(t, unpublish(ctx, d, "v", target))
	must(t, unpublish(ctx, d, "v", target))
	must(t, remove(ctx, d, "v"))
	if left := w.files(t); len(left) > 0 {
		t.Errorf("left in the pool: %v", left)
	}
}

func TestOvercommitIsRefused(t *testing.T) {
	w := newWorld(t)
	d, ctx := w.driver(t), within(t)
	want(t, create(ctx, d, "v", 1<<50), errdefs.ErrResourceExhausted, fault.CapacityExceeded)
	if left := w.files(t); len(left) > 0 {
		t.Errorf("left in the pool: %v", left)
	}
}

func TestSecondMountMayBeReadOnly(t *testing.T) {
	w := newWorld(t)
	d, ctx, a, b := w.driver(t), within(t), w.target("a"), w.target("b")
	must(t, create(ctx, d, "v", size))
	must(t, publish(ctx, d, "v", a, false))
	must(t, publish(ctx, d, "v", a, false))
	must(t, publish(ctx, d, "v", b, true))
	want(t, publish(ctx, d, "v", a, true), errdefs.ErrAlreadyExists, fault.Conflict)
	must(t, os.WriteFile(filepath.Join(a, "f"), []byte("x"), 0o600))
	if got, err := os.ReadFile(filepath.Join(b, "f")); string(got) != "x" {
		t.Errorf("the second mount has %q (%v), want x", got, err)
	}
	if err := os.WriteFile(filepath.Join(b, "g"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing to the read-only mount: %v, want EROFS", err)
	}
	must(t, unpublish(ctx, d, "v", a))
	must(t, unpublish(ctx, d, "v", b))
}

func TestRebootKeepsTheData(t *testing.T) {
	w := newWorld(t)
	d, ctx, target := w.driver(t), within(t), w.target("a")
	must(t, create(ctx, d, "v", size))
	must(t, publish(ctx, d, "v", target, false))
	must(t, os.WriteFile(filepath.Join(target, "f"), []byte("kept"), 0o600))
	d.Close()
	must(t, unix.Unmount(target, 0)) // the mount and the loop device are gone, the driver is another
	w.checkKernel(t)
	d = w.driver(t)
	must(t, publish(ctx, d, "v", target, false))
	if got, err := os.ReadFile(filepath.Join(target, "f")); string(got) != "kept" {
		t.Errorf("after the reboot the file has %q (%v), want kept", got, err)
	}
	must(t, unpublish(ctx, d, "v", target))
}

func TestForeignMountsAndHandlesAreLeftAlone(t *testing.T) {
	w := newWorld(t)
	d, ctx, target := w.driver(t), within(t), w.target("a")
	must(t, create(ctx, d, "v", size))
	must(t, os.Mkdir(target, 0o700))
	must(t, unix.Mount("tmpfs", target, "tmpfs", 0, ""))
	want(t, publish(ctx, d, "v", target, false), errdefs.ErrFailedPrecondition, fault.TargetInUse)
	want(t, unpublish(ctx, d, "v", target), errdefs.ErrFailedPrecondition, fault.TargetInUse)
	must(t, unix.Unmount(target, 0))
	must(t, os.WriteFile(filepath.Join(target, "f"), nil, 0o600))
	want(t, unpublish(ctx, d, "v", target), errdefs.ErrFailedPrecondition, fault.InvalidTarget)

	must(t, os.WriteFile(filepath.Join(w.dir, "secret.json"), []byte(`{"name":"x"}`), 0o600))
	want(t, publish(ctx, d, "../secret", w.target("b"), false), errdefs.ErrNotFound, fault.VolumeNotFound)
	must(t, remove(ctx, d, "../secret"))
	if _, err := os.Stat(filepath.Join(w.dir, "secret.json")); err != nil {
		t.Error(err)
	}
	want(t, publish(ctx, d, "v", w.dir+"/x/../y", false), errdefs.ErrInvalidArgument, fault.InvalidTarget)
}

func TestOneDriverHasThePool(t *testing.T) {
	w := newWorld(t)
	w.driver(t)
	_, err := New(within(t), Config{Pool: filepath.Join(w.dir, "pool"), Node: "node-1"})
	want(t, err, errdefs.ErrUnavailable, fault.Busy)
}
