// Package fault gives every error of FluxSandbox a kind and a reason.
//
// The kind is one of the closed set of github.com/containerd/errdefs (ErrInvalidArgument,
// ErrNotFound, …): it says what a caller can do about it, and it alone decides the gRPC code and the
// HTTP status. The reason is a word in UPPER_SNAKE_CASE that a program can compare, and that travels
// as google.rpc.ErrorInfo (domain "sandbox.flux.io"). The message is for the person who meets it: what
// failed, on what, why, and what to do.
//
// Packages below this one (mount, capacity) import nothing of ours; an error of theirs gives its reason
// by a method Reason() string, which ReasonOf finds as well.
package fault

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
)

// Domain is the domain of every reason in google.rpc.ErrorInfo.
const Domain = "sandbox.flux.io"

// Reason is a machine-readable cause. The set grows; a word once used keeps its meaning.
type Reason string

// The reasons.
const (
	InvalidRequest     Reason = "INVALID_REQUEST"
	InvalidName        Reason = "INVALID_NAME"
	InvalidTarget      Reason = "INVALID_TARGET"
	TargetDenied       Reason = "TARGET_DENIED"
	TargetNested       Reason = "TARGET_NESTED"
	TargetInUse        Reason = "TARGET_IN_USE"
	InvalidSource      Reason = "INVALID_SOURCE"
	SourceDenied       Reason = "SOURCE_DENIED"
	SourceNotFound     Reason = "SOURCE_NOT_FOUND"
	InvalidSubPath     Reason = "INVALID_SUB_PATH"
	InvalidMode        Reason = "INVALID_MODE"
	ModeDenied         Reason = "MODE_DENIED"
	InvalidSize        Reason = "INVALID_SIZE"
	SizeMismatch       Reason = "SIZE_MISMATCH"
	SizeRequired       Reason = "SIZE_REQUIRED"
	LimitNotEnforced   Reason = "LIMIT_NOT_ENFORCEABLE"
	CapacityExceeded   Reason = "CAPACITY_EXCEEDED"
	ToolMissing        Reason = "TOOL_MISSING"
	ProjectConflict    Reason = "PROJECT_CONFLICT"
	InvalidTenant      Reason = "INVALID_TENANT"
	TenantMismatch     Reason = "TENANT_MISMATCH"
	InvalidVolumeType  Reason = "INVALID_VOLUME_TYPE"
	VolumeTypeOff      Reason = "VOLUME_TYPE_UNAVAILABLE"
	TooManyVolumes     Reason = "TOO_MANY_VOLUMES"
	InvalidOnFailure   Reason = "INVALID_ON_FAILURE"
	FeatureDisabled    Reason = "FEATURE_DISABLED"
	CrossTopology      Reason = "CROSS_TOPOLOGY"
	VersionSkew        Reason = "VERSION_SKEW"
	Immutable          Reason = "IMMUTABLE"
	Conflict           Reason = "CONFLICT"
	StaleCommand       Reason = "STALE_COMMAND"
	SandboxNotFound    Reason = "SANDBOX_NOT_FOUND"
	SandboxExists      Reason = "SANDBOX_EXISTS"
	SandboxNotRunning  Reason = "SANDBOX_NOT_RUNNING"
	SandboxTerminating Reason = "SANDBOX_TERMINATING"
	GroupNotFound      Reason = "GROUP_NOT_FOUND"
	ImageNotFound      Reason = "IMAGE_NOT_FOUND"
	InvalidImage       Reason = "INVALID_IMAGE"
	ImagePullFailed    Reason = "IMAGE_PULL_FAILED"
	NoAgent            Reason = "NO_AGENT"
	NodeDead           Reason = "NODE_DEAD"
	NoCapacity         Reason = "NO_CAPACITY"
	PodNotFound        Reason = "POD_NOT_FOUND"
	PodNameTaken       Reason = "POD_NAME_TAKEN"
	PodRefused         Reason = "POD_REFUSED"
	PodsUnavailable    Reason = "PODS_UNAVAILABLE"
	ClaimNameTaken     Reason = "CLAIM_NAME_TAKEN"
	ClaimRefused       Reason = "CLAIM_REFUSED"
	ClaimTerminating   Reason = "CLAIM_TERMINATING"
	AgentUnavailable   Reason = "AGENT_UNAVAILABLE"
	AgentRecovering    Reason = "AGENT_RECOVERING"
	OperationPending   Reason = "OPERATION_PENDING"
	DeadlineExceeded   Reason = "DEADLINE_EXCEEDED"
	Busy               Reason = "BUSY"
	VolumeGone         Reason = "VOLUME_GONE"
	PodGone            Reason = "POD_GONE"
	PodPrivileged      Reason = "POD_PRIVILEGED"
	PodUserNamespace   Reason = "POD_USER_NAMESPACE"
	RuntimeUnsupported Reason = "RUNTIME_UNSUPPORTED"
	RateLimited        Reason = "RATE_LIMITED"
	RollbackFailed     Reason = "ROLLBACK_INCOMPLETE"
	Unauthenticated    Reason = "UNAUTHENTICATED"
	Forbidden          Reason = "FORBIDDEN"
	AuthUnavailable    Reason = "AUTH_UNAVAILABLE"
	NamespaceNotFound  Reason = "NAMESPACE_NOT_FOUND"
	ClaimNotFound      Reason = "CLAIM_NOT_FOUND"
	VolumeNotFound     Reason = "VOLUME_NOT_FOUND"
	VolumeNotBound     Reason = "VOLUME_NOT_BOUND"
	UnreachableVolume  Reason = "UNREACHABLE_VOLUME"
	DriverUnavailable  Reason = "DRIVER_UNAVAILABLE"
	DriverFailed       Reason = "DRIVER_FAILED"
	DriverRefused      Reason = "DRIVER_REFUSED"
	NotAvailable       Reason = "NOT_AVAILABLE"
	SecretUnavailable  Reason = "SECRET_UNAVAILABLE"
	VolumeOffline      Reason = "VOLUME_OFFLINE"
	AnchorPending      Reason = "ANCHOR_PENDING"
	AnchorLost         Reason = "ANCHOR_LOST"
	Internal           Reason = "INTERNAL"
)

// Error is an error with a kind and a reason.
type Error struct {
	// Kind is a sentinel of containerd's errdefs.
	Kind error
	// Reason is the machine-readable cause.
	Reason Reason
	// Message is for people.
	Message string
	// Metadata are further facts for programs, such as "requested" and "actual".
	Metadata map[string]string
	// Err is the cause, or nil. Its text is not repeated in Message.
	Err error
}

// New makes an error of a kind (a sentinel of errdefs) and a reason. A %w in format wraps a cause.
func New(kind error, reason Reason, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Kind: kind, Reason: reason, Message: err.Error(), Err: errors.Unwrap(err)}
}

// With adds a fact for programs and returns the error.
func (e *Error) With(key, value string) *Error {
	if e.Metadata == nil {
		e.Metadata = map[string]string{}
	}
	e.Metadata[key] = value
	return e
}

func (e *Error) Error() string { return e.Message }

// Unwrap gives errors.Is both the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Err}
}

// ReasonOf is the reason of the outermost error in err's chain that has one; Internal when none has.
// It is empty for nil.
func ReasonOf(err error) Reason {
	if err == nil {
		return ""
	}
	if r, ok := find(err); ok {
		return r
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return DeadlineExceeded
	case errdefs.IsUnavailable(err):
		return AgentUnavailable
	}
	return Internal
}

func find(err error) (Reason, bool) {
	for err != nil {
		switch e := err.(type) {
		case *Error:
			return e.Reason, true
		case interface{ Reason() string }:
			return Reason(e.Reason()), true
		}
		switch e := err.(type) {
		case interface{ Unwrap() error }:
			err = e.Unwrap()
		case interface{ Unwrap() []error }:
			for _, inner := range e.Unwrap() {
				if r, ok := find(inner); ok {
					return r, true
				}
			}
			return "", false
		default:
			return "", false
		}
	}
	return "", false
}

// MetadataOf are the facts of every Error in err's chain, the outermost winning.
func MetadataOf(err error) map[string]string {
	var e *Error
	out := map[string]string{}
	for errors.As(err, &e) {
		for k, v := range e.Metadata {
			if _, ok := out[k]; !ok {
				out[k] = v
			}
		}
		if e.Err == nil {
			break
		}
		err = e.Err
	}
	return out
}

// IsPermanent says that trying the same thing again cannot help until somebody changes something:
// the request, the configuration or the data. Everything else is transient.
func IsPermanent(err error) bool {
	switch {
	case errdefs.IsInvalidArgument(err),
		errdefs.IsPermissionDenied(err),
		errdefs.IsAlreadyExists(err),
		errdefs.IsNotImplemented(err),
		errdefs.IsOutOfRange(err),
		errdefs.IsFailedPrecondition(err),
		errdefs.IsNotFound(err):
		return true
	}
	return false
}
