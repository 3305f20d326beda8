package kube

import (
	"iter"
	"log/slog"
	"strconv"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/follow"
)

// objects is what is known of the objects of one kind. It hears of their states from the watch and from the answers to
// requests, in any order; of each object it keeps the newest, and tells followers of it. The watch writes to it as a
// cache.ReflectorStore.
type objects[T store.Object] struct {
	hub    follow.Hub[T]
	listed chan struct{} // closed when it has had the first list
	log    *slog.Logger

	mu    sync.RWMutex // guards the fields below; held while the hub is told, so that its order is that of the changes
	byKey map[store.Key]*record[T]
	keys  map[types.UID]store.Key // of what is in byKey
	// gone has the objects of which it is known from elsewhere than the watch that they are gone, with their last
	// known version, until the watch is past that: it may bring older states of them.
	gone map[types.UID]uint64
	// watched is the version up to which the watch has told everything.
	watched uint64
	// floor is the version of the last refresh: what is not known and not newer than it is gone, though the watch may still
	// tell of it.
	floor uint64
}

var (
	_ cache.ReflectorStore         = (*objects[*sandbox])(nil)
	_ cache.ReflectorBookmarkStore = (*objects[*sandbox])(nil)
)

func newObjects[T store.Object]() *objects[T] {
	return &objects[T]{
		listed: make(chan struct{}),
		log:    slog.Default(),
		byKey:  map[store.Key]*record[T]{},
		keys:   map[types.UID]store.Key{},
		gone:   map[types.UID]uint64{},
	}
}

// get is the object of that name, nil for none.
func (o *objects[T]) get(key store.Key) *record[T] {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.byKey[key]
}

// getByUID is the object of that UID, nil for none.
func (o *objects[T]) getByUID(uid types.UID) *record[T] {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.byKey[o.keys[uid]]
}

// each calls f with all objects, or those of these keys, while none changes.
func (o *objects[T]) each(keys []store.Key, f func(iter.Seq[T])) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	f(func(yield func(T) bool) {
		if len(keys) > 0 {
			for _, k := range keys {
				if r := o.byKey[k]; r != nil && !yield(r.object) {
					return
				}
			}
			return
		}
		for _, r := range o.byKey {
			if !yield(r.object) {
				return
			}
		}
	})
}

// saw takes over a state that the API server answered with, and returns what is known of that name by now: this or a
// later state, nil when there is no such object any more.
func (o *objects[T]) saw(r *record[T]) *record[T] {
	o.mu.Lock()
	defer o.mu.Unlock()
	// An object of which the watch has told this state, and that is not known any more, was deleted meanwhile.
	if _, known := o.keys[r.uid()]; known || r.version > o.watched {
		o.put(r)
	}
	return o.byKey[r.key()]
}

// sawEnd takes over that an object is gone, and its last state.
func (o *objects[T]) sawEnd(last *record[T]) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, known := o.keys[last.uid()]; known { // else the watch was first
		o.gone[last.uid()] = last.version
		o.remove(last)
	}
}

// put makes r the state of its object unless a newer one is known. One that cannot be read is left out: what was known before
// stays, as nobody can tell what is wished now. The caller holds mu.
func (o *objects[T]) put(r *record[T]) {
	if r.unreadable != nil {
		o.log.Error("an object cannot be read, and stays as it was for us: correct it, or delete it", "object", r.key().String(), "resourceVersion", r.version, "error", r.unreadable)
		return
	}
	if _, gone := o.gone[r.uid()]; gone {
		return
	}
	key := r.key()
	if _, known := o.keys[r.uid()]; !known && r.version <= o.floor {
		return
	}
	if now := o.byKey[key]; now != nil {
		if now.version >= r.version {
			return
		}
		if now.uid() != r.uid() {
			o.gone[now.uid()] = now.version
			o.remove(now)
		}
	}
	o.byKey[key] = r
	o.keys[r.uid()] = key
	o.hub.Changed(r.object)
}

// remove removes an object that is known. The caller holds mu.
func (o *objects[T]) remove(last *record[T]) {
	delete(o.byKey, o.keys[last.uid()])
	delete(o.keys, last.uid())
	o.hub.Deleted(last.object)
}

// Add implements cache.ReflectorStore.
func (o *objects[T]) Add(obj any) error { return o.Update(obj) }

// Update implements cache.ReflectorStore.
func (o *objects[T]) Update(obj any) error {
	r := obj.(*record[T])
	o.mu.Lock()
	defer o.mu.Unlock()
	o.watched = max(o.watched, r.version)
	o.put(r)
	return nil
}

// Delete implements cache.ReflectorStore.
func (o *objects[T]) Delete(obj any) error {
	r := obj.(*record[T])
	o.mu.Lock()
	defer o.mu.Unlock()
	o.watched = max(o.watched, r.version)
	delete(o.gone, r.uid())
	if key, known := o.keys[r.uid()]; known {
		if r.unreadable != nil {
			r = o.byKey[key]
		}
		o.remove(r)
	}
	return nil
}

// Bookmark implements cache.ReflectorBookmarkStore.
func (o *objects[T]) Bookmark(resourceVersion string) error {
	version, err := strconv.ParseUint(resourceVersion, 10, 64)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.watched = max(o.watched, version)
	return nil
}

// Replace implements cache.ReflectorStore. The list is what there was at one version, which can be before what is
// known from answers.
func (o *objects[T]) Replace(list []any, resourceVersion string) error {
	version, err := strconv.ParseUint(resourceVersion, 10, 64)
	if err != nil {
		return err
	}
	records := make([]*record[T], len(list))
	for i, obj := range list {
		records[i] = obj.(*record[T])
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.replace(records, version)
	return nil
}

// replace is Replace. The caller holds mu.
func (o *objects[T]) replace(list []*record[T], version uint64) {
	o.watched = max(o.watched, version)
	listed := make(map[types.UID]bool, len(list))
	for _, r := range list {
		listed[r.uid()] = true
	}
	// What is gone goes first: a name may have passed to another object.
	for uid, key := range o.keys {
		if r := o.byKey[key]; !listed[uid] && r.version <= version {
			o.remove(r)
		}
	}
	for uid, last := range o.gone {
		if !listed[uid] && last <= version {
			delete(o.gone, uid)
		}
	}
	for _, r := range list {
		o.put(r)
	}
	select {
	case <-o.listed:
	default:
		close(o.listed)
	}
}

// refreshed takes over everything that there was at a version, which the watch may not have told of yet.
func (o *objects[T]) refreshed(list []*record[T], resourceVersion string) error {
	version, err := strconv.ParseUint(resourceVersion, 10, 64)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.replace(list, version)
	o.floor = max(o.floor, version)
	return nil
}

// Resync implements cache.ReflectorStore. There is none.
func (o *objects[T]) Resync() error { return nil }
