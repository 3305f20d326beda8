package logfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Writer appends entries to a log directory and keeps it within its bounds. It is safe for concurrent use.
type Writer struct {
	dir      string
	maxSize  int64
	maxFiles int
	now      func() time.Time

	mu     sync.Mutex // guards everything below
	file   *os.File
	number int
	size   int64
}

// NewWriter opens the log in dir, which must exist, and continues it. maxSize (bytes, at least MinSize) bounds one
// file, maxFiles (at least 1) their number.
func NewWriter(dir string, maxSize int64, maxFiles int, now func() time.Time) (*Writer, error) {
	if maxSize < MinSize || maxFiles < 1 {
		return nil, fmt.Errorf("log in %s: size %d and %d files: need at least %d bytes and 1 file", dir, maxSize, maxFiles, MinSize)
	}
	w := &Writer{dir: dir, maxSize: maxSize, maxFiles: maxFiles, now: now, number: 1}
	found, err := numbers(dir)
	if err != nil {
		return nil, err
	}
	if len(found) > 0 {
		w.number = found[len(found)-1]
	}
	if err := w.removeBelow(w.number - maxFiles + 1); err != nil {
		return nil, err
	}
	if err := w.open(); err != nil {
		return nil, err
	}
	return w, nil
}

// Copy reads one stream to its end and logs it. An error in writing loses the entry and nothing else: a sandbox must
// never block because a disk is full. The error returned is the stream's.
func (w *Writer) Copy(stream string, r io.Reader) error {
	buf := make([]byte, MaxText)
	used := 0
	for {
		n, err := r.Read(buf[used:])
		used += n
		rest := w.writeLines(stream, buf[:used], err != nil)
		used = copy(buf, rest)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// writeLines logs the complete lines of data, and of an incomplete one what fills the buffer (as a part) or, at the
// end of the stream, whatever is there. It answers what is left.
func (w *Writer) writeLines(stream string, data []byte, atEnd bool) (rest []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	stamp := w.now().UTC().Format(time.RFC3339Nano)
	var out []byte
	for len(data) > 0 {
		line, tail, complete := bytes.Cut(data, []byte{'\n'})
		tag := byte('F')
		if !complete && !atEnd {
			if len(line) < MaxText {
				break
			}
			tag = 'P'
		}
		out = append(out, stamp...)
		out = append(out, ' ')
		out = append(out, stream...)
		out = append(out, ' ', tag, ' ')
		out = append(out, line...)
		out = append(out, '\n')
		data = tail
	}
	w.write(out)
	return data
}

// write appends whole lines, each to a file in which it has room. The caller holds mu.
func (w *Writer) write(lines []byte) {
	for len(lines) > 0 {
		room := w.maxSize - w.size
		chunk := lines
		if int64(len(chunk)) > room {
			end := bytes.LastIndexByte(chunk[:max(room, 0)], '\n') + 1
			if end == 0 {
				if err := w.rotate(); err != nil {
					return
				}
				continue
			}
			chunk = chunk[:end]
		}
		n, err := w.file.Write(chunk)
		w.size += int64(n)
		if err != nil {
			return
		}
		lines = lines[len(chunk):]
	}
}

// rotate begins the next file. The caller holds mu.
func (w *Writer) rotate() error {
	if err := w.removeBelow(w.number + 1 - w.maxFiles + 1); err != nil {
		return err
	}
	old := w.file
	w.number++
	if err := w.open(); err != nil {
		w.number--
		return err
	}
	old.Close()
	return nil
}

// open opens the current file for appending, and ends a line that a killed writer left open in it.
func (w *Writer) open() error {
	f, err := os.OpenFile(filepath.Join(w.dir, fileName(w.number)), os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	size := info.Size()
	last := make([]byte, 1)
	if size > 0 {
		if _, err := f.ReadAt(last, size-1); err == nil && last[0] != '\n' {
			n, _ := f.Write([]byte{'\n'})
			size += int64(n)
		}
	}
	w.file, w.size = f, size
	return nil
}

func (w *Writer) removeBelow(number int) error {
	found, err := numbers(w.dir)
	if err != nil {
		return err
	}
	for _, n := range found {
		if n >= number {
			break
		}
		if err := os.Remove(filepath.Join(w.dir, fileName(n))); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Close closes the current file.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.file.Close()
}
