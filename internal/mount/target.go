package mount

import (
	"errors"
	"path"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// targetMode is the mode of directories made for a target (design ruling 12).
const targetMode = 0o755

// place is a resolved target.
type place struct {
	leaf  int    // the directory, O_PATH
	mount uint64 // id of the mount it lies on
}

// madeDir is a directory that was made on the way to a target.
type madeDir struct {
	parent   int // O_PATH; owned
	name     string
	dev, ino uint64
}

// walker resolves one target. It remembers what it made, so that a failed
// attach can take it away.
type walker struct {
	*thread
	target string
	parts  []string
	steps  Observer
	made   []madeDir
	own    uint64 // the mount that is being placed, which is no obstacle to itself
}

func newWalker(t *thread, target string, steps Observer) (*walker, error) {
	if err := checkTarget(target); err != nil {
		return nil, err
	}
	return &walker{thread: t, target: target, parts: strings.Split(target[1:], "/"), steps: steps}, nil
}

func checkTarget(target string) error {
	if !path.IsAbs(target) || target == "/" || path.Clean(target) != target || strings.ContainsRune(target, 0) || len(target) >= unix.PathMax {
		return &Error{Op: "attach", Path: target, Code: ReasonInvalidTarget, Kind: errdefs.ErrInvalidArgument,
			Message: "a target must be an absolute path below '/', without '.', '..' or doubled slashes"}
	}
	return nil
}

func (w *walker) refuse(code, message string, err error) error {
	return &Error{Op: "attach", Path: w.target, Code: code, Message: message, Kind: errdefs.ErrFailedPrecondition, Err: err}
}

// resolve opens the target, making what is missing, and checks that a volume
// may lie there. The caller closes place.leaf.
func (w *walker) resolve() (place, error) {
	// The common case in one call: everything exists, on the root's own mount.
	leaf, err := openat2(w.root, w.target[1:], directoryPath, beneath|unix.RESOLVE_NO_XDEV)
	at := place{leaf: leaf, mount: w.rootMount}
	if err != nil {
		if at, err = w.walk(); err != nil {
			return place{}, err
		}
	}
	if err := w.check(at); err != nil {
		unix.Close(at.leaf)
		return place{}, err
	}
	return at, nil
}

// walk goes down one component at a time.
func (w *walker) walk() (place, error) {
	at := place{leaf: w.root, mount: w.rootMount}
	for i, name := range w.parts {
		next, err := w.step(at, i, name)
		if at.leaf != w.root {
			unix.Close(at.leaf)
		}
		if err != nil {
			return place{}, err
		}
		at = next
	}
	return at, nil
}

func (w *walker) step(at place, i int, name string) (place, error) {
	fd, err := openat2(at.leaf, name, directoryPath, beneath)
	if errors.Is(err, unix.ENOENT) {
		if err := w.mkdir(at.leaf, i, name); err != nil {
			return place{}, err
		}
		fd, err = openat2(at.leaf, name, directoryPath, beneath)
	}
	if err != nil {
		return place{}, w.stepError(at.leaf, i, name, err)
	}
	mount, err := w.mountID(fd, "", unix.AT_EMPTY_PATH)
	if err == nil && mount != at.mount {
		err = w.crossed(mount, i)
	}
	if err != nil {
		unix.Close(fd)
		return place{}, wrapKernel("attach", w.target, err)
	}
	return place{leaf: fd, mount: mount}, nil
}

func (w *walker) upTo(i int) string { return "/" + strings.Join(w.parts[:i+1], "/") }

func (w *walker) stepError(dir, i int, name string, err error) error {
	switch {
	case errors.Is(err, unix.ELOOP):
		return w.refuse(ReasonTargetSymlink, w.upTo(i)+" is a symbolic link; name the real directory", err)
	case errors.Is(err, unix.ENOTDIR):
		return w.refuse(ReasonTargetNotDirectory, w.upTo(i)+" exists and is no directory", err)
	case errors.Is(err, unix.EXDEV), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EAGAIN):
		return w.raced(err)
	}
	return failed("attach", w.target, "cannot open "+w.upTo(i), err)
}

func (w *walker) raced(err error) error {
	return &Error{Op: "attach", Path: w.target, Code: ReasonAttachRaced, Kind: errdefs.ErrAborted,
		Message: "directories of the target are being renamed or removed; nothing was left mounted", Err: err}
}

// crossed decides about a component that lies on another mount than its parent.
func (w *walker) crossed(mount uint64, i int) error {
	if mount == w.own {
		return w.raced(nil)
	}
	if i == len(w.parts)-1 {
		return w.refuse(ReasonTargetOnVolume, "the target is a mount point already", nil)
	}
	info, found, err := w.describe(mount, statmountMntBasic|statmountFSType)
	if err != nil {
		return err
	}
	if !found {
		return w.raced(nil)
	}
	// A missing directory would be made on the other filesystem, and a volume in
	// a volume cannot be detached without the outer one being in the way.
	if info.FSType != "tmpfs" {
		return w.refuse(ReasonTargetOnVolume, w.upTo(i)+" is another mount ("+info.FSType+"); targets may lie on the sandbox's root or below a tmpfs", nil)
	}
	return nil
}

func (w *walker) mkdir(dir, i int, name string) error {
	w.steps.before(StepTargetMkdir)
	defer w.steps.after(StepTargetMkdir)
	err := unix.Mkdirat(dir, name, targetMode)
	switch {
	case err == nil:
	case errors.Is(err, unix.EEXIST):
		return nil // somebody else made it; it is looked at like any other
	case errors.Is(err, unix.EROFS):
		return w.refuse(ReasonTargetReadOnly, w.upTo(i)+" does not exist and the sandbox's root filesystem is read-only; put the directory into the image", err)
	case errors.Is(err, unix.ENOENT):
		return w.raced(err)
	default:
		return failed("attach", w.target, "cannot make "+w.upTo(i), err)
	}
	made := madeDir{name: name}
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return w.raced(err)
	}
	made.dev, made.ino = st.Dev, st.Ino
	if made.parent, err = unix.FcntlInt(uintptr(dir), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return failed("attach", w.target, "cannot keep a descriptor", err)
	}
	w.made = append(w.made, made)
	return nil
}

// check refuses a directory that is not empty or whose mount is shared.
func (w *walker) check(at place) error {
	empty, err := isEmpty(at.leaf)
	switch {
	case errors.Is(err, unix.ENOENT):
		return w.raced(err)
	case err != nil:
		return failed("attach", w.target, "cannot read the directory", err)
	case !empty:
		return w.refuse(ReasonTargetNotEmpty, "the directory is not empty; the volume would hide what is there", nil)
	}
	info, found, err := w.describe(at.mount, statmountMntBasic)
	switch {
	case err != nil:
		return failed("attach", w.target, "cannot look at the mount below", err)
	case !found:
		return w.raced(nil)
	case info.Shared:
		return w.refuse(ReasonTargetShared, "the mount below the target is shared; the volume would appear in other mount namespaces too", nil)
	}
	return nil
}

// isEmpty tells whether a directory has no entries besides "." and "..". An
// O_PATH descriptor cannot be read, hence the reopening.
func isEmpty(dir int) (bool, error) {
	fd, err := openat2(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, beneath)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	var buf [2048]byte
	for {
		n, err := unix.ReadDirent(fd, buf[:])
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return err == nil, err
		}
		if _, count, _ := unix.ParseDirent(buf[:n], 1, nil); count > 0 {
			return false, nil
		}
	}
}

// removeMade takes away, deepest first, the directories that were made and are
// still the same and empty. What cannot be removed stays: it does no harm.
func (w *walker) removeMade() {
	for i := len(w.made) - 1; i >= 0; i-- {
		d := w.made[i]
		var st unix.Stat_t
		if unix.Fstatat(d.parent, d.name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Dev == d.dev && st.Ino == d.ino {
			_ = unix.Unlinkat(d.parent, d.name, unix.AT_REMOVEDIR)
		}
	}
}

// close releases the descriptors.
func (w *walker) close() {
	for _, d := range w.made {
		unix.Close(d.parent)
	}
	w.made = nil
}
