package mount

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Identity identifies one mount on this boot. It is what a journal records.
type Identity struct {
	// UniqueID is never reused during a boot; 0 if the kernel has no such ids.
	// A detached tree keeps it when it is attached and moved.
	UniqueID uint64 `json:"uniqueID,omitempty"`
	// MountID is the id that /proc/PID/mountinfo shows. It is reused.
	MountID int `json:"mountID"`
	// Device is "major:minor" of the superblock.
	Device string `json:"device"`
	// Root is the directory of that filesystem which the mount shows; empty
	// for a tree that is not attached, where the kernel does not tell.
	Root string `json:"root,omitempty"`
}

// IsZero tells whether nothing was recorded.
func (id Identity) IsZero() bool { return id == Identity{} }

// Info describes one mount as a mount namespace has it.
type Info struct {
	// UniqueID and ParentUniqueID are 0 if the kernel has no such ids.
	UniqueID, ParentUniqueID uint64
	MountID, ParentID        int
	// Device is "major:minor" of the superblock.
	Device string
	// Root is the directory of the filesystem which the mount shows.
	Root string
	// MountPoint is relative to the namespace's root. It is empty when the mount
	// cannot be reached from there.
	MountPoint string
	FSType     string
	// Source is what the mounter called the device; may be empty.
	Source                          string
	ReadOnly, NoSUID, NoDev, NoExec bool
	// SuperblockReadOnly is the filesystem's own state, shared by all its mounts.
	SuperblockReadOnly bool
	// Shared tells that mounts below this one propagate to its peers.
	Shared bool
	// PeerGroup is the group of mounts to which, and Master the one from which
	// mounting and unmounting propagates here; 0 for none.
	PeerGroup, Master uint64
}

// Identity returns what to record about the mount.
func (i Info) Identity() Identity {
	return Identity{UniqueID: i.UniqueID, MountID: i.MountID, Device: i.Device, Root: i.Root}
}

// is tells whether the mount is the one that was recorded.
func (i Info) is(id Identity) bool {
	if id.UniqueID != 0 && i.UniqueID != 0 {
		return i.UniqueID == id.UniqueID
	}
	if i.MountID != id.MountID {
		return false
	}
	// A detached tree's device is that of stat, which for btrfs is not the
	// superblock's: only a record that was read back after the attach compares.
	return id.Root == "" || (i.Device == id.Device && i.Root == id.Root)
}

// Mounts lists the mounts of the caller's own mount namespace.
func Mounts() ([]Info, error) {
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, failed("list mounts", "", "cannot open mountinfo", err)
	}
	defer f.Close()
	list, err := parseMountinfo(f)
	if err != nil {
		return nil, failed("list mounts", "", "cannot read mountinfo", err)
	}
	return list, nil
}

// parseMountinfo reads the format of /proc/PID/mountinfo (proc(5)).
func parseMountinfo(r io.Reader) ([]Info, error) {
	entries, err := mountinfo.GetMountsFromReader(r, nil)
	if err != nil {
		return nil, err
	}
	list := make([]Info, 0, len(entries))
	for _, e := range entries {
		info := Info{
			MountID: e.ID, ParentID: e.Parent,
			Device: fmt.Sprintf("%d:%d", e.Major, e.Minor),
			Root:   e.Root, MountPoint: e.Mountpoint, FSType: e.FSType, Source: e.Source,
		}
		for opt := range strings.SplitSeq(e.Options, ",") {
			switch opt {
			case "ro":
				info.ReadOnly = true
			case "nosuid":
				info.NoSUID = true
			case "nodev":
				info.NoDev = true
			case "noexec":
				info.NoExec = true
			}
		}
		for opt := range strings.SplitSeq(e.VFSOptions, ",") {
			if opt == "ro" {
				info.SuperblockReadOnly = true
			}
		}
		for tag := range strings.FieldsSeq(e.Optional) {
			kind, group, _ := strings.Cut(tag, ":")
			n, err := strconv.ParseUint(group, 10, 64)
			switch {
			case err != nil: // "unbindable", or what is not known yet
			case kind == "shared":
				info.Shared, info.PeerGroup = true, n
			case kind == "master":
				info.Master = n
			}
		}
		list = append(list, info)
	}
	return list, nil
}

// readMountinfo reads an open mountinfo file from its start.
func readMountinfo(fd int) ([]Info, error) {
	if _, err := unix.Seek(fd, 0, io.SeekStart); err != nil {
		return nil, err
	}
	data, err := readAll(fd)
	if err != nil {
		return nil, err
	}
	return parseMountinfo(bytes.NewReader(data))
}

// readAll reads to the end with plain system calls: it runs on threads inside
// a container, where nothing may be opened by path.
func readAll(fd int) ([]byte, error) {
	var all []byte
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		case n == 0:
			return all, nil
		default:
			all = append(all, buf[:n]...)
		}
	}
}

// FilesystemType returns the type of the filesystem that holds an absolute,
// clean path of the caller's namespace, read from mountinfo: the path itself is
// not touched, so a dead server cannot make it wait.
func FilesystemType(name string) (string, error) {
	list, err := Mounts()
	if err != nil {
		return "", err
	}
	best := -1
	for i, m := range list {
		// A later mount of the same place lies on top of the earlier one.
		if within(m.MountPoint, name) && (best < 0 || len(m.MountPoint) >= len(list[best].MountPoint)) {
			best = i
		}
	}
	if best < 0 {
		return "", failed("find filesystem", name, "no mount holds the path", unix.ENOENT)
	}
	return list[best].FSType, nil
}

// within tells whether name is dir or lies below it, by whole components.
func within(dir, name string) bool {
	return dir == "/" || name == dir || (len(name) > len(dir) && name[len(dir)] == '/' && name[:len(dir)] == dir)
}

// MayHang tells whether calls on a filesystem of this type may wait for a
// server, for ever if that is dead. Such sources go through the helper.
func MayHang(fsType string) bool {
	base, _, _ := strings.Cut(fsType, ".")
	switch base {
	case "nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ceph", "fuse", "fuseblk", "9p", "virtiofs", "lustre", "gpfs",
		"afs", "kafs", "glusterfs", "beegfs", "orangefs", "pvfs2", "ocfs2", "gfs2", "coda", "ncpfs", "autofs", "quobyte", "wekafs", "panfs":
		return true
	}
	return false
}

// splitPlace splits an absolute path into the part below "/" of its parent
// ("." for the root itself) and its last component.
func splitPlace(place string) (parent, leaf string) {
	dir, leaf := path.Split(place)
	dir = strings.Trim(dir, "/")
	if dir == "" {
		dir = "."
	}
	return dir, leaf
}
