package capacity

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// The steps of Pool.Create, in order.
const (
	StepReserve    = "reserve"    // check free space, make the temporary file at its size
	StepFormat     = "format"     // make the filesystem
	StepInitialise = "initialise" // mount it once: empty it, set the mode of its root
	StepSync       = "sync"       // the image's content is on disk
	StepPublish    = "publish"    // give the image its name, sync the directory
)

// CreateSteps are the steps of Pool.Create that an Observer is told of.
var CreateSteps = []string{StepReserve, StepFormat, StepInitialise, StepSync, StepPublish}

const (
	// ImageSuffix ends the file name of every image.
	ImageSuffix = ".img"
	// tempPrefix starts the file name of an image that is being made. No image may be named so.
	tempPrefix = ".flux-tmp-"
	// maxName is NAME_MAX of every filesystem that an image can lie on.
	maxName = 255
)

// Pool makes images below one folder. What the folder's images promise counts together against what its
// filesystem has free. Pools in several processes may share a folder.
type Pool struct {
	// Dir is the open folder. Only root may be able to write to it and to the folders below it.
	Dir *os.File
	// Overcommit is by what factor sparse images may promise more than is free; 1 when zero, which
	// keeps every promise as long as nobody else fills the disk.
	Overcommit float64
	// Observe is told of the CreateSteps; nil tells nobody.
	Observe Observer
}

// Spec says how an image is made.
type Spec struct {
	// Size is the exact size of the file in bytes. The filesystem's own data takes its part of it.
	Size int64
	// Filesystem is Ext4 when empty.
	Filesystem Filesystem
	// Preallocate takes the space from the disk at once, so that no other program can use it up.
	Preallocate bool
	// RootMode is the mode of the volume's root directory, which belongs to root; 0755 when zero. Permissions and
	// fs.ModeSticky count.
	RootMode fs.FileMode
}

// OpenImage opens the image of that name (without suffix) in dir. The error is NotFound where there is
// none. The caller closes the file.
func OpenImage(dir *os.File, name string) (*os.File, error) {
	if err := CheckImageName(name); err != nil {
		return nil, err
	}
	return openImage(dir, name+ImageSuffix)
}

func openImage(dir *os.File, file string) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), file, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	path := dir.Name() + "/" + file
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENXIO):
		return nil, fail(errdefs.ErrFailedPrecondition, ReasonInvalidImage, "%s is no disk image: %w", path, err)
	case err != nil:
		return nil, failed("open the disk image %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	if _, err := identify(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// CheckImageName says whether an image can have that name: one path component that does not start with
// a dot, and leaves room for the suffix.
func CheckImageName(name string) error {
	switch {
	case name == "", strings.HasPrefix(name, "."), strings.ContainsAny(name, "/\x00"):
		return fail(errdefs.ErrInvalidArgument, ReasonInvalidImage,
			"%q cannot name a disk image: it must be one path component that does not start with a dot", name)
	case len(name)+len(ImageSuffix) > maxName:
		return fail(errdefs.ErrInvalidArgument, ReasonInvalidImage,
			"a disk image's name may have at most %d bytes, not %d", maxName-len(ImageSuffix), len(name))
	}
	return nil
}

// ImageSize is the exact size with which the image was made, in bytes.
func ImageSize(image *os.File) (int64, error) {
	st, err := image.Stat()
	if err != nil {
		return 0, failed("stat %s: %w", image.Name(), errors.Unwrap(err))
	}
	return st.Size(), nil
}

// CheckSize compares an existing image with the size that is asked for; zero asks for none. The error has
// both figures.
func CheckSize(image *os.File, size int64) error {
	actual, err := ImageSize(image)
	if err != nil || size == 0 || size == actual {
		return err
	}
	return fail(errdefs.ErrFailedPrecondition, ReasonSizeMismatch,
		"the disk image %s exists with %d bytes, not the requested %d: a volume's size does not change; ask for the size that it has, or for none",
		image.Name(), actual, size).sizes(size, actual)
}

// Create makes the image of that name in dir, a folder of the pool, unless it exists with that size. The
// caller closes the file that is returned; created says whether this call made the image.
func (p *Pool) Create(ctx context.Context, dir *os.File, name string, spec Spec) (image *os.File, created bool, err error) {
	if spec.Filesystem == "" {
		spec.Filesystem = Ext4
	}
	if spec.RootMode == 0 {
		spec.RootMode = 0o755
	}
	if err := CheckImageName(name); err != nil {
		return nil, false, err
	}
	if existing, err := p.existing(dir, name, spec.Size); existing != nil || err != nil {
		return existing, false, err
	}
	if err := spec.check(); err != nil {
		return nil, false, err
	}
	temp, tempName, err := p.make(ctx, dir, name, spec)
	if err != nil {
		return nil, false, err
	}
	err = p.Observe.step(StepPublish, func() error {
		// Whoever was first has made the image: nothing is replaced.
		if err := unix.Renameat2(int(dir.Fd()), tempName, int(dir.Fd()), name+ImageSuffix, unix.RENAME_NOREPLACE); err != nil {
			return err
		}
		return syncDir(dir)
	})
	temp.Close()
	if err != nil {
		// After a failed sync the image may have its name already: it is whole, and stays.
		_ = unix.Unlinkat(int(dir.Fd()), tempName, 0)
		if errors.Is(err, unix.EEXIST) {
			existing, err := p.existing(dir, name, spec.Size)
			return existing, false, err
		}
		return nil, false, failed("publish the disk image %s/%s: %w", dir.Name(), name, err)
	}
	image, err = OpenImage(dir, name)
	return image, err == nil, err
}

// syncDir makes the directory's entries durable. The directory may be open as O_PATH, which fsync refuses.
func syncDir(dir *os.File) error {
	d, err := reopen(dir, os.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// existing opens the image if it is there and has the size.
func (p *Pool) existing(dir *os.File, name string, size int64) (*os.File, error) {
	image, err := OpenImage(dir, name)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := CheckSize(image, size); err != nil {
		image.Close()
		return nil, err
	}
	return image, nil
}

func (s Spec) check() error {
	least := s.Filesystem.MinSize()
	if least == 0 {
		_, _, err := s.Filesystem.command(0)
		return err
	}
	if s.Size < least {
		return fail(errdefs.ErrInvalidArgument, ReasonInvalidSize,
			"a disk image with %s needs at least %d bytes (%d MiB), not %d: ask for more",
			s.Filesystem, least, least>>20, s.Size).sizes(s.Size, least)
	}
	return s.Filesystem.CheckTool()
}

// make makes the whole image under a temporary name. The file that it returns holds the creator's lock.
func (p *Pool) make(ctx context.Context, dir *os.File, name string, spec Spec) (*os.File, string, error) {
	what := dir.Name() + "/" + name + ImageSuffix
	var temp *os.File
	var tempName string
	if err := p.Observe.step(StepReserve, func() (err error) {
		temp, tempName, err = p.reserve(ctx, dir, what, spec)
		return err
	}); err != nil {
		return nil, "", err
	}
	if err := p.fill(ctx, temp, spec); err != nil {
		_ = unix.Unlinkat(int(dir.Fd()), tempName, 0)
		temp.Close()
		return nil, "", fmt.Errorf("make the disk image %s: %w", what, err)
	}
	return temp, tempName, nil
}

// fill makes the filesystem in the temporary file.
func (p *Pool) fill(ctx context.Context, temp *os.File, spec Spec) error {
	if err := p.Observe.step(StepFormat, func() error { return spec.Filesystem.format(ctx, temp, spec.Size) }); err != nil {
		return err
	}
	if err := p.Observe.step(StepInitialise, func() error { return initialise(ctx, temp, spec) }); err != nil {
		return err
	}
	if err := p.Observe.step(StepSync, temp.Sync); err != nil {
		return failed("sync: %w", err)
	}
	return nil
}

// reserve makes the temporary file at its full size, if the pool can promise that much. The pool's folder
// is locked meanwhile: two makers never count the same free bytes.
func (p *Pool) reserve(ctx context.Context, dir *os.File, what string, spec Spec) (*os.File, string, error) {
	lock, err := p.lock(ctx)
	if err != nil {
		return nil, "", err
	}
	defer lock.Close()
	if err := p.checkSpace(what, spec.Size); err != nil {
		return nil, "", err
	}
	random := make([]byte, 8)
	_, _ = rand.Read(random) // never fails (crypto/rand)
	tempName := tempPrefix + hex.EncodeToString(random) + ImageSuffix
	fd, err := unix.Openat(int(dir.Fd()), tempName, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, "", failed("make the disk image %s: %w", what, err)
	}
	temp := os.NewFile(uintptr(fd), dir.Name()+"/"+tempName)
	err = ofdLock(temp, unix.F_OFD_SETLK, byteCreator)
	if err == nil {
		err = noEINTR(func() error { return unix.Ftruncate(fd, spec.Size) })
	}
	if err == nil && spec.Preallocate {
		err = noEINTR(func() error { return unix.Fallocate(fd, 0, 0, spec.Size) })
	}
	if err != nil {
		_ = unix.Unlinkat(int(dir.Fd()), tempName, 0)
		temp.Close()
		return nil, "", failed("make the disk image %s of %d bytes: %w", what, spec.Size, err)
	}
	return temp, tempName, nil
}

// lock takes the pool's own lock: a flock on its folder.
func (p *Pool) lock(ctx context.Context) (*os.File, error) {
	return acquireFlags(ctx, p.Dir, os.O_RDONLY|unix.O_DIRECTORY, flock)
}

// checkSpace refuses an image that the pool cannot promise.
func (p *Pool) checkSpace(what string, size int64) error {
	free, promised, err := p.Space()
	if err != nil {
		return err
	}
	// Compared as floats: an overcommitted pool may exceed what an int64 holds.
	left := p.left(free, promised)
	if float64(size) > left {
		return fail(errdefs.ErrResourceExhausted, ReasonCapacityExceeded,
			"the disk image %s of %d bytes does not fit: %s has %d bytes free, of which other images were promised %d (overcommit %g), so %.0f are left",
			what, size, p.Dir.Name(), free, promised, p.overcommit(), left).sizes(size, wholeBytes(left))
	}
	return nil
}

func (p *Pool) overcommit() float64 { return cmp.Or(p.Overcommit, 1) }

func (p *Pool) left(free, promised int64) float64 {
	return math.Max(0, float64(free)*p.overcommit()-float64(promised))
}

func wholeBytes(n float64) int64 { return int64(math.Min(n, math.MaxInt64/2)) }

// Available is how many bytes the pool can still promise.
func (p *Pool) Available() (int64, error) {
	free, promised, err := p.Space()
	return p.AvailableOf(free, promised), err
}

// AvailableOf is Available for what Space said.
func (p *Pool) AvailableOf(free, promised int64) int64 { return wholeBytes(p.left(free, promised)) }

// Space is what the pool's filesystem has free, and how much of that its sparse images were promised and do
// not use yet. Both are in bytes.
func (p *Pool) Space() (free, promised int64, err error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.Dir.Fd()), &st); err != nil {
		return 0, 0, failed("read the free space of %s: %w", p.Dir.Name(), err)
	}
	err = p.walk(func(_ string, _ fs.DirEntry, info fs.FileInfo) error {
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			used := st.Blocks * 512 // st_blocks counts units of 512 bytes, whatever the filesystem (stat(2))
			promised += max(0, info.Size()-used)
		}
		return nil
	})
	return int64(st.Bavail) * st.Bsize, promised, err
}

// walk calls f for every image of the pool, temporary ones too. The path is relative to the pool's folder.
func (p *Pool) walk(f func(path string, entry fs.DirEntry, info fs.FileInfo) error) error {
	root := os.DirFS(fmt.Sprintf("/proc/self/fd/%d", p.Dir.Fd()))
	err := fs.WalkDir(root, ".", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && (!entry.Type().IsRegular() || !strings.HasSuffix(entry.Name(), ImageSuffix)) {
			return nil
		}
		var info fs.FileInfo
		if err == nil {
			info, err = entry.Info()
		}
		if errors.Is(err, fs.ErrNotExist) && path != "." {
			return nil // renamed or removed meanwhile
		}
		if err != nil {
			return err
		}
		return f(path, entry, info)
	})
	if err != nil {
		return failed("look through %s: %w", p.Dir.Name(), err)
	}
	return nil
}

// Sweep removes what makers left that are gone, and returns the paths, relative to the pool's folder. Call
// it at start, or at any other time: images that are being made are left alone.
func (p *Pool) Sweep(ctx context.Context) (removed []string, err error) {
	// Under the lock every temporary file has its maker's lock on it from its first moment.
	lock, err := p.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	err = p.walk(func(path string, entry fs.DirEntry, _ fs.FileInfo) error {
		if !strings.HasPrefix(entry.Name(), tempPrefix) {
			return nil
		}
		f, err := openImage(p.Dir, path)
		if errdefs.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		defer f.Close()
		if err := ofdLock(f, unix.F_OFD_SETLK, byteCreator); err != nil {
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
				return nil // its maker lives
			}
			return err
		}
		if err := unix.Unlinkat(int(p.Dir.Fd()), path, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		removed = append(removed, path)
		return nil
	})
	return removed, err
}
