package capacity

import (
	"context"
	"errors"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Remove removes the image of that name from dir, durably. Where there is none it does nothing. An image that
// has a loop device is refused (Unavailable, BUSY): nobody attaches it meanwhile, as Remove has the turn.
func (p *Pool) Remove(ctx context.Context, dir *os.File, name string) error {
	image, err := OpenImage(dir, name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer image.Close()
	turn, err := lockByte(ctx, image, byteAttach)
	if err != nil {
		return err
	}
	defer turn.Close()
	used, err := Loops{}.InUse(image)
	if err != nil {
		return err
	}
	if used {
		return fail(errdefs.ErrUnavailable, ReasonBusy,
			"%s cannot be removed: it has a loop device, so it is mounted somewhere; unmount it first", image.Name())
	}
	if err := unix.Unlinkat(int(dir.Fd()), name+ImageSuffix, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return failed("remove %s: %w", image.Name(), err)
	}
	if err := syncDir(dir); err != nil {
		return failed("sync %s: %w", dir.Name(), err)
	}
	return nil
}
