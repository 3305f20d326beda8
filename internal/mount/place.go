package mount

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Place puts the tree on a directory of the caller's own mount namespace, and takes over what the mount there
// propagates to: where that is shared, so is the new mount. It is for paths that another program hands to us
// to be mounted on (CSI); what goes into a sandbox goes by Namespace.Attach. The tree is closed.
func (t *Tree) Place(dir *os.File) error {
	if err := t.open("place"); err != nil {
		return err
	}
	err := unix.MoveMount(t.fd(), "", int(dir.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	runtime.KeepAlive(dir)
	if err != nil {
		return failed("place", dir.Name(), "move_mount failed", err)
	}
	return t.Close()
}
