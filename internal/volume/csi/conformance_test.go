package csi

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

	csiv1 "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/csidriver/csidrivertest"
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

const volumeSize = 32 << 20

// world is a driver and a node's folder.
type world struct {
	*csidrivertest.Driver
	dir string
	// local says that the driver is known to be of this node's disks.
	local bool
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{Driver: csidrivertest.New(t), dir: filepath.Join(t.TempDir(), "csi"), local: true}
	t.Cleanup(func() {
		mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
		if err != nil || strings.Contains(string(mounts), w.dir) {
			t.Errorf("a mount is left below %s (%v)", w.dir, err)
		}
		if entries, err := os.ReadDir(w.dir); err == nil && len(entries) > 0 {
			t.Errorf("left below %s: %v", w.dir, entries)
		}
	})
	if err := os.MkdirAll(w.dir, 0o711); err != nil {
		t.Fatal(err)
	}
	w.Create(t, "v", volumeSize)
	return w
}

// source is one as a process that starts has it.
func (w *world) source(t testing.TB, faults *sourcetest.Faults) *Source {
	t.Helper()
	s, err := New(Config{Dir: w.dir, Drivers: []Driver{{Name: csidrivertest.Name, Socket: w.Socket, NodeLocal: w.local}}})
	if err != nil {
		t.Fatal(err)
	}
	s.sys = faulty{system: s.sys, faults: faults}
	return s
}

func request(handle string, change ...func(*volume.Request)) volume.Request {
	r := volume.Request{Type: v1alpha1.VolumeTypePV, Source: "pv-1", PersistentVolume: "pv-1", TenantID: "t-1",
		CSI: &volume.CSIVolume{Driver: csidrivertest.Name, Handle: handle, AccessMode: readWriteOnce}}
	for _, c := range change {
		c(&r)
	}
	return r
}

func (w *world) state(t testing.TB) []string {
	t.Helper()
	var out []string
	for _, file := range testenv.LoopDevices() {
		if rest, below := strings.CutPrefix(file, w.Pool+"/"); below {
			out = append(out, "loop of "+rest)
		}
	}
	list, err := mount.Mounts()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range list {
		if rest, below := strings.CutPrefix(m.MountPoint, w.dir); below {
			out = append(out, "mount at "+rest)
		}
	}
	if err := filepath.WalkDir(w.dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		out = append(out, fmt.Sprintf("%s %s", strings.TrimPrefix(path, w.dir), entry.Type()))
		if filepath.Base(path) == mountDir && entry.IsDir() {
			return fs.SkipDir // the data
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

func TestConformance(t *testing.T) {
	sourcetest.Run(t, func(t testing.TB) sourcetest.Harness {
		w := newWorld(t)
		return sourcetest.Harness{
			New:      func(faults *sourcetest.Faults) volume.Source { return w.source(t, faults) },
			Request:  request("v", func(r *volume.Request) { r.SizeLimitBytes = volumeSize }),
			Populate: populate,
			Refused: map[string]sourcetest.Refusal{
				"another driver": {Reason: fault.SourceDenied, Request: request("v", func(r *volume.Request) { r.CSI.Driver = "other" })},
				"no volume":      {Reason: fault.InvalidSource, Request: request("")},
				"no CSI":         {Reason: fault.InvalidSource, Request: request("v", func(r *volume.Request) { r.CSI = nil })},
				"one Pod's":      {Reason: fault.InvalidSource, Request: request("v", func(r *volume.Request) { r.CSI.AccessMode = "ReadWriteOncePod" })},
				"read-only mode": {Reason: fault.ModeDenied, Request: request("v", func(r *volume.Request) { r.CSI.AccessMode = readOnlyMany })},
				"read-only":      {Reason: fault.ModeDenied, Request: request("v", func(r *volume.Request) { r.CSI.ReadOnly = true })},
			},
			State: w.state,
		}
	})
}

// A filesystem of a driver that is not known to be of this node's disks is touched by another process only.
func TestForeignFilesystemsAreTouchedByAHelper(t *testing.T) {
	w := newWorld(t)
	w.local = false
	s := w.source(t, nil)
	s.sys = helpers{s.sys, t}
	p := prepare(t, s, request("v", func(r *volume.Request) { r.SizeLimitBytes = volumeSize }))
	populate(t, p)
	for subPath, ok := range map[string]bool{"": true, "sub": true, "missing": false, "link": false} {
		tree, err := s.Tree(ctxOf(t), p, subPath)
		if (err == nil) != ok || !ok && !fault.IsPermanent(err) {
			t.Errorf("%q: %v", subPath, err)
		}
		if err == nil {
			must(t, tree.Close())
		}
	}
	released(t, s, p)
}

// helpers fails a test in which this process touches a volume's filesystem.
type helpers struct {
	system
	t *testing.T
}

func (h helpers) Clone(ctx context.Context, path string, id mount.Identity, subPath string, helper bool) (*mount.Tree, error) {
	if !helper {
		h.t.Error("cloned without a helper")
	}
	return h.system.Clone(ctx, path, id, subPath, helper)
}

func (h helpers) Size(ctx context.Context, tree *mount.Tree, helper bool) (int64, error) {
	if !helper {
		h.t.Error("asked for the size without a helper")
	}
	return h.system.Size(ctx, tree, helper)
}

func populate(t testing.TB, p volume.Prepared) {
	t.Helper()
	d, err := parseDetails(p)
	if err != nil {
		t.Fatal(err)
	}
	sourcetest.Populate(t, d.Path)
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

func (f faulty) HeldElsewhere(ctx context.Context, m mount.Match, at mount.Info) ([]mount.NamespaceRef, error) {
	return call(f, "HeldElsewhere", func() ([]mount.NamespaceRef, error) { return f.system.HeldElsewhere(ctx, m, at) })
}

func (f faulty) Clone(ctx context.Context, path string, id mount.Identity, subPath string, helper bool) (*mount.Tree, error) {
	return call(f, "Clone", func() (*mount.Tree, error) { return f.system.Clone(ctx, path, id, subPath, helper) })
}

func (f faulty) Size(ctx context.Context, tree *mount.Tree, helper bool) (int64, error) {
	return call(f, "Size", func() (int64, error) { return f.system.Size(ctx, tree, helper) })
}

func (f faulty) Ask(ctx context.Context, d Driver) (abilities, error) {
	return call(f, "Ask", func() (abilities, error) { return f.system.Ask(ctx, d) })
}

func (f faulty) Publish(ctx context.Context, d Driver, r *csiv1.NodePublishVolumeRequest) error {
	return call0(f, "Publish", func() error { return f.system.Publish(ctx, d, r) })
}

func (f faulty) Unpublish(ctx context.Context, d Driver, r *csiv1.NodeUnpublishVolumeRequest) error {
	return call0(f, "Unpublish", func() error { return f.system.Unpublish(ctx, d, r) })
}
