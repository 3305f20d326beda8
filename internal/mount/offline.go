package mount

import (
	"errors"
	"fmt"
	"runtime"
	"slices"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// offline are the answers of a filesystem that was shut down, or that has lost
// the device, server or network that it is on.
var offline = []error{unix.EIO, unix.ESHUTDOWN, unix.ENXIO, unix.ENODEV, unix.ENOTCONN, unix.ESTALE, unix.EREMOTEIO}

func isOffline(err error) bool {
	return slices.ContainsFunc(offline, func(errno error) bool { return errors.Is(err, errno) })
}

// Online returns an error with reason VOLUME_OFFLINE if the tree's filesystem is
// of no use any more. It writes nothing, and wants nothing of the disk that is
// not in memory. It may wait for a file server: see MayHang and OnlineInHelper.
func (t *Tree) Online() error {
	if err := t.open("look at"); err != nil {
		return err
	}
	defer runtime.KeepAlive(t.file)
	return online(t.fd(), "")
}

// online asks a directory for its attributes, and for an extended one that need
// not be there: after a shutdown XFS refuses both, ext4 the second, while both
// go on to answer statfs.
func online(fd int, path string) error {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	if err == nil {
		// By its path, as the descriptor may be one that is for paths alone.
		_, err = unix.Getxattr(fmt.Sprintf("/proc/self/fd/%d", fd), "user.flux-sandbox", nil)
	}
	return ifOffline(err, path)
}

// ifOffline is an error with reason VOLUME_OFFLINE for one that says so; else nil.
func ifOffline(err error, path string) error {
	if !isOffline(err) {
		return nil
	}
	return &Error{Op: "look at", Path: path, Code: ReasonVolumeOffline, Kind: errdefs.ErrUnavailable,
		Message: "the volume's filesystem was shut down, or has lost what it is on", Err: err}
}
