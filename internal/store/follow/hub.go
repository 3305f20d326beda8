package follow

import (
	"context"
	"iter"
	"sync"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Hub passes the changes of one kind of objects on to those who follow it. The zero Hub is ready.
type Hub[T store.Object] struct {
	mu     sync.Mutex // guards all fields
	closed bool
	all    map[*queue[T]]struct{}               // those that follow every object
	byKey  map[store.Key]map[*queue[T]]struct{} // those that follow objects by name
}

// Follow is store.Objects.Follow. snapshot calls its argument with the objects that exist (of these keys,
// when there are any), and holds up every Changed and Deleted until that returns. Nobody changes keys or
// the objects afterwards.
func (h *Hub[T]) Follow(ctx context.Context, keys []store.Key, snapshot func(func(existing iter.Seq[T]))) iter.Seq[store.Event[T]] {
	return func(yield func(store.Event[T]) bool) {
		q := newQueue[T]()
		snapshot(func(existing iter.Seq[T]) {
			for object := range existing {
				q.changed(object)
			}
			q.synced()
			h.join(q, keys)
		})
		defer h.leave(q, keys)
		for {
			event, ok := q.next(ctx)
			if !ok || !yield(event) {
				return
			}
		}
	}
}

// Changed tells of an object's new state. The object is not changed by anybody afterwards.
func (h *Hub[T]) Changed(object T) {
	h.each(object, func(q *queue[T]) { q.changed(object) })
}

// Deleted tells that an object is gone, and its last state.
func (h *Hub[T]) Deleted(object T) {
	h.each(object, func(q *queue[T]) { q.deleted(object) })
}

// Close ends every Follow, now and later.
func (h *Hub[T]) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for q := range h.all {
		q.close()
	}
	for _, queues := range h.byKey {
		for q := range queues {
			q.close()
		}
	}
}

func (h *Hub[T]) each(object T, tell func(*queue[T])) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for q := range h.all {
		tell(q)
	}
	for q := range h.byKey[store.KeyOf(object)] {
		tell(q)
	}
}

func (h *Hub[T]) join(q *queue[T], keys []store.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		q.close()
		return
	}
	if len(keys) == 0 {
		if h.all == nil {
			h.all = map[*queue[T]]struct{}{}
		}
		h.all[q] = struct{}{}
		return
	}
	if h.byKey == nil {
		h.byKey = map[store.Key]map[*queue[T]]struct{}{}
	}
	for _, k := range keys {
		if h.byKey[k] == nil {
			h.byKey[k] = map[*queue[T]]struct{}{}
		}
		h.byKey[k][q] = struct{}{}
	}
}

func (h *Hub[T]) leave(q *queue[T], keys []store.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.all, q)
	for _, k := range keys {
		delete(h.byKey[k], q)
		if len(h.byKey[k]) == 0 {
			delete(h.byKey, k)
		}
	}
}
