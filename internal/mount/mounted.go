package mount

import (
	"context"
	"runtime"
	"slices"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Sources that another program mounts for us (a CSI driver) at a path of our own mount namespace.

// At returns what is mounted at an absolute, clean path without symbolic links of
// the caller's namespace, on top if mounts are stacked there. The path itself is
// not touched, so that no file server is waited for.
func At(place string) (Info, bool, error) {
	list, err := ownMounts()
	if err != nil {
		return Info{}, false, failed("look for the mount at", place, "cannot list mounts", err)
	}
	var here []Info
	below := map[int]bool{}
	for _, m := range list {
		if m.MountPoint == place {
			here = append(here, m)
			below[m.ParentID] = true
		}
	}
	for _, m := range here {
		if !below[m.MountID] {
			return m, true, nil
		}
	}
	return Info{}, false, nil
}

// ownMounts are the mounts of the caller's namespace, with unique ids where the
// kernel has them.
func ownMounts() ([]Info, error) {
	if modern() {
		var buf statBuffer
		return listNamespace(0, listmountRoot, &buf)
	}
	return Mounts()
}

// CloneMounted is Clone of the directory subPath (empty for the root) of what is
// mounted at a path, if that is still the mount with the identity: else whatever
// lies below the place of a mount that is gone would be taken for it.
// Reasons: SOURCE_NOT_MOUNTED, VOLUME_OFFLINE, and those of OpenRoot and OpenSubPath.
func CloneMounted(at string, id Identity, subPath string) (*Tree, error) {
	tree, err := cloneMounted(at, id, subPath)
	if err != nil {
		if gone := ifOffline(err, at); gone != nil {
			err = gone
		}
		return nil, err
	}
	if err := online(tree.fd(), at); err != nil {
		tree.Close()
		return nil, err
	}
	return tree, nil
}

func cloneMounted(at string, id Identity, subPath string) (*Tree, error) {
	root, err := OpenRoot(at)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	unique := modern() && id.UniqueID != 0
	want := uint64(id.MountID)
	if unique {
		want = id.UniqueID
	}
	got, isUnique, err := mountIDAt(int(root.Fd()), "", unix.AT_EMPTY_PATH, unique)
	runtime.KeepAlive(root)
	switch {
	case err != nil:
		return nil, failed("clone", at, "cannot read the mount's id", err)
	case got != want || isUnique != unique:
		return nil, &Error{Op: "clone", Path: at, Code: ReasonSourceNotMounted, Kind: errdefs.ErrUnavailable,
			Message: "the source is not mounted there any more; it has to be mounted again"}
	case subPath == "":
		return Clone(root)
	}
	dir, err := OpenSubPath(root, subPath)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return Clone(dir)
}

// HeldElsewhere returns the other mount namespaces of the node that have a
// matching mount which does not go with the given ones: those that propagation
// made of them are unmounted with them. Mounts of our own namespace do not count.
func HeldElsewhere(ctx context.Context, m Match, with ...Info) ([]NamespaceRef, error) {
	own, err := namespaceInode(unix.AT_FDCWD, "/proc/thread-self/ns/mnt")
	if err != nil {
		return nil, failed("look for holders", "", "cannot read our own namespace", err)
	}
	all, err := Holding(ctx, m)
	if err != nil {
		return nil, err
	}
	var held []NamespaceRef
	for _, ref := range all {
		if ref.ID == own {
			continue
		}
		var stay []Info
		for _, i := range ref.Mounts {
			copied := slices.ContainsFunc(with, func(at Info) bool {
				return at.PeerGroup != 0 && (i.PeerGroup == at.PeerGroup || i.Master == at.PeerGroup)
			})
			if !copied {
				stay = append(stay, i)
			}
		}
		if len(stay) > 0 {
			ref.Mounts = stay
			held = append(held, ref)
		}
	}
	return held, nil
}
