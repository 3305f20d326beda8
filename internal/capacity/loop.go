package capacity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// The steps of Loops.Attach, in order.
const (
	StepLock      = "lock"
	StepLookup    = "lookup"
	StepConfigure = "configure"
)

// AttachSteps are the steps of Loops.Attach that an Observer is told of. Configure is left out where
// the image has a device already.
var AttachSteps = []string{StepLock, StepLookup, StepConfigure}

// recheck is how often a loop device that somebody else made is looked for while it is waited for. Ours
// hold a lock that can be waited on.
const recheck = 10 * time.Millisecond

// maxBindAttempts bounds how often a free device may be lost to another program before Attach gives up
// with a transient error. Other goroutines of this process do not compete (configuring).
const maxBindAttempts = 256

// Device is an open loop device. While it is open, or a filesystem on it is mounted, the device stays;
// with the last of these it clears itself.
type Device struct {
	// Path is the device's path, "/dev/loop7".
	Path string
	// Number is the device number, as in stat's st_rdev.
	Number uint64
	// DirectIO says that the device by-passes the page cache of the filesystem below. A filesystem
	// without direct I/O (tmpfs) makes it false.
	DirectIO bool

	file *os.File
}

// Close lets go of the device. It does not disturb a filesystem that is mounted from it.
func (d *Device) Close() error { return d.file.Close() }

// Loops makes and finds loop devices. The zero value is ready for use, by any number of goroutines.
type Loops struct {
	// Observe is told of the AttachSteps; nil tells nobody.
	Observe Observer
}

// configuring spares goroutines that attach different images from fighting for the same free device.
// It guards nothing that is not also safe without it.
var configuring sync.Mutex

// Attach returns the loop device of the image, and makes one only where there is none. The image is a
// regular file, open for reading at least. Attach waits, at most as long as ctx lasts, for somebody else
// who is attaching the same image, and for a device that is being cleared (and so for the superblock on
// it). The caller closes the Device once the filesystem on it is mounted.
func (l Loops) Attach(ctx context.Context, image *os.File) (*Device, error) {
	id, err := identify(image)
	if err != nil {
		return nil, err
	}
	var turn *os.File
	if err := l.Observe.step(StepLock, func() (err error) {
		turn, err = lockByte(ctx, image, byteAttach)
		return err
	}); err != nil {
		return nil, err
	}
	defer turn.Close()

	var found *Device
	if err := l.Observe.step(StepLookup, func() (err error) {
		found, err = id.lookup()
		return err
	}); err != nil || found != nil {
		return found, err
	}

	var made *Device
	err = l.Observe.step(StepConfigure, func() error {
		// With the turn ours and no device bound, the only one that can hold this lock is a device that
		// is about to let go of the image, or a child that was forked a moment ago.
		backing, err := lockDevice(ctx, image)
		if err != nil {
			return err
		}
		// From here on the loop device keeps the open file, and with it the lock.
		defer backing.Close()
		made, err = configure(ctx, backing, id)
		return err
	})
	return made, err
}

// Lookup returns the image's loop device, or nil if it has none. The caller closes it; while it is open
// the device cannot clear itself.
func (l Loops) Lookup(image *os.File) (*Device, error) {
	id, err := identify(image)
	if err != nil {
		return nil, err
	}
	return id.lookup()
}

// InUse says whether the image has a loop device, be it one that is about to go. Attaching by others may
// change the answer at any time.
func (l Loops) InUse(image *os.File) (bool, error) {
	d, err := l.Lookup(image)
	if err != nil {
		return false, err
	}
	if d != nil {
		d.Close()
		return true, nil
	}
	f, err := reopen(image, os.O_RDWR)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if err := flock(f, false); errors.Is(err, unix.EAGAIN) {
		return true, nil
	} else if err != nil {
		return false, failed("lock %s: %w", image.Name(), err)
	}
	return false, nil
}

// WaitGone waits until the image has no loop device, and so no mounted superblock. It gives up with ctx:
// the error is then Unavailable, reason BUSY, and wraps the context's.
func (l Loops) WaitGone(ctx context.Context, image *os.File) error {
	busy := func(cause error) error {
		return fail(errdefs.ErrUnavailable, ReasonBusy,
			"%s still has a loop device: a mount namespace or an open file holds its filesystem: %w", image.Name(), cause)
	}
	held, err := lockDevice(ctx, image)
	if err != nil {
		if ctx.Err() != nil {
			return busy(context.Cause(ctx))
		}
		return err
	}
	held.Close()
	// A device that another program made holds no lock; it can only be looked for.
	ticker := time.NewTicker(recheck)
	defer ticker.Stop()
	for {
		d, err := l.Lookup(image)
		if err != nil || d == nil {
			return err
		}
		d.Close()
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return busy(context.Cause(ctx))
		}
	}
}

// AttachedName is the name under which the image of a loop device was attached (LoopName), whatever became of the file
// since. The device is a number, "7:3". It is empty where that is no loop device, or is bound to nothing.
func AttachedName(device string) (string, error) {
	link, err := os.Readlink("/sys/dev/block/" + device)
	if err != nil || !strings.HasPrefix(filepath.Base(link), "loop") {
		return "", nil // another kind of device, or of filesystem
	}
	path := "/dev/" + filepath.Base(link)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENXIO) {
		return "", nil
	}
	if err != nil {
		return "", failed("open %s: %w", path, errors.Unwrap(err))
	}
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if errors.Is(err, unix.ENXIO) {
		return "", nil
	}
	if err != nil {
		return "", failed("status of %s: %w", path, err)
	}
	return unix.ByteSliceToString(info.File_name[:]), nil
}

// LoopName is how a loop device calls the image of that name (without suffix).
func LoopName(name string) string { return loopName(name + ImageSuffix) }

// loopName is as much of a file's name as a loop device keeps (LO_NAME_SIZE, with a final zero).
func loopName(file string) string { return file[:min(len(file), unix.LO_NAME_SIZE-1)] }

// identity is what a loop device tells of its backing file.
type identity struct {
	dev, inode uint64
	name       string
}

func identify(image *os.File) (identity, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &st); err != nil {
		return identity{}, failed("stat %s: %w", image.Name(), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return identity{}, fail(errdefs.ErrFailedPrecondition, ReasonInvalidImage,
			"%s is no regular file, so it is no disk image", image.Name())
	}
	return identity{dev: st.Dev, inode: st.Ino, name: filepath.Base(image.Name())}, nil
}

// lookup finds the bound device by the backing inode. Devices whose backing path ends in the image's name
// are tried first; but names lie (renamed, deleted and hard-linked files), so all others follow.
func (id identity) lookup() (*Device, error) {
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, failed("list loop devices: %w", err)
	}
	likely := func(path string) bool {
		b, err := os.ReadFile(path)
		if err != nil {
			return false
		}
		backing := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), " (deleted)")
		return filepath.Base(backing) == id.name
	}
	rank := make(map[string]bool, len(paths))
	for _, p := range paths {
		rank[p] = likely(p)
	}
	sort.SliceStable(paths, func(i, j int) bool { return rank[paths[i]] && !rank[paths[j]] })
	for _, p := range paths {
		name := filepath.Base(filepath.Dir(filepath.Dir(p)))
		d, err := id.open("/dev/" + name)
		if err != nil || d != nil {
			return d, err
		}
	}
	return nil, nil
}

// open opens the device if it is bound to the image, and returns nil if it is not. A bound device that is
// open stays bound: clearing waits for the last one who has it open (loop(4), LO_FLAGS_AUTOCLEAR).
func (id identity) open(path string) (*Device, error) {
	// Read-only, so that closing a stranger's device tells nobody (udev) that it was written to.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO):
		return nil, nil // removed, or being cleared
	case err != nil:
		return nil, failed("open %s: %w", path, errors.Unwrap(err))
	}
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if errors.Is(err, unix.ENXIO) || err == nil && (info.Device != id.dev || info.Inode != id.inode) {
		f.Close()
		return nil, nil
	}
	if err != nil {
		f.Close()
		return nil, failed("status of %s: %w", path, err)
	}
	return newDevice(path, f, info)
}

func newDevice(path string, f *os.File, info *unix.LoopInfo64) (*Device, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, failed("stat %s: %w", path, err)
	}
	return &Device{Path: path, Number: st.Rdev, DirectIO: info.Flags&unix.LO_FLAGS_DIRECT_IO != 0, file: f}, nil
}

// configure binds a free device to the image. Another process may take the free device first (EBUSY):
// then the next one is tried.
func configure(ctx context.Context, backing *os.File, id identity) (*Device, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, failed("open /dev/loop-control (is the loop driver there?): %w", errors.Unwrap(err))
	}
	defer control.Close()
	configuring.Lock()
	defer configuring.Unlock()
	for range maxBindAttempts {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", context.Cause(ctx))
		}
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, failed("find a free loop device: %w", err)
		}
		path := fmt.Sprintf("/dev/loop%d", n)
		f, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENXIO) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, failed("open %s: %w", path, errors.Unwrap(err))
		}
		err = bind(f, backing, id.name)
		if errors.Is(err, unix.EBUSY) {
			f.Close()
			continue
		}
		if err != nil {
			f.Close()
			return nil, failed("bind %s to %s: %w", path, backing.Name(), err)
		}
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		if err == nil && (info.Device != id.dev || info.Inode != id.inode) {
			err = fmt.Errorf("it is bound to inode %d, not %d", info.Inode, id.inode)
		}
		if err != nil {
			f.Close()
			return nil, failed("verify %s: %w", path, err)
		}
		return newDevice(path, f, info)
	}
	return nil, fail(errdefs.ErrUnavailable, ReasonBusy,
		"every free loop device was taken by another program before %s could have it", backing.Name())
}

func bind(device, backing *os.File, name string) error {
	config := unix.LoopConfig{
		Fd:   uint32(backing.Fd()),
		Size: blockSize,
		Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO},
	}
	copy(config.Info.File_name[:], loopName(name)) // AttachedName reads it back
	err := noEINTR(func() error { return unix.IoctlLoopConfigure(int(device.Fd()), &config) })
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		// Some kernels refuse direct I/O where others fall back in silence.
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
		err = noEINTR(func() error { return unix.IoctlLoopConfigure(int(device.Fd()), &config) })
	}
	return err
}
