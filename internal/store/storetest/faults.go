package storetest

import (
	"errors"
	"strconv"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// testFaults makes the write of each call fail: nothing has changed, nobody hears of it, and the same call
// then works. Nothing is tested of a backend that cannot make a write fail.
func testFaults[T store.Object](f *fixture[T]) {
	if f.backend.FailWrite == nil {
		return
	}
	none := store.Preconditions{}
	f.create("plain")
	held := f.object(key("held"), "first")
	held.SetFinalizers([]string{"example.com/hold"})
	f.must(f.objects.Create(f.ctx, held))
	events := f.follow()
	events.expect(store.Changed, "")
	events.expect(store.Changed, "")
	events.expect(store.Synced, "")

	for _, c := range []struct {
		name   string
		object string
		event  store.EventType
		call   func() error
	}{
		{"Create", "new", store.Changed, func() error {
			_, err := f.objects.Create(f.ctx, f.object(key("new"), ""))
			return err
		}},
		{"UpdateSpec", "plain", store.Changed, func() error {
			_, err := f.objects.UpdateSpec(f.ctx, key("plain"), none, f.setSpec("second"))
			return err
		}},
		{"UpdateStatus", "plain", store.Changed, func() error {
			_, err := f.objects.UpdateStatus(f.ctx, key("plain"), none, f.setStatus(2))
			return err
		}},
		{"Delete", "plain", store.Deleted, func() error { return f.objects.Delete(f.ctx, key("plain"), none) }},
		{"Delete with a finalizer", "held", store.Changed, func() error { return f.objects.Delete(f.ctx, key("held"), none) }},
		{"removal of the last finalizer", "held", store.Deleted, func() error {
			_, err := f.objects.UpdateSpec(f.ctx, key("held"), none, setFinalizers[T]())
			return err
		}},
	} {
		before, hadErr := f.objects.Get(f.ctx, key(c.object))
		f.backend.FailWrite(1)
		if err := c.call(); err == nil || errors.Is(err, errdefs.ErrConflict) || errors.Is(err, errdefs.ErrNotFound) {
			f.Fatalf("%s whose write fails returned %v", c.name, err)
		}
		after, err := f.objects.Get(f.ctx, key(c.object))
		if (err == nil) != (hadErr == nil) {
			f.Fatalf("a failed %s changed the object's existence: %v", c.name, err)
		}
		if err == nil {
			f.sameState("after a failed "+c.name+", the object", after, before)
		}
		if err := c.call(); err != nil {
			f.Fatalf("%s, tried again: %v", c.name, err)
		}
		events.expect(c.event, c.object)
	}
	testFaultsUnderLoad(f)
}

// testFaultsUnderLoad makes writes fail while many write to one object, and counts what was acknowledged.
func testFaultsUnderLoad[T store.Object](f *fixture[T]) {
	f.create("counter")
	f.updateSpec(key("counter"), f.setSpec("0"))
	const writers, writes = 8, 20
	var group sync.WaitGroup
	var mu sync.Mutex // guards acknowledged and failed
	acknowledged, failed := 0, 0
	for w := range writers {
		group.Go(func() {
			for i := range writes {
				if w == 0 && i%4 == 0 {
					f.backend.FailWrite(2)
				}
				_, err := f.objects.UpdateSpec(f.ctx, key("counter"), store.Preconditions{}, func(o T) error {
					n, err := strconv.Atoi(*f.spec(o))
					*f.spec(o) = strconv.Itoa(n + 1)
					return err
				})
				mu.Lock()
				if err == nil {
					acknowledged++
				} else {
					failed++
				}
				mu.Unlock()
			}
		})
	}
	group.Wait()
	if got := *f.spec(f.get(key("counter"))); got != strconv.Itoa(acknowledged) {
		f.Errorf("the counter is %s after %d writes were acknowledged and %d failed", got, acknowledged, failed)
	}
	if failed == 0 {
		f.Error("no write failed")
	}
}
