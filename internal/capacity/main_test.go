package capacity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// loopsBelow lists the loop devices whose backing file lies below dir, deleted or not.
func loopsBelow(dir string) []string {
	var found []string
	for device, file := range testenv.LoopDevices() {
		if strings.HasPrefix(file, dir) {
			found = append(found, device+": "+file)
		}
	}
	return found
}

// pool makes a pool in a new folder on the disk, and fails the test if a loop device of it is left at the end.
func pool(t testing.TB) *Pool {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedBinary(t, "mkfs.ext4", "mkfs.xfs")
	return poolAt(t, t.TempDir())
}

func poolAt(t testing.TB, path string) *Pool {
	t.Helper()
	dir, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		dir.Close()
		for _, l := range loopsBelow(path) {
			t.Errorf("loop device left: %s", l)
		}
	})
	return &Pool{Dir: dir}
}

func withTimeout(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func create(t testing.TB, p *Pool, name string, spec Spec) *os.File {
	t.Helper()
	image, _, err := p.Create(withTimeout(t), p.Dir, name, spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { image.Close() })
	return image
}

// mounted is a detached mount of an image, reachable through path.
type mounted struct {
	root *os.File
	path string
}

func mountImage(t testing.TB, image *os.File, filesystem Filesystem) mounted {
	t.Helper()
	device, err := Loops{}.Attach(withTimeout(t), image)
	if err != nil {
		t.Fatal(err)
	}
	root, err := mountDetached(device, filesystem)
	device.Close()
	if err != nil {
		t.Fatal(err)
	}
	return mounted{root: root, path: fmt.Sprintf("/proc/self/fd/%d", root.Fd())}
}

func (m mounted) close(t testing.TB, image *os.File) {
	t.Helper()
	m.root.Close()
	if err := (Loops{}).WaitGone(withTimeout(t), image); err != nil {
		t.Error(err)
	}
}

func wantReason(t testing.TB, err error, reason string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || e.Reason() != reason {
		t.Fatalf("error %v, want reason %s", err, reason)
	}
}

func names(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func statfs(t testing.TB, path string) unix.Statfs_t {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		t.Fatal(err)
	}
	return st
}
