package journal

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// compactBase is how much a log may grow, in bytes, before it is written anew, however small it was: by some hundreds of
// attaches and detaches.
const compactBase = 1 << 20

// file is what the log needs of an *os.File; a test lets its calls fail.
type file interface {
	WriteAt(p []byte, at int64) (int, error)
	Truncate(size int64) error
	Close() error
}

// log is the open file. It is guarded by its journal's mutex.
type log struct {
	file file
	// size is where the next record goes.
	size int64
	// limit is the size beyond which it is written anew; deadBase is compactBase outside of tests.
	limit, deadBase int64
	// torn: behind size may be the beginning of a record that could not be written.
	torn bool
}

// append writes one record behind the last. When it fails the file is as before, or all further writes fail until it
// is.
func (l *log) append(frame []byte) error {
	if l.torn {
		if err := l.file.Truncate(l.size); err != nil {
			return fmt.Errorf("nothing can be recorded while what is left of a record that failed cannot be removed: %w", err)
		}
		l.torn = false
	}
	if _, err := l.file.WriteAt(frame, l.size); err != nil {
		l.torn = true
		if truncateErr := l.file.Truncate(l.size); truncateErr != nil {
			return errors.Join(err, fmt.Errorf("what is left of the record cannot be removed: %w", truncateErr))
		}
		l.torn = false
		return err
	}
	l.size += int64(len(frame))
	return nil
}

// overgrown says whether the log should be written anew: by then most of it has been overtaken.
func (l *log) overgrown() bool { return l.size > l.limit }

// postpone lets the log grow as much again before it is tried to write it anew.
func (l *log) postpone() { l.limit = l.size + max(l.size, l.deadBase) }

// replace puts a file with these contents in the log's place. When it fails the log goes on as it is.
func (l *log) replace(path string, data []byte) error {
	next, err := os.OpenFile(path+newSuffix, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	_, err = next.Write(data)
	if err == nil {
		err = os.Rename(next.Name(), path)
	}
	if err != nil {
		return errors.Join(err, next.Close(), os.Remove(next.Name()))
	}
	if l.file != nil {
		_ = l.file.Close() // it has no name any more, and nothing in it counts
	}
	l.file, l.size, l.torn = next, int64(len(data)), false
	l.postpone()
	return nil
}

func (l *log) close() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}

const (
	// lockWait is how long Open waits for another process that holds the journal: a predecessor that is just
	// ending needs a moment, a second agent never gives way.
	lockWait = 5 * time.Second
	// lockRetry is how often it looks.
	lockRetry = 10 * time.Millisecond
)

// errLocked: another process has the lock.
var errLocked = errors.New("another process has the lock")

// lockFile takes the lock, which ends with the process at the latest.
func lockFile(path string, wait time.Duration) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	deadline := time.NewTimer(wait)
	defer deadline.Stop()
	retry := time.NewTicker(lockRetry)
	defer retry.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return nil, errors.Join(err, f.Close())
		}
		select {
		case <-retry.C:
		case <-deadline.C:
			return nil, errors.Join(errLocked, f.Close())
		}
	}
}
