package mount

import (
	"errors"
	"os"
	"path"
	"runtime"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// noLinks makes a lookup follow no symbolic link in any component.
	noLinks = unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS
	// beneath also keeps it below the directory where it starts.
	beneath = noLinks | unix.RESOLVE_BENEATH

	directoryPath = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC

	// openRetries bounds the retries of openat2 on EAGAIN, which it answers when
	// something was renamed during the lookup (openat2(2)).
	openRetries = 128
)

// openat2 opens name below dirfd, retrying what the kernel asks to retry.
func openat2(dirfd int, name string, flags, resolve uint64) (int, error) {
	how := unix.OpenHow{Flags: flags, Resolve: resolve}
	var fd int
	var err error
	for range openRetries {
		fd, err = unix.Openat2(dirfd, name, &how)
		if err != unix.EAGAIN && err != unix.EINTR {
			break
		}
	}
	return fd, err
}

// pathReasons are the codes with which a lookup reports its failures, so that
// the same lookup serves sources and subPaths.
type pathReasons struct{ notFound, symlink, escapes, notDirectory, invalid string }

var (
	sourceReasons  = pathReasons{ReasonSourceNotFound, ReasonSourceSymlink, ReasonSourceEscapes, ReasonSourceNotDirectory, ReasonInvalidSource}
	subPathReasons = pathReasons{ReasonSubPathNotFound, ReasonSubPathSymlink, ReasonSubPathEscapes, ReasonSubPathNotDirectory, ReasonInvalidSubPath}
)

// OpenRoot opens an operator-configured directory as a starting point for
// OpenBeneath. The path must be absolute and clean and may go through no
// symbolic link: else whoever owns the link chooses the root.
// Reasons: INVALID_SOURCE, SOURCE_NOT_FOUND, SOURCE_SYMLINK, SOURCE_NOT_DIRECTORY.
func OpenRoot(root string) (*os.File, error) {
	const op = "open root"
	if !path.IsAbs(root) || path.Clean(root) != root || strings.ContainsRune(root, 0) {
		return nil, &Error{Op: op, Path: root, Code: ReasonInvalidSource, Kind: errdefs.ErrInvalidArgument,
			Message: "a root must be an absolute path without '.', '..' or doubled slashes"}
	}
	fd, err := openat2(unix.AT_FDCWD, root, directoryPath, noLinks)
	if err != nil {
		return nil, lookupError(op, root, err, sourceReasons)
	}
	return os.NewFile(uintptr(fd), root), nil
}

// OpenBeneath opens the directory rel beneath root. Nothing is created, no
// symbolic link is followed, and the lookup cannot leave root; "." is root
// itself. Reasons: the SOURCE_ ones.
func OpenBeneath(root *os.File, rel string) (*os.File, error) {
	return openBeneath("open source", root, rel, sourceReasons)
}

// OpenSubPath is OpenBeneath for the subPath of a volume whose root is dir.
// Reasons: the SUBPATH_ ones.
func OpenSubPath(dir *os.File, subPath string) (*os.File, error) {
	return openBeneath("open subPath", dir, subPath, subPathReasons)
}

func openBeneath(op string, root *os.File, rel string, reasons pathReasons) (*os.File, error) {
	if err := checkRelative(op, rel, reasons); err != nil {
		return nil, err
	}
	fd, err := openat2(int(root.Fd()), rel, directoryPath, beneath)
	runtime.KeepAlive(root)
	if err != nil {
		return nil, lookupError(op, rel, err, reasons)
	}
	return os.NewFile(uintptr(fd), path.Join(root.Name(), rel)), nil
}

// checkRelative refuses what can be refused without looking. The kernel's
// RESOLVE_BENEATH is the guard; this only gives better messages.
func checkRelative(op, rel string, reasons pathReasons) error {
	switch {
	case rel == "" || strings.ContainsRune(rel, 0):
		return &Error{Op: op, Path: rel, Code: reasons.invalid, Kind: errdefs.ErrInvalidArgument, Message: "the path is empty or holds a NUL byte"}
	case path.IsAbs(rel):
		return &Error{Op: op, Path: rel, Code: reasons.escapes, Kind: errdefs.ErrInvalidArgument, Message: "the path must be relative"}
	}
	for part := range strings.SplitSeq(rel, "/") {
		if part == ".." {
			return &Error{Op: op, Path: rel, Code: reasons.escapes, Kind: errdefs.ErrInvalidArgument, Message: "the path must not contain '..'"}
		}
	}
	return nil
}

func lookupError(op, name string, err error, reasons pathReasons) error {
	e := &Error{Op: op, Path: name, Err: err}
	switch {
	case errors.Is(err, unix.ENOENT):
		e.Code, e.Kind, e.Message = reasons.notFound, errdefs.ErrNotFound, "the directory does not exist and is not created"
	case errors.Is(err, unix.ELOOP):
		e.Code, e.Kind, e.Message = reasons.symlink, errdefs.ErrFailedPrecondition, "a component is a symbolic link; name the real directory"
	case errors.Is(err, unix.EXDEV):
		e.Code, e.Kind, e.Message = reasons.escapes, errdefs.ErrInvalidArgument, "the path leaves its root"
	case errors.Is(err, unix.ENOTDIR):
		e.Code, e.Kind, e.Message = reasons.notDirectory, errdefs.ErrFailedPrecondition, "a component is no directory"
	case errors.Is(err, unix.ENAMETOOLONG):
		e.Code, e.Kind, e.Message = reasons.invalid, errdefs.ErrInvalidArgument, "the path is too long"
	default:
		return failed(op, name, "lookup failed", err)
	}
	return e
}
