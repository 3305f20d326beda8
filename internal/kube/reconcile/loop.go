// Package reconcile is the frame of the controllers that work on objects of ours one by one: a queue of names, some
// workers, and a function that looks at what is and does what is missing (level-triggered: a name says only that something
// may have changed).
//
// # Nothing is decided on what has passed
//
// The store shows a write of this process as soon as it is answered, so a pass sees what the one before it did; a
// controller that counts needs no ledger of what it expects beside it. Two things a store cannot know: what the leader
// before this one wrote a moment ago, and what became of a write that had no answer. After either, all is read again from
// the API server before anything is decided (Fresh).
package reconcile

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Options make a Loop.
type Options struct {
	// Name is for logs. Workers is how many names are worked on at once.
	Name    string
	Workers int
	Clock   clock.WithTicker
	Log     *slog.Logger
	// Do does what is missing for a name. It is called again after the time that it returns, 0 for never; after an error
	// it is called again with growing pauses. The same name is never worked on twice at once.
	Do func(ctx context.Context, key store.Key) (again time.Duration, err error)
}

// The pauses after errors.
const (
	firstPause = 50 * time.Millisecond
	maxPause   = time.Minute
)

// Loop works on names.
type Loop struct {
	Options
	queue workqueue.TypedRateLimitingInterface[store.Key]
}

// New makes a Loop.
func New(o Options) *Loop {
	return &Loop{Options: o, queue: workqueue.NewTypedRateLimitingQueueWithConfig(
		workqueue.NewTypedItemExponentialFailureRateLimiter[store.Key](firstPause, maxPause),
		workqueue.TypedRateLimitingQueueConfig[store.Key]{Clock: o.Clock},
	)}
}

// Add has a name looked at.
func (l *Loop) Add(key store.Key) { l.queue.Add(key) }

// AddAfter has a name looked at after a time, if nothing else does before.
func (l *Loop) AddAfter(key store.Key, after time.Duration) { l.queue.AddAfter(key, after) }

// Run works until ctx ends, and returns when all that was begun is over.
func (l *Loop) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, l.queue.ShutDown)()
	var workers sync.WaitGroup
	for range max(l.Workers, 1) {
		workers.Go(func() {
			for l.next(ctx) {
			}
		})
	}
	workers.Wait()
}

func (l *Loop) next(ctx context.Context) bool {
	key, over := l.queue.Get()
	if over {
		return false
	}
	defer l.queue.Done(key)
	if ctx.Err() != nil {
		return false
	}
	again, err := l.Do(ctx, key)
	switch {
	case err == nil:
		l.queue.Forget(key)
	case ctx.Err() == nil:
		l.Log.Warn("it is tried again", "of", l.Name, "object", key.String(), "error", err)
		l.queue.AddRateLimited(key)
	}
	if again > 0 {
		l.AddAfter(key, again)
	}
	return true
}

// Follow tells each of every object that exists and of all that changes, until ctx ends.
func Follow[T store.Object](ctx context.Context, of store.Follower[T], each func(T)) {
	for event := range of.Follow(ctx) {
		if event.Type != store.Synced {
			each(event.Object)
		}
	}
}
