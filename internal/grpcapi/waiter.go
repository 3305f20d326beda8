package grpcapi

import (
	"context"
	"errors"
	"sync"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// errStopping ends the calls that wait when the server stops.
var errStopping = errors.New("the server is stopping")

// waiter follows all sandboxes once, and wakes the calls that wait for one of them.
type waiter struct {
	sandboxes store.Sandboxes
	// synced is closed when the follower has seen every sandbox that existed at its start.
	synced chan struct{}
	// ended is closed when the follower has stopped.
	ended chan struct{}

	mu sync.Mutex // guards the fields below
	// latest has the newest state of every sandbox. The objects are shared: nobody changes them.
	latest map[types.UID]*v1alpha1.Sandbox
	subs   map[types.UID]map[*subscription]struct{}
}

// subscription is one call's view of one sandbox. Its fields are guarded by waiter.mu.
type subscription struct {
	latest *v1alpha1.Sandbox
	gone   bool
	// wake has room for one signal: that there is a state that the call has not looked at.
	wake chan struct{}
}

func newWaiter(sandboxes store.Sandboxes) *waiter {
	return &waiter{
		sandboxes: sandboxes,
		synced:    make(chan struct{}),
		ended:     make(chan struct{}),
		latest:    map[types.UID]*v1alpha1.Sandbox{},
		subs:      map[types.UID]map[*subscription]struct{}{},
	}
}

// run follows the store until ctx ends. It is called once.
func (w *waiter) run(ctx context.Context) {
	defer close(w.ended)
	for event := range w.sandboxes.Follow(ctx) {
		switch event.Type {
		case store.Synced:
			close(w.synced)
		case store.Changed:
			w.set(event.Object.UID, event.Object)
		case store.Deleted:
			w.set(event.Object.UID, nil)
		}
	}
}

func (w *waiter) set(uid types.UID, sb *v1alpha1.Sandbox) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if sb == nil {
		delete(w.latest, uid)
	} else {
		w.latest[uid] = sb
	}
	for sub := range w.subs[uid] {
		sub.latest, sub.gone = sb, sb == nil
		select {
		case sub.wake <- struct{}{}:
		default:
		}
	}
}

func (w *waiter) subscribe(uid types.UID) (sub *subscription, cancel func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	sub = &subscription{latest: w.latest[uid], wake: make(chan struct{}, 1)}
	if w.subs[uid] == nil {
		w.subs[uid] = map[*subscription]struct{}{}
	}
	w.subs[uid][sub] = struct{}{}
	return sub, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.subs[uid], sub)
		if len(w.subs[uid]) == 0 {
			delete(w.subs, uid)
		}
	}
}

func (w *waiter) look(sub *subscription) (sb *v1alpha1.Sandbox, gone bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return sub.latest, sub.gone
}

// until calls decide with the states of a sandbox, beginning with known, the caller's own, and never
// with one older than it, until decide is done or fails. A sandbox that is gone is nil. decide must not
// change its argument. The error is decide's, ctx's, or errStopping.
func (w *waiter) until(ctx context.Context, known *v1alpha1.Sandbox, decide func(*v1alpha1.Sandbox) (bool, error)) error {
	sub, cancel := w.subscribe(known.UID)
	defer cancel()
	current, gone := w.look(sub)
	if current == nil {
		// The follower has not seen it yet, or no longer. The store knows which; what comes after this
		// reading comes through the subscription.
		switch stored, err := w.sandboxes.GetByUID(ctx, known.UID); {
		case errdefs.IsNotFound(err):
			gone = true
		case err != nil:
			return err
		default:
			current = stored
		}
	}
	for {
		if gone || current.Generation >= known.Generation {
			if gone {
				current = nil
			}
			if done, err := decide(current); done || err != nil {
				return err
			}
		}
		select {
		case <-sub.wake:
			current, gone = w.look(sub)
		case <-ctx.Done():
			return ctx.Err()
		case <-w.ended:
			return errStopping
		}
	}
}
