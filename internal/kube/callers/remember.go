package callers

import (
	"context"
	"crypto/sha256"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"
)

// askTimeout bounds one question to the API server.
const askTimeout = 10 * time.Second

// answers remembers answers of the API server for a while, and asks the same question once at a time.
type answers[V any] struct {
	remembered *cache.LRUExpireCache
	asked      singleflight.Group
}

func newAnswers[V any](size int, clock clock.PassiveClock) *answers[V] {
	return &answers[V]{remembered: cache.NewLRUExpireCacheWithClock(size, clock)}
}

// get returns the answer to a question: a remembered one, or what ask returns, remembered for as long as it says. An
// error is not remembered. A caller that gives up leaves the question to the others that wait for it.
func (a *answers[V]) get(ctx context.Context, question []byte, ask func(context.Context) (V, time.Duration, error)) (V, error) {
	sum := sha256.Sum256(question)
	key := string(sum[:])
	if v, ok := a.remembered.Get(key); ok {
		return v.(V), nil
	}
	waiting := a.asked.DoChan(key, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
		defer cancel()
		v, keep, err := ask(ctx)
		if err == nil && keep > 0 {
			a.remembered.Add(key, v, keep)
		}
		return v, err
	})
	select {
	case r := <-waiting:
		return r.Val.(V), r.Err
	case <-ctx.Done():
		var none V
		return none, ctx.Err()
	}
}
