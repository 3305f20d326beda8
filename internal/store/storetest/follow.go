package storetest

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

func testFollowReplay[T store.Object](f *fixture[T]) {
	want := map[string]T{"a": f.create("a"), "b": f.create("b")}
	r := f.follow()
	for range 2 {
		got := r.expect(store.Changed, "")
		f.sameState("the replay", got, want[got.GetName()])
		delete(want, got.GetName())
	}
	r.expect(store.Synced, "")
	c := f.create("c")
	f.sameState("the event", r.expect(store.Changed, "c"), c)
	c = f.updateSpec(key("c"), f.setSpec("second"))
	f.sameState("the event", r.expect(store.Changed, "c"), c)
	c = f.updateStatus(key("c"), f.setStatus(1))
	f.sameState("the event", r.expect(store.Changed, "c"), c)
	c = f.updateSpec(key("c"), setFinalizers[T]("example.com/hold"))
	f.sameState("the event", r.expect(store.Changed, "c"), c)
	if err := f.objects.Delete(f.ctx, key("c"), store.Preconditions{}); err != nil {
		f.Fatal(err)
	}
	if got := r.expect(store.Changed, "c"); got.GetDeletionTimestamp() == nil {
		f.Error("the event of a Delete has no deletionTimestamp")
	}
	last := f.updateSpec(key("c"), setFinalizers[T]())
	if got := r.expect(store.Deleted, "c"); got.GetUID() != last.GetUID() || got.GetDeletionTimestamp() == nil {
		f.Errorf("the last state is %s", f.describe(got))
	}

	empty := f.follow(key("nobody"))
	empty.expect(store.Synced, "")
}

func testFollowKeys[T store.Object](f *fixture[T]) {
	f.create("a")
	f.create("b")
	f.create("c")
	r := f.follow(key("a"), key("later"), key("b"))
	r.expect(store.Changed, "")
	r.expect(store.Changed, "")
	r.expect(store.Synced, "")
	f.updateSpec(key("c"), f.setSpec("second"))
	f.must(f.objects.Create(f.ctx, f.object(store.Key{Namespace: "other", Name: "a"}, "")))
	f.create("later")
	r.expect(store.Changed, "later")
	f.updateSpec(key("b"), f.setSpec("second"))
	r.expect(store.Changed, "b")
	if err := f.objects.Delete(f.ctx, key("a"), store.Preconditions{}); err != nil {
		f.Fatal(err)
	}
	r.expect(store.Deleted, "a")
}

// A reader that is slow gets the latest state of each object, and holds nobody up.
func testFollowSlowReader[T store.Object](f *fixture[T]) {
	f.create("a")
	f.create("b")
	r := f.follow()
	first := r.expect(store.Changed, "")
	var other string
	if other = "a"; first.GetName() == "a" {
		other = "b"
	}
	// "other" waits in the replay while it is changed many times.
	for i := range 50 {
		f.updateStatus(key(other), f.setStatus(int32(i+1)))
	}
	f.sameState("the replay of a changed object", r.expect(store.Changed, other), f.get(key(other)))
	r.expect(store.Synced, "")

	for i := range 50 {
		f.updateStatus(key("a"), f.setStatus(int32(i+100)))
		f.updateSpec(key("b"), f.setSpec(strconv.Itoa(i)))
	}
	f.create("c")
	f.sameState("the one event of a", r.expect(store.Changed, "a"), f.get(key("a")))
	f.sameState("the one event of b", r.expect(store.Changed, "b"), f.get(key("b")))
	r.expect(store.Changed, "c")
}

func testFollowDeletions[T store.Object](f *fixture[T]) {
	remove := func(name string) {
		f.Helper()
		if err := f.objects.Delete(f.ctx, key(name), store.Preconditions{}); err != nil {
			f.Fatal(err)
		}
	}
	f.create("a")
	r := f.follow()
	r.expect(store.Changed, "a")
	r.expect(store.Synced, "")

	// A change and a deletion that both wait become one event, with the last state; another object of that
	// name comes after it.
	a := f.updateSpec(key("a"), f.setSpec("last"))
	remove("a")
	second := f.create("a")
	gone := r.expect(store.Deleted, "a")
	if gone.GetUID() != a.GetUID() || *f.spec(gone) != "last" {
		f.Errorf("the last state of a is %s", f.describe(gone))
	}
	f.sameState("the second a", r.expect(store.Changed, "a"), second)

	// What came and went unseen leaves nothing behind.
	for range 20 {
		f.create("flash")
		remove("flash")
	}
	f.create("b")
	r.expect(store.Changed, "b")

	// Also what went during the replay.
	late := f.follow()
	seen := late.expect(store.Changed, "").GetName()
	unseen := map[string]string{"a": "b", "b": "a"}[seen]
	remove(unseen)
	late.expect(store.Synced, "")
	remove(seen)
	late.expect(store.Deleted, seen)
}

func testFollowEnds[T store.Object](f *fixture[T]) {
	f.create("a")
	ctx, cancel := context.WithCancel(f.ctx)
	defer cancel()
	events := 0
	for e := range f.objects.Follow(ctx) {
		if events++; e.Type == store.Synced {
			cancel() // the loop ends although nothing happens any more
		}
	}
	if events != 2 {
		f.Errorf("%d events; want 2", events)
	}
	for range f.objects.Follow(ctx) {
		f.Error("an ended context yields events")
	}
	seq := f.objects.Follow(f.ctx)
	for range 2 { // each range follows anew
		for e := range seq {
			if e.Type != store.Changed {
				f.Errorf("the first event is %s", e.Type)
			}
			break
		}
	}
}

// Readers that follow while others write see every object's states in order, and all of the last ones.
func testFollowOrder[T store.Object](f *fixture[T]) {
	const objects, writes, readers = 5, 30, 3
	var reading, writing sync.WaitGroup
	for range readers {
		reading.Go(func() {
			versions := map[string]uint64{}
			finished := 0
			for e := range f.objects.Follow(f.ctx) {
				if e.Type != store.Changed {
					continue
				}
				version, err := strconv.ParseUint(e.Object.GetResourceVersion(), 10, 64)
				if name := e.Object.GetName(); err != nil || version <= versions[name] {
					f.Errorf("%s: version %d after %d (%v)", name, version, versions[name], err)
				} else {
					versions[name] = version
				}
				if *f.status(e.Object) == writes {
					finished++
				}
				if finished == objects {
					return
				}
			}
			f.Errorf("a reader saw the last state of %d objects of %d", finished, objects)
		})
	}
	for i := range objects {
		writing.Go(func() {
			name := fmt.Sprint("o", i)
			if _, err := f.objects.Create(f.ctx, f.object(key(name), "")); err != nil {
				f.Error(err)
				return
			}
			for w := range writes {
				if _, err := f.objects.UpdateStatus(f.ctx, key(name), store.Preconditions{}, f.setStatus(int32(w+1))); err != nil {
					f.Error(err)
				}
			}
		})
	}
	writing.Wait()
	reading.Wait()
}
