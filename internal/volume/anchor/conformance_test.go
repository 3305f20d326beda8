package anchor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/sourcetest"
)

func TestMain(m *testing.M) {
	mount.RunHelperIfAsked()
	testenv.InOwnMountNamespace()
	os.Exit(m.Run())
}

const (
	volumeSize = 8 << 20
	driver     = "driver.example.com"
)

// world is kubelet's folder, and a node's.
type world struct {
	t            testing.TB
	kubelet, dir string
}

func newWorld(t testing.TB) *world {
	t.Helper()
	testenv.NeedRoot(t)
	base, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, kubelet: filepath.Join(base, "kubelet"), dir: filepath.Join(base, "anchors")}
	t.Cleanup(func() {
		for _, m := range w.mounts(w.kubelet) {
			_ = unix.Unmount(m, unix.MNT_DETACH)
		}
		if left := w.mounts(base); len(left) > 0 {
			t.Errorf("mounts are left: %v", left)
		}
		if entries, err := os.ReadDir(w.dir); err == nil && len(entries) > 0 {
			t.Errorf("left below %s: %v", w.dir, entries)
		}
	})
	return w
}

// mounts are the mount points below a folder, the deepest first.
func (w *world) mounts(dir string) []string {
	w.t.Helper()
	all, err := mount.Mounts()
	if err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, m := range all {
		if strings.HasPrefix(m.MountPoint, dir+"/") {
			out = append(out, m.MountPoint)
		}
	}
	slices.Sort(out)
	slices.Reverse(out)
	return out
}

func (w *world) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) source(faults *sourcetest.Faults) *Source {
	w.t.Helper()
	s, err := New(Config{Dir: w.dir, Kubelet: w.kubelet})
	w.check(err)
	s.sys = faulty{system: s.sys, faults: faults}
	return s
}

// staged is where the driver stages a volume.
func (w *world) staged(handle string) string {
	return w.source(nil).stagedOf(&volume.AnchorVolume{Driver: driver, Handle: handle})
}

func (w *world) published(pod string) string {
	return filepath.Join(w.kubelet, "pods", pod, "volumes/kubernetes.io~csi/pv-1/mount")
}

// stage mounts a new filesystem as the driver's NodeStageVolume does.
func (w *world) stage(handle string) {
	w.t.Helper()
	w.check(os.MkdirAll(w.staged(handle), 0o750))
	w.check(unix.Mount("volume", w.staged(handle), "tmpfs", 0, fmt.Sprintf("size=%d", volumeSize)))
}

// publish mounts a staged volume for a Pod.
func (w *world) publish(handle, pod string) {
	w.t.Helper()
	w.check(os.MkdirAll(w.published(pod), 0o750))
	w.check(unix.Mount(w.staged(handle), w.published(pod), "", unix.MS_BIND, ""))
}

func (w *world) unmount(path string) {
	w.t.Helper()
	w.check(unix.Unmount(path, 0))
}

func request(change ...func(*volume.Request)) volume.Request {
	r := volume.Request{Type: v1alpha1.VolumeTypePVC, Source: "claim", PersistentVolume: "pv-1", TenantID: "t-1",
		Anchor: &volume.AnchorVolume{PodUID: "uid-1", Pod: "ns/anchor-1", Plugin: "kubernetes.io/csi", Driver: driver, Handle: "h"}}
	for _, c := range change {
		c(&r)
	}
	return r
}

func (w *world) state(t testing.TB) []string {
	t.Helper()
	var out []string
	for _, m := range w.mounts(filepath.Dir(w.dir)) {
		out = append(out, "mount at "+strings.TrimPrefix(m, filepath.Dir(w.dir)))
	}
	err := filepath.WalkDir(w.dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		out = append(out, fmt.Sprintf("%s %s", strings.TrimPrefix(path, w.dir), entry.Type()))
		if filepath.Base(path) == guardDir && entry.IsDir() {
			return fs.SkipDir // the data
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

func TestConformance(t *testing.T) {
	sourcetest.Run(t, func(t testing.TB) sourcetest.Harness {
		w := newWorld(t)
		w.stage("h")
		w.publish("h", "uid-1")
		without := func(change func(*volume.AnchorVolume)) volume.Request {
			return request(func(r *volume.Request) { change(r.Anchor) })
		}
		return sourcetest.Harness{
			New:      func(faults *sourcetest.Faults) volume.Source { return w.source(faults) },
			Request:  request(func(r *volume.Request) { r.SizeLimitBytes = volumeSize }),
			Populate: populate,
			Refused: map[string]sourcetest.Refusal{
				"no anchor":   {Reason: fault.InvalidSource, Request: request(func(r *volume.Request) { r.Anchor = nil })},
				"no Pod":      {Reason: fault.InvalidSource, Request: without(func(v *volume.AnchorVolume) { v.PodUID = "" })},
				"another Pod": {Reason: fault.InvalidSource, Request: without(func(v *volume.AnchorVolume) { v.PodUID = "../uid" })},
				"plugin":      {Reason: fault.InvalidSource, Request: without(func(v *volume.AnchorVolume) { v.Plugin = ".." })},
				"no volume":   {Reason: fault.InvalidSource, Request: request(func(r *volume.Request) { r.PersistentVolume = ".." })},
				"no handle":   {Reason: fault.InvalidSource, Request: without(func(v *volume.AnchorVolume) { v.Handle = "" })},
				"no driver":   {Reason: fault.InvalidSource, Request: without(func(v *volume.AnchorVolume) { v.Driver = "" })},
				"driver path": {Reason: fault.InvalidSource, Request: without(func(v *volume.AnchorVolume) { v.Driver = "a/b" })},
			},
			State: w.state,
		}
	})
}

func populate(t testing.TB, p volume.Prepared) {
	t.Helper()
	rec, err := parseDetails(p)
	if err != nil {
		t.Fatal(err)
	}
	dir := rec.Path
	err = errors.Join(
		os.MkdirAll(dir+"/sub/deep", 0o755),
		os.MkdirAll(dir+"/sub-sibling", 0o755),
		os.WriteFile(dir+"/file", []byte("x"), 0o644),
	)
	for link, to := range map[string]string{"link": "/", "up": "..", "inside": "sub"} {
		if e := os.Symlink(to, dir+"/"+link); e != nil && !errors.Is(e, fs.ErrExist) {
			err = errors.Join(err, e)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

// faulty is a system in which one call may fail.
type faulty struct {
	system
	faults *sourcetest.Faults
}

func call[T any](f faulty, name string, do func() (T, error)) (T, error) {
	if err := f.faults.Call(name); err != nil {
		var none T
		return none, err
	}
	return do()
}

func call0(f faulty, name string, do func() error) error {
	_, err := call(f, name, func() (struct{}, error) { return struct{}{}, do() })
	return err
}

func (f faulty) Load(dir string) (r record, known bool, err error) {
	err = call0(f, "Load", func() error { r, known, err = f.system.Load(dir); return err })
	return r, known, err
}

func (f faulty) Save(dir string, r record) error {
	return call0(f, "Save", func() error { return f.system.Save(dir, r) })
}

func (f faulty) Forget(dir string) error {
	return call0(f, "Forget", func() error { return f.system.Forget(dir) })
}

func (f faulty) List(dir string) ([]string, error) {
	return call(f, "List", func() ([]string, error) { return f.system.List(dir) })
}

func (f faulty) At(path string) (i mount.Info, there bool, err error) {
	err = call0(f, "At", func() error { i, there, err = f.system.At(path); return err })
	return i, there, err
}

func (f faulty) Mounts() ([]mount.Info, error) { return call(f, "Mounts", f.system.Mounts) }

func (f faulty) Exists(path string) (bool, error) {
	return call(f, "Exists", func() (bool, error) { return f.system.Exists(path) })
}

func (f faulty) Bind(ctx context.Context, path, place string) error {
	return call0(f, "Bind", func() error { return f.system.Bind(ctx, path, place) })
}

func (f faulty) Unbind(place string) error {
	return call0(f, "Unbind", func() error { return f.system.Unbind(place) })
}

func (f faulty) HeldElsewhere(ctx context.Context, m mount.Match) ([]mount.NamespaceRef, error) {
	return call(f, "HeldElsewhere", func() ([]mount.NamespaceRef, error) { return f.system.HeldElsewhere(ctx, m) })
}

func (f faulty) InPod(pid int, pod string) bool { return f.system.InPod(pid, pod) }

func (f faulty) Clone(ctx context.Context, path string, id mount.Identity, subPath string) (*mount.Tree, error) {
	return call(f, "Clone", func() (*mount.Tree, error) { return f.system.Clone(ctx, path, id, subPath) })
}

func (f faulty) Size(ctx context.Context, tree *mount.Tree) (int64, error) {
	return call(f, "Size", func() (int64, error) { return f.system.Size(ctx, tree) })
}
