package capacity

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// The reasons of this package's errors.
const (
	// ReasonInvalidSize: the size is below what the filesystem needs, or not a size at all.
	ReasonInvalidSize = "INVALID_SIZE"
	// ReasonSizeMismatch: the image exists and has another size; "requested" and "actual" tell both.
	ReasonSizeMismatch = "SIZE_MISMATCH"
	// ReasonCapacityExceeded: the pool cannot promise, or no longer has, that much space.
	ReasonCapacityExceeded = "CAPACITY_EXCEEDED"
	// ReasonNotFound: there is no such image.
	ReasonNotFound = "SOURCE_NOT_FOUND"
	// ReasonInvalidImage: the file is not an image that this package made.
	ReasonInvalidImage = "INVALID_SOURCE"
	// ReasonToolMissing: the program that makes the filesystem is not installed.
	ReasonToolMissing = "TOOL_MISSING"
	// ReasonQuotaUnsupported: the filesystem or the kernel has no project quota.
	ReasonQuotaUnsupported = "QUOTA_UNSUPPORTED"
	// ReasonProjectConflict: the directory belongs to another project than the record says.
	ReasonProjectConflict = "PROJECT_CONFLICT"
	// ReasonBusy: the device is still in use.
	ReasonBusy = "BUSY"
	// ReasonInternal: the kernel refused something that it should not have.
	ReasonInternal = "INTERNAL"
)

// Error is an error of this package.
type Error struct {
	kind   error
	reason string
	text   string
	cause  error
	facts  map[string]string
}

func fail(kind error, reason, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{kind: kind, reason: reason, text: err.Error(), cause: errors.Unwrap(err)}
}

// failed is an error of the system: its kind is read off the errno.
func failed(format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	e := &Error{kind: errdefs.ErrInternal, reason: ReasonInternal, text: err.Error(), cause: errors.Unwrap(err)}
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		e.kind, e.reason = errdefs.ErrResourceExhausted, ReasonCapacityExceeded
	case errors.Is(err, unix.ENOENT):
		e.kind, e.reason = errdefs.ErrNotFound, ReasonNotFound
	case errors.Is(err, unix.EBUSY):
		e.kind, e.reason = errdefs.ErrUnavailable, ReasonBusy
	}
	return e
}

// sizes adds the two figures of a comparison to the error.
func (e *Error) sizes(requested, actual int64) *Error {
	e.facts = map[string]string{
		"requested": strconv.FormatInt(requested, 10),
		"actual":    strconv.FormatInt(actual, 10),
	}
	return e
}

func (e *Error) Error() string { return e.text }

// Reason is the machine-readable cause, one of the Reason constants.
func (e *Error) Reason() string { return e.reason }

// Kind is the sentinel of errdefs that says what a caller can do about it.
func (e *Error) Kind() error { return e.kind }

// Facts are further facts for programs: "requested" and "actual" in bytes, where two sizes differ. It
// may be nil and must not be changed.
func (e *Error) Facts() map[string]string { return e.facts }

// Unwrap gives errors.Is both the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.cause == nil {
		return []error{e.kind}
	}
	return []error{e.kind, e.cause}
}

// Observer is told before (done false) and after (done true) each step of an operation, in the
// goroutine that does it. A test uses it to kill the process at every one of them.
type Observer func(step string, done bool)

// step runs one step under the observer. After a failure "done" is not told.
func (o Observer) step(name string, f func() error) error {
	if o != nil {
		o(name, false)
	}
	if err := f(); err != nil {
		return err
	}
	if o != nil {
		o(name, true)
	}
	return nil
}
