package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

func testCreate[T store.Object](f *fixture[T]) {
	wanted := f.object(key("a"), "first")
	wanted.SetLabels(map[string]string{"app.example/part": "x"})
	wanted.SetFinalizers([]string{"example.com/hold"})
	wanted.SetUID("chosen by the caller")
	wanted.SetGeneration(7)
	wanted.SetDeletionTimestamp(&metav1.Time{})
	*f.status(wanted) = 3

	made := f.must(f.objects.Create(f.ctx, wanted))
	if made.GetUID() == "" || made.GetUID() == wanted.GetUID() || made.GetResourceVersion() == "" ||
		made.GetGeneration() != 1 || isZero(made.GetCreationTimestamp()) || made.GetDeletionTimestamp() != nil {
		f.Errorf("the metadata is not the store's: %+v", made)
	}
	if *f.spec(made) != "first" || made.GetLabels()["app.example/part"] != "x" || len(made.GetFinalizers()) != 1 {
		f.Errorf("spec, labels or finalizers were not kept: %+v", made)
	}
	if *f.status(made) != 0 {
		f.Error("Create stored a status")
	}
	if gvk := made.GetObjectKind().GroupVersionKind(); gvk != v1alpha1.GroupVersion.WithKind(f.kind) {
		f.Errorf("the kind is %v", gvk)
	}
	f.sameState("Get", f.get(key("a")), made)
	f.sameState("GetByUID", f.must(f.objects.GetByUID(f.ctx, made.GetUID())), made)

	_, err := f.objects.Create(f.ctx, f.object(key("a"), "second"))
	refused(f, err, errdefs.ErrAlreadyExists, f.exists)
	f.sameState("after a refused Create, Get", f.get(key("a")), made)

	other := f.must(f.objects.Create(f.ctx, f.object(store.Key{Namespace: "other", Name: "a"}, "")))
	if other.GetUID() == made.GetUID() {
		f.Error("two objects have one UID")
	}
}

func testCreateNames[T store.Object](f *fixture[T]) {
	for _, k := range []store.Key{
		{},
		{Namespace: "default"},
		{Name: "a"},
		{Namespace: "default", Name: "A"},
		{Namespace: "default", Name: "a_b"},
		{Namespace: "default", Name: "a/b"},
		{Namespace: "default", Name: "-a"},
		{Namespace: "default", Name: ".."},
		{Namespace: "default", Name: "a\x00"},
		{Namespace: "default", Name: strings.Repeat("a", 254)},
		{Namespace: "a.b", Name: "a"},
		{Namespace: strings.Repeat("a", 64), Name: "a"},
	} {
		_, err := f.objects.Create(f.ctx, f.object(k, ""))
		if !errors.Is(err, errdefs.ErrInvalidArgument) || fault.ReasonOf(err) != fault.InvalidName {
			f.Errorf("%q: error %v; want an invalid name", k, err)
		}
	}
	for _, k := range []store.Key{
		{Namespace: "0", Name: "a.b-c.0"},
		{Namespace: strings.Repeat("a", 63), Name: strings.Repeat("a", 253)},
	} {
		if _, err := f.objects.Create(f.ctx, f.object(k, "")); err != nil {
			f.Errorf("%q: %v", k, err)
		}
	}
}

// A caller can do what it likes with what it gave and what it got.
func testCopies[T store.Object](f *fixture[T]) {
	given := f.object(key("a"), "first")
	given.SetLabels(map[string]string{"l": "1"})
	made := f.must(f.objects.Create(f.ctx, given))
	spoil := func(o T) {
		o.GetLabels()["l"] = "spoilt"
		*f.spec(o) = "spoilt"
	}
	check := func(after string) {
		f.Helper()
		got := f.get(key("a"))
		if got.GetLabels()["l"] != "1" || *f.spec(got) != "first" {
			f.Fatalf("%s, the stored object is spoilt: %+v", after, got)
		}
	}
	spoil(given)
	spoil(made)
	check("after Create")
	spoil(f.get(key("a")))
	check("after Get")
	spoil(f.must(f.objects.GetByUID(f.ctx, made.GetUID())))
	check("after GetByUID")
	page, err := f.objects.List(f.ctx, store.ListOptions{})
	if err != nil {
		f.Fatal(err)
	}
	spoil(page.Items[0])
	check("after List")
	spoil(f.follow().expect(store.Changed, "a"))
	check("after Follow")

	var kept T
	f.updateSpec(key("a"), func(o T) error { kept = o; o.SetAnnotations(map[string]string{"a": "1"}); return nil })
	spoil(kept)
	kept.GetAnnotations()["a"] = "spoilt"
	check("after UpdateSpec")
	if got := f.get(key("a")).GetAnnotations()["a"]; got != "1" {
		f.Fatalf("after UpdateSpec, an annotation is %q", got)
	}
	failed := errors.New("no")
	_, err = f.objects.UpdateSpec(f.ctx, key("a"), store.Preconditions{}, func(o T) error { spoil(o); return failed })
	if !errors.Is(err, failed) {
		f.Fatal(err)
	}
	check("after a refused UpdateSpec")
}

func testNotFound[T store.Object](f *fixture[T]) {
	f.create("a")
	k := key("missing")
	none := store.Preconditions{}
	never := func(T) error { f.Error("the change of a missing object was called"); return nil }
	_, err := f.objects.Get(f.ctx, k)
	refused(f, err, errdefs.ErrNotFound, f.notFound)
	_, err = f.objects.Get(f.ctx, store.Key{Namespace: "other", Name: "a"})
	refused(f, err, errdefs.ErrNotFound, f.notFound)
	_, err = f.objects.Get(f.ctx, store.Key{})
	refused(f, err, errdefs.ErrNotFound, f.notFound)
	_, err = f.objects.GetByUID(f.ctx, "missing")
	refused(f, err, errdefs.ErrNotFound, f.notFound)
	_, err = f.objects.GetByUID(f.ctx, "")
	refused(f, err, errdefs.ErrNotFound, f.notFound)
	_, err = f.objects.UpdateSpec(f.ctx, k, none, never)
	refused(f, err, errdefs.ErrNotFound, f.notFound)
	_, err = f.objects.UpdateStatus(f.ctx, k, none, never)
	refused(f, err, errdefs.ErrNotFound, f.notFound)
	refused(f, f.objects.Delete(f.ctx, k, none), errdefs.ErrNotFound, f.notFound)
}

func testList[T store.Object](f *fixture[T]) {
	list := func(options store.ListOptions) (names []string, token string) {
		f.Helper()
		page, err := f.objects.List(f.ctx, options)
		if err != nil {
			f.Fatal(err)
		}
		for _, o := range page.Items {
			names = append(names, store.KeyOf(o).String())
		}
		return names, page.Continue
	}
	equal := func(got []string, want ...string) {
		f.Helper()
		if !slices.Equal(got, want) {
			f.Errorf("got %v; want %v", got, want)
		}
	}
	got, token := list(store.ListOptions{Limit: 2})
	equal(got)
	if token != "" {
		f.Error("an empty list is continued")
	}
	for _, k := range []store.Key{{Namespace: "b", Name: "1"}, {Namespace: "a", Name: "2"}, {Namespace: "a", Name: "10"}, {Namespace: "a-b", Name: "0"}} {
		o := f.object(k, "")
		o.SetLabels(map[string]string{"namespace": k.Namespace})
		f.must(f.objects.Create(f.ctx, o))
	}
	got, _ = list(store.ListOptions{})
	equal(got, "a/10", "a/2", "a-b/0", "b/1")
	got, _ = list(store.ListOptions{Namespace: "a"})
	equal(got, "a/10", "a/2")
	got, _ = list(store.ListOptions{Labels: labels.SelectorFromSet(labels.Set{"namespace": "b"})})
	equal(got, "b/1")
	got, token = list(store.ListOptions{Limit: 3})
	equal(got, "a/10", "a/2", "a-b/0")
	// The object that a page ended with may go before the next is asked for.
	if err := f.objects.Delete(f.ctx, store.Key{Namespace: "a-b", Name: "0"}, store.Preconditions{}); err != nil {
		f.Fatal(err)
	}
	got, token = list(store.ListOptions{Limit: 3, Continue: token})
	equal(got, "b/1")
	if token != "" {
		f.Error("the last page is continued")
	}
	if _, token = list(store.ListOptions{Limit: 3}); token != "" {
		f.Error("a page that has all is continued")
	}
	for _, bad := range []string{"x", "!!", "YQ"} {
		_, err := f.objects.List(f.ctx, store.ListOptions{Continue: bad})
		refused(f, err, errdefs.ErrInvalidArgument, fault.InvalidRequest)
	}
}

// meddle changes what only the store may change.
func meddle[T store.Object](o T) {
	o.SetName("renamed")
	o.SetNamespace("moved")
	o.SetUID("forged")
	o.SetGeneration(99)
	o.SetResourceVersion("99")
	o.SetCreationTimestamp(metav1.Time{})
	o.SetDeletionTimestamp(&metav1.Time{})
	o.GetObjectKind().SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("Forged"))
}

func (f *fixture[T]) sameIdentity(got, want T) {
	f.Helper()
	if store.KeyOf(got) != store.KeyOf(want) || got.GetUID() != want.GetUID() ||
		got.GetCreationTimestamp() != want.GetCreationTimestamp() || got.GetDeletionTimestamp() != nil ||
		got.GetObjectKind().GroupVersionKind() != want.GetObjectKind().GroupVersionKind() {
		f.Errorf("an update changed what is the store's: %+v", got)
	}
}

func testUpdateSpec[T store.Object](f *fixture[T]) {
	made := f.create("a")
	f.updateStatus(key("a"), f.setStatus(5))
	updated := f.updateSpec(key("a"), func(o T) error {
		meddle(o)
		*f.status(o) = 6
		*f.spec(o) = "second"
		return nil
	})
	f.sameIdentity(updated, made)
	if *f.spec(updated) != "second" || *f.status(updated) != 5 || updated.GetGeneration() != 2 {
		f.Errorf("spec %q, status %d, generation %d; want second, 5, 2", *f.spec(updated), *f.status(updated), updated.GetGeneration())
	}
	f.sameState("Get", f.get(key("a")), updated)

	labelled := f.updateSpec(key("a"), func(o T) error {
		o.SetLabels(map[string]string{"sandbox.flux.io/x": "1"})
		o.SetAnnotations(map[string]string{"a.b/c": "2"})
		o.SetFinalizers([]string{"example.com/hold"})
		return nil
	})
	if labelled.GetGeneration() != 2 || labelled.GetResourceVersion() == updated.GetResourceVersion() {
		f.Errorf("a change of metadata gave generation %d, version %s", labelled.GetGeneration(), labelled.GetResourceVersion())
	}
	got := f.get(key("a"))
	if got.GetLabels()["sandbox.flux.io/x"] != "1" || got.GetAnnotations()["a.b/c"] != "2" || len(got.GetFinalizers()) != 1 {
		f.Errorf("a change of metadata was not kept: %+v", got)
	}
	bare := f.updateSpec(key("a"), func(o T) error {
		o.SetLabels(nil)
		o.SetAnnotations(map[string]string{})
		o.SetFinalizers(nil)
		return nil
	})
	if len(bare.GetLabels())+len(bare.GetAnnotations())+len(bare.GetFinalizers()) != 0 {
		f.Errorf("metadata was not removed: %+v", bare)
	}
}

func testUpdateStatus[T store.Object](f *fixture[T]) {
	made := f.create("a")
	updated := f.updateStatus(key("a"), func(o T) error {
		meddle(o)
		o.SetLabels(map[string]string{"l": "1"})
		o.SetFinalizers([]string{"example.com/hold"})
		*f.spec(o) = "second"
		*f.status(o) = 5
		return nil
	})
	f.sameIdentity(updated, made)
	if *f.spec(updated) != "first" || *f.status(updated) != 5 || updated.GetGeneration() != 1 ||
		len(updated.GetLabels()) != 0 || len(updated.GetFinalizers()) != 0 {
		f.Errorf("a write of the status changed more than that: %+v", updated)
	}
	if updated.GetResourceVersion() == made.GetResourceVersion() {
		f.Error("the resourceVersion did not change")
	}
	f.sameState("Get", f.get(key("a")), updated)
}

// What changes nothing is not written, and nobody hears of it.
func testUpdateNothing[T store.Object](f *fixture[T]) {
	made := f.create("a")
	r := f.follow()
	r.expect(store.Changed, "a")
	r.expect(store.Synced, "")
	same := f.updateSpec(key("a"), func(o T) error { meddle(o); *f.status(o) = 9; return f.setSpec("first")(o) })
	f.sameState("an update of nothing", same, made)
	same = f.updateStatus(key("a"), func(o T) error { meddle(o); *f.spec(o) = "ignored"; return nil })
	f.sameState("an update of nothing", same, made)
	f.sameState("Get", f.get(key("a")), made)
	changed := f.updateSpec(key("a"), f.setSpec("second"))
	f.sameState("the next event", r.expect(store.Changed, "a"), changed)
}

func testUpdateRefused[T store.Object](f *fixture[T]) {
	made := f.create("a")
	no := errors.New("the caller's own error")
	spoil := func(o T) error { *f.spec(o) = "spoilt"; *f.status(o) = 9; return no }
	_, err := f.objects.UpdateSpec(f.ctx, key("a"), store.Preconditions{}, spoil)
	if err != no {
		f.Errorf("UpdateSpec returned %v", err)
	}
	_, err = f.objects.UpdateStatus(f.ctx, key("a"), store.Preconditions{}, spoil)
	if err != no {
		f.Errorf("UpdateStatus returned %v", err)
	}
	f.sameState("Get", f.get(key("a")), made)
}

func testPreconditions[T store.Object](f *fixture[T]) {
	old := f.create("a")
	now := f.updateStatus(key("a"), f.setStatus(1))
	for _, c := range []struct {
		pre    store.Preconditions
		kind   error
		reason fault.Reason
	}{
		{store.Preconditions{UID: "other"}, errdefs.ErrNotFound, f.notFound},
		{store.Preconditions{ResourceVersion: old.GetResourceVersion()}, errdefs.ErrConflict, fault.Conflict},
		{store.Preconditions{UID: now.GetUID(), ResourceVersion: old.GetResourceVersion()}, errdefs.ErrConflict, fault.Conflict},
		{store.Preconditions{UID: "other", ResourceVersion: now.GetResourceVersion()}, errdefs.ErrNotFound, f.notFound},
	} {
		_, err := f.objects.UpdateSpec(f.ctx, key("a"), c.pre, f.setSpec("second"))
		refused(f, err, c.kind, c.reason)
		_, err = f.objects.UpdateStatus(f.ctx, key("a"), c.pre, f.setStatus(2))
		refused(f, err, c.kind, c.reason)
		refused(f, f.objects.Delete(f.ctx, key("a"), c.pre), c.kind, c.reason)
		f.sameState("Get", f.get(key("a")), now)
	}
	holds := func(o T) store.Preconditions {
		return store.Preconditions{UID: o.GetUID(), ResourceVersion: o.GetResourceVersion()}
	}
	now = f.must(f.objects.UpdateSpec(f.ctx, key("a"), holds(now), f.setSpec("second")))
	now = f.must(f.objects.UpdateStatus(f.ctx, key("a"), holds(now), f.setStatus(2)))
	if err := f.objects.Delete(f.ctx, key("a"), holds(now)); err != nil {
		f.Error(err)
	}
}

// A write that comes between reading and writing makes the update read and compute again; with a version
// as its precondition it fails.
func testLostRace[T store.Object](f *fixture[T]) {
	f.create("a")
	calls := 0
	meet := func() {
		if calls++; calls == 1 {
			done := make(chan error)
			go func() {
				_, err := f.objects.UpdateStatus(f.ctx, key("a"), store.Preconditions{}, f.setStatus(5))
				done <- err
			}()
			if err := <-done; err != nil {
				f.Error(err)
			}
		}
	}
	got := f.updateSpec(key("a"), func(o T) error {
		meet()
		o.SetLabels(map[string]string{"seen": fmt.Sprint(*f.status(o))})
		return nil
	})
	if calls != 2 || got.GetLabels()["seen"] != "5" || *f.status(got) != 5 {
		f.Errorf("after %d calls, seen is %q and the status %d; want 2, 5, 5", calls, got.GetLabels()["seen"], *f.status(got))
	}
	calls = 0
	made := f.updateStatus(key("a"), f.setStatus(1))
	pre := store.Preconditions{ResourceVersion: made.GetResourceVersion()}
	_, err := f.objects.UpdateSpec(f.ctx, key("a"), pre, func(o T) error { meet(); return f.setSpec("second")(o) })
	refused(f, err, errdefs.ErrConflict, fault.Conflict)
	if calls != 1 {
		f.Errorf("an update of a given version was computed %d times", calls)
	}
}

func testTooLarge[T store.Object](f *fixture[T]) {
	large := strings.Repeat("x", store.MaxObjectBytes)
	_, err := f.objects.Create(f.ctx, f.object(key("large"), large))
	refused(f, err, errdefs.ErrInvalidArgument, store.TooLarge)
	made := f.create("a")
	_, err = f.objects.UpdateSpec(f.ctx, key("a"), store.Preconditions{}, f.setSpec(large))
	refused(f, err, errdefs.ErrInvalidArgument, store.TooLarge)
	f.sameState("Get", f.get(key("a")), made)
}

func testDelete[T store.Object](f *fixture[T]) {
	made := f.create("a")
	if err := f.objects.Delete(f.ctx, key("a"), store.Preconditions{}); err != nil {
		f.Fatal(err)
	}
	_, err := f.objects.Get(f.ctx, key("a"))
	refused(f, err, errdefs.ErrNotFound, f.notFound)
	_, err = f.objects.GetByUID(f.ctx, made.GetUID())
	refused(f, err, errdefs.ErrNotFound, f.notFound)

	again := f.create("a")
	if again.GetUID() == made.GetUID() || again.GetResourceVersion() == made.GetResourceVersion() {
		f.Error("a new object of the same name has the UID or version of the old one")
	}
	_, err = f.objects.UpdateSpec(f.ctx, key("a"), store.Preconditions{UID: made.GetUID()}, f.setSpec("second"))
	refused(f, err, errdefs.ErrNotFound, f.notFound)
}

func testFinalizers[T store.Object](f *fixture[T]) {
	o := f.object(key("a"), "first")
	o.SetFinalizers([]string{"example.com/one", "example.com/two"})
	made := f.must(f.objects.Create(f.ctx, o))
	if err := f.objects.Delete(f.ctx, key("a"), store.Preconditions{UID: made.GetUID()}); err != nil {
		f.Fatal(err)
	}
	deleting := f.get(key("a"))
	if deleting.GetDeletionTimestamp().IsZero() || deleting.GetResourceVersion() == made.GetResourceVersion() {
		f.Fatalf("Delete did not mark the object: %+v", deleting)
	}
	if err := f.objects.Delete(f.ctx, key("a"), store.Preconditions{}); err != nil {
		f.Fatal(err)
	}
	f.sameState("after a second Delete, Get", f.get(key("a")), deleting)
	_, err := f.objects.Create(f.ctx, f.object(key("a"), ""))
	refused(f, err, errdefs.ErrAlreadyExists, f.exists)

	_, err = f.objects.UpdateSpec(f.ctx, key("a"), store.Preconditions{}, setFinalizers[T]("example.com/one", "example.com/new"))
	refused(f, err, errdefs.ErrFailedPrecondition, fault.SandboxTerminating)
	one := f.updateSpec(key("a"), setFinalizers[T]("example.com/two"))
	f.sameState("Get", f.get(key("a")), one)
	// An object that is being deleted can still be changed.
	f.updateStatus(key("a"), f.setStatus(1))
	f.updateSpec(key("a"), f.setSpec("second"))

	last := f.updateSpec(key("a"), func(o T) error { *f.spec(o) = "last"; return setFinalizers[T]()(o) })
	if last.GetUID() != made.GetUID() || *f.spec(last) != "last" || len(last.GetFinalizers()) != 0 || last.GetDeletionTimestamp() == nil {
		f.Errorf("the last state is %+v", last)
	}
	_, err = f.objects.Get(f.ctx, key("a"))
	refused(f, err, errdefs.ErrNotFound, f.notFound)
	f.create("a")
}

// The kinds have names and UIDs of their own.
func testKindsAreApart(t *testing.T, b Backend) {
	ctx := context.Background()
	s := sandboxes.empty()
	s.Namespace, s.Name = "default", "a"
	g := groups.empty()
	g.Namespace, g.Name = "default", "a"
	s, err := b.Store.Sandboxes().Create(ctx, s)
	if err != nil {
		t.Fatal(err)
	}
	if g, err = b.Store.Groups().Create(ctx, g); err != nil {
		t.Fatal(err)
	}
	_, err = b.Store.Sandboxes().GetByUID(ctx, g.UID)
	refused(t, err, errdefs.ErrNotFound, fault.SandboxNotFound)
	if err := b.Store.Groups().Delete(ctx, key("a"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Store.Sandboxes().GetByUID(ctx, s.UID); err != nil {
		t.Fatal(err)
	}
}

func testEpoch(t *testing.T, b Backend) {
	last := int64(0)
	for range 3 {
		e, err := b.Store.NextEpoch(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if e <= last {
			t.Fatalf("epoch %d after %d", e, last)
		}
		last = e
	}
	if b.FailWrite == nil {
		return
	}
	b.FailWrite(1)
	if e, err := b.Store.NextEpoch(context.Background()); err == nil {
		t.Fatalf("epoch %d was not written, and no error came", e)
	}
	if e, err := b.Store.NextEpoch(context.Background()); err != nil || e <= last {
		t.Fatalf("epoch %d after %d: %v", e, last, err)
	}
}
