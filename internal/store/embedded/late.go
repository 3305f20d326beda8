package embedded

import (
	"fmt"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

const (
	// flushAfter is how long a late write may wait for a commit. The next write of anything takes it along, so that
	// a flush of its own is needed only when it gets quiet.
	flushAfter = 50 * time.Millisecond
	// flushRetry is when a flush that failed is tried again, if no write comes before.
	flushRetry = time.Second
	// reserve is how many resourceVersions a commit puts aside: states that are shown before they are durable get
	// them, and a process that comes after a crash begins behind them. When they are used up, writes wait for a
	// commit again.
	reserve = 1 << 16
)

// late are the states that are shown and not durable yet. The store's mu guards it.
type late struct {
	count  int       // of the states, of all kinds
	since  time.Time // none is late for longer
	timer  *time.Timer
	armed  bool
	behind error // how the last attempt to write them failed; nil when it did not
}

// showsEarly says whether a late write may be shown before it is durable. mu is held. It may not while the file cannot be
// written: then its writer is to hear of that.
func (s *Store) showsEarly() bool {
	return s.late.behind == nil && s.version.Load() <= s.reserved
}

// flushIn has what is late committed after d, unless that happens before. mu is held.
func (s *Store) flushIn(d time.Duration) {
	if s.late.armed || s.closed {
		return
	}
	s.late.armed = true
	if s.late.timer == nil {
		s.late.timer = time.AfterFunc(d, s.flush)
	} else {
		s.late.timer.Reset(d)
	}
}

// flush wakes the committer when something has been late for long enough.
func (s *Store) flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.late.armed = false
	if s.late.count == 0 || s.closed {
		return
	}
	if left := s.options.flushAfter - time.Since(s.late.since); left > 0 {
		s.flushIn(left) // what the timer was set for is durable, and this came later
		return
	}
	s.wakeCommitter()
}

func (l *late) stop() {
	if l.timer != nil {
		l.timer.Stop()
	}
}

// lateWrites are the writes of all that is late and not staged anew. mu is held.
func (s *Store) lateWrites() []write {
	if s.late.count == 0 {
		return nil
	}
	return append(s.sandboxes.lateWrites(nil), s.groups.lateWrites(nil)...)
}

func (c *collection[T]) lateWrites(writes []write) []write {
	for key, state := range c.late {
		if c.staged[key] == nil { // else the write that is staged has it
			writes = append(writes, write{
				bucket: c.kind.bucket, key: []byte(key.String()), value: state.raw,
				done: func() { c.caughtUp(key, state) },
			})
		}
	}
	return writes
}

// showEarly shows a state that is not durable yet. mu is held.
func (c *collection[T]) showEarly(key store.Key, next *state[T]) {
	l := &c.store.late
	if c.late[key] == nil {
		if l.count++; l.count == 1 {
			l.since = time.Now()
		}
	}
	c.late[key] = next
	c.show(key, next)
	c.store.flushIn(c.store.options.flushAfter)
}

// caughtUp notes that a late state (nil for none) is durable. mu is held.
func (c *collection[T]) caughtUp(key store.Key, durable *state[T]) {
	if durable != nil && c.late[key] == durable {
		delete(c.late, key)
		c.store.late.count--
	}
}

// flushFailed notes that what is late could not be written, and has it tried again. mu is held.
func (s *Store) flushFailed(err error) {
	if s.late.count == 0 {
		return
	}
	if s.late.behind == nil {
		s.options.Logger.Error("what was acknowledged could not be written to the state file: until it is, every write waits for its commit",
			"objects", s.late.count, "error", err)
	}
	s.late.behind = err
	if s.broken == nil {
		s.flushIn(flushRetry)
	}
}

// lost is an error when the store was closed with something late.
func (s *Store) lost() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.late.count == 0 {
		return nil
	}
	return fmt.Errorf("close the state file %s: the last state of %d objects could not be written, and is found out again at the next start: %w",
		s.file.Path(), s.late.count, s.late.behind)
}
