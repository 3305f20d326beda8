package local

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity/capacitytest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/sourcetest"
)

func TestMain(m *testing.M) {
	mount.RunHelperIfAsked()
	os.Exit(m.Run())
}

func TestConformance(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedBinary(t, "mkfs.ext4", "mkfs.xfs")
	for name, variant := range map[string]variant{
		"directory":            {},
		"directory with quota": {size: 1 << 30},
		"ext4 image":           {backing: BackingImage, filesystem: capacity.Ext4, size: 32 << 20},
		"xfs image":            {backing: BackingImage, filesystem: capacity.XFS, size: 300 << 20},
	} {
		t.Run(name, func(t *testing.T) { sourcetest.Run(t, variant.harness) })
	}
}

type variant struct {
	backing    Backing
	filesystem capacity.Filesystem
	size       int64
}

// harness is a scratch folder with a tenant's root, a volume in it, and what must be refused.
func (v variant) harness(t testing.TB) sourcetest.Harness {
	t.Helper()
	scratch := t.TempDir()
	for _, dir := range []string{"data/t-1", "data/t-2", "public"} {
		mkdir(t, scratch, dir)
	}
	roots := []Root{
		{Path: scratch + "/data/{tenantId}", Backing: v.backing, Filesystem: v.filesystem},
		{Path: scratch + "/public", Modes: []v1alpha1.VolumeMode{"ro"}, Shared: true},
	}
	limiter := &capacitytest.Limiter{}
	if v.backing != BackingImage {
		mkdir(t, scratch, "data/t-1/v")
	}
	request := func(source string) volume.Request {
		return volume.Request{Type: v1alpha1.VolumeTypeLocal, Source: scratch + source, TenantID: "t-1", SizeLimitBytes: v.size}
	}
	t.Cleanup(func() {
		for _, l := range loops(scratch) {
			t.Errorf("loop device left: %s", l)
		}
	})
	return sourcetest.Harness{
		New: func(faults *sourcetest.Faults) volume.Source {
			src, err := New(roots, limiter)
			if err != nil {
				t.Fatal(err)
			}
			src.sys = faulty{system: src.sys, faults: faults}
			return src
		},
		Request:  request("/data/t-1/v"),
		Populate: func(t testing.TB, p volume.Prepared) { populate(t, p) },
		Refused: map[string]sourcetest.Refusal{
			"another tenant's":  {Request: request("/data/t-2/v"), Reason: fault.TenantMismatch},
			"below no root":     {Request: request("/elsewhere"), Reason: fault.SourceDenied},
			"a prefix sibling":  {Request: request("/public2/v"), Reason: fault.SourceDenied},
			"a static prefix":   {Request: request("/data"), Reason: fault.SourceDenied},
			"shared, but to rw": {Request: request("/public"), Reason: fault.ModeDenied},
			"not clean":         {Request: request("/data/t-1/../t-2/v"), Reason: fault.InvalidSource},
		},
		State: func(t testing.TB) []string { return state(t, scratch, limiter) },
	}
}

func mkdir(t testing.TB, scratch, dir string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(scratch, dir), 0o755); err != nil {
		t.Fatal(err)
	}
}

func state(t testing.TB, scratch string, limiter *capacitytest.Limiter) []string {
	t.Helper()
	out := loops(scratch)
	err := filepath.WalkDir(scratch, func(path string, entry fs.DirEntry, err error) error {
		out = append(out, fmt.Sprintf("%s %s", strings.TrimPrefix(path, scratch), entry.Type()))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, limit := range limiter.Limits() {
		out = append(out, fmt.Sprintf("a project with %+v", limit))
	}
	sort.Strings(out)
	return out
}

// loops are the loop devices on files below dir.
func loops(dir string) []string {
	var out []string
	for _, file := range testenv.LoopDevices() {
		if rest, below := strings.CutPrefix(file, dir+"/"); below {
			out = append(out, "loop of /"+rest)
		}
	}
	return out
}

func populate(t testing.TB, p volume.Prepared) {
	t.Helper()
	inside(t, p, func(dir string) { sourcetest.Populate(t, dir) })
}

// inside runs f with a path to the content of a prepared volume.
func inside(t testing.TB, p volume.Prepared, f func(dir string)) {
	t.Helper()
	d, err := parseDetails(p)
	if err != nil {
		t.Fatal(err)
	}
	if d.Backing == BackingDirectory {
		f(d.path())
		return
	}
	image, err := os.OpenFile(filepath.Join(d.path(), d.Image+capacity.ImageSuffix), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	device, err := capacity.Loops{}.Attach(context.Background(), image)
	if err != nil {
		t.Fatal(err)
	}
	at := t.TempDir()
	err = unix.Mount(device.Path, at, string(d.Filesystem), 0, "")
	device.Close()
	if err != nil {
		t.Fatal(err)
	}
	f(at)
	if err := unix.Unmount(at, 0); err != nil {
		t.Fatal(err)
	}
	// Another mount of the image may keep the device; without one it must go before the state is looked at.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if used, err := mounted(device.Number); err != nil || used {
		return
	}
	if err := (capacity.Loops{}).WaitGone(ctx, image); err != nil {
		t.Fatal(err)
	}
}

// mounted says whether a mount of the device is in this mount namespace.
func mounted(device uint64) (bool, error) {
	list, err := mount.Mounts()
	for _, m := range list {
		if m.Device == fmt.Sprintf("%d:%d", unix.Major(device), unix.Minor(device)) {
			return true, err
		}
	}
	return false, err
}
