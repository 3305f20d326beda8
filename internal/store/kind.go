package store

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Reasons that only stores give.
const (
	// GroupExists: a group of that name exists.
	GroupExists fault.Reason = "GROUP_EXISTS"
	// Unavailable: the store could not write, or is closed. What was to be written was not.
	Unavailable fault.Reason = "STORE_UNAVAILABLE"
	// TooLarge: an object is larger than Kubernetes would take.
	TooLarge fault.Reason = "OBJECT_TOO_LARGE"
	// NoNamespace: the Namespace does not exist, or is being deleted.
	NoNamespace fault.Reason = "NAMESPACE_NOT_FOUND"
	// SetNotFound and ClaimNotFound: there is no SandboxSet, no SandboxClaim of that name; SetExists and ClaimExists: there
	// is one.
	SetNotFound   fault.Reason = "SET_NOT_FOUND"
	ClaimNotFound fault.Reason = "SANDBOX_CLAIM_NOT_FOUND"
	SetExists     fault.Reason = "SET_EXISTS"
	ClaimExists   fault.Reason = "SANDBOX_CLAIM_EXISTS"
	// Forbidden: the store may not do that, by the rights it was given or by an admission policy.
	Forbidden fault.Reason = "FORBIDDEN"
)

// MaxObjectBytes is the most that the JSON of an object may have: what etcd takes in one request by
// default (--max-request-bytes), so that whatever is stored here can be stored there.
const MaxObjectBytes = 3 << 19

// Kind makes the errors that speak of one kind of objects. Backends share it, so that a caller cannot
// tell them apart.
type Kind struct {
	noun             string
	notFound, exists fault.Reason
}

// The kinds.
var (
	SandboxKind = Kind{noun: "sandbox", notFound: fault.SandboxNotFound, exists: fault.SandboxExists}
	GroupKind   = Kind{noun: "sandbox group", notFound: fault.GroupNotFound, exists: GroupExists}
	SetKind     = Kind{noun: "sandbox set", notFound: SetNotFound, exists: SetExists}
	ClaimKind   = Kind{noun: "sandbox claim", notFound: ClaimNotFound, exists: ClaimExists}
)

// String is the kind's name for people.
func (k Kind) String() string { return k.noun }

// NotFound says that there is no object of that name.
func (k Kind) NotFound(key Key) error {
	return fault.New(errdefs.ErrNotFound, k.notFound, "%s %s does not exist", k.noun, key)
}

// NotFoundUID says that there is no object of that UID.
func (k Kind) NotFoundUID(uid types.UID) error {
	return fault.New(errdefs.ErrNotFound, k.notFound, "no %s has the UID %q", k.noun, uid)
}

// Replaced says that the object of that name is not the one that was meant.
func (k Kind) Replaced(key Key, want, have types.UID) error {
	return fault.New(errdefs.ErrNotFound, k.notFound,
		"%s %s with the UID %q is gone; the one of that name now has the UID %q", k.noun, key, want, have)
}

// Exists says that an object of that name exists.
func (k Kind) Exists(key Key) error {
	return fault.New(errdefs.ErrAlreadyExists, k.exists, "%s %s exists already", k.noun, key)
}

// Changed says that the object is no longer at the version that a precondition asked for.
func (k Kind) Changed(key Key, want, have string) error {
	return fault.New(errdefs.ErrConflict, fault.Conflict,
		"%s %s is at version %s, not at %s: read it again and repeat the change", k.noun, key, have, want)
}

// Contended says that an update gave up as others kept changing the object.
func (k Kind) Contended(key Key, attempts int) error {
	return fault.New(errdefs.ErrConflict, fault.Conflict,
		"%s %s was changed by others during each of %d attempts to change it: try again", k.noun, key, attempts)
}

// Terminating says that a finalizer was added to an object that is being deleted.
func (k Kind) Terminating(key Key, finalizer string) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.SandboxTerminating,
		"%s %s is being deleted: the finalizer %q cannot be added to it", k.noun, key, finalizer)
}

// CheckSize says whether the JSON of an object is small enough to be stored.
func (k Kind) CheckSize(key Key, bytes int) error {
	if bytes <= MaxObjectBytes {
		return nil
	}
	return fault.New(errdefs.ErrInvalidArgument, TooLarge,
		"%s %s would have %d bytes, and %d is the most: shorten its annotations, environment or messages",
		k.noun, key, bytes, MaxObjectBytes)
}

// CheckKey says whether Kubernetes takes the namespace (a DNS label) and the name (a DNS subdomain).
func (k Kind) CheckKey(key Key) error {
	if problems := validation.IsDNS1123Label(key.Namespace); len(problems) > 0 {
		return k.badName("namespace", key.Namespace, problems)
	}
	if problems := validation.IsDNS1123Subdomain(key.Name); len(problems) > 0 {
		return k.badName("name", key.Name, problems)
	}
	return nil
}

func (k Kind) badName(what, value string, problems []string) error {
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidName,
		"%s %q of the %s: %s", what, value, k.noun, strings.Join(problems, "; "))
}

// BadContinue says that a ListOptions.Continue is none that a List returned.
func BadContinue(token string) error {
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest,
		"%q is not the continuation of a list: start the list again", token)
}

// OpenOutcome says that a context ended while a write was under way. cause is the context's error.
func OpenOutcome(what string, cause error) error {
	return fmt.Errorf("%s: gave up waiting, the write may still take effect: %w", what, cause)
}
