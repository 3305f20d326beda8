package containers

import (
	"bufio"
	"errors"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// resolveUser finds the IDs of an image's USER: "", or a name or number, optionally with ":" and a group's name or
// number. Names are looked up in the image's own /etc/passwd and /etc/group, read from the snapshot's layers: mounting
// them for it would leave a mount behind in a crash.
func resolveUser(user string, rootfs []mount.Mount) (specs.User, error) {
	var resolved specs.User
	if user == "" || user == "0" || user == "root" {
		return resolved, nil
	}
	name, group, hasGroup := strings.Cut(user, ":")
	setDefault(&name, "0")
	entry := lookup(rootfs, "etc/passwd", name)
	switch uid, err := strconv.ParseUint(name, 10, 31); {
	case len(entry) >= 4:
		ids := make([]uint32, 2)
		for i, field := range entry[2:4] {
			id, err := strconv.ParseUint(field, 10, 31)
			if err != nil {
				return resolved, invalid("the image's /etc/passwd: user %s has ID %q", name, field)
			}
			ids[i] = uint32(id)
		}
		resolved.UID, resolved.GID = ids[0], ids[1]
	case err == nil:
		resolved.UID = uint32(uid)
	default:
		return resolved, invalid("the image runs as user %q, which its /etc/passwd does not have: name a number, or add it to the image", name)
	}
	if hasGroup && group != "" {
		entry := lookup(rootfs, "etc/group", group)
		if len(entry) >= 3 {
			group = entry[2]
		}
		gid, err := strconv.ParseUint(group, 10, 31)
		if err != nil {
			return resolved, invalid("the image runs as group %q, which its /etc/group does not have: name a number, or add it to the image", group)
		}
		resolved.GID = uint32(gid)
	}
	return resolved, nil
}

// lookup finds the line of a passwd(5) or group(5) file whose name or number is key.
func lookup(rootfs []mount.Mount, file, key string) []string {
	f := openInLayers(rootfs, file)
	if f == nil {
		return nil
	}
	defer f.Close()
	// The file is the image maker's: no more of it is read than a real one has.
	lines := bufio.NewScanner(io.LimitReader(f, 1<<20))
	for lines.Scan() {
		fields := strings.Split(lines.Text(), ":")
		if len(fields) >= 3 && (fields[0] == key || fields[2] == key) {
			return fields
		}
	}
	return nil
}

// openInLayers opens a file of a root filesystem that is not mounted: an overlay's, the topmost layer first, or a bind
// mount's. nil if it is not there, or the snapshotter has no directories to look into.
func openInLayers(rootfs []mount.Mount, file string) *os.File {
	for _, dir := range layerDirs(rootfs) {
		f, err := openBeneath(dir, file)
		if err == nil {
			return f
		}
		if !errors.Is(err, unix.ENOENT) {
			return nil
		}
	}
	return nil
}

func layerDirs(rootfs []mount.Mount) []string {
	if len(rootfs) != 1 {
		return nil
	}
	m := rootfs[0]
	if m.Type != "overlay" {
		if slices.Contains(m.Options, "rbind") || slices.Contains(m.Options, "bind") {
			return []string{m.Source}
		}
		return nil
	}
	var dirs []string
	for _, option := range m.Options {
		if upper, ok := strings.CutPrefix(option, "upperdir="); ok {
			dirs = slices.Insert(dirs, 0, upper)
		}
		if lower, ok := strings.CutPrefix(option, "lowerdir="); ok {
			dirs = append(dirs, strings.Split(lower, ":")...)
		}
	}
	return dirs
}

// openBeneath opens a regular file below dir, whose content is not trusted: links lead nowhere outside it, and opening
// a pipe or device has no effect.
func openBeneath(dir, file string) (*os.File, error) {
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, file, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), file)
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		return nil, unix.EINVAL
	}
	return f, nil
}
