package reconcile

import (
	"context"
	"iter"

	"k8s.io/client-go/util/workqueue"
)

// Changes takes what is added to a queue out of it, one after another, until ctx ends or the caller stops; the queue is shut
// down then. What is added while it is worked on comes again.
func Changes[T comparable](ctx context.Context, queue workqueue.TypedInterface[T]) iter.Seq[T] {
	return func(yield func(T) bool) {
		defer queue.ShutDown()
		defer context.AfterFunc(ctx, queue.ShutDown)()
		for {
			changed, over := queue.Get()
			if over || ctx.Err() != nil || !yield(changed) {
				return
			}
			queue.Done(changed)
		}
	}
}
