package store

import (
	"context"
	"iter"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// Store keeps the objects of one installation. All its methods may be called from any goroutine.
type Store interface {
	Sandboxes() Sandboxes
	Groups() Groups
	// NextEpoch counts up a stored number and returns it: greater than 0, and greater than everything
	// that it ever returned, also before a restart. A leader calls it once, when it takes office, and
	// agents refuse commands of an older epoch. Numbers may be skipped.
	NextEpoch(ctx context.Context) (int64, error)
}

// Sandboxes are the Sandbox objects.
type Sandboxes = Objects[*v1alpha1.Sandbox]

// Groups are the SandboxGroup objects.
type Groups = Objects[*v1alpha1.SandboxGroup]

// Object is what a Store can keep: a pointer to a Kubernetes API type.
type Object interface {
	metav1.Object
	runtime.Object
}

// Key names an object of one kind.
type Key struct{ Namespace, Name string }

// KeyOf is the key of an object.
func KeyOf(o metav1.Object) Key { return Key{Namespace: o.GetNamespace(), Name: o.GetName()} }

// String is namespace/name.
func (k Key) String() string { return k.Namespace + "/" + k.Name }

// Objects are the objects of one kind.
type Objects[T Object] interface {
	Reader[T]
	Follower[T]
	Writer[T]
}

// Reader reads objects.
type Reader[T Object] interface {
	// Get returns the object of that name. Errors: ErrNotFound.
	Get(ctx context.Context, key Key) (T, error)
	// GetByUID returns the object of that UID. Errors: ErrNotFound.
	GetByUID(ctx context.Context, uid types.UID) (T, error)
	// List returns objects ordered by namespace and name. Pages are not a snapshot: an object that comes
	// or goes between two pages may be missed, one that stays is returned exactly once.
	// Errors: ErrInvalidArgument for a Continue that no List returned.
	List(ctx context.Context, options ListOptions) (Page[T], error)
}

// ListOptions choose the objects of a List. The zero value means all.
type ListOptions struct {
	// Namespace restricts the list to one namespace; all when empty.
	Namespace string
	// Labels restricts it to objects whose labels match; all when nil.
	Labels labels.Selector
	// Limit is the most objects to return; no bound when 0.
	Limit int
	// Continue is that of the page before; the first page when empty.
	Continue string
}

// Page is a part of a list.
type Page[T Object] struct {
	Items []T
	// Continue asks for the next page; empty on the last.
	Continue string
}

// Follower follows objects as they change.
type Follower[T Object] interface {
	// Follow yields every object that exists (Changed), then Synced once, then what changes, until ctx
	// ends, the loop is left, or the backend is closed:
	//
	//	for event := range sandboxes.Follow(ctx) { … }
	//
	// With keys it follows only the objects of these names, at a cost that does not grow with the number
	// of others. Each range over it follows anew.
	//
	// It is level-triggered. A reader that is slow gets the latest state of each object and none in
	// between; it never holds up a writer, and what waits for it is bounded by the objects that exist or
	// that it has seen. The states of one object (one UID) come in the order in which they were written.
	// The deletion of an object that the reader has seen is always yielded, and before another object of
	// the same name.
	Follow(ctx context.Context, keys ...Key) iter.Seq[Event[T]]
}

// EventType says what an Event tells.
type EventType int

// The event types.
const (
	// Changed: Object exists, and this is its state.
	Changed EventType = iota + 1
	// Deleted: Object is gone, and this was its last state. What the removal of its last finalizer changed besides may
	// be missing in it, as such a write need not be stored.
	Deleted
	// Synced: every object that existed when Follow began was yielded. Object is nil.
	Synced
)

func (t EventType) String() string {
	switch t {
	case Changed:
		return "Changed"
	case Deleted:
		return "Deleted"
	case Synced:
		return "Synced"
	}
	return "unknown"
}

// Event is one step of a Follow.
type Event[T Object] struct {
	Type   EventType
	Object T
}

// Preconditions must hold of an object for a write to happen. The zero value asks for nothing.
type Preconditions struct {
	// UID is that of the object that is meant. When another has its name by now, the write fails with
	// ErrNotFound, as the object that was meant is gone.
	UID types.UID
	// ResourceVersion is the version that must be the present one; else the write fails with ErrConflict
	// and is not tried again.
	ResourceVersion string
}

// Writer writes objects.
//
// The functions given to UpdateSpec and UpdateStatus get a copy of the object as it is at that moment
// and change it. They may be called several times, so they have no other effect, and they do not call
// the store. An error of theirs ends the update, with nothing written, and is returned as it is. What an
// update changes nothing of is not written: the object keeps its resourceVersion and nobody hears of it.
type Writer[T Object] interface {
	// Create makes the object and returns it with uid, creationTimestamp, resourceVersion, and
	// generation 1. The status of the argument is not stored.
	// Errors: ErrAlreadyExists; ErrInvalidArgument, reason INVALID_NAME.
	Create(ctx context.Context, object T) (T, error)
	// UpdateSpec changes the spec, labels, annotations, finalizers and owner references; other changes that
	// the function makes are ignored. The generation grows by one when the spec changed. Removing the last
	// finalizer of an object that is being deleted removes the object, and its last state is returned.
	// Errors: ErrNotFound; ErrConflict, reason CONFLICT; ErrFailedPrecondition when a finalizer is added to
	// an object that is being deleted.
	UpdateSpec(ctx context.Context, key Key, pre Preconditions, change func(T) error) (T, error)
	// UpdateStatus changes the status; other changes that the function makes are ignored.
	// Errors: ErrNotFound; ErrConflict, reason CONFLICT.
	UpdateStatus(ctx context.Context, key Key, pre Preconditions, change func(T) error) (T, error)
	// Delete removes the object. One that has finalizers is marked instead: it gets a deletionTimestamp
	// (and, as in Kubernetes, the next generation), and goes when its last finalizer is removed. Deleting
	// it again changes nothing and is no error.
	// Errors: ErrNotFound; ErrConflict, reason CONFLICT.
	Delete(ctx context.Context, key Key, pre Preconditions) error
}
