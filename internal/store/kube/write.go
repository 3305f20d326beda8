package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/patch"
)

// maxAttempts bounds how often a write is computed. An attempt is lost to another writer of the same object.
const maxAttempts = 1000

// Create implements store.Writer.
func (c *collection[T]) Create(ctx context.Context, object T) (T, error) {
	var none T
	key := store.KeyOf(object)
	if err := c.kind.CheckKey(key); err != nil {
		return none, err
	}
	if err := ctx.Err(); err != nil {
		return none, c.ended("create", key, err)
	}
	made := c.kind.Empty()
	c.kind.TakeSpec(made, object)
	made.SetNamespace(key.Namespace)
	made.SetName(key.Name)
	made.GetObjectKind().SetGroupVersionKind(c.kind.GVK)
	raw, err := json.Marshal(made)
	if err != nil {
		return none, fmt.Errorf("encode %s %s: %w", c.kind, key, err)
	}
	if err := c.kind.CheckSize(key, len(raw)); err != nil {
		return none, err
	}
	r, err := c.client.create(ctx, key.Namespace, raw)
	if err != nil {
		return none, c.writeFault(ctx, "create", key, err)
	}
	c.objects.saw(r)
	return copyOf(r.object), nil
}

// UpdateSpec implements store.Writer.
func (c *collection[T]) UpdateSpec(ctx context.Context, key store.Key, pre store.Preconditions, change func(T) error) (T, error) {
	return c.mutate(ctx, "update", key, pre, func(now *record[T]) (write[T], error) {
		next, err := changed(now, change, c.kind.TakeSpec)
		if err != nil {
			return nil, err
		}
		if now.object.GetDeletionTimestamp() != nil {
			for _, f := range next.GetFinalizers() {
				if !slices.Contains(now.object.GetFinalizers(), f) {
					return nil, c.kind.Terminating(key, f)
				}
			}
		}
		return c.revise(key, now, next, c.kind.SpecPart)
	})
}

// UpdateStatus implements store.Writer.
func (c *collection[T]) UpdateStatus(ctx context.Context, key store.Key, pre store.Preconditions, change func(T) error) (T, error) {
	return c.mutate(ctx, "update the status of", key, pre, func(now *record[T]) (write[T], error) {
		next, err := changed(now, change, c.kind.TakeStatus)
		if err != nil {
			return nil, err
		}
		return c.revise(key, now, next, c.kind.StatusPart, "status")
	})
}

// Delete implements store.Writer.
func (c *collection[T]) Delete(ctx context.Context, key store.Key, pre store.Preconditions) error {
	return c.deleteWith(ctx, key, pre, metav1.DeleteOptions{})
}

func (c *collection[T]) deleteWith(ctx context.Context, key store.Key, pre store.Preconditions, options metav1.DeleteOptions) error {
	_, err := c.mutate(ctx, "delete", key, pre, func(now *record[T]) (write[T], error) {
		if now.object.GetDeletionTimestamp() != nil {
			return nil, nil
		}
		return func(ctx context.Context) (next, last *record[T], err error) {
			next, err = c.client.deleteWith(ctx, now, options)
			if next == nil {
				last = now
			}
			return next, last, err
		}, nil
	})
	return err
}

// write makes one request that changes an object. It returns the object as it is then, or its last state when it is
// gone by that.
type write[T store.Object] func(context.Context) (next, last *record[T], err error)

// changed is the object after the caller's change: of that, only what take copies.
func changed[T store.Object](now *record[T], change func(T) error, take func(to, from T)) (T, error) {
	wanted := copyOf(now.object)
	if err := change(wanted); err != nil {
		return wanted, err
	}
	next := copyOf(now.object)
	take(next, wanted)
	return next, nil
}

// revise is the write after which a part of the object is as in next; nil when it is so already.
func (c *collection[T]) revise(key store.Key, now *record[T], next T, part func(T) any, subresource ...string) (write[T], error) {
	p, err := patch.Diff(part(now.object), part(next), patch.WithRaw(now.raw), patch.WithGuard(now.uid(), now.object.GetResourceVersion()))
	if err != nil {
		return nil, fmt.Errorf("change %s %s: %w", c.kind, key, err)
	}
	if p == nil {
		return nil, nil
	}
	if len(now.raw)+len(p) > store.MaxObjectBytes {
		raw, err := patch.Apply(now.raw, p)
		if err != nil {
			return nil, fmt.Errorf("change %s %s: %w", c.kind, key, err)
		}
		if err := c.kind.CheckSize(key, len(raw)); err != nil {
			return nil, err
		}
	}
	return func(ctx context.Context) (next, last *record[T], err error) {
		r, err := c.client.patch(ctx, key, p, subresource...)
		if err == nil && r.gone() {
			return nil, r, nil
		}
		return r, nil, err
	}, nil
}

// mutate changes an object. compute gives the write that does it, from the present state, or nil when there is nothing
// to do; it may be called several times.
func (c *collection[T]) mutate(ctx context.Context, verb string, key store.Key, pre store.Preconditions, compute func(now *record[T]) (write[T], error)) (T, error) {
	var none T
	now := c.objects.get(key)
	asked := false // the API server was asked for now
	for range maxAttempts {
		if err := ctx.Err(); err != nil {
			return none, c.ended(verb, key, err)
		}
		if now == nil {
			var err error
			if now, err = c.fresh(ctx, key, nil); err != nil {
				return none, err
			}
			asked = true
		}
		err := c.check(key, now, pre)
		var do write[T]
		if err == nil {
			do, err = compute(now)
		}
		if do == nil && !asked {
			// Refused, or nothing to do: that must not rest on a state that has passed.
			seen, askErr := c.fresh(ctx, key, now)
			if askErr != nil {
				return none, askErr
			}
			if asked = true; seen != now {
				now = seen
				continue
			}
		}
		switch {
		case err != nil:
			return none, err
		case do == nil:
			return copyOf(now.object), nil
		}
		done, err := c.perform(ctx, verb, key, now, do)
		if err == nil {
			return copyOf(done.object), nil
		}
		if !errors.Is(err, errStale) {
			return none, err
		}
		now, asked = c.objects.get(key), false
	}
	return none, c.kind.Contended(key, maxAttempts)
}

func (c *collection[T]) check(key store.Key, now *record[T], pre store.Preconditions) error {
	if uid := now.uid(); pre.UID != "" && pre.UID != uid {
		return c.kind.Replaced(key, pre.UID, uid)
	}
	if v := now.object.GetResourceVersion(); pre.ResourceVersion != "" && pre.ResourceVersion != v {
		return c.kind.Changed(key, pre.ResourceVersion, v)
	}
	return nil
}

// errStale: the object has got another state since the write was computed.
var errStale = errors.New("stale")

// perform makes a write that was computed from the state now, when it is the object's turn.
func (c *collection[T]) perform(ctx context.Context, verb string, key store.Key, now *record[T], do write[T]) (*record[T], error) {
	release, err := c.turns.take(ctx, key)
	if err != nil {
		return nil, c.ended(verb, key, err)
	}
	defer release()
	if c.objects.get(key) != now {
		return nil, errStale
	}
	next, last, err := do(ctx)
	switch {
	case err == nil && last != nil:
		c.objects.sawEnd(last)
		return last, nil
	case err == nil:
		c.objects.saw(next)
		return next, nil
	case lost(err):
		seen, askErr := c.fresh(ctx, key, now)
		if askErr != nil {
			return nil, askErr
		}
		if seen != now {
			return nil, errStale
		}
	case apierrors.IsNotFound(err):
		c.objects.sawEnd(now)
	}
	return nil, c.writeFault(ctx, verb, key, err)
}

// lost says that a write was refused as the object is not what it was computed from: by the preconditions of a
// deletion, or since the patch could not be applied, which the API server calls invalid without a cause.
func lost(err error) bool {
	var status apierrors.APIStatus
	return apierrors.IsConflict(err) ||
		apierrors.IsInvalid(err) && errors.As(err, &status) && (status.Status().Details == nil || len(status.Status().Details.Causes) == 0)
}
