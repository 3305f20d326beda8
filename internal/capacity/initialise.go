package capacity

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// initialise mounts the new image where nobody sees it, which proves that it can be mounted, makes it empty
// (mkfs.ext4 leaves lost+found) and sets the mode of its root. It returns once the superblock is gone, so that
// everything is in the file when that is synced. A process killed meanwhile leaves no mount and no device.
func initialise(ctx context.Context, temp *os.File, spec Spec) error {
	var loops Loops
	device, err := loops.Attach(ctx, temp)
	if err != nil {
		return err
	}
	err = prepareRoot(device, spec)
	device.Close()
	return errors.Join(err, loops.WaitGone(ctx, temp))
}

func prepareRoot(device *Device, spec Spec) error {
	root, err := mountDetached(device, spec.Filesystem)
	if err != nil {
		return failed("mount the new %s of %s: %w", spec.Filesystem, device.Path, err)
	}
	defer root.Close()
	err = unix.Unlinkat(int(root.Fd()), "lost+found", unix.AT_REMOVEDIR)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return failed("remove lost+found: %w", err)
	}
	// By path: fchmod refuses the O_PATH descriptor that fsmount gives.
	if err := unix.Fchmodat(int(root.Fd()), ".", uint32(spec.RootMode.Perm())|sticky(spec.RootMode), 0); err != nil {
		return failed("set the mode of the root directory: %w", err)
	}
	return nil
}

func sticky(mode fs.FileMode) uint32 {
	if mode&fs.ModeSticky != 0 {
		return unix.S_ISVTX
	}
	return 0
}

// mountDetached mounts the device without a place in any mount namespace: the mount ends with the file.
func mountDetached(device *Device, filesystem Filesystem) (*os.File, error) {
	ctx, err := unix.Fsopen(string(filesystem), unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen: %w", err)
	}
	defer unix.Close(ctx)
	if err := unix.FsconfigSetString(ctx, "source", device.Path); err != nil {
		return nil, fmt.Errorf("set source: %w", err)
	}
	if err := unix.FsconfigCreate(ctx); err != nil {
		return nil, fmt.Errorf("read the superblock: %w", err)
	}
	fd, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsmount: %w", err)
	}
	return os.NewFile(uintptr(fd), device.Path), nil
}
