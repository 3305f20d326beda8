package follow

import (
	"container/list"
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// queue holds what one reader has not taken yet.
type queue[T store.Object] struct {
	wake chan struct{} // has a token when something was added since the reader last looked

	mu      sync.Mutex                  // guards the fields below
	waiting *list.List                  // of store.Event[T], shared objects, in the order of delivery
	place   map[types.UID]*list.Element // where an object waits
	seen    map[types.UID]struct{}      // objects whose deletion the reader must hear of
	closed  bool
}

func newQueue[T store.Object]() *queue[T] {
	return &queue[T]{
		wake:    make(chan struct{}, 1),
		waiting: list.New(),
		place:   map[types.UID]*list.Element{},
		seen:    map[types.UID]struct{}{},
	}
}

func (q *queue[T]) changed(object T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.put(store.Event[T]{Type: store.Changed, Object: object})
}

func (q *queue[T]) deleted(object T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	uid := object.GetUID()
	if _, seen := q.seen[uid]; seen {
		q.put(store.Event[T]{Type: store.Deleted, Object: object})
		return
	}
	if e, ok := q.place[uid]; ok {
		q.waiting.Remove(e)
		delete(q.place, uid)
	}
}

// put adds an event, or replaces the one that waits for the same object. The caller holds mu.
func (q *queue[T]) put(event store.Event[T]) {
	uid := event.Object.GetUID()
	if e, ok := q.place[uid]; ok {
		e.Value = event
		return
	}
	q.place[uid] = q.waiting.PushBack(event)
	q.signal()
}

func (q *queue[T]) synced() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting.PushBack(store.Event[T]{Type: store.Synced})
	q.signal()
}

func (q *queue[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.signal()
}

func (q *queue[T]) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// next waits for an event and takes it, with a copy of its object; false when ctx ended or the queue was
// closed. For one reader.
func (q *queue[T]) next(ctx context.Context) (store.Event[T], bool) {
	for {
		if ctx.Err() != nil {
			return store.Event[T]{}, false
		}
		event, ok, closed := q.take()
		if closed {
			return store.Event[T]{}, false
		}
		if ok {
			if event.Type != store.Synced {
				event.Object = event.Object.DeepCopyObject().(T)
			}
			return event, true
		}
		select {
		case <-ctx.Done():
		case <-q.wake:
		}
	}
}

func (q *queue[T]) take() (event store.Event[T], ok, closed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	front := q.waiting.Front()
	if q.closed || front == nil {
		return event, false, q.closed
	}
	event = q.waiting.Remove(front).(store.Event[T])
	switch event.Type {
	case store.Changed:
		q.seen[event.Object.GetUID()] = struct{}{}
		delete(q.place, event.Object.GetUID())
	case store.Deleted:
		delete(q.seen, event.Object.GetUID())
		delete(q.place, event.Object.GetUID())
	}
	return event, true, false
}
