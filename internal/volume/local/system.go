package local

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// releaseWait is how long Release waits for the kernel to let go of an image whose mounts are gone, which takes
// milliseconds. After it the agent is told to come back, as a mount namespace may hold it for much longer.
const releaseWait = 2 * time.Second

// system is what a Source does to the machine. It is a seam for tests, which let each call fail.
type system interface {
	// FilesystemType is that of the filesystem at the path, found without touching the path.
	FilesystemType(path string) (string, error)
	// OpenDir opens the directory rel beneath prefix.
	OpenDir(prefix, rel string) (*os.File, error)
	// OpenSubPath opens the directory subPath beneath dir.
	OpenSubPath(dir *os.File, subPath string) (*os.File, error)
	// MakeDirs opens the directory rel beneath dir, and makes what is missing of it, for root alone.
	MakeDirs(dir *os.File, rel string) (*os.File, error)
	Clone(dir *os.File) (*mount.Tree, error)
	CloneInHelper(ctx context.Context, prefix, rel string) (*mount.Tree, error)
	NewFilesystem(f mount.Filesystem) (*mount.Tree, error)
	Sub(tree *mount.Tree, subPath string) (*mount.Tree, error)
	// OwnFilesystem says whether a whole filesystem is mounted at the path, found without touching the path.
	OwnFilesystem(path string) (bool, error)
	// Size is the size of the directory's, or tree's, filesystem in bytes.
	Size(dir *os.File) (int64, error)
	SizeInHelper(ctx context.Context, tree *mount.Tree) (int64, error)
	// Limit holds a directory to a size under the volume's key; Unlimit undoes that.
	Limit(dir *os.File, key string, size int64) error
	Unlimit(dir *os.File, key string) error
	OpenImage(dir *os.File, name string) (*os.File, error)
	ImageSize(image *os.File) (int64, error)
	DetectFilesystem(image *os.File) (capacity.Filesystem, error)
	CreateImage(ctx context.Context, pool *capacity.Pool, dir *os.File, name string, spec capacity.Spec) error
	SweepImages(ctx context.Context, pool *capacity.Pool) error
	AttachLoop(ctx context.Context, image *os.File) (*capacity.Device, error)
	// WaitLoopGone waits at most releaseWait.
	WaitLoopGone(ctx context.Context, image *os.File) error
}

// The failpoints of the steps below this package, which may not import failpoint themselves.
var (
	createSteps = capacity.Observer(failpoint.Steps("image-create", capacity.CreateSteps))
	attachSteps = capacity.Observer(failpoint.Steps("loop-attach", capacity.AttachSteps))
)

// kernel is the real system.
type kernel struct {
	limiter capacity.Limiter
	loops   capacity.Loops
	types   *mountTypes
}

func newKernel(limiter capacity.Limiter) *kernel {
	return &kernel{limiter: limiter, loops: capacity.Loops{Observe: attachSteps}, types: &mountTypes{}}
}

func (k *kernel) FilesystemType(path string) (string, error) { return k.types.lookup(path) }

func (k *kernel) OpenDir(prefix, rel string) (*os.File, error) {
	root, err := mount.OpenRoot(prefix)
	if err != nil || rel == "." {
		return root, err
	}
	defer root.Close()
	return mount.OpenBeneath(root, rel)
}

func (k *kernel) OpenSubPath(dir *os.File, subPath string) (*os.File, error) {
	return mount.OpenSubPath(dir, subPath)
}

func (k *kernel) MakeDirs(dir *os.File, rel string) (*os.File, error) {
	here, err := mount.OpenBeneath(dir, ".")
	for part := range pathParts(rel) {
		if err != nil {
			return nil, err
		}
		var next *os.File
		next, err = makeDir(here, part)
		here.Close()
		here = next
	}
	return here, err
}

// makeDir opens a directory, and makes it durably where it is missing.
func makeDir(parent *os.File, name string) (*os.File, error) {
	dir, err := mount.OpenBeneath(parent, name)
	if !errdefs.IsNotFound(err) {
		return dir, err
	}
	if err := unix.Mkdirat(int(parent.Fd()), name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fault.New(errdefs.ErrInternal, fault.Internal, "make the folder %s: %w", path.Join(parent.Name(), name), err)
	}
	// fsync takes no O_PATH descriptor.
	again, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", parent.Fd()))
	if err != nil {
		return nil, err
	}
	defer again.Close()
	if err := again.Sync(); err != nil {
		return nil, err
	}
	return mount.OpenBeneath(parent, name)
}

func (k *kernel) Clone(dir *os.File) (*mount.Tree, error) { return mount.Clone(dir) }

func (k *kernel) CloneInHelper(ctx context.Context, prefix, rel string) (*mount.Tree, error) {
	return mount.CloneInHelper(ctx, prefix, rel)
}

func (k *kernel) NewFilesystem(f mount.Filesystem) (*mount.Tree, error) {
	return mount.NewFilesystem(f)
}

func (k *kernel) Sub(tree *mount.Tree, subPath string) (*mount.Tree, error) {
	return tree.Sub(subPath)
}

func (k *kernel) OwnFilesystem(path string) (bool, error) {
	mounts, err := mount.Mounts()
	if err != nil {
		return false, err
	}
	// The last one at a path is the one that is seen.
	for _, m := range slices.Backward(mounts) {
		if m.MountPoint == path {
			return m.Root == "/", nil
		}
	}
	return false, nil
}

func (k *kernel) Size(dir *os.File) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return 0, fmt.Errorf("read the size of the filesystem of %s: %w", dir.Name(), err)
	}
	return int64(st.Blocks) * st.Frsize, nil
}

func (k *kernel) SizeInHelper(ctx context.Context, tree *mount.Tree) (int64, error) {
	usage, err := mount.StatfsInHelper(ctx, tree)
	return int64(usage.TotalBytes), err
}

func (k *kernel) Limit(dir *os.File, key string, size int64) error {
	if err := k.limiter.Supported(dir); err != nil {
		return err
	}
	_, err := capacity.Bind(k.limiter, dir, key, capacity.Limit{Bytes: size, Inodes: inodesOf(size)})
	return err
}

// inodesOf is how many files a volume of that size may have: one for every 16 KiB, as ext4 has by default, and a few
// for the smallest.
func inodesOf(size int64) int64 { return max(size/(16<<10), 1024) }

func (k *kernel) Unlimit(dir *os.File, key string) error {
	return capacity.Unbind(k.limiter, dir, key)
}

func (k *kernel) OpenImage(dir *os.File, name string) (*os.File, error) {
	return capacity.OpenImage(dir, name)
}

func (k *kernel) ImageSize(image *os.File) (int64, error) { return capacity.ImageSize(image) }

func (k *kernel) DetectFilesystem(image *os.File) (capacity.Filesystem, error) {
	return capacity.DetectFilesystem(image)
}

func (k *kernel) CreateImage(ctx context.Context, pool *capacity.Pool, dir *os.File, name string, spec capacity.Spec) error {
	pool.Observe = createSteps
	image, _, err := pool.Create(ctx, dir, name, spec)
	if err != nil {
		return err
	}
	return image.Close()
}

func (k *kernel) SweepImages(ctx context.Context, pool *capacity.Pool) error {
	_, err := pool.Sweep(ctx)
	return err
}

func (k *kernel) AttachLoop(ctx context.Context, image *os.File) (*capacity.Device, error) {
	return k.loops.Attach(ctx, image)
}

func (k *kernel) WaitLoopGone(ctx context.Context, image *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, releaseWait)
	defer cancel()
	return k.loops.WaitGone(ctx, image)
}

// pathParts are the components of a clean relative path; none for ".".
func pathParts(rel string) iter.Seq[string] {
	if rel == "." {
		return func(func(string) bool) {}
	}
	return strings.SplitSeq(rel, "/")
}
