package local

import (
	"context"
	"os"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/sourcetest"
)

// faulty is a system in which one call may fail.
type faulty struct {
	system
	faults *sourcetest.Faults
}

// call0 and call make a call unless it is the one to fail.
func call0(f faulty, name string, do func() error) error {
	if err := f.faults.Call(name); err != nil {
		return err
	}
	return do()
}

func call[T any](f faulty, name string, do func() (T, error)) (T, error) {
	if err := f.faults.Call(name); err != nil {
		var none T
		return none, err
	}
	return do()
}

func (f faulty) FilesystemType(path string) (string, error) {
	return call(f, "FilesystemType", func() (string, error) { return f.system.FilesystemType(path) })
}

func (f faulty) OpenDir(prefix, rel string) (*os.File, error) {
	return call(f, "OpenDir", func() (*os.File, error) { return f.system.OpenDir(prefix, rel) })
}

func (f faulty) OpenSubPath(dir *os.File, subPath string) (*os.File, error) {
	return call(f, "OpenSubPath", func() (*os.File, error) { return f.system.OpenSubPath(dir, subPath) })
}

func (f faulty) MakeDirs(dir *os.File, rel string) (*os.File, error) {
	return call(f, "MakeDirs", func() (*os.File, error) { return f.system.MakeDirs(dir, rel) })
}

func (f faulty) Clone(dir *os.File) (*mount.Tree, error) {
	return call(f, "Clone", func() (*mount.Tree, error) { return f.system.Clone(dir) })
}

func (f faulty) CloneInHelper(ctx context.Context, prefix, rel string) (*mount.Tree, error) {
	return call(f, "CloneInHelper", func() (*mount.Tree, error) { return f.system.CloneInHelper(ctx, prefix, rel) })
}

func (f faulty) NewFilesystem(fs mount.Filesystem) (*mount.Tree, error) {
	return call(f, "NewFilesystem", func() (*mount.Tree, error) { return f.system.NewFilesystem(fs) })
}

func (f faulty) Sub(tree *mount.Tree, subPath string) (*mount.Tree, error) {
	return call(f, "Sub", func() (*mount.Tree, error) { return f.system.Sub(tree, subPath) })
}

func (f faulty) OwnFilesystem(path string) (bool, error) {
	return call(f, "OwnFilesystem", func() (bool, error) { return f.system.OwnFilesystem(path) })
}

func (f faulty) Size(dir *os.File) (int64, error) {
	return call(f, "Size", func() (int64, error) { return f.system.Size(dir) })
}

func (f faulty) SizeInHelper(ctx context.Context, tree *mount.Tree) (int64, error) {
	return call(f, "SizeInHelper", func() (int64, error) { return f.system.SizeInHelper(ctx, tree) })
}

func (f faulty) Limit(dir *os.File, key string, size int64) error {
	return call0(f, "Limit", func() error { return f.system.Limit(dir, key, size) })
}

func (f faulty) Unlimit(dir *os.File, key string) error {
	return call0(f, "Unlimit", func() error { return f.system.Unlimit(dir, key) })
}

func (f faulty) OpenImage(dir *os.File, name string) (*os.File, error) {
	return call(f, "OpenImage", func() (*os.File, error) { return f.system.OpenImage(dir, name) })
}

func (f faulty) ImageSize(image *os.File) (int64, error) {
	return call(f, "ImageSize", func() (int64, error) { return f.system.ImageSize(image) })
}

func (f faulty) DetectFilesystem(image *os.File) (capacity.Filesystem, error) {
	return call(f, "DetectFilesystem", func() (capacity.Filesystem, error) { return f.system.DetectFilesystem(image) })
}

func (f faulty) CreateImage(ctx context.Context, pool *capacity.Pool, dir *os.File, name string, spec capacity.Spec) error {
	return call0(f, "CreateImage", func() error { return f.system.CreateImage(ctx, pool, dir, name, spec) })
}

func (f faulty) SweepImages(ctx context.Context, pool *capacity.Pool) error {
	return call0(f, "SweepImages", func() error { return f.system.SweepImages(ctx, pool) })
}

func (f faulty) AttachLoop(ctx context.Context, image *os.File) (*capacity.Device, error) {
	return call(f, "AttachLoop", func() (*capacity.Device, error) { return f.system.AttachLoop(ctx, image) })
}

func (f faulty) WaitLoopGone(ctx context.Context, image *os.File) error {
	return call0(f, "WaitLoopGone", func() error { return f.system.WaitLoopGone(ctx, image) })
}
