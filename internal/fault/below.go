package fault

import "github.com/containerd/errdefs"

// kindBelow has the kinds of the reasons that packages mount and capacity give, which import nothing of ours. The test
// reads them off those packages.
var kindBelow = map[Reason]error{
	"TARGET_SYMLINK":         errdefs.ErrFailedPrecondition,
	"TARGET_NOT_DIRECTORY":   errdefs.ErrFailedPrecondition,
	"TARGET_NOT_EMPTY":       errdefs.ErrFailedPrecondition,
	"TARGET_ON_VOLUME":       errdefs.ErrFailedPrecondition,
	"TARGET_SHARED":          errdefs.ErrFailedPrecondition,
	"TARGET_READ_ONLY":       errdefs.ErrFailedPrecondition,
	"ATTACH_RACED":           errdefs.ErrAborted,
	"DETACH_RACED":           errdefs.ErrAborted,
	"NESTED_MOUNT":           errdefs.ErrFailedPrecondition,
	"NAMESPACE_GONE":         errdefs.ErrUnavailable,
	"NAMESPACE_IS_HOST":      errdefs.ErrFailedPrecondition,
	"NAMESPACE_OCCUPIED":     errdefs.ErrUnavailable,
	"OUTCOME_UNKNOWN":        errdefs.ErrUnavailable,
	"SOURCE_SYMLINK":         errdefs.ErrFailedPrecondition,
	"SOURCE_ESCAPES":         errdefs.ErrFailedPrecondition,
	"SOURCE_NOT_DIRECTORY":   errdefs.ErrFailedPrecondition,
	"SOURCE_NOT_MOUNTED":     errdefs.ErrUnavailable,
	"VOLUME_OFFLINE":         errdefs.ErrUnavailable,
	"SUBPATH_NOT_FOUND":      errdefs.ErrNotFound,
	"SUBPATH_SYMLINK":        errdefs.ErrFailedPrecondition,
	"SUBPATH_ESCAPES":        errdefs.ErrInvalidArgument,
	"SUBPATH_NOT_DIRECTORY":  errdefs.ErrFailedPrecondition,
	"FILESYSTEM_REFUSED":     errdefs.ErrFailedPrecondition,
	"IDMAP_UNSUPPORTED":      errdefs.ErrFailedPrecondition,
	"MAY_HANG":               errdefs.ErrFailedPrecondition,
	"MOUNT_LIMIT":            errdefs.ErrResourceExhausted,
	"KERNEL_FEATURE_MISSING": errdefs.ErrNotImplemented,
	"HELPER_DEADLINE":        errdefs.ErrUnavailable,
	"HELPER_FAILED":          errdefs.ErrUnavailable,
	"TREE_CLOSED":            errdefs.ErrInternal,
	"KERNEL":                 errdefs.ErrInternal,
	"QUOTA_UNSUPPORTED":      errdefs.ErrFailedPrecondition,
}
