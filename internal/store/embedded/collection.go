package embedded

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/follow"
)

// state is one state of an object. It is never changed once others can see it.
type state[T store.Object] struct {
	object T
	raw    []byte // as it is stored: object and the fields that this build does not know
	// plain: raw is the encoding of object, so there are no such fields.
	plain bool
	gone  bool // the object does not exist any more, and this was its last state
	// early: it may be shown before it is durable.
	early bool
	batch *batch // that makes it durable; nil when nobody waits for that
}

// collection keeps the objects of one kind.
type collection[T store.Object] struct {
	store *Store
	kind  kind[T]
	hub   follow.Hub[T]

	// The fields below are guarded by the store's mu.

	shown  map[store.Key]*state[T] // what readers see
	keys   map[types.UID]store.Key // of the shown objects
	staged map[store.Key]*state[T] // newer than shown, and not durable yet
	late   map[store.Key]*state[T] // shown, and not durable yet
}

var (
	_ store.Sandboxes            = (*collection[*sandbox])(nil)
	_ store.LateWriter[*sandbox] = (*collection[*sandbox])(nil)
)

func newCollection[T store.Object](s *Store, k kind[T]) *collection[T] {
	return &collection[T]{
		store:  s,
		kind:   k,
		shown:  map[store.Key]*state[T]{},
		keys:   map[types.UID]store.Key{},
		staged: map[store.Key]*state[T]{},
		late:   map[store.Key]*state[T]{},
	}
}

// load fills an empty collection from its bucket. Its error names each object that cannot be read.
func (c *collection[T]) load(bucket *bolt.Bucket) error {
	var problems []error
	err := bucket.ForEach(func(k, v []byte) error {
		read, err := c.kind.read(slices.Clone(v))
		object := read.object
		if err != nil {
			problems = append(problems, fmt.Errorf("%s %s: %w", c.kind, k, err))
			return nil
		}
		key := store.KeyOf(object)
		version, err := parseNumber([]byte(object.GetResourceVersion()))
		other, twice := c.keys[object.GetUID()]
		switch {
		case key.String() != string(k):
			err = fmt.Errorf("it is stored under another name than its own, %s", key)
		case object.GetUID() == "":
			err = errors.New("it has no UID")
		case twice:
			err = fmt.Errorf("it has the UID of %s", other)
		case err != nil:
			err = fmt.Errorf("its resourceVersion: %w", err)
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("%s %s: %w", c.kind, k, err))
			return nil
		}
		if version > c.store.version.Load() {
			c.store.version.Store(version)
		}
		c.shown[key] = read
		c.keys[object.GetUID()] = key
		return nil
	})
	return errors.Join(append(problems, err)...)
}

// Get implements store.Reader.
func (c *collection[T]) Get(ctx context.Context, key store.Key) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, err
	}
	c.store.mu.RLock()
	s := c.shown[key]
	c.store.mu.RUnlock()
	if s == nil {
		return none, c.kind.NotFound(key)
	}
	return copyOf(s.object), nil
}

// GetByUID implements store.Reader.
func (c *collection[T]) GetByUID(ctx context.Context, uid types.UID) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, err
	}
	c.store.mu.RLock()
	s := c.shown[c.keys[uid]]
	c.store.mu.RUnlock()
	if s == nil {
		return none, c.kind.NotFoundUID(uid)
	}
	return copyOf(s.object), nil
}

// List implements store.Reader.
func (c *collection[T]) List(ctx context.Context, options store.ListOptions) (store.Page[T], error) {
	if err := ctx.Err(); err != nil {
		return store.Page[T]{}, err
	}
	return store.Pick(options, func(f func(iter.Seq[T])) { c.each(nil, f) })
}

// Follow implements store.Follower.
func (c *collection[T]) Follow(ctx context.Context, keys ...store.Key) iter.Seq[store.Event[T]] {
	keys = slices.Clone(keys)
	return c.hub.Follow(ctx, keys, func(f func(iter.Seq[T])) { c.each(keys, f) })
}

// each calls f with all shown objects, or those of these keys, while none changes.
func (c *collection[T]) each(keys []store.Key, f func(iter.Seq[T])) {
	c.store.mu.RLock()
	defer c.store.mu.RUnlock()
	f(func(yield func(T) bool) {
		if len(keys) > 0 {
			for _, k := range keys {
				if s := c.shown[k]; s != nil && !yield(s.object) {
					return
				}
			}
			return
		}
		for _, s := range c.shown {
			if !yield(s.object) {
				return
			}
		}
	})
}

func copyOf[T store.Object](object T) T { return object.DeepCopyObject().(T) }
