package callers

import (
	"context"
	"crypto/sha256"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// askTimeout bounds one question to the API server.
const askTimeout = 10 * time.Second

// awayPatience is how long an API server that does not answer is waited for where its last answer will do, and
// stillAwayPatience within awayFor of that: a call with several questions waits once.
const (
	awayPatience      = 2 * time.Second
	stillAwayPatience = 200 * time.Millisecond
	awayFor           = 10 * time.Second
)

// outage knows since when the API server has not answered.
type outage struct{ seen atomic.Pointer[time.Time] }

func (o *outage) noticed(now time.Time) { o.seen.Store(&now) }

func (o *outage) recent(now time.Time) bool {
	seen := o.seen.Load()
	return seen != nil && now.Sub(*seen) < awayFor
}

func (o *outage) over() { o.seen.Store(nil) }

// answers remembers answers of the API server for a while, and asks the same question once at a time.
type answers[V any] struct {
	remembered *cache.LRUExpireCache
	// last has answers that will do for longer when the API server does not answer.
	last   *cache.LRUExpireCache
	asked  singleflight.Group
	clock  clock.PassiveClock
	outage *outage
}

// answer is what the API server said. keep is how long it is taken for true, away how long while the API server cannot be
// asked again.
type answer[V any] struct {
	value      V
	keep, away time.Duration
}

func newAnswers[V any](size int, clock clock.PassiveClock, outage *outage) *answers[V] {
	return &answers[V]{remembered: cache.NewLRUExpireCacheWithClock(size, clock), last: cache.NewLRUExpireCacheWithClock(size, clock), clock: clock, outage: outage}
}

// get returns the answer to a question: a remembered one, or what ask returns, remembered for as long as it says. An
// error is not remembered. A caller that gives up leaves the question to the others that wait for it.
func (a *answers[V]) get(ctx context.Context, question []byte, ask func(context.Context) (answer[V], error)) (V, error) {
	sum := sha256.Sum256(question)
	key := string(sum[:])
	if v, ok := a.remembered.Get(key); ok {
		return v.(V), nil
	}
	waiting := a.asked.DoChan(key, func() (any, error) {
		if v, ok := a.remembered.Get(key); ok { // answered between the look above and this question
			return v, nil
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
		defer cancel()
		got, err := ask(ctx)
		if fault.ReasonOf(err) == fault.AuthUnavailable {
			a.outage.noticed(a.clock.Now())
		} else {
			a.outage.over()
			a.last.Remove(key)
		}
		if err != nil {
			return got.value, err
		}
		if got.keep > 0 {
			a.remembered.Add(key, got.value, got.keep)
		}
		if got.away > 0 {
			a.last.Add(key, got.value, got.away)
		}
		return got.value, nil
	})
	last, known := a.last.Get(key)
	var patience <-chan time.Time
	if known {
		wait := awayPatience
		if a.outage.recent(a.clock.Now()) {
			wait = stillAwayPatience
		}
		timer := time.NewTimer(wait)
		defer timer.Stop()
		patience = timer.C
	}
	select {
	case r := <-waiting:
		if known && fault.ReasonOf(r.Err) == fault.AuthUnavailable {
			return last.(V), nil
		}
		return r.Val.(V), r.Err
	case <-patience:
		a.outage.noticed(a.clock.Now())
		return last.(V), nil
	case <-ctx.Done():
		var none V
		return none, ctx.Err()
	}
}
