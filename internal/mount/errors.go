package mount

import (
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Reasons: machine-readable causes, returned by the Reason methods of the
// errors of this package. They are part of the product's API: never renamed.
const (
	ReasonInvalidTarget       = "INVALID_TARGET"         // not a clean absolute path, or "/"
	ReasonTargetSymlink       = "TARGET_SYMLINK"         // a component of the target is a symbolic link
	ReasonTargetNotDirectory  = "TARGET_NOT_DIRECTORY"   // a component exists and is no directory
	ReasonTargetNotEmpty      = "TARGET_NOT_EMPTY"       // the directory has entries that the volume would hide
	ReasonTargetOnVolume      = "TARGET_ON_VOLUME"       // the target is a mount point or lies on another mount
	ReasonTargetShared        = "TARGET_SHARED"          // the mount below the target propagates to others
	ReasonTargetReadOnly      = "TARGET_READ_ONLY"       // a directory is missing and cannot be made
	ReasonAttachRaced         = "ATTACH_RACED"           // directories of the target kept moving
	ReasonDetachRaced         = "DETACH_RACED"           // the mount kept moving
	ReasonBusy                = "BUSY"                   // processes use the mount
	ReasonNestedMount         = "NESTED_MOUNT"           // another mount lies in or on the mount
	ReasonMayHang             = "MAY_HANG"               // the operation may wait for a dead server: a helper must do it
	ReasonNamespaceGone       = "NAMESPACE_GONE"         // the container's init is gone, or the namespace was closed
	ReasonNamespaceIsHost     = "NAMESPACE_IS_HOST"      // the process shares our mount namespace or its root
	ReasonNamespaceOccupied   = "NAMESPACE_OCCUPIED"     // the thread had not begun when the deadline passed; nothing was done
	ReasonOutcomeUnknown      = "OUTCOME_UNKNOWN"        // the deadline passed while the kernel was working
	ReasonSourceNotFound      = "SOURCE_NOT_FOUND"       // source directory is missing
	ReasonSourceSymlink       = "SOURCE_SYMLINK"         // source path goes through a symbolic link
	ReasonSourceEscapes       = "SOURCE_ESCAPES"         // source path leaves its root
	ReasonSourceNotDirectory  = "SOURCE_NOT_DIRECTORY"   // source is no directory
	ReasonInvalidSource       = "INVALID_SOURCE"         // source path is malformed, or cannot be cloned
	ReasonSourceNotMounted    = "SOURCE_NOT_MOUNTED"     // another mount, or none, is where the source was mounted
	ReasonVolumeOffline       = "VOLUME_OFFLINE"         // the filesystem was shut down, or has lost its device or server
	ReasonSubPathNotFound     = "SUBPATH_NOT_FOUND"      // subPath does not exist (it is never created)
	ReasonSubPathSymlink      = "SUBPATH_SYMLINK"        // subPath goes through a symbolic link
	ReasonSubPathEscapes      = "SUBPATH_ESCAPES"        // subPath leaves the volume
	ReasonSubPathNotDirectory = "SUBPATH_NOT_DIRECTORY"  // subPath is no directory
	ReasonInvalidSubPath      = "INVALID_SUB_PATH"       // subPath is malformed
	ReasonFilesystem          = "FILESYSTEM_REFUSED"     // the kernel refused to set up the filesystem
	ReasonIDMapUnsupported    = "IDMAP_UNSUPPORTED"      // the filesystem cannot be id-mapped
	ReasonMountLimit          = "MOUNT_LIMIT"            // fs.mount-max is reached
	ReasonKernelFeature       = "KERNEL_FEATURE_MISSING" // see Require
	ReasonHelperDeadline      = "HELPER_DEADLINE"        // a helper did not answer in time
	ReasonHelperFailed        = "HELPER_FAILED"          // a helper died or could not be started
	ReasonTreeClosed          = "TREE_CLOSED"            // the tree was closed or attached before
	ReasonKernel              = "KERNEL"                 // a system call failed for a reason of its own
)

// Error is a failed operation of this package.
type Error struct {
	// Op is what was tried: "attach", "clone", ….
	Op string
	// Path is what it was tried on; empty where there is no path.
	Path string
	// Code is one of the Reason constants.
	Code string
	// Message says why and what to do, in one line.
	Message string
	// Kind is the errdefs sentinel that decides who may retry.
	Kind error
	// Err is the cause, usually a unix.Errno; may be nil.
	Err error
}

// Error says what failed, on what and why.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Op)
	if e.Path != "" {
		fmt.Fprintf(&b, " %s", e.Path)
	}
	if e.Message != "" {
		fmt.Fprintf(&b, ": %s", e.Message)
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %s", e.Err)
	}
	return strings.ToValidUTF8(b.String(), "\uFFFD") // a path of a sandbox may be any bytes, and no message takes them
}

// Unwrap makes errors.Is find both the kind and the cause.
func (e *Error) Unwrap() []error {
	var list []error
	if e.Kind != nil {
		list = append(list, e.Kind)
	}
	if e.Err != nil {
		list = append(list, e.Err)
	}
	return list
}

// Reason returns the machine-readable cause.
func (e *Error) Reason() string { return e.Code }

// failed wraps an errno for which there is no more precise reason.
func failed(op, path, message string, err error) *Error {
	return &Error{Op: op, Path: path, Code: reasonOf(err), Message: message, Kind: kindOf(err), Err: err}
}

func reasonOf(err error) string {
	switch {
	case errors.Is(err, unix.ENOSYS):
		return ReasonKernelFeature
	default:
		return ReasonKernel
	}
}

// kindOf maps an errno to the kind that its retry behaviour calls for.
func kindOf(err error) error {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return errdefs.ErrInternal
	}
	switch errno {
	case unix.ENOENT, unix.ESRCH, unix.ENODEV, unix.ENXIO:
		return errdefs.ErrNotFound
	case unix.EPERM, unix.EACCES:
		return errdefs.ErrPermissionDenied
	case unix.EINVAL, unix.ENAMETOOLONG:
		return errdefs.ErrInvalidArgument
	case unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE, unix.ENOMEM:
		return errdefs.ErrResourceExhausted
	case unix.ENOSYS, unix.EOPNOTSUPP:
		return errdefs.ErrNotImplemented
	case unix.EBUSY, unix.EROFS, unix.ELOOP, unix.ENOTDIR, unix.ENOTEMPTY:
		return errdefs.ErrFailedPrecondition
	case unix.EAGAIN, unix.EIO, unix.ENOTCONN, unix.ESTALE, unix.ETIMEDOUT, unix.EINTR:
		return errdefs.ErrUnavailable
	}
	return errdefs.ErrInternal
}

// BusyError is a detach that was refused because the mount is in use.
type BusyError struct {
	// Target is where the mount is now.
	Target string
	// Holders are the processes found to use it, at most MaxHolders. It is empty
	// when the kernel itself (a loop device, a swap file) or a descriptor in
	// flight holds the mount.
	Holders []Holder
}

// Error names the holders.
func (e *BusyError) Error() string {
	if len(e.Holders) == 0 {
		return fmt.Sprintf("detach %s: the volume is in use, but by no process that can be seen (a loop device or swap file on it?); end the use or force the detach", e.Target)
	}
	names := make([]string, 0, len(e.Holders))
	for _, h := range e.Holders {
		names = append(names, h.String())
	}
	return fmt.Sprintf("detach %s: the volume is in use by %s; end these processes or force the detach", e.Target, strings.Join(names, ", "))
}

// Unwrap returns errdefs.ErrFailedPrecondition.
func (e *BusyError) Unwrap() error { return errdefs.ErrFailedPrecondition }

// Reason returns ReasonBusy.
func (e *BusyError) Reason() string { return ReasonBusy }
