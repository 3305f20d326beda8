package containers

import (
	"context"
	"sync"
)

// keyedLocks is a lock per sandbox UID. The zero value is ready.
type keyedLocks struct {
	mu   sync.Mutex // guards held
	held map[string]*keyedLock
}

type keyedLock struct {
	token chan struct{} // holds one token while the lock is free
	users int           // holder and waiters; guarded by keyedLocks.mu
}

// lock waits for the lock of key, or for the end of ctx.
func (l *keyedLocks) lock(ctx context.Context, key string) (unlock func(), err error) {
	l.mu.Lock()
	if l.held == nil {
		l.held = map[string]*keyedLock{}
	}
	k := l.held[key]
	if k == nil {
		k = &keyedLock{token: make(chan struct{}, 1)}
		k.token <- struct{}{}
		l.held[key] = k
	}
	k.users++
	l.mu.Unlock()

	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if k.users--; k.users == 0 {
			delete(l.held, key)
		}
	}
	select {
	case <-k.token:
		return func() {
			k.token <- struct{}{}
			leave()
		}, nil
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
}
