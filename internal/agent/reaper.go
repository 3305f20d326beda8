package agent

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// The reaper looks again after reapBase, doubled up to reapMax while nothing changes: the kernel tells nobody when the
// last file on a detached mount is closed.
const (
	reapBase = 20 * time.Millisecond
	reapMax  = 5 * time.Second
	// reapPatience is how long a pass waits for one source's release; it goes on by itself after that.
	reapPatience = time.Second
)

// reaper finishes what could not be finished at once: it forgets volumes that were detached lazily when no process holds
// them any more, and releases sources that have no user left.
type reaper struct {
	a      *Agent
	signal chan struct{}

	mu   sync.Mutex     // guards the fields below
	keys map[string]int // volume keys to look at, and how often each was asked for
	pass chan struct{}  // closed at the end of the present pass
}

func newReaper(a *Agent) *reaper {
	return &reaper{a: a, signal: make(chan struct{}, 1), keys: map[string]int{}, pass: make(chan struct{})}
}

// wake asks the reaper to look at a volume key.
func (r *reaper) wake(key string) {
	r.mu.Lock()
	r.keys[key]++
	r.mu.Unlock()
	select {
	case r.signal <- struct{}{}:
	default:
	}
}

// await waits until nothing is left to do for any of the keys, or the context ends.
func (r *reaper) await(ctx context.Context, keys map[string]bool) {
	for {
		r.mu.Lock()
		pass, left := r.pass, false
		for k := range keys {
			_, waiting := r.keys[k]
			left = left || waiting
		}
		r.mu.Unlock()
		if !left {
			return
		}
		select {
		case <-pass:
		case <-ctx.Done():
			return
		case <-r.a.stopping.Done():
			return
		}
	}
}

func (r *reaper) run() {
	delay := reapBase
	for {
		timer := r.a.config.Clock.NewTimer(delay)
		var tick <-chan time.Time
		if r.waiting() {
			tick = timer.C()
		}
		select {
		case <-r.signal:
			delay = reapBase
		case <-tick:
			delay = min(2*delay, reapMax)
		case <-r.a.stopping.Done():
			timer.Stop()
			return
		}
		timer.Stop()
		r.look()
	}
}

func (r *reaper) waiting() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.keys) > 0
}

// look makes one pass over the keys. A key that was asked for again meanwhile stays for the next one.
func (r *reaper) look() {
	r.mu.Lock()
	keys := maps.Clone(r.keys)
	r.mu.Unlock()
	for key, asked := range keys {
		done := r.forgetLazy(key)
		ctx, cancel := context.WithTimeout(r.a.stopping, reapPatience)
		released := r.a.prepared.release(ctx, key)
		cancel()
		if !done || !released {
			continue
		}
		r.mu.Lock()
		if r.keys[key] == asked {
			delete(r.keys, key)
		}
		r.mu.Unlock()
	}
	r.mu.Lock()
	close(r.pass)
	r.pass = make(chan struct{})
	r.mu.Unlock()
}

// forgetLazy forgets the volumes of a key that were detached lazily and that nobody holds any more. It is false when
// some are still held.
func (r *reaper) forgetLazy(key string) bool {
	done := true
	for _, v := range r.a.journal.Users(key) {
		if v.Phase != journal.Lazy {
			continue
		}
		held, err := r.a.held(v)
		if err == nil && !held {
			err = r.a.updater.forget(v)
			r.a.changed(v.SandboxUID)
		}
		if err != nil {
			r.a.log.Warn("cannot tell whether a volume that was detached lazily is still held", append(about(v), "error", err)...)
		}
		done = done && err == nil && !held
	}
	return done
}

// held says whether anything still holds a mount that is gone from its sandbox's tree.
func (a *Agent) held(v journal.Volume) (bool, error) {
	users, err := mount.Users(a.stopping, v.Mount)
	if err != nil || len(users) > 0 {
		return err == nil, err
	}
	return a.heldInside(a.sandbox(v.SandboxUID), v.Mount)
}

// heldInside says whether a mount namespace that the sandbox made for itself has a copy of a mount.
func (a *Agent) heldInside(sb *sandbox, m mount.Identity) (bool, error) {
	c, ok := sb.seen()
	if !ok || !hasTask(c) {
		return false, nil
	}
	own, err := sb.namespaceID(c.PID)
	if err != nil || own == 0 {
		return false, err
	}
	nested, err := nestedNamespaces(own, c.PID, a.processes(sb))
	if err != nil || len(nested) == 0 {
		return false, err
	}
	refs, err := mount.Holding(a.stopping, content(m))
	for _, ref := range refs {
		if nested[ref.ID] {
			return true, err
		}
	}
	return false, err
}
