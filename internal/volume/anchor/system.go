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

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/folder"
)

// system is what a Source does to the machine. It is a seam for tests, which let each call fail.
type system interface {
	Load(dir string) (record, bool, error)
	Save(dir string, r record) error
	Forget(dir string) error
	List(dir string) ([]string, error)
	// At is what is mounted at a path, found without touching it; Mounts is all that is mounted in our own namespace.
	At(path string) (mount.Info, bool, error)
	Mounts() ([]mount.Info, error)
	// Exists says whether a folder is there, without touching what may be mounted at it.
	Exists(path string) (bool, error)
	// Bind mounts a folder at a place as well, which is made; Unbind ends that, if it is so.
	Bind(ctx context.Context, path, place string) error
	Unbind(place string) error
	// HeldElsewhere are the other mount namespaces that have what is mounted, beside copies of mounts of ours.
	HeldElsewhere(ctx context.Context, m mount.Match) ([]mount.NamespaceRef, error)
	// InPod says whether a process is one of a Pod's.
	InPod(pid int, pod string) bool
	// Clone is a tree of a directory of what is mounted at a path, Size the size of its filesystem.
	Clone(ctx context.Context, path string, id mount.Identity, subPath string) (*mount.Tree, error)
	Size(ctx context.Context, tree *mount.Tree) (int64, error)
}

// kernel is the real system.
type kernel struct{}

func (kernel) Load(dir string) (record, bool, error)    { return folder.Load[record](dir) }
func (kernel) Save(dir string, r record) error          { return folder.Save(dir, r) }
func (kernel) Forget(dir string) error                  { return folder.Forget(dir, guardDir) }
func (kernel) List(dir string) ([]string, error)        { return folder.List(dir) }
func (kernel) At(path string) (mount.Info, bool, error) { return mount.At(path) }
func (kernel) Mounts() ([]mount.Info, error)            { return mount.Mounts() }

func (kernel) Exists(path string) (bool, error) {
	// The name in the folder above: a stat would ask the filesystem that is mounted there.
	entries, err := os.ReadDir(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() == filepath.Base(path) }), err
}

func (kernel) Bind(ctx context.Context, path, place string) error {
	if err := os.MkdirAll(place, 0o700); err != nil {
		return err
	}
	at, err := mount.OpenRoot(place)
	if err != nil {
		return err
	}
	defer at.Close()
	tree, err := mount.CloneInHelper(ctx, filepath.Dir(path), filepath.Base(path))
	if err != nil {
		return err
	}
	defer tree.Close()
	return tree.Place(at)
}

func (kernel) Unbind(place string) error {
	// Lazily, as its filesystem may hang; nobody has files open below it.
	for {
		err := unix.Unmount(place, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		switch {
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT): // nothing is mounted there any more
			return nil
		case err != nil:
			return &os.PathError{Op: "unmount", Path: place, Err: err}
		}
	}
}

func (kernel) HeldElsewhere(ctx context.Context, m mount.Match) ([]mount.NamespaceRef, error) {
	all, err := mount.Mounts()
	if err != nil {
		return nil, err
	}
	own := slices.DeleteFunc(all, func(i mount.Info) bool { return i.Device != m.Device })
	return mount.HeldElsewhere(ctx, m, own...)
}

func (kernel) InPod(pid int, pod string) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return false // it has ended
	}
	// kubelet names a Pod's cgroup by its UID; as a systemd unit, with underscores.
	return strings.Contains(string(data), "pod"+pod) || strings.Contains(string(data), "pod"+strings.ReplaceAll(pod, "-", "_"))
}

func (kernel) Clone(ctx context.Context, path string, id mount.Identity, subPath string) (*mount.Tree, error) {
	return mount.CloneMountedInHelper(ctx, path, id, subPath)
}

func (kernel) Size(ctx context.Context, tree *mount.Tree) (int64, error) {
	usage, err := mount.StatfsInHelper(ctx, tree)
	return int64(usage.TotalBytes), err
}
