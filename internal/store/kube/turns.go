package kube

import (
	"context"
	"sync"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// turns lets one at a time write an object. The zero value is ready.
type turns struct {
	mu    sync.Mutex // guards byKey
	byKey map[store.Key]*turn
}

type turn struct {
	free  chan struct{} // has a token while nobody writes
	users int           // that write or wait; guarded by turns.mu
}

// take waits for the object's turn, and returns how to give it back.
func (t *turns) take(ctx context.Context, key store.Key) (release func(), err error) {
	t.mu.Lock()
	u := t.byKey[key]
	if u == nil {
		u = &turn{free: make(chan struct{}, 1)}
		u.free <- struct{}{}
		if t.byKey == nil {
			t.byKey = map[store.Key]*turn{}
		}
		t.byKey[key] = u
	}
	u.users++
	t.mu.Unlock()

	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if u.users--; u.users == 0 {
			delete(t.byKey, key)
		}
	}
	select {
	case <-u.free:
		return func() { u.free <- struct{}{}; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}
