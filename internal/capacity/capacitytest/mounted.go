package capacitytest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
)

// Mount mounts a new ext4 filesystem on an image of size bytes at a new directory, until the end of the test, and returns
// the directory. It is what an administrator makes for a local PersistentVolume.
func Mount(t testing.TB, size int64) string {
	t.Helper()
	check := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(what, err)
		}
	}
	image := filepath.Join(t.TempDir(), "image")
	file, err := os.OpenFile(image, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	check("image:", err)
	t.Cleanup(func() { _ = file.Close() })
	check("image:", file.Truncate(size))
	// The loop device has sectors of 4096 bytes where it does direct I/O.
	if out, err := exec.Command("mkfs.ext4", "-q", "-b", "4096", image).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	device, err := capacity.Loops{}.Attach(context.Background(), file)
	check("loop device:", err)
	defer device.Close()
	at := t.TempDir()
	check("mount:", unix.Mount(device.Path, at, "ext4", 0, ""))
	t.Cleanup(func() {
		if err := unix.Unmount(at, 0); err != nil {
			t.Error("unmount:", err)
			return
		}
		if err := (capacity.Loops{}).WaitGone(context.Background(), file); err != nil {
			t.Error("loop device:", err)
		}
	})
	return at
}
