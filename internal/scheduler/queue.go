package scheduler

import (
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// queue hands keys to workers. A key that is added several times before it is taken is taken once; a key
// that is added while a worker has it is handed out again when the worker is done. So no two workers ever
// have the same key.
type queue[K comparable] struct {
	clock clock.WithDelayedExecution

	mu      sync.Mutex // guards all below
	ready   sync.Cond  // signalled when todo grows or the queue is closed
	todo    []K
	dirty   map[K]struct{} // in todo, or to be put there when done
	taken   map[K]struct{}
	delayed map[K]delayedKey
	closed  bool
}

type delayedKey struct {
	due   time.Time
	timer clock.Timer
}

func newQueue[K comparable](c clock.WithDelayedExecution) *queue[K] {
	q := &queue[K]{clock: c, dirty: map[K]struct{}{}, taken: map[K]struct{}{}, delayed: map[K]delayedKey{}}
	q.ready.L = &q.mu
	return q
}

// add puts a key into the queue. It never blocks and never asks the clock, so that a timer may call it.
func (q *queue[K]) add(key K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.addLocked(key)
}

func (q *queue[K]) addLocked(key K) {
	if _, ok := q.dirty[key]; ok || q.closed {
		return
	}
	q.dirty[key] = struct{}{}
	if _, ok := q.taken[key]; ok {
		return
	}
	q.todo = append(q.todo, key)
	q.ready.Signal()
}

// addAt puts a key into the queue at a time. Of several times for one key the earliest counts.
func (q *queue[K]) addAt(key K, due time.Time) {
	delay := due.Sub(q.clock.Now())
	if delay <= 0 {
		q.add(key)
		return
	}
	q.mu.Lock()
	old, ok := q.delayed[key]
	if q.closed || ok && !due.Before(old.due) {
		q.mu.Unlock()
		return
	}
	q.delayed[key] = delayedKey{due: due}
	q.mu.Unlock()
	if ok && old.timer != nil {
		old.timer.Stop()
	}
	// The clock is asked without the lock: a fake one runs its timers while it holds its own.
	timer := q.clock.AfterFunc(delay, func() { q.fire(key, due) })
	q.mu.Lock()
	defer q.mu.Unlock()
	if d, ok := q.delayed[key]; ok && d.due.Equal(due) {
		q.delayed[key] = delayedKey{due: due, timer: timer}
	}
}

func (q *queue[K]) fire(key K, due time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if d, ok := q.delayed[key]; ok && d.due.Equal(due) {
		delete(q.delayed, key)
	}
	q.addLocked(key)
}

// get waits for a key. It is false when the queue is closed.
func (q *queue[K]) get() (K, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.todo) == 0 && !q.closed {
		q.ready.Wait()
	}
	var none K
	if q.closed {
		return none, false
	}
	key := q.todo[0]
	q.todo[0] = none
	q.todo = q.todo[1:]
	delete(q.dirty, key)
	q.taken[key] = struct{}{}
	return key, true
}

// done says that the worker that took a key no longer has it.
func (q *queue[K]) done(key K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.taken, key)
	if _, ok := q.dirty[key]; ok && !q.closed {
		q.todo = append(q.todo, key)
		q.ready.Signal()
	}
}

// close wakes every get with false, and stops all timers.
func (q *queue[K]) close() {
	q.mu.Lock()
	q.closed = true
	delayed := q.delayed
	q.delayed = map[K]delayedKey{}
	q.ready.Broadcast()
	q.mu.Unlock()
	for _, d := range delayed {
		if d.timer != nil {
			d.timer.Stop()
		}
	}
}
