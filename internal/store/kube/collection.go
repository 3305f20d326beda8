package kube

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"sync/atomic"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// collection is the store.Objects of one kind.
type collection[T store.Object] struct {
	kind    kind[T]
	client  client[T]
	objects *objects[T]
	turns   turns
	failure atomic.Pointer[error] // why the last attempt to watch ended
}

var _ store.Sandboxes = (*collection[*sandbox])(nil)

func newCollection[T store.Object](api rest.Interface, k kind[T]) *collection[T] {
	return &collection[T]{kind: k, client: client[T]{rest: api, resource: k.resource}, objects: newObjects[T]()}
}

// Get implements store.Reader.
func (c *collection[T]) Get(ctx context.Context, key store.Key) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, err
	}
	r := c.objects.get(key)
	if r == nil {
		var err error
		if r, err = c.fresh(ctx, key, nil); err != nil {
			return none, err
		}
	}
	return copyOf(r.object), nil
}

// GetByUID implements store.Reader. The API server finds nothing by UID, so an object that another process made a
// moment ago may not be found yet.
func (c *collection[T]) GetByUID(ctx context.Context, uid types.UID) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, err
	}
	r := c.objects.getByUID(uid)
	if r == nil {
		return none, c.kind.NotFoundUID(uid)
	}
	return copyOf(r.object), nil
}

// List implements store.Reader.
func (c *collection[T]) List(ctx context.Context, options store.ListOptions) (store.Page[T], error) {
	if err := ctx.Err(); err != nil {
		return store.Page[T]{}, err
	}
	return store.Pick(options, func(f func(iter.Seq[T])) { c.objects.each(nil, f) })
}

// Follow implements store.Follower.
func (c *collection[T]) Follow(ctx context.Context, keys ...store.Key) iter.Seq[store.Event[T]] {
	keys = slices.Clone(keys)
	return c.objects.hub.Follow(ctx, keys, func(f func(iter.Seq[T])) { c.objects.each(keys, f) })
}

// refresh reads all objects from the API server, as they are at this moment: what other processes have written, and
// writes of ours that had no answer, are known when it returns, whatever the watch has told.
func (c *collection[T]) refresh(ctx context.Context) error {
	answer, err := c.client.list(ctx, metav1.ListOptions{})
	if err != nil {
		return c.fault(ctx, "list", store.Key{}, err)
	}
	list, ok := answer.(*recordList[T])
	if !ok {
		return fmt.Errorf("list objects of kind %s: the answer is a %T", c.kind, answer)
	}
	return c.objects.refreshed(list.Items, list.ResourceVersion)
}

// fresh reads the object from the API server. known is what was known of it before, or nil.
func (c *collection[T]) fresh(ctx context.Context, key store.Key, known *record[T]) (*record[T], error) {
	if c.kind.CheckKey(key) != nil { // there is none, and it would be no URL
		return nil, c.kind.NotFound(key)
	}
	r, err := c.client.get(ctx, key)
	switch {
	case err == nil && r.unreadable != nil:
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.InvalidRequest, "read %s %s: a field of it cannot be read (%w): correct it (kubectl edit), or delete it", c.kind, key, r.unreadable)
	case err == nil:
		if r = c.objects.saw(r); r != nil {
			return r, nil
		}
		return nil, c.kind.NotFound(key)
	case apierrors.IsNotFound(err) && known != nil:
		c.objects.sawEnd(known)
	}
	return nil, c.fault(ctx, "read", key, err)
}

func copyOf[T store.Object](object T) T { return object.DeepCopyObject().(T) }
