package reconcile

import (
	"context"
	"errors"
	"sync"

	"github.com/containerd/errdefs"
)

// Fresh sees to it that what is known is not behind what was written.
type Fresh struct {
	refresh func(context.Context) error

	mu sync.Mutex // guards the fields below; held while it is read again, as nobody may decide before
	// doubts counts what may not be known; known is how many of these the last reading was after.
	doubts, known int
}

// NewFresh makes a Fresh that knows nothing yet. refresh reads everything again from the API server.
func NewFresh(refresh func(context.Context) error) *Fresh { return &Fresh{refresh: refresh, doubts: 1} }

// Ensure returns when all writes before it are known. It makes calls only when there is a doubt.
func (f *Fresh) Ensure(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.doubts == f.known {
		return nil
	}
	if err := f.refresh(ctx); err != nil {
		return err
	}
	f.known = f.doubts
	return nil
}

// Wrote hears of a write's error, and returns it: one that leaves open what became of the write is a doubt.
func (f *Fresh) Wrote(err error) error {
	if Open(err) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.doubts++
	}
	return err
}

// Open says that a write that failed may have taken effect.
func Open(err error) bool {
	return errdefs.IsUnavailable(err) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
