package storetest

import (
	"context"
	"errors"
	"strconv"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// No write is lost when many write to one object, its spec and its status at once.
func testConcurrent[T store.Object](f *fixture[T]) {
	f.create("a")
	f.updateSpec(key("a"), f.setSpec("0"))
	const writers, writes = 16, 10
	var group sync.WaitGroup
	for range writers {
		group.Go(func() {
			for range writes {
				_, err := f.objects.UpdateSpec(f.ctx, key("a"), store.Preconditions{}, func(o T) error {
					n, err := strconv.Atoi(*f.spec(o))
					*f.spec(o) = strconv.Itoa(n + 1)
					return err
				})
				if err != nil {
					f.Error(err)
				}
				_, err = f.objects.UpdateStatus(f.ctx, key("a"), store.Preconditions{}, func(o T) error {
					*f.status(o)++
					return nil
				})
				if err != nil {
					f.Error(err)
				}
			}
		})
	}
	group.Wait()
	got := f.get(key("a"))
	if *f.spec(got) != strconv.Itoa(writers*writes) || *f.status(got) != writers*writes {
		f.Errorf("spec %s and status %d after %d writes of each", *f.spec(got), *f.status(got), writers*writes)
	}
	if got.GetGeneration() != writers*writes+2 {
		f.Errorf("generation %d after %d changes of the spec", got.GetGeneration(), writers*writes+1)
	}
}

// Of those who create or delete one object at once, one wins.
func testConcurrentCreate[T store.Object](f *fixture[T]) {
	const clients = 16
	for range 5 {
		race := func(what string, loser error, act func() error) {
			f.Helper()
			results := make(chan error, clients)
			for range clients {
				go func() { results <- act() }()
			}
			won := 0
			for range clients {
				switch err := <-results; {
				case err == nil:
					won++
				case !errors.Is(err, loser):
					f.Error(err)
				}
			}
			if won != 1 {
				f.Errorf("%d of %d clients could %s the object", won, clients, what)
			}
		}
		race("create", errdefs.ErrAlreadyExists, func() error {
			_, err := f.objects.Create(f.ctx, f.object(key("a"), ""))
			return err
		})
		race("delete", errdefs.ErrNotFound, func() error {
			return f.objects.Delete(f.ctx, key("a"), store.Preconditions{})
		})
	}
}

func testEndedContext[T store.Object](f *fixture[T]) {
	made := f.create("a")
	ctx, cancel := context.WithCancel(f.ctx)
	cancel()
	_, getErr := f.objects.Get(ctx, key("a"))
	_, uidErr := f.objects.GetByUID(ctx, made.GetUID())
	_, listErr := f.objects.List(ctx, store.ListOptions{})
	_, createErr := f.objects.Create(ctx, f.object(key("b"), ""))
	_, specErr := f.objects.UpdateSpec(ctx, key("a"), store.Preconditions{}, f.setSpec("second"))
	_, statusErr := f.objects.UpdateStatus(ctx, key("a"), store.Preconditions{}, f.setStatus(1))
	deleteErr := f.objects.Delete(ctx, key("a"), store.Preconditions{})
	for name, err := range map[string]error{
		"Get": getErr, "GetByUID": uidErr, "List": listErr, "Create": createErr,
		"UpdateSpec": specErr, "UpdateStatus": statusErr, "Delete": deleteErr,
	} {
		if !errors.Is(err, context.Canceled) {
			f.Errorf("%s with an ended context: %v", name, err)
		}
	}
	f.sameState("Get", f.get(key("a")), made)
}
