package kube

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// backoff are the pauses between attempts to watch an API server that is away. The longest is how late others' changes
// can be heard of once it is back.
var backoff = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 6, Cap: 3 * time.Second}

// watch keeps the objects up to date until ctx ends.
func (c *collection[T]) watch(ctx context.Context, log *slog.Logger) {
	source := &cache.ListWatch{ListWithContextFunc: c.client.list, WatchFuncWithContext: c.client.watch}
	reflector := cache.NewReflectorWithOptions(source, &record[T]{}, c.objects, cache.ReflectorOptions{
		Name: "store", TypeDescription: c.kind.resource, Backoff: &backoff,
	})
	_ = backoff.DelayWithReset(clock.RealClock{}, time.Minute).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		if err := reflector.ListAndWatchWithContext(ctx); err != nil && ctx.Err() == nil {
			c.failure.Store(&err)
			log.Warn("the API server cannot be watched: what others change is seen when it is back", "resource", c.kind.resource, "error", err)
		}
		return false, nil
	})
}

// awaitList waits until all objects have been read.
func (c *collection[T]) awaitList(ctx context.Context) error {
	select {
	case <-c.objects.listed:
		return nil
	case <-ctx.Done():
		cause := ctx.Err()
		if failure := c.failure.Load(); failure != nil {
			cause = errors.Join(cause, *failure)
		}
		return fault.New(errdefs.ErrUnavailable, store.Unavailable, "read all objects of kind %s: %w", c.kind, cause)
	}
}
