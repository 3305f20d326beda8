package folder

import (
	"context"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Turns lets one call at a time change something of a volume. The zero value is ready.
type Turns struct {
	mu sync.Mutex // guards busy
	// busy has the keys of which a call changes something; a channel is closed at the end of its call.
	busy map[string]chan struct{}
}

// Take makes this call the only one of a volume, until done is called. Only a Sweep can be in the way.
func (t *Turns) Take(ctx context.Context, key string) (done func(), err error) {
	mine := make(chan struct{})
	for {
		t.mu.Lock()
		other := t.busy[key]
		if other == nil {
			if t.busy == nil {
				t.busy = map[string]chan struct{}{}
			}
			t.busy[key] = mine
		}
		t.mu.Unlock()
		if other == nil {
			return func() {
				t.mu.Lock()
				delete(t.busy, key)
				t.mu.Unlock()
				close(mine)
			}, nil
		}
		select {
		case <-other:
		case <-ctx.Done():
			return nil, fault.New(errdefs.ErrUnavailable, fault.OperationPending, "volume %s is being cleaned up: %w", key, context.Cause(ctx))
		}
	}
}
