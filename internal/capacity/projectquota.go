package capacity

import (
	"errors"
	"io"
	"os"
	"unsafe"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// ProjectQuota is the kernel's project quota, by FS_IOC_FSSETXATTR and quotactl_fd(2).
type ProjectQuota struct{}

var _ Limiter = ProjectQuota{}

// fsxattr is struct fsxattr of linux/fs.h.
type fsxattr struct {
	xflags, extsize, nextents, projid, cowextsize uint32
	_                                             [8]byte
}

// The requests of linux/fs.h for struct fsxattr: _IOR('X', 31, …) and _IOW('X', 32, …).
const (
	fsIocGetXattr = 0x801c581f
	fsIocSetXattr = 0x401c5820
	// xflagProjInherit (FS_XFLAG_PROJINHERIT): new entries get the directory's project id.
	xflagProjInherit = 0x200
)

// dqblk is struct if_dqblk of linux/quota.h.
type dqblk struct {
	bhardlimit, bsoftlimit uint64 // in KiB
	curspace               uint64 // in bytes
	ihardlimit, isoftlimit uint64
	curinodes              uint64
	btime, itime           uint64
	valid                  uint32
	_                      uint32
}

// The commands of linux/quota.h, for project quota (type 2): QCMD(cmd, type) is cmd<<8 | type.
const (
	prjQuota   = 2
	qGetInfo   = 0x800005
	qGetQuota  = 0x800007
	qSetQuota  = 0x800008
	qifBLimits = 1
	qifILimits = 4
)

// quotactl is quotactl_fd(2), there since Linux 5.14.
func quotactl(dir *os.File, cmd, id uint32, addr unsafe.Pointer) error {
	// O_PATH descriptors are refused (EBADF).
	f, err := reopen(dir, os.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer f.Close()
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, f.Fd(), uintptr(cmd<<8|prjQuota), uintptr(id), uintptr(addr), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// Supported implements Limiter.
func (ProjectQuota) Supported(dir *os.File) error {
	var info [3]uint64 // struct if_dqinfo, 24 bytes
	err := quotactl(dir, qGetInfo, 0, unsafe.Pointer(&info))
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL),
		errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTTY), errors.Is(err, unix.ENOTBLK), errors.Is(err, unix.ENODEV):
		return fail(errdefs.ErrFailedPrecondition, ReasonQuotaUnsupported,
			"the filesystem of %s enforces no project quota (%w): mount it with prjquota on a kernel that has it, or use backing: image", dir.Name(), err)
	}
	return failed("probe the project quota of %s: %w", dir.Name(), err)
}

// Usage implements Limiter.
func (ProjectQuota) Usage(dir *os.File, id uint32) (Usage, error) {
	var q dqblk
	err := quotactl(dir, qGetQuota, id, unsafe.Pointer(&q))
	if errors.Is(err, unix.ENOENT) {
		return Usage{}, nil
	}
	if err != nil {
		return Usage{}, failed("read the project quota %d of %s: %w", id, dir.Name(), err)
	}
	return Usage{
		Bytes: int64(q.curspace), Inodes: int64(q.curinodes),
		Limit: Limit{Bytes: int64(q.bhardlimit) << 10, Inodes: int64(q.ihardlimit)},
	}, nil
}

// Project implements Limiter.
func (ProjectQuota) Project(dir *os.File) (uint32, error) {
	f, err := reopen(dir, os.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	attr, err := getXattr(f)
	return attr.projid, err
}

// Set implements Limiter.
func (ProjectQuota) Set(dir *os.File, id uint32, limit Limit) error {
	// Limit first: no moment in which the directory is in the project and may grow without end.
	if err := setLimit(dir, id, limit); err != nil {
		return err
	}
	return assign(dir, 0, id, xflagProjInherit)
}

// Clear implements Limiter.
func (ProjectQuota) Clear(dir *os.File, id uint32) error {
	f, err := reopen(dir, os.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	attr, err := getXattr(f)
	f.Close()
	if err != nil || attr.projid != id {
		return err
	}
	if err := setLimit(dir, id, Limit{}); err != nil {
		return err
	}
	return assign(dir, id, 0, 0)
}

func setLimit(dir *os.File, id uint32, limit Limit) error {
	q := dqblk{bhardlimit: uint64(limit.Bytes >> 10), ihardlimit: uint64(limit.Inodes), valid: qifBLimits | qifILimits}
	if err := quotactl(dir, qSetQuota, id, unsafe.Pointer(&q)); err != nil {
		return failed("set the project quota %d of %s: %w", id, dir.Name(), err)
	}
	return nil
}

// assign moves the directory and the files and directories in it from one project to another; what belongs to
// a third stays there. Symlinks, devices and the like have no project id that can be set, and take no space.
func assign(dir *os.File, from, to, flag uint32) error {
	d, err := reopen(dir, os.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer d.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(d.Fd()), &st); err != nil {
		return failed("stat %s: %w", dir.Name(), err)
	}
	return assignTree(d, st.Dev, from, to, flag)
}

func assignTree(f *os.File, device uint64, from, to, flag uint32) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return failed("stat %s: %w", f.Name(), err)
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	if st.Dev != device || !isDir && st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil
	}
	attr, err := getXattr(f)
	if err != nil {
		return err
	}
	if attr.projid == from && (from != to) {
		attr.projid = to
		attr.xflags &^= xflagProjInherit
		if isDir {
			attr.xflags |= flag
		}
		if err := ioctlXattr(f, fsIocSetXattr, &attr); err != nil {
			return failed("give %s the project id %d: %w", f.Name(), to, err)
		}
	}
	if !isDir {
		return nil
	}
	for {
		names, err := f.Readdirnames(256)
		for _, name := range names {
			// Directories and regular files alone: O_NONBLOCK keeps a FIFO from blocking, and a device is
			// never opened (O_PATH first would cost a second call for every file).
			if err := assignEntry(f, name, device, from, to, flag); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return failed("list %s: %w", f.Name(), errors.Unwrap(err))
		}
	}
}

func assignEntry(parent *os.File, name string, device uint64, from, to, flag uint32) error {
	var st unix.Stat_t
	err := unix.Fstatat(int(parent.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if kind := st.Mode & unix.S_IFMT; errors.Is(err, unix.ENOENT) || err == nil && kind != unix.S_IFDIR && kind != unix.S_IFREG {
		return nil
	}
	if err != nil {
		return failed("stat %s/%s: %w", parent.Name(), name, err)
	}
	fd, err := unix.Openat(int(parent.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return failed("open %s/%s: %w", parent.Name(), name, err)
	}
	f := os.NewFile(uintptr(fd), parent.Name()+"/"+name)
	defer f.Close()
	return assignTree(f, device, from, to, flag)
}

func getXattr(f *os.File) (fsxattr, error) {
	var attr fsxattr
	if err := ioctlXattr(f, fsIocGetXattr, &attr); err != nil {
		return attr, failed("read the project id of %s: %w", f.Name(), err)
	}
	return attr, nil
}

func ioctlXattr(f *os.File, request uintptr, attr *fsxattr) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(attr)))
	if errno != 0 {
		return errno
	}
	return nil
}
