package mount

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Tree is a detached mount tree held by a descriptor: one mount, without what
// is mounted below it. Closing it without attaching destroys it; so does the
// death of the process. A Tree is used by one goroutine at a time.
type Tree struct{ file *os.File }

// Attributes are set on a tree before anybody can see it.
type Attributes struct {
	// ReadOnly makes the mount read-only; the superblock stays as it is.
	ReadOnly bool
	// NoExec forbids to run programs from the mount.
	NoExec bool
	// IDMap is a user namespace whose mapping is applied to owners; nil for none.
	// Not every filesystem can (overlay, NFS and most FUSE cannot).
	IDMap *os.File
}

// Usage is what a filesystem says about its size.
type Usage struct {
	TotalBytes, FreeBytes, AvailableBytes uint64
	TotalInodes, FreeInodes               uint64
}

// Clone makes a detached tree of one directory of the caller's own mount
// namespace. It is nosuid, nodev and private from the start. Mounts below the
// directory are not part of it. Reason: INVALID_SOURCE.
func Clone(dir *os.File) (*Tree, error) {
	tree, err := cloneAt(int(dir.Fd()))
	runtime.KeepAlive(dir)
	if errors.Is(err, unix.EINVAL) {
		return nil, &Error{Op: "clone", Path: dir.Name(), Code: ReasonInvalidSource, Kind: errdefs.ErrFailedPrecondition,
			Message: "the directory is not in this process's mount namespace, or is unbindable", Err: err}
	}
	if err != nil {
		return nil, failed("clone", dir.Name(), "open_tree failed", err)
	}
	return tree, nil
}

func cloneAt(fd int) (*Tree, error) {
	clone, err := unix.OpenTree(fd, "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.O_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return ownTree(clone)
}

// ownTree takes over a descriptor of a detached mount and sets what every tree
// has. A clone of a shared mount is in its peer group: hence private.
func ownTree(fd int) (*Tree, error) {
	tree := &Tree{file: os.NewFile(uintptr(fd), "tree")}
	err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV,
		Propagation: unix.MS_PRIVATE,
	})
	if err != nil {
		tree.Close()
		return nil, fmt.Errorf("mount_setattr: %w", err)
	}
	return tree, nil
}

// Close destroys the tree unless it was attached. It may be called twice.
func (t *Tree) Close() error {
	if t.file == nil {
		return nil
	}
	err := t.file.Close()
	t.file = nil
	return err
}

func (t *Tree) open(op string) error {
	if t == nil || t.file == nil {
		return &Error{Op: op, Code: ReasonTreeClosed, Kind: errdefs.ErrFailedPrecondition, Message: "the tree was closed or attached before; clone the source again"}
	}
	return nil
}

func (t *Tree) fd() int { return int(t.file.Fd()) }

// Identity returns what is known of the mount before it is attached: its ids
// and the device, as stat has it. Root is empty. With unique ids this is enough
// to find the mount later, whatever happens in between.
func (t *Tree) Identity() (Identity, error) {
	if err := t.open("identify"); err != nil {
		return Identity{}, err
	}
	defer runtime.KeepAlive(t.file)
	var st unix.Statx_t
	if err := statxAt(t.fd(), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return Identity{}, failed("identify", "", "statx of the tree failed", err)
	}
	id := Identity{MountID: int(st.Mnt_id), Device: fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor)}
	if modern() {
		unique, _, err := mountIDAt(t.fd(), "", unix.AT_EMPTY_PATH, true)
		if err != nil {
			return Identity{}, failed("identify", "", "statx of the tree failed", err)
		}
		id.UniqueID = unique
	}
	return id, nil
}

// SetAttributes sets the attributes on the tree. nosuid, nodev and private
// propagation were set when the tree was made and are set again. It must not be
// called after the attach. Reason: IDMAP_UNSUPPORTED.
func (t *Tree) SetAttributes(a Attributes) error {
	if err := t.open("set attributes"); err != nil {
		return err
	}
	defer runtime.KeepAlive(t.file)
	attr := unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV,
		Propagation: unix.MS_PRIVATE,
	}
	if a.ReadOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if a.NoExec {
		attr.Attr_set |= unix.MOUNT_ATTR_NOEXEC
	}
	if a.IDMap != nil {
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(a.IDMap.Fd())
	}
	err := unix.MountSetattr(t.fd(), "", unix.AT_EMPTY_PATH, &attr)
	runtime.KeepAlive(a.IDMap)
	if err == nil {
		return nil
	}
	if a.IDMap != nil && errors.Is(err, unix.EINVAL) {
		return &Error{Op: "set attributes", Code: ReasonIDMapUnsupported, Kind: errdefs.ErrFailedPrecondition,
			Message: "the filesystem cannot be id-mapped for a container with a user namespace of its own", Err: err}
	}
	return failed("set attributes", "", "mount_setattr failed", err)
}

// Sub makes a detached tree of a directory beneath the tree's root, with the
// tree's attributes. Nothing is created and no symbolic link is followed; the
// tree itself stays. Sub(".") makes an equal tree, for the next user of a source
// that was prepared once. On kernels before 6.15 the tree's mount is replaced by an
// equal one, so its Identity changes. Reasons: the SUBPATH_ ones.
func (t *Tree) Sub(subPath string) (*Tree, error) {
	const op = "open subPath"
	if err := t.open(op); err != nil {
		return nil, err
	}
	dir, err := openBeneath(op, t.file, subPath, subPathReasons)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	sub, err := cloneAt(int(dir.Fd()))
	runtime.KeepAlive(dir)
	if errors.Is(err, unix.EINVAL) {
		sub, err = t.subAttached(int(dir.Fd()))
	}
	if err != nil {
		return nil, failed(op, subPath, "cannot clone the directory", err)
	}
	return sub, nil
}

// subAttached clones a directory of the tree on a kernel that clones attached
// mounts only: the tree is attached for a moment in a namespace that ends with
// the thread made for it. A mount that was attached cannot be detached again
// with its descriptor, so the tree gets a fresh clone of itself.
func (t *Tree) subAttached(dir int) (*Tree, error) {
	var sub, self *Tree
	err := onThrowawayThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make private: %w", err)
		}
		// Stacked on the root: no directory is needed and nobody looks there.
		err := unix.MoveMount(t.fd(), "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH)
		if err != nil {
			return fmt.Errorf("move_mount: %w", err)
		}
		if sub, err = cloneAt(dir); err != nil {
			return err
		}
		self, err = cloneAt(t.fd())
		return err
	})
	if err != nil {
		if sub != nil {
			sub.Close()
		}
		return nil, err
	}
	t.file.Close()
	t.file = self.file
	return sub, nil
}

// Statfs returns size and free space. It may wait for a file server: see
// MayHang and StatfsInHelper.
func (t *Tree) Statfs() (Usage, error) {
	if err := t.open("statfs"); err != nil {
		return Usage{}, err
	}
	defer runtime.KeepAlive(t.file)
	return statfs(t.fd())
}

func statfs(fd int) (Usage, error) {
	var st unix.Statfs_t
	for {
		err := unix.Fstatfs(fd, &st)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return Usage{}, failed("statfs", "", "cannot read the filesystem's size", err)
		}
		unit := uint64(st.Frsize)
		return Usage{TotalBytes: st.Blocks * unit, FreeBytes: st.Bfree * unit, AvailableBytes: st.Bavail * unit,
			TotalInodes: st.Files, FreeInodes: st.Ffree}, nil
	}
}
