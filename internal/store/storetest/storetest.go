// Package storetest is the suite that every store.Store passes.
//
// A backend's test calls Run with a function that opens an empty store. Two hooks let the suite see and do
// what the interface does not: change an object as a newer build would, and make a write fail.
package storetest

import (
	"context"
	"errors"
	"iter"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Backend is an empty store with its hooks.
type Backend struct {
	Store store.Store
	// EditRaw changes the stored JSON of a sandbox, as a build that knows more fields would.
	EditRaw func(key store.Key, edit func(object map[string]any))
	// KnownMetadata: the backend itself stores no fields of metadata that it does not know.
	KnownMetadata bool
	// Raw returns the stored JSON of a sandbox, decoded.
	Raw func(key store.Key) map[string]any
	// FailWrite makes the n-th write from now fail (1 is the next) and no other. nil when the backend
	// cannot do that.
	FailWrite func(n int)
}

// Run runs the suite. open is called for each test and registers its own clean-up.
func Run(t *testing.T, open func(t *testing.T) Backend) {
	t.Run("Sandboxes", func(t *testing.T) { runKind(t, open, sandboxes) })
	t.Run("Groups", func(t *testing.T) { runKind(t, open, groups) })
	t.Run("UnknownFields", func(t *testing.T) { testUnknownFields(t, open(t)) })
	t.Run("MissingMembers", func(t *testing.T) { testMissingMembers(t, open(t)) })
	t.Run("KindsAreApart", func(t *testing.T) { testKindsAreApart(t, open(t)) })
	t.Run("Epoch", func(t *testing.T) { testEpoch(t, open(t)) })
}

func runKind[T store.Object](t *testing.T, open func(t *testing.T) Backend, k subject[T]) {
	for _, test := range []struct {
		name string
		run  func(*fixture[T])
	}{
		{"Create", testCreate[T]},
		{"CreateNames", testCreateNames[T]},
		{"CopiesAreTheCallers", testCopies[T]},
		{"NotFound", testNotFound[T]},
		{"List", testList[T]},
		{"UpdateSpec", testUpdateSpec[T]},
		{"UpdateStatus", testUpdateStatus[T]},
		{"UpdateNothing", testUpdateNothing[T]},
		{"UpdateRefused", testUpdateRefused[T]},
		{"Preconditions", testPreconditions[T]},
		{"LostRace", testLostRace[T]},
		{"TooLarge", testTooLarge[T]},
		{"Delete", testDelete[T]},
		{"Finalizers", testFinalizers[T]},
		{"Concurrent", testConcurrent[T]},
		{"ConcurrentCreate", testConcurrentCreate[T]},
		{"FollowReplaysThenChanges", testFollowReplay[T]},
		{"FollowKeys", testFollowKeys[T]},
		{"FollowSlowReader", testFollowSlowReader[T]},
		{"FollowDeletions", testFollowDeletions[T]},
		{"FollowEnds", testFollowEnds[T]},
		{"FollowIsOrdered", testFollowOrder[T]},
		{"Faults", testFaults[T]},
		{"EndedContext", testEndedContext[T]},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := open(t)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			t.Cleanup(cancel)
			test.run(&fixture[T]{T: t, subject: k, backend: b, objects: k.of(b.Store), ctx: ctx})
		})
	}
}

// subject is what the suite must know of a kind: one field of its spec and one of its status.
type subject[T store.Object] struct {
	of               func(store.Store) store.Objects[T]
	empty            func() T
	kind             string
	notFound, exists fault.Reason
	spec             func(T) *string
	status           func(T) *int32
}

var sandboxes = subject[*v1alpha1.Sandbox]{
	of:       func(s store.Store) store.Objects[*v1alpha1.Sandbox] { return s.Sandboxes() },
	empty:    func() *v1alpha1.Sandbox { return &v1alpha1.Sandbox{} },
	kind:     "Sandbox",
	notFound: fault.SandboxNotFound,
	exists:   fault.SandboxExists,
	spec:     func(o *v1alpha1.Sandbox) *string { return &o.Spec.WorkingDir },
	status:   func(o *v1alpha1.Sandbox) *int32 { return &o.Status.Restarts },
}

var groups = subject[*v1alpha1.SandboxGroup]{
	of:       func(s store.Store) store.Objects[*v1alpha1.SandboxGroup] { return s.Groups() },
	empty:    func() *v1alpha1.SandboxGroup { return &v1alpha1.SandboxGroup{} },
	kind:     "SandboxGroup",
	notFound: fault.GroupNotFound,
	exists:   store.GroupExists,
	spec:     func(o *v1alpha1.SandboxGroup) *string { return &o.Spec.SchedulingPolicy.Strategy },
	status:   func(o *v1alpha1.SandboxGroup) *int32 { return &o.Status.Sandboxes },
}

// fixture is one test of one kind.
type fixture[T store.Object] struct {
	*testing.T
	subject[T]
	backend Backend
	objects store.Objects[T]
	ctx     context.Context
}

func key(name string) store.Key { return store.Key{Namespace: "default", Name: name} }

// object is one with this name, and its spec.
func (f *fixture[T]) object(k store.Key, spec string) T {
	o := f.empty()
	o.SetNamespace(k.Namespace)
	o.SetName(k.Name)
	*f.spec(o) = spec
	return o
}

func (f *fixture[T]) create(name string) T {
	f.Helper()
	return f.must(f.objects.Create(f.ctx, f.object(key(name), "first")))
}

func (f *fixture[T]) get(k store.Key) T {
	f.Helper()
	return f.must(f.objects.Get(f.ctx, k))
}

func (f *fixture[T]) must(o T, err error) T {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
	return o
}

// setSpec is a change for UpdateSpec; setStatus one for UpdateStatus.
func (f *fixture[T]) setSpec(v string) func(T) error {
	return func(o T) error { *f.spec(o) = v; return nil }
}

func (f *fixture[T]) setStatus(v int32) func(T) error {
	return func(o T) error { *f.status(o) = v; return nil }
}

func setFinalizers[T store.Object](finalizers ...string) func(T) error {
	return func(o T) error { o.SetFinalizers(finalizers); return nil }
}

// updateSpec and updateStatus update without preconditions.
func (f *fixture[T]) updateSpec(k store.Key, change func(T) error) T {
	f.Helper()
	return f.must(f.objects.UpdateSpec(f.ctx, k, store.Preconditions{}, change))
}

func (f *fixture[T]) updateStatus(k store.Key, change func(T) error) T {
	f.Helper()
	return f.must(f.objects.UpdateStatus(f.ctx, k, store.Preconditions{}, change))
}

// refused says that err has this kind and reason.
func refused(t testing.TB, err, kind error, reason fault.Reason) {
	t.Helper()
	if !errors.Is(err, kind) || fault.ReasonOf(err) != reason {
		t.Fatalf("error %v (reason %s); want kind %v, reason %s", err, fault.ReasonOf(err), kind, reason)
	}
}

// reader takes the events of a Follow one by one.
type reader[T store.Object] struct {
	*fixture[T]
	next func() (store.Event[T], bool)
}

// follow starts to follow; the subscription begins with the first event that is taken.
func (f *fixture[T]) follow(keys ...store.Key) reader[T] {
	next, stop := iter.Pull(f.objects.Follow(f.ctx, keys...))
	f.Cleanup(stop)
	return reader[T]{fixture: f, next: next}
}

// take is the next event.
func (r reader[T]) take() store.Event[T] {
	r.Helper()
	e, ok := r.next()
	if !ok {
		r.Fatal("the Follow ended; an event was expected")
	}
	return e
}

// expect takes an event of that type, of the object of that name (none when empty).
func (r reader[T]) expect(typ store.EventType, name string) T {
	r.Helper()
	e := r.take()
	if e.Type != typ || (name != "" && e.Object.GetName() != name) {
		r.Fatalf("got %s of %s; want %s of %s", e.Type, nameOf(e), typ, name)
	}
	return e.Object
}

func nameOf[T store.Object](e store.Event[T]) string {
	if e.Type == store.Synced {
		return "(nothing)"
	}
	return e.Object.GetName()
}

// sameState fails unless two objects are one state of one object.
func (f *fixture[T]) sameState(what string, got, want T) {
	f.Helper()
	if got.GetUID() != want.GetUID() || got.GetResourceVersion() != want.GetResourceVersion() ||
		*f.spec(got) != *f.spec(want) || *f.status(got) != *f.status(want) {
		f.Fatalf("%s is %s; want %s", what, f.describe(got), f.describe(want))
	}
}

func (f *fixture[T]) describe(o T) string {
	return o.GetName() + " uid=" + string(o.GetUID()) + " version=" + o.GetResourceVersion() + " spec=" + *f.spec(o)
}

// Namespaces are those of the objects that the suite makes. A backend that knows namespaces has them.
func Namespaces() []string {
	return []string{"default", "other", "a", "b", "a-b", "0", strings.Repeat("a", 63)}
}

func isZero(t metav1.Time) bool { return t.IsZero() }
