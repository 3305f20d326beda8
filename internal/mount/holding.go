package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctls on a mount namespace's descriptor, include/uapi/linux/nsfs.h (Linux 6.12).
const (
	nsMntGetNext = 0x8010b70b
	nsMntGetPrev = 0x8010b70c
	mntNSInfoLen = 16
)

// mntNSInfo is struct mnt_ns_info.
type mntNSInfo struct {
	size   uint32
	mounts uint32
	id     uint64
}

// Match says which mounts keep a source in use.
type Match struct {
	// Device is "major:minor" of the superblock.
	Device string
	// Root is the directory of that filesystem; mounts of it and of directories
	// below it match. Empty matches every mount of the device.
	Root string
}

func (m Match) matches(i Info) bool {
	return i.Device == m.Device && (m.Root == "" || within(m.Root, i.Root))
}

// NamespaceRef is a mount namespace in which matching mounts are.
type NamespaceRef struct {
	// ID is the inode number, as /proc/PID/ns/mnt shows it.
	ID uint64
	// PIDs are processes in it. There may be none: a descriptor or a thread can
	// hold a namespace too.
	PIDs []int
	// Mounts are the matching ones.
	Mounts []Info
}

// Holding returns the mount namespaces of this node that hold a matching mount,
// our own included. A source is released only when none but the expected ones
// are left: a nested namespace in a sandbox keeps a copy of every mount that the
// sandbox had when it was made. From Linux 6.12 on the kernel lists all
// namespaces; before, those of all threads are looked at, and a namespace that
// only a descriptor holds is entered to look.
// Mounts that were detached lazily are in no namespace: see Users.
func Holding(ctx context.Context, m Match) ([]NamespaceRef, error) {
	byID := map[uint64]*NamespaceRef{}
	list, err := holdingListed(ctx, m)
	if errors.Is(err, errNotListed) {
		list, err = holdingScanned(ctx, m)
	}
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, nil
	}
	for i := range list {
		byID[list[i].ID] = &list[i]
	}
	err = eachProcess(ctx, func(pid, dir int) bool {
		if id, err := namespaceInode(dir, "ns/mnt"); err == nil && byID[id] != nil {
			byID[id].PIDs = append(byID[id].PIDs, pid)
		}
		return true
	})
	return list, err
}

func namespaceInode(dirfd int, name string) (uint64, error) {
	var st unix.Stat_t
	err := unix.Fstatat(dirfd, name, &st, 0)
	return st.Ino, err
}

// errNotListed tells that the kernel cannot list namespaces.
var errNotListed = errors.New("the kernel does not list mount namespaces")

func holdingListed(ctx context.Context, m Match) ([]NamespaceRef, error) {
	if !modern() {
		return nil, errNotListed
	}
	own, err := unix.Open("/proc/self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, failed("list namespaces", "", "cannot open our own", err)
	}
	defer unix.Close(own)
	var list []NamespaceRef
	var buf statBuffer
	look := func(fd int) error {
		if err := ctx.Err(); err != nil {
			return &Error{Op: "list namespaces", Code: ReasonOutcomeUnknown, Kind: err, Message: "the deadline passed"}
		}
		ref, err := lookInto(fd, m, &buf)
		if err == nil && len(ref.Mounts) > 0 {
			list = append(list, ref)
		}
		return err
	}
	if err := look(own); err != nil {
		return nil, err
	}
	for _, direction := range []uintptr{nsMntGetPrev, nsMntGetNext} {
		if err := walkNamespaces(own, direction, look); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func walkNamespaces(from int, direction uintptr, look func(int) error) error {
	at := from
	for {
		info := mntNSInfo{size: mntNSInfoLen}
		next, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(at), direction, uintptr(unsafe.Pointer(&info)))
		if at != from {
			unix.Close(at)
		}
		switch {
		case errno == unix.ENOENT:
			return nil
		case errno == unix.ENOTTY || errno == unix.EPERM || errno == unix.EINVAL:
			return errNotListed
		case errno != 0:
			return failed("list namespaces", "", "ioctl NS_MNT_GET failed", errno)
		}
		at = int(next)
		if err := look(at); err != nil {
			unix.Close(at)
			return err
		}
	}
}

// lookInto looks for matching mounts in a namespace, from the bottom of its
// mount stack: what is mounted over the namespace's root hides nothing.
func lookInto(nsFD int, m Match, buf *statBuffer) (NamespaceRef, error) {
	wrap := func(err error) error {
		return failed("look into namespace", "", "cannot list its mounts", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(nsFD, &st); err != nil {
		return NamespaceRef{}, wrap(err)
	}
	var nsID uint64
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(nsFD), unix.NS_GET_MNTNS_ID, uintptr(unsafe.Pointer(&nsID))); errno != 0 {
		return NamespaceRef{}, wrap(errno)
	}
	ref := NamespaceRef{ID: st.Ino}
	list, err := listAll(nsID, buf)
	if err == unix.ENOENT {
		return ref, nil // empty, or ended meanwhile
	}
	if err != nil {
		return NamespaceRef{}, wrap(err)
	}
	for _, info := range list {
		if m.matches(info) {
			ref.Mounts = append(ref.Mounts, info)
		}
	}
	return ref, nil
}

func listAll(nsID uint64, buf *statBuffer) ([]Info, error) {
	top, err := listmount(listmountRoot, nsID)
	if err != nil || len(top) == 0 {
		return nil, err
	}
	bottom, err := buf.stat(top[0], nsID, statmountAll)
	for err == nil && bottom.ParentUniqueID != 0 && bottom.ParentUniqueID != bottom.UniqueID {
		var parent Info
		if parent, err = buf.stat(bottom.ParentUniqueID, nsID, statmountAll); err == nil {
			bottom = parent
		}
	}
	if err != nil {
		return nil, err
	}
	list, err := listNamespace(nsID, bottom.UniqueID, buf)
	return append(list, bottom), err
}

// holdingScanned looks through the namespaces of all threads, and those that
// only descriptors hold.
func holdingScanned(ctx context.Context, m Match) ([]NamespaceRef, error) {
	seen := map[uint64]bool{}
	var list []NamespaceRef
	add := func(id uint64, infos []Info) {
		ref := NamespaceRef{ID: id}
		for _, i := range infos {
			if m.matches(i) {
				ref.Mounts = append(ref.Mounts, i)
			}
		}
		if len(ref.Mounts) > 0 {
			list = append(list, ref)
		}
	}
	err := eachProcess(ctx, func(pid, dir int) bool {
		tids, err := readNumbers(dir, "task")
		if err != nil {
			return true
		}
		for _, tid := range tids {
			task := "task/" + strconv.Itoa(tid)
			id, err := namespaceInode(dir, task+"/ns/mnt")
			if err != nil || seen[id] {
				continue
			}
			fd, err := unix.Openat(dir, task+"/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				continue
			}
			infos, err := readMountinfo(fd)
			unix.Close(fd)
			if err == nil {
				seen[id] = true
				add(id, infos)
			}
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	err = eachProcess(ctx, func(pid, dir int) bool {
		fds, err := readNumbers(dir, "fd")
		if err != nil {
			return true
		}
		buf := make([]byte, 64)
		for _, n := range fds {
			name := "fd/" + strconv.Itoa(n)
			size, err := unix.Readlinkat(dir, name, buf)
			if err != nil || !strings.HasPrefix(string(buf[:size]), "mnt:[") {
				continue
			}
			id, err := namespaceInode(dir, name)
			if err != nil || seen[id] {
				continue
			}
			seen[id] = true
			if infos, err := mountsBehind(dir, name); err == nil {
				add(id, infos)
			}
		}
		return true
	})
	return list, err
}

// mountsBehind enters a namespace that has no process to ask.
func mountsBehind(dir int, name string) ([]Info, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ns := os.NewFile(uintptr(fd), name)
	defer ns.Close()
	proc, err := unix.Open("/proc", directoryPath, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(proc)
	var list []Info
	err = onThrowawayThread(func() error {
		t := &thread{root: -1, mountinfo: -1}
		defer t.close()
		if err := t.enter(fd, proc, ""); err != nil {
			return fmt.Errorf("enter: %w", err)
		}
		list, err = t.mounts()
		return err
	})
	return list, err
}
