package logfile

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Entry is one entry of the log.
type Entry struct {
	// Time is when the logger read the line.
	Time time.Time
	// Stream is Stdout or Stderr.
	Stream string
	// Partial says that the line continues in the next entry of this stream.
	Partial bool
	// Text is the line without its end.
	Text string
}

// Options select what Read answers. The zero value is everything that is there now.
type Options struct {
	// Follow waits for more at the end of the log, across rotations, until Until is closed, the directory is removed,
	// or the context ends.
	Follow bool
	// Until ends a follow: what is in the log by then is still answered. nil: never.
	Until <-chan struct{}
	// Tail > 0 begins with the last Tail entries (of Stream, if that is set).
	Tail int
	// Stream answers this stream only. Empty: both.
	Stream string
}

// Read calls yield for each entry of the log in dir, in the order of writing. It ends with yield's first error. A
// missing directory is os.ErrNotExist; a directory that goes away while it is read is the log's end.
func Read(ctx context.Context, dir string, opts Options, yield func(Entry) error) error {
	r := &reader{dir: dir}
	defer r.close()
	var watch *watcher
	if opts.Follow {
		// Before the first read, so that nothing written in between goes unnoticed.
		var err error
		if watch, err = newWatcher(dir); err != nil {
			return err
		}
		defer watch.close()
	} else if _, err := os.Stat(dir); err != nil {
		return err
	}
	send := func(e Entry) error {
		if opts.Stream != "" && e.Stream != opts.Stream {
			return nil
		}
		return yield(e)
	}
	if opts.Tail > 0 {
		last := ring{size: opts.Tail}
		if err := r.drain(ctx, func(e Entry) error {
			if opts.Stream == "" || e.Stream == opts.Stream {
				last.add(e)
			}
			return nil
		}); err != nil {
			return err
		}
		for _, e := range last.inOrder() {
			if err := yield(e); err != nil {
				return err
			}
		}
		if !opts.Follow {
			return nil
		}
	}
	for {
		ended := !opts.Follow || isClosed(opts.Until)
		if err := r.drain(ctx, send); err != nil || ended {
			return err
		}
		gone, err := watch.wait(ctx, opts.Until)
		if err != nil {
			return err
		}
		if gone {
			return r.drain(ctx, send)
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// reader remembers its place in the log.
type reader struct {
	dir     string
	number  int // of the open file
	file    *os.File
	buf     *bufio.Reader
	offset  int64  // of what was read of it
	partial []byte // of a line that the writer has not finished
}

func (r *reader) close() {
	if r.file != nil {
		r.file.Close()
	}
}

// drain answers everything that is in the log now. What comes while it reads it leaves alone: a process that writes
// faster than it is read would keep it for ever.
func (r *reader) drain(ctx context.Context, yield func(Entry) error) error {
	last, size, err := r.end()
	if err != nil {
		return err
	}
	for {
		if r.file != nil {
			limit := size
			if r.number < last { // it is complete, since a higher one exists
				limit = math.MaxInt64
			}
			if err := r.readFile(ctx, limit, yield); err != nil || r.number >= last {
				return err
			}
			r.file.Close()
			r.file, r.partial = nil, nil
		}
		next, err := r.following()
		if err != nil || next == 0 || next > last {
			return err
		}
		f, err := os.Open(filepath.Join(r.dir, fileName(next)))
		if errors.Is(err, os.ErrNotExist) {
			continue // rotated away meanwhile
		}
		if err != nil {
			return err
		}
		r.file, r.number, r.buf, r.offset = f, next, bufio.NewReaderSize(f, 64<<10), 0
	}
}

// end is where the log ends now: its highest file, and the size of that. Of a log that is gone it is the end of the file
// that the reader has open.
func (r *reader) end() (last int, size int64, err error) {
	for {
		found, err := numbers(r.dir)
		if errors.Is(err, os.ErrNotExist) || err == nil && len(found) == 0 {
			return r.number, math.MaxInt64, nil
		}
		if err != nil {
			return 0, 0, err
		}
		last = found[len(found)-1]
		info, err := os.Stat(filepath.Join(r.dir, fileName(last)))
		if errors.Is(err, os.ErrNotExist) {
			continue // rotated away meanwhile
		}
		if err != nil {
			return 0, 0, err
		}
		return last, info.Size(), nil
	}
}

// following answers the lowest number above the reader's, or 0.
func (r *reader) following() (int, error) {
	found, err := numbers(r.dir)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	for _, n := range found {
		if n > r.number {
			return n, nil
		}
	}
	return 0, err
}

// readFile answers the lines of the open file that begin before limit.
func (r *reader) readFile(ctx context.Context, limit int64, yield func(Entry) error) error {
	for r.offset < limit {
		if err := ctx.Err(); err != nil {
			return err
		}
		line, err := r.buf.ReadSlice('\n')
		r.offset += int64(len(line))
		r.partial = append(r.partial, line...)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err != nil {
			return err
		}
		entry, ok := parse(r.partial[:len(r.partial)-1])
		r.partial = r.partial[:0]
		if !ok {
			continue // the torn end of a killed writer
		}
		if err := yield(entry); err != nil {
			return err
		}
	}
	return nil
}

func parse(line []byte) (Entry, bool) {
	parts := bytes.SplitN(line, []byte{' '}, 4)
	if len(parts) != 4 || len(parts[2]) != 1 {
		return Entry{}, false
	}
	at, err := time.Parse(time.RFC3339Nano, string(parts[0]))
	stream := string(parts[1])
	if err != nil || (stream != Stdout && stream != Stderr) {
		return Entry{}, false
	}
	return Entry{Time: at, Stream: stream, Partial: parts[2][0] == 'P', Text: string(parts[3])}, true
}

// ring keeps the last size entries.
type ring struct {
	size    int
	entries []Entry
	next    int // the oldest, once the ring is full
}

func (r *ring) add(e Entry) {
	if len(r.entries) < r.size {
		r.entries = append(r.entries, e)
		return
	}
	r.entries[r.next] = e
	r.next = (r.next + 1) % r.size
}

func (r *ring) inOrder() []Entry {
	return append(append([]Entry(nil), r.entries[r.next:]...), r.entries[:r.next]...)
}

// watcher tells when a log directory has changed, by inotify(7).
type watcher struct {
	dir     string
	file    *os.File
	changed chan struct{} // holds a token after a change
}

func newWatcher(dir string) (*watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("follow %s: inotify: %w (raise fs.inotify.max_user_instances if it is exhausted)", dir, err)
	}
	w := &watcher{dir: dir, file: os.NewFile(uintptr(fd), "inotify"), changed: make(chan struct{}, 1)}
	for _, watch := range []struct {
		path string
		mask uint32
	}{
		{dir, unix.IN_MODIFY | unix.IN_CREATE},
		// The directory's own end is told by its parent: it would not tell itself as long as a file in it is open.
		{filepath.Dir(dir), unix.IN_DELETE | unix.IN_MOVED_FROM},
	} {
		if _, err := unix.InotifyAddWatch(fd, watch.path, watch.mask|unix.IN_ONLYDIR); err != nil {
			w.close()
			return nil, &os.PathError{Op: "watch", Path: watch.path, Err: err}
		}
	}
	go w.run()
	return w, nil
}

func (w *watcher) close() { w.file.Close() }

// run ends when the watcher is closed.
func (w *watcher) run() {
	buf := make([]byte, 64*(unix.SizeofInotifyEvent+unix.NAME_MAX+1))
	for {
		if _, err := w.file.Read(buf); err != nil {
			return
		}
		// What changed does not matter: whoever waits looks at everything.
		select {
		case w.changed <- struct{}{}:
		default:
		}
	}
}

// wait blocks until the directory changed, is gone, or until is closed.
func (w *watcher) wait(ctx context.Context, until <-chan struct{}) (gone bool, err error) {
	select {
	case <-w.changed:
		_, err := os.Stat(w.dir)
		return errors.Is(err, os.ErrNotExist), nil
	case <-until:
		return false, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}
