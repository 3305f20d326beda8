package embedded

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"

	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// beforeFlush: what is late has been answered, and is in no file.
var beforeFlush = failpoint.Declare("store/flush/before")

// write is one key of the file that gets a new value.
type write struct {
	bucket, key []byte
	value       []byte // nil removes the key
	// done is called when the write is durable, with the store's mu held.
	done func()
}

// batch is a set of writes that are committed together.
type batch struct {
	writes []write       // guarded by the store's mu until the committer takes the batch, then its own
	err    error         // set before done is closed
	done   chan struct{} // closed when the batch is committed or has failed
}

// errDropped: the batch was never tried, as a batch failed that it may rest on.
var errDropped = errors.New("the write rested on one that failed")

// wait waits until the batch is durable or has failed.
func (b *batch) wait(ctx context.Context, what string) error {
	select {
	case <-b.done:
		return b.err
	case <-ctx.Done():
		return store.OpenOutcome(what, ctx.Err())
	}
}

// openBatch is the batch that gathers. The caller holds mu, and adds to it.
func (s *Store) openBatch() (*batch, error) {
	if s.broken != nil {
		return nil, s.broken
	}
	if s.batch == nil {
		s.batch = &batch{done: make(chan struct{})}
		s.wakeCommitter()
	}
	return s.batch, nil
}

// wakeCommitter has the committer look. The caller holds mu, and the store is not closed.
func (s *Store) wakeCommitter() {
	select {
	case s.wake <- struct{}{}:
	default: // it has not taken the last token yet, and will see all there is
	}
}

// commitBatches is the committer. It ends when wake is closed and all is committed.
func (s *Store) commitBatches() {
	defer close(s.ended)
	for range s.wake {
		s.commitBatch()
	}
	s.commitBatch()
}

// commitBatch commits the batch that gathers, and with it everything that is late.
func (s *Store) commitBatch() {
	s.mu.Lock()
	b := s.batch
	s.batch = nil
	broken := s.broken
	writes := s.lateWrites()
	s.mu.Unlock()
	if b == nil {
		if len(writes) == 0 {
			return
		}
		_ = beforeFlush.Hit()
		b = &batch{done: make(chan struct{})}
	}
	writes = append(writes, b.writes...)
	var reserved uint64
	if broken == nil || broken == errClosed {
		reserved, b.err, broken = s.writeBatch(writes)
	} else {
		b.err = broken
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	defer close(b.done)
	if b.err == nil {
		s.reserved, s.late.behind = reserved, nil
		s.late.since = time.Now() // what is late now came during the commit
		for _, w := range writes {
			w.done()
		}
		b.writes = nil // the objects of the batch keep it
		return
	}
	if broken != nil && s.broken == nil {
		s.broken = broken
	}
	s.flushFailed(b.err)
	clear(s.sandboxes.staged)
	clear(s.groups.staged)
	if next := s.batch; next != nil {
		s.batch = nil
		next.err = errDropped
		close(next.done)
	}
}

// writeBatch writes and syncs a batch, and reserves resourceVersions. broken is set when it cannot be told whether
// that took effect.
func (s *Store) writeBatch(writes []write) (reserved uint64, err, broken error) {
	reserved = s.version.Add(1) + reserve // unique to the batch, and higher than any in it
	version := strconv.AppendUint(nil, reserved, 10)
	err = s.file.Update(func(tx *bolt.Tx) error {
		for _, w := range writes {
			bucket := tx.Bucket(w.bucket)
			if w.value == nil {
				if err := bucket.Delete(w.key); err != nil {
					return err
				}
			} else if err := bucket.Put(w.key, w.value); err != nil {
				return err
			}
		}
		if err := tx.Bucket(metaBucket).Put(versionKey, version); err != nil {
			return err
		}
		return s.fault(written)
	})
	if err == nil {
		err = s.fault(committed)
	}
	if err == nil {
		return reserved, nil, nil
	}
	var stored []byte
	readErr := s.file.View(func(tx *bolt.Tx) error {
		stored = append(stored, tx.Bucket(metaBucket).Get(versionKey)...)
		return nil
	})
	if readErr == nil && string(stored) != string(version) {
		return 0, fault.New(errdefs.ErrUnavailable, store.Unavailable,
			"write to the state file %s: %w (nothing was changed; check the disk's space and health, then try again)", s.file.Path(), err), nil
	}
	broken = fault.New(errdefs.ErrUnavailable, store.Unavailable,
		"write to the state file %s: %w (it cannot be told what reached the disk, so nothing more is written: check the disk and restart the server)", s.file.Path(), err)
	return 0, broken, broken
}

// stage is a place at which a test can make a commit fail.
type stage int

const (
	written   stage = iota // the transaction is complete and not committed: its failure undoes it
	committed              // it is committed: as if its last sync had failed
)

func (s *Store) fault(at stage) error {
	if s.options.fault == nil {
		return nil
	}
	return s.options.fault(at)
}

func parseNumber(b []byte) (uint64, error) {
	if b == nil {
		return 0, nil
	}
	return strconv.ParseUint(string(b), 10, 63)
}
