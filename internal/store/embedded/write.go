package embedded

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/patch"
)

// maxAttempts bounds how often an update is computed. Each attempt that is lost means that somebody else
// staged a write, and then waits for a commit; so an update loses about as often as there are writers.
const maxAttempts = 1000

// Create implements store.Writer.
func (c *collection[T]) Create(ctx context.Context, object T) (T, error) {
	key := store.KeyOf(object)
	if err := c.kind.CheckKey(key); err != nil {
		var none T
		return none, err
	}
	return c.mutate(ctx, key, "create", func(now *state[T]) (*state[T], error) {
		if now.exists() {
			return nil, c.kind.Exists(key)
		}
		made := c.kind.Empty()
		c.kind.TakeSpec(made, object)
		made.SetNamespace(key.Namespace)
		made.SetName(key.Name)
		made.SetUID(uuid.NewUUID())
		made.SetCreationTimestamp(metav1.NewTime(c.store.options.Clock.Now()))
		made.SetGeneration(1)
		made.SetResourceVersion(c.store.nextVersion())
		raw, err := c.kind.encode(made)
		if err != nil {
			return nil, fmt.Errorf("encode %s %s: %w", c.kind, key, err)
		}
		return c.newState(key, raw)
	})
}

// UpdateSpec implements store.Writer.
func (c *collection[T]) UpdateSpec(ctx context.Context, key store.Key, pre store.Preconditions, change func(T) error) (T, error) {
	return c.updateSpec(ctx, key, pre, change, false)
}

// UpdateSpecLate implements store.LateWriter.
func (c *collection[T]) UpdateSpecLate(ctx context.Context, key store.Key, pre store.Preconditions, change func(T) error) (T, error) {
	return c.updateSpec(ctx, key, pre, change, true)
}

func (c *collection[T]) updateSpec(ctx context.Context, key store.Key, pre store.Preconditions, change func(T) error, late bool) (T, error) {
	return c.mutate(ctx, key, "update", func(now *state[T]) (*state[T], error) {
		next, err := c.changed(key, now, pre, change, c.kind.TakeSpec)
		if err != nil {
			return nil, err
		}
		deleting := now.object.GetDeletionTimestamp() != nil
		if deleting {
			for _, f := range next.GetFinalizers() {
				if !slices.Contains(now.object.GetFinalizers(), f) {
					return nil, c.kind.Terminating(key, f)
				}
			}
		}
		revised, err := c.revise(key, now, next, c.kind.SpecPart)
		if err == nil && revised != now {
			revised.gone = deleting && len(next.GetFinalizers()) == 0
			revised.early = late && !revised.gone
		}
		return revised, err
	})
}

// UpdateStatus implements store.Writer.
func (c *collection[T]) UpdateStatus(ctx context.Context, key store.Key, pre store.Preconditions, change func(T) error) (T, error) {
	return c.updateStatus(ctx, key, pre, change, false)
}

// UpdateStatusLate implements store.LateWriter.
func (c *collection[T]) UpdateStatusLate(ctx context.Context, key store.Key, pre store.Preconditions, change func(T) error) (T, error) {
	return c.updateStatus(ctx, key, pre, change, true)
}

func (c *collection[T]) updateStatus(ctx context.Context, key store.Key, pre store.Preconditions, change func(T) error, late bool) (T, error) {
	return c.mutate(ctx, key, "update the status of", func(now *state[T]) (*state[T], error) {
		next, err := c.changed(key, now, pre, change, c.kind.TakeStatus)
		if err != nil {
			return nil, err
		}
		revised, err := c.revise(key, now, next, c.kind.StatusPart)
		if err == nil && revised != now {
			revised.early = late
		}
		return revised, err
	})
}

// Delete implements store.Writer.
func (c *collection[T]) Delete(ctx context.Context, key store.Key, pre store.Preconditions) error {
	_, err := c.mutate(ctx, key, "delete", func(now *state[T]) (*state[T], error) {
		if err := c.check(key, now, pre); err != nil {
			return nil, err
		}
		if len(now.object.GetFinalizers()) == 0 {
			last, err := c.write(key, now, nil)
			if err == nil {
				last.gone = true
			}
			return last, err
		}
		if now.object.GetDeletionTimestamp() != nil {
			return now, nil
		}
		next := copyOf(now.object)
		next.SetDeletionTimestamp(&metav1.Time{Time: c.store.options.Clock.Now()})
		next.SetGeneration(now.object.GetGeneration() + 1)
		return c.revise(key, now, next, c.kind.SpecPart)
	})
	return err
}

func (s *state[T]) exists() bool { return s != nil && !s.gone }

func (c *collection[T]) check(key store.Key, now *state[T], pre store.Preconditions) error {
	if !now.exists() {
		return c.kind.NotFound(key)
	}
	if uid := now.object.GetUID(); pre.UID != "" && pre.UID != uid {
		return c.kind.Replaced(key, pre.UID, uid)
	}
	if v := now.object.GetResourceVersion(); pre.ResourceVersion != "" && pre.ResourceVersion != v {
		return c.kind.Changed(key, pre.ResourceVersion, v)
	}
	return nil
}

// changed is the object after the caller's change: of that, only what take copies.
func (c *collection[T]) changed(key store.Key, now *state[T], pre store.Preconditions, change func(T) error, take func(to, from T)) (T, error) {
	var none T
	if err := c.check(key, now, pre); err != nil {
		return none, err
	}
	wanted := copyOf(now.object)
	if err := change(wanted); err != nil {
		return none, err
	}
	next := copyOf(now.object)
	take(next, wanted)
	return next, nil
}

// revise is the state in which a part of the object is as in next; now itself when that changes nothing.
func (c *collection[T]) revise(key store.Key, now *state[T], next T, part func(T) any) (*state[T], error) {
	if now.plain {
		return c.rewrite(key, now, next)
	}
	p, err := patch.Make(part(now.object), part(next), patch.WithRaw(now.raw))
	if err != nil {
		return nil, fmt.Errorf("change %s %s: %w", c.kind, key, err)
	}
	if len(p) == 0 {
		return now, nil
	}
	if p.Touches("/spec") {
		p = append(p, patch.Operation{Op: "add", Path: "/metadata/generation", Value: now.object.GetGeneration() + 1})
	}
	return c.write(key, now, p)
}

// write is the state after a patch and with a new resourceVersion.
func (c *collection[T]) write(key store.Key, now *state[T], p patch.Patch) (*state[T], error) {
	p = append(p, patch.Operation{Op: "add", Path: "/metadata/resourceVersion", Value: c.store.nextVersion()})
	raw, err := p.Apply(now.raw)
	if err != nil {
		return nil, fmt.Errorf("change %s %s: %w", c.kind, key, err)
	}
	return c.newState(key, raw)
}

// rewrite is revise where nothing is stored that this build does not know: then the patched object is the encoding of
// next, which takes a third of the time.
func (c *collection[T]) rewrite(key store.Key, now *state[T], next T) (*state[T], error) {
	raw, err := c.kind.encode(next)
	if err == nil && bytes.Equal(raw, now.raw) {
		return now, nil
	}
	var changed bool
	if err == nil {
		changed, err = c.kind.specDiffers(now.object, next)
	}
	if err == nil {
		if changed {
			next.SetGeneration(now.object.GetGeneration() + 1)
		}
		next.SetResourceVersion(c.store.nextVersion())
		raw, err = c.kind.encode(next)
	}
	if err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", c.kind, key, err)
	}
	if err := c.kind.CheckSize(key, len(raw)); err != nil {
		return nil, err
	}
	// What is shown is what would be read from the file: times, for example, lose their fractions.
	object, err := c.kind.decode(raw)
	if err != nil {
		return nil, fmt.Errorf("decode %s %s: %w", c.kind, key, err)
	}
	return &state[T]{object: object, raw: raw, plain: true}, nil
}

func (c *collection[T]) newState(key store.Key, raw []byte) (*state[T], error) {
	if err := c.kind.CheckSize(key, len(raw)); err != nil {
		return nil, err
	}
	s, err := c.kind.read(raw)
	if err != nil {
		return nil, fmt.Errorf("decode %s %s: %w", c.kind, key, err)
	}
	return s, nil
}

// mutate computes the next state of an object from its present one (nil when there is none), and makes it
// durable, or shows it if it is an early one. compute returns its argument when there is nothing to write; it may be called several times.
func (c *collection[T]) mutate(ctx context.Context, key store.Key, verb string, compute func(now *state[T]) (*state[T], error)) (T, error) {
	var none T
	what := fmt.Sprintf("%s %s %s", verb, c.kind, key)
	for range maxAttempts {
		if err := ctx.Err(); err != nil {
			return none, fmt.Errorf("%s: %w", what, err)
		}
		now := c.newest(key)
		next, err := compute(now)
		if err == nil && next != now {
			if err = c.stage(key, now, next); err == errStale {
				continue
			}
		}
		// An answer is given only when what it rests on is durable, or shown: next, or else now.
		basis := next
		if err != nil {
			basis = now
		}
		if waitErr := basis.durable(ctx, what); waitErr != nil {
			if errors.Is(waitErr, errDropped) || (basis == now && ctx.Err() == nil) {
				continue
			}
			return none, waitErr
		}
		if err != nil {
			return none, err
		}
		return copyOf(next.object), nil
	}
	return none, c.kind.Contended(key, maxAttempts)
}

// durable waits until the state is durable.
func (s *state[T]) durable(ctx context.Context, what string) error {
	if s == nil || s.batch == nil {
		return nil
	}
	return s.batch.wait(ctx, what)
}

// newest is the newest state of an object, durable or not; nil when there is none.
func (c *collection[T]) newest(key store.Key) *state[T] {
	c.store.mu.RLock()
	defer c.store.mu.RUnlock()
	return c.newestLocked(key)
}

func (c *collection[T]) newestLocked(key store.Key) *state[T] {
	if s, ok := c.staged[key]; ok {
		return s
	}
	return c.shown[key]
}

// errStale: the object has got another state since the write was computed.
var errStale = errors.New("stale")

// stage makes next the newest state of the object, if now still is. An early one is shown at once, unless what it rests
// on is not shown itself.
func (c *collection[T]) stage(key store.Key, now, next *state[T]) error {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	if c.newestLocked(key) != now {
		return errStale
	}
	if next.early && c.staged[key] == nil && c.store.broken == nil && c.store.showsEarly() {
		c.showEarly(key, next)
		return nil
	}
	b, err := c.store.openBatch()
	if err != nil {
		return err
	}
	next.batch = b
	c.staged[key] = next
	w := write{bucket: c.kind.bucket, key: []byte(key.String()), value: next.raw}
	if next.gone {
		w.value = nil
	}
	w.done = func() { c.committed(key, next) }
	b.writes = append(b.writes, w)
	return nil
}

// committed shows a state that is durable now. The store's mu is held.
func (c *collection[T]) committed(key store.Key, s *state[T]) {
	if c.staged[key] == s {
		delete(c.staged, key)
	}
	c.caughtUp(key, c.late[key]) // s rests on it
	c.show(key, s)
}

// show shows a state to readers. The store's mu is held.
func (c *collection[T]) show(key store.Key, s *state[T]) {
	uid := s.object.GetUID()
	if s.gone {
		delete(c.shown, key)
		delete(c.keys, uid)
		c.hub.Deleted(s.object)
		return
	}
	c.shown[key] = s
	c.keys[uid] = key
	c.hub.Changed(s.object)
}
