package mount

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Layout and constants of statmount(2) and listmount(2), include/uapi/linux/mount.h.
const (
	statmountSBBasic  = 0x1
	statmountMntBasic = 0x2
	statmountMntRoot  = 0x8
	statmountMntPoint = 0x10
	statmountFSType   = 0x20
	statmountSBSource = 0x200

	// statmountPlace is what tells which mount it is and where it lies.
	statmountPlace = statmountSBBasic | statmountMntBasic | statmountMntRoot | statmountMntPoint
	statmountAll   = statmountPlace | statmountFSType | statmountSBSource

	statmountHeader = 512 // sizeof(struct statmount), strings follow

	offSize       = 0
	offMask       = 8
	offDevMajor   = 16
	offDevMinor   = 20
	offSBFlags    = 32
	offFSType     = 36
	offMntID      = 40
	offParentID   = 48
	offMntIDOld   = 56
	offParentOld  = 60
	offAttr       = 64
	offPropagate  = 72
	offPeerGroup  = 80
	offMaster     = 88
	offMntRoot    = 104
	offMntPoint   = 108
	offSBSource   = 124
	statmountMax  = 1 << 20 // no answer is longer; a bound on growing the buffer
	statmountGrow = 4

	// listmountRoot asks for all mounts below the namespace's root (LSMT_ROOT).
	listmountRoot = ^uint64(0)

	mntIDReqV0 = 24
	mntIDReqV1 = 32 // with mnt_ns_id, Linux 6.11
)

// mntIDReq is struct mnt_id_req.
type mntIDReq struct {
	size    uint32
	spare   uint32
	mntID   uint64
	param   uint64
	mntNSID uint64
}

func newMntIDReq(id, param, nsID uint64) mntIDReq {
	req := mntIDReq{size: mntIDReqV0, mntID: id, param: param, mntNSID: nsID}
	if nsID != 0 {
		req.size = mntIDReqV1
	}
	return req
}

// modern tells whether this kernel has unique mount ids, statmount and
// listmount, and lets us use them. They came together in Linux 6.8.
var modern = sync.OnceValue(func() bool {
	id, unique, err := mountIDAt(unix.AT_FDCWD, "/", 0, true)
	if err != nil || !unique {
		return false
	}
	var buf statBuffer
	if _, err := buf.stat(id, 0, statmountMntBasic); err != nil {
		return false
	}
	_, err = listmount(id, 0)
	return err == nil
})

// mountIDAt returns the id of the mount on which the file lies. unique asks for
// the id that is not reused during a boot; the answer tells which one it is.
// It waits for no file server.
func mountIDAt(dirfd int, name string, flags int, unique bool) (uint64, bool, error) {
	mask := unix.STATX_MNT_ID
	if unique {
		mask = unix.STATX_MNT_ID_UNIQUE
	}
	var st unix.Statx_t
	if err := statxAt(dirfd, name, flags, mask, &st); err != nil {
		return 0, false, err
	}
	if st.Mask&unix.STATX_MNT_ID_UNIQUE != 0 {
		return st.Mnt_id, true, nil
	}
	if st.Mask&unix.STATX_MNT_ID == 0 {
		return 0, false, unix.ENOSYS
	}
	return st.Mnt_id, false, nil
}

func statxAt(dirfd int, name string, flags, mask int, st *unix.Statx_t) error {
	for {
		err := unix.Statx(dirfd, name, flags|unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, mask, st)
		if err != unix.EINTR {
			return err
		}
	}
}

// statBuffer is a reusable buffer for statmount. The zero value is ready.
type statBuffer struct{ buf []byte }

// stat asks for one mount by unique id. nsID 0 is the calling thread's namespace.
func (b *statBuffer) stat(id, nsID, mask uint64) (Info, error) {
	if b.buf == nil {
		b.buf = make([]byte, statmountHeader+2*unix.PathMax)
	}
	req := newMntIDReq(id, mask, nsID)
	for {
		_, _, errno := unix.Syscall6(unix.SYS_STATMOUNT, uintptr(unsafe.Pointer(&req)),
			uintptr(unsafe.Pointer(&b.buf[0])), uintptr(len(b.buf)), 0, 0, 0)
		switch {
		case errno == unix.EINTR:
		case errno == unix.EOVERFLOW && len(b.buf) < statmountMax:
			b.buf = make([]byte, len(b.buf)*statmountGrow)
		case errno != 0:
			return Info{}, errno
		default:
			return parseStatmount(b.buf)
		}
	}
}

var errStatmountFormat = errors.New("statmount answered in an unknown format")

// parseStatmount reads struct statmount. Fields that the kernel did not fill
// stay zero.
func parseStatmount(b []byte) (Info, error) {
	if len(b) < statmountHeader {
		return Info{}, errStatmountFormat
	}
	size := int64(binary.NativeEndian.Uint32(b[offSize:]))
	if size < statmountHeader || size > int64(len(b)) {
		return Info{}, errStatmountFormat
	}
	b = b[:size]
	u32 := func(off int) uint32 { return binary.NativeEndian.Uint32(b[off:]) }
	u64 := func(off int) uint64 { return binary.NativeEndian.Uint64(b[off:]) }
	mask := u64(offMask)
	var parseErr error
	str := func(bit uint64, off int) string {
		if mask&bit == 0 {
			return ""
		}
		strs := b[statmountHeader:]
		at := u32(off)
		if int64(at) >= int64(len(strs)) {
			parseErr = errStatmountFormat
			return ""
		}
		s, _, ok := bytes.Cut(strs[at:], []byte{0})
		if !ok {
			parseErr = errStatmountFormat
		}
		return string(s)
	}
	var info Info
	if mask&statmountSBBasic != 0 {
		info.Device = fmt.Sprintf("%d:%d", u32(offDevMajor), u32(offDevMinor))
		info.SuperblockReadOnly = u32(offSBFlags)&unix.MS_RDONLY != 0
	}
	if mask&statmountMntBasic != 0 {
		info.UniqueID = u64(offMntID)
		info.ParentUniqueID = u64(offParentID)
		info.MountID = int(u32(offMntIDOld))
		info.ParentID = int(u32(offParentOld))
		attr := u64(offAttr)
		info.ReadOnly = attr&unix.MOUNT_ATTR_RDONLY != 0
		info.NoSUID = attr&unix.MOUNT_ATTR_NOSUID != 0
		info.NoDev = attr&unix.MOUNT_ATTR_NODEV != 0
		info.NoExec = attr&unix.MOUNT_ATTR_NOEXEC != 0
		info.Shared = u64(offPropagate)&unix.MS_SHARED != 0
		info.PeerGroup, info.Master = u64(offPeerGroup), u64(offMaster)
	}
	info.Root = str(statmountMntRoot, offMntRoot)
	info.MountPoint = str(statmountMntPoint, offMntPoint)
	info.FSType = str(statmountFSType, offFSType)
	info.Source = str(statmountSBSource, offSBSource)
	return info, parseErr
}

// listmount returns the unique ids of all mounts below the mount id, without
// id itself (but with listmountRoot the root mount is in the list).
func listmount(id, nsID uint64) ([]uint64, error) {
	const page = 256
	var all []uint64
	var buf [page]uint64
	var last uint64
	for {
		req := newMntIDReq(id, last, nsID)
		n, _, errno := unix.Syscall6(unix.SYS_LISTMOUNT, uintptr(unsafe.Pointer(&req)),
			uintptr(unsafe.Pointer(&buf[0])), page, 0, 0, 0)
		switch {
		case errno == unix.EINTR:
			continue
		case errno != 0:
			return nil, errno
		}
		all = append(all, buf[:n]...)
		if n < page {
			return all, nil
		}
		last = buf[n-1]
	}
}
