package mount

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Filesystem describes a filesystem to be mounted without a place on the host.
type Filesystem struct {
	// Type is the kernel's name: "ext4", "xfs", "tmpfs", "fuse", ….
	Type string
	// Source is the device or server; may be empty. A path is looked up in the
	// caller's mount namespace.
	Source string
	// Options are the filesystem's own, in their order.
	Options []Option
	// ReadOnly makes the superblock read-only. Every further mount of the same
	// device must then be so too; to make one mount read-only use SetAttributes.
	ReadOnly bool
}

// Option is one filesystem option. With a File its descriptor is passed, with
// a Value the string; with neither it is a flag.
type Option struct {
	Key, Value string
	File       *os.File
}

// NewFilesystem makes a detached tree of a filesystem: nosuid, nodev, private.
// A device that is mounted already is not mounted again: the new tree shares
// the superblock, and its options are not looked at. Not for network
// filesystems, whose server may not answer.
// Reason: FILESYSTEM_REFUSED, with the kernel's own words in the message.
func NewFilesystem(fs Filesystem) (*Tree, error) {
	ctx, err := unix.Fsopen(fs.Type, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fs.refused(-1, "the kernel does not know the filesystem, or we may not mount it", err)
	}
	defer unix.Close(ctx)
	if fs.Source != "" {
		if err := unix.FsconfigSetString(ctx, "source", fs.Source); err != nil {
			return nil, fs.refused(ctx, "source refused", err)
		}
	}
	if fs.ReadOnly {
		if err := unix.FsconfigSetFlag(ctx, "ro"); err != nil {
			return nil, fs.refused(ctx, "option ro refused", err)
		}
	}
	for _, o := range fs.Options {
		if err := o.set(ctx); err != nil {
			return nil, fs.refused(ctx, fmt.Sprintf("option %s refused", o.Key), err)
		}
	}
	if err := unix.FsconfigCreate(ctx); err != nil {
		return nil, fs.refused(ctx, "cannot set up the filesystem", err)
	}
	fd, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, fs.refused(ctx, "cannot mount the filesystem", err)
	}
	tree, err := ownTree(fd)
	if err != nil {
		return nil, fs.refused(ctx, "cannot set attributes", err)
	}
	return tree, nil
}

func (o Option) set(ctx int) error {
	switch {
	case o.File != nil:
		// FUSE takes its descriptor as a number.
		err := unix.FsconfigSetString(ctx, o.Key, fmt.Sprint(o.File.Fd()))
		runtime.KeepAlive(o.File)
		return err
	case o.Value != "":
		return unix.FsconfigSetString(ctx, o.Key, o.Value)
	default:
		return unix.FsconfigSetFlag(ctx, o.Key)
	}
}

func (fs Filesystem) refused(ctx int, message string, err error) error {
	if log := contextLog(ctx); log != "" {
		message += " (" + log + ")"
	}
	kind := kindOf(err)
	if kind == errdefs.ErrInternal || kind == errdefs.ErrInvalidArgument {
		kind = errdefs.ErrFailedPrecondition
	}
	return &Error{Op: "mount " + fs.Type, Path: fs.Source, Code: ReasonFilesystem, Message: message, Kind: kind, Err: err}
}

// contextLog reads the messages that the kernel left in a filesystem context.
// Each read returns one, prefixed by its severity.
func contextLog(ctx int) string {
	if ctx < 0 {
		return ""
	}
	var lines []string
	buf := make([]byte, 4096)
	const most = 16
	for range most {
		n, err := unix.Read(ctx, buf)
		if err != nil || n <= 0 {
			break
		}
		line := strings.TrimSpace(string(buf[:n]))
		for _, severity := range []string{"e ", "w ", "i "} {
			line = strings.TrimPrefix(line, severity)
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "; ")
}
