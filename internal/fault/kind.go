package fault

import (
	"context"

	"github.com/containerd/errdefs"
)

// kindOf has the kind of every reason: the one that its errors are made with. A row of status.volumes
// carries a reason and a message only; this table gives its reader the kind back.
var kindOf = map[Reason]error{
	InvalidRequest:     errdefs.ErrInvalidArgument,
	InvalidName:        errdefs.ErrInvalidArgument,
	InvalidTarget:      errdefs.ErrInvalidArgument,
	TargetDenied:       errdefs.ErrPermissionDenied,
	TargetNested:       errdefs.ErrFailedPrecondition,
	TargetInUse:        errdefs.ErrAlreadyExists,
	InvalidSource:      errdefs.ErrInvalidArgument,
	SourceDenied:       errdefs.ErrPermissionDenied,
	SourceNotFound:     errdefs.ErrNotFound,
	InvalidSubPath:     errdefs.ErrInvalidArgument,
	InvalidMode:        errdefs.ErrInvalidArgument,
	ModeDenied:         errdefs.ErrPermissionDenied,
	InvalidSize:        errdefs.ErrInvalidArgument,
	SizeMismatch:       errdefs.ErrFailedPrecondition,
	SizeRequired:       errdefs.ErrFailedPrecondition,
	LimitNotEnforced:   errdefs.ErrFailedPrecondition,
	CapacityExceeded:   errdefs.ErrResourceExhausted,
	ToolMissing:        errdefs.ErrFailedPrecondition,
	ProjectConflict:    errdefs.ErrFailedPrecondition,
	InvalidTenant:      errdefs.ErrInvalidArgument,
	TenantMismatch:     errdefs.ErrPermissionDenied,
	InvalidVolumeType:  errdefs.ErrInvalidArgument,
	VolumeTypeOff:      errdefs.ErrFailedPrecondition,
	TooManyVolumes:     errdefs.ErrFailedPrecondition,
	InvalidOnFailure:   errdefs.ErrInvalidArgument,
	FeatureDisabled:    errdefs.ErrFailedPrecondition,
	CrossTopology:      errdefs.ErrFailedPrecondition,
	VersionSkew:        errdefs.ErrFailedPrecondition,
	Immutable:          errdefs.ErrInvalidArgument,
	Conflict:           errdefs.ErrConflict,
	StaleCommand:       errdefs.ErrFailedPrecondition,
	SandboxNotFound:    errdefs.ErrNotFound,
	SandboxExists:      errdefs.ErrAlreadyExists,
	SandboxNotRunning:  errdefs.ErrFailedPrecondition,
	SandboxTerminating: errdefs.ErrFailedPrecondition,
	GroupNotFound:      errdefs.ErrFailedPrecondition,
	ImageNotFound:      errdefs.ErrNotFound,
	InvalidImage:       errdefs.ErrInvalidArgument,
	ImagePullFailed:    errdefs.ErrUnavailable,
	NoAgent:            errdefs.ErrUnavailable,
	NodeDead:           errdefs.ErrAborted,
	NoCapacity:         errdefs.ErrResourceExhausted,
	PodNotFound:        errdefs.ErrNotFound,
	PodNameTaken:       errdefs.ErrAlreadyExists,
	PodRefused:         errdefs.ErrFailedPrecondition,
	ClaimNameTaken:     errdefs.ErrAlreadyExists,
	ClaimRefused:       errdefs.ErrFailedPrecondition,
	ClaimTerminating:   errdefs.ErrUnavailable,
	PodsUnavailable:    errdefs.ErrFailedPrecondition,
	AgentUnavailable:   errdefs.ErrUnavailable,
	AgentRecovering:    errdefs.ErrUnavailable,
	OperationPending:   context.DeadlineExceeded,
	DeadlineExceeded:   context.DeadlineExceeded,
	Busy:               errdefs.ErrFailedPrecondition,
	VolumeGone:         errdefs.ErrAborted,
	PodGone:            errdefs.ErrFailedPrecondition,
	PodPrivileged:      errdefs.ErrFailedPrecondition,
	PodUserNamespace:   errdefs.ErrFailedPrecondition,
	RuntimeUnsupported: errdefs.ErrFailedPrecondition,
	RateLimited:        errdefs.ErrResourceExhausted,
	RollbackFailed:     errdefs.ErrInternal,
	Unauthenticated:    errdefs.ErrUnauthenticated,
	Forbidden:          errdefs.ErrPermissionDenied,
	AuthUnavailable:    errdefs.ErrUnavailable,
	NamespaceNotFound:  errdefs.ErrNotFound,
	ClaimNotFound:      errdefs.ErrNotFound,
	VolumeNotFound:     errdefs.ErrNotFound,
	VolumeNotBound:     errdefs.ErrFailedPrecondition,
	UnreachableVolume:  errdefs.ErrFailedPrecondition,
	DriverUnavailable:  errdefs.ErrUnavailable,
	DriverFailed:       errdefs.ErrInternal,
	DriverRefused:      errdefs.ErrFailedPrecondition,
	NotAvailable:       errdefs.ErrNotImplemented,
	SecretUnavailable:  errdefs.ErrUnavailable,
	VolumeOffline:      errdefs.ErrUnavailable,
	AnchorPending:      errdefs.ErrUnavailable,
	AnchorLost:         errdefs.ErrUnavailable,
	Internal:           errdefs.ErrInternal,
}

// KindOf is the kind of the errors that carry a reason. A reason that this build does not know, as a newer
// component may send it, is ErrUnknown, which is transient: nothing is known that would rule out a retry.
func KindOf(reason Reason) error {
	if kind, ok := kindOf[reason]; ok {
		return kind
	}
	if kind, ok := kindBelow[reason]; ok {
		return kind
	}
	return errdefs.ErrUnknown
}
