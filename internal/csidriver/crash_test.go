//go:build failpoint

package csidriver

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
)

// crashEnv has "OPERATION DIR" for a process that does one operation and is killed in it.
const crashEnv = "FLUX_TEST_CSI_CRASH"

func TestMain(m *testing.M) {
	operation, dir, child := strings.Cut(os.Getenv(crashEnv), " ")
	if !child {
		os.Exit(m.Run())
	}
	ctx := context.Background()
	d, err := New(ctx, Config{Pool: filepath.Join(dir, "pool"), Node: "node-1"})
	if err == nil {
		err = operations[operation](ctx, d, filepath.Join(dir, "target"))
	}
	fmt.Println("not killed:", err)
	os.Exit(1)
}

var operations = map[string]func(ctx context.Context, d *Driver, target string) error{
	"create":    func(ctx context.Context, d *Driver, _ string) error { return create(ctx, d, "v", size) },
	"delete":    func(ctx context.Context, d *Driver, _ string) error { return remove(ctx, d, "v") },
	"publish":   func(ctx context.Context, d *Driver, target string) error { return publish(ctx, d, "v", target, false) },
	"unpublish": func(ctx context.Context, d *Driver, target string) error { return unpublish(ctx, d, "v", target) },
}

// operationOf says in which operation a failpoint lies; "" for those of other packages.
func operationOf(point string) string {
	switch prefix, _, _ := strings.Cut(point, "/"); prefix {
	case "csi-create", "csi-image":
		return "create"
	case "csi-delete":
		return "delete"
	case "csi-publish", "csi-device":
		return "publish"
	case "csi-unpublish":
		return "unpublish"
	}
	return ""
}

// TestKilledAtEveryStep kills the driver at every declared step. The next one repairs the pool: the volume is whole or
// not there at all, the same operation done again succeeds, its data is there, and nothing is left in the end.
func TestKilledAtEveryStep(t *testing.T) {
	count := 0
	for _, point := range failpoint.Names() {
		operation := operationOf(point)
		if operation == "" {
			continue
		}
		count++
		t.Run(point, func(t *testing.T) { killAt(t, operation, point) })
	}
	if most := 2 * (5 + 3 + 2 + 2 + 3 + 2); count != most {
		t.Errorf("%d steps were killed at, want %d", count, most)
	}
}

func killAt(t *testing.T, operation, point string) {
	w := newWorld(t)
	ctx, target := within(t), w.target("target")
	d := w.driver(t)
	if operation != "create" {
		must(t, create(ctx, d, "v", size))
		must(t, publish(ctx, d, "v", target, false))
		must(t, os.WriteFile(filepath.Join(target, "f"), []byte("kept"), 0o600))
		if operation != "unpublish" {
			must(t, unpublish(ctx, d, "v", target))
		}
	}
	d.Close()
	killChild(t, operation, w.dir, point)

	d = w.driver(t)
	images, records := 0, 0
	for _, f := range w.files(t) {
		switch f {
		case "v.img":
			images++
		case "v.json":
			records++
		default:
			t.Errorf("left after the repair: %s", f)
		}
	}
	if images != records {
		t.Errorf("after the repair there are %d images and %d records", images, records)
	}
	must(t, operations[operation](ctx, d, target))
	if operation != "delete" {
		must(t, publish(ctx, d, "v", target, false))
		if got, err := os.ReadFile(filepath.Join(target, "f")); operation != "create" && string(got) != "kept" {
			t.Errorf("the volume's file has %q (%v), want kept", got, err)
		}
		must(t, unpublish(ctx, d, "v", target))
		must(t, remove(ctx, d, "v"))
	}
	if left := w.files(t); len(left) > 0 {
		t.Errorf("left in the pool: %v", left)
	}
	if err := unix.Access(target, unix.F_OK); err == nil {
		t.Errorf("the target is left")
	}
}

func killChild(t *testing.T, operation, dir, point string) {
	t.Helper()
	child := exec.Command("/proc/self/exe")
	child.Env = append(os.Environ(), crashEnv+"="+operation+" "+dir, failpoint.Env+"="+point+"=kill")
	out, err := child.CombinedOutput()
	status, _ := child.ProcessState.Sys().(syscall.WaitStatus)
	if !status.Signaled() || status.Signal() != syscall.SIGKILL {
		t.Fatalf("the driver was not killed at %s: %v: %s", point, err, out)
	}
}
