package mount

import (
	"fmt"
	"strings"
	"unsafe"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Feature is one thing that the engine asks of the kernel or of our rights.
type Feature struct {
	Name string
	// OK tells that it works here and now.
	OK bool
	// Needed tells that the engine does not work without it.
	Needed bool
	// Since is the Linux version that it came with.
	Since string
	// Purpose says what it is for, and what happens without.
	Purpose string
	// Detail says why it is not OK.
	Detail string
}

// Features is the table of Probe.
type Features []Feature

// Probe tries what the engine needs. It leaves nothing behind.
func Probe() Features {
	var list Features
	add := func(name, since string, needed bool, purpose string, err error) {
		f := Feature{Name: name, OK: err == nil, Needed: needed, Since: since, Purpose: purpose}
		if err != nil {
			f.Detail = err.Error()
		}
		list = append(list, f)
	}
	add("openat2", "5.6", true, "paths beneath a root with no symlink followed", probeOpenat2())
	add("pidfd_open", "5.3", true, "a container's init that cannot be mistaken", probePidfd())
	add("STATX_MNT_ID", "5.8", true, "which mount a file lies on", probeMountID())
	tree, err := NewFilesystem(Filesystem{Type: "tmpfs", Options: []Option{{Key: "size", Value: "64k"}}})
	add("fsopen/fsmount, mount_setattr", "5.12", true, "detached trees with attributes set before anybody sees them", err)
	if err == nil {
		defer tree.Close()
	}
	add("open_tree, move_mount, unshare, setns", "5.2", true, "cloning a source and placing it in a sandbox", probeMove())
	add("idmapped mounts", "5.12", false, "volumes for containers with a user namespace; without, these are refused", probeIDMap(tree))
	add("unique mount ids, statmount, listmount", "6.8", false, "identity that is never reused and lookups without parsing text; without, mountinfo is parsed", probeModern())
	add("listmount of other namespaces", "6.11", false, "finding a source's last user quickly; without, /proc is scanned", probeNamespaceID())
	add("listing of mount namespaces", "6.12", false, "finding nested namespaces that no process shows; without, /proc is scanned", probeNamespaceList())
	add("open_tree of a detached tree", "6.15", false, "subPath of a block volume; without, a workbench namespace is used for it", probeCloneDetached(tree))
	add("loop devices", "3.0", false, "image-backed directories; without, these are refused", probeDevice("/dev/loop-control"))
	add("FUSE", "3.0", false, "buckets; without, these are refused", probeDevice("/dev/fuse"))
	return list
}

// Require returns an error that names every needed feature which is missing.
// Reason: KERNEL_FEATURE_MISSING.
func Require(features Features) error {
	var missing []string
	for _, f := range features {
		if f.Needed && !f.OK {
			missing = append(missing, fmt.Sprintf("%s (Linux %s; %s: %s)", f.Name, f.Since, f.Purpose, f.Detail))
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return &Error{Op: "probe the kernel", Code: ReasonKernelFeature, Kind: errdefs.ErrNotImplemented,
		Message: "missing: " + strings.Join(missing, "; ") + "; the engine needs Linux 5.15 or later, root and CAP_SYS_ADMIN"}
}

func probeOpenat2() error {
	fd, err := openat2(unix.AT_FDCWD, "/", directoryPath, noLinks)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

func probePidfd() error {
	fd, err := unix.PidfdOpen(unix.Getpid(), 0)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

func probeMountID() error {
	_, _, err := mountIDAt(unix.AT_FDCWD, "/", 0, false)
	return err
}

// probeMove places a tree where nobody sees it: in a namespace of its own.
func probeMove() error {
	return onThrowawayThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make private: %w", err)
		}
		root, err := unix.Open("/", directoryPath, 0)
		if err != nil {
			return err
		}
		defer unix.Close(root)
		tree, err := cloneAt(root)
		if err != nil {
			return fmt.Errorf("open_tree: %w", err)
		}
		defer tree.Close()
		return unix.MoveMount(tree.fd(), "", root, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	})
}

// probeIDMap asks for an id-mapping with our own user namespace: a kernel that
// knows the attribute refuses that namespace with EPERM, another with EINVAL.
func probeIDMap(tree *Tree) error {
	if tree == nil {
		return unix.EPERM
	}
	fd, err := unix.Open("/proc/self/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	err = unix.MountSetattr(tree.fd(), "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(fd)})
	if err == unix.EPERM {
		return nil
	}
	return err
}

func probeModern() error {
	if !modern() {
		return unix.ENOSYS
	}
	return nil
}

func probeNamespaceID() error {
	fd, err := unix.Open("/proc/self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var id uint64
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.NS_GET_MNTNS_ID, uintptr(unsafe.Pointer(&id))); errno != 0 {
		return errno
	}
	_, err = listmount(listmountRoot, id)
	return err
}

func probeNamespaceList() error {
	fd, err := unix.Open("/proc/self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	info := mntNSInfo{size: mntNSInfoLen}
	next, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), nsMntGetNext, uintptr(unsafe.Pointer(&info)))
	switch errno {
	case 0:
		unix.Close(int(next))
		return nil
	case unix.ENOENT: // ours is the last
		return nil
	}
	return errno
}

func probeCloneDetached(tree *Tree) error {
	if tree == nil {
		return unix.EPERM
	}
	if err := unix.Mkdirat(tree.fd(), "probe", 0o700); err != nil {
		return err
	}
	fd, err := openat2(tree.fd(), "probe", directoryPath, beneath)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	sub, err := cloneAt(fd)
	if err == nil {
		sub.Close()
	}
	return err
}

func probeDevice(name string) error {
	var st unix.Stat_t
	return unix.Stat(name, &st)
}
