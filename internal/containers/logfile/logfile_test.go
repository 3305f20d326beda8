package logfile_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/containers/logfile"
)

var noon = time.Date(2026, 11, 29, 12, 0, 0, 1, time.UTC)

func newWriter(t *testing.T, dir string, size int64, files int) *logfile.Writer {
	t.Helper()
	w, err := logfile.NewWriter(dir, size, files, func() time.Time { return noon })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

func copyAll(t *testing.T, w *logfile.Writer, stream, text string) {
	t.Helper()
	if err := w.Copy(stream, strings.NewReader(text)); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, dir string, opts logfile.Options) []logfile.Entry {
	t.Helper()
	var found []logfile.Entry
	if err := logfile.Read(t.Context(), dir, opts, func(e logfile.Entry) error {
		found = append(found, e)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

func texts(entries []logfile.Entry) string {
	var b strings.Builder
	for _, e := range entries {
		fmt.Fprintf(&b, "%s:%s;", e.Stream, e.Text)
	}
	return b.String()
}

func TestEntriesRoundTrip(t *testing.T) {
	dir := t.TempDir()
	w := newWriter(t, dir, logfile.MinSize, 3)
	long := strings.Repeat("x", logfile.MaxText+10)
	copyAll(t, w, logfile.Stdout, "a line\n\n  spaces  \n"+long+"\nwithout end")
	copyAll(t, w, logfile.Stderr, "error\n")

	want := []logfile.Entry{
		{Time: noon, Stream: "stdout", Text: "a line"},
		{Time: noon, Stream: "stdout", Text: ""},
		{Time: noon, Stream: "stdout", Text: "  spaces  "},
		{Time: noon, Stream: "stdout", Text: long[:logfile.MaxText], Partial: true},
		{Time: noon, Stream: "stdout", Text: long[logfile.MaxText:]},
		{Time: noon, Stream: "stdout", Text: "without end"},
		{Time: noon, Stream: "stderr", Text: "error"},
	}
	got := read(t, dir, logfile.Options{})
	if len(got) != len(want) {
		t.Fatalf("%d entries, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("entry %d is %+v, want %+v", i, got[i], want[i])
		}
	}
	if got := texts(read(t, dir, logfile.Options{Stream: "stderr"})); got != "stderr:error;" {
		t.Errorf("one stream: %s", got)
	}
	if got := texts(read(t, dir, logfile.Options{Tail: 2})); got != "stdout:without end;stderr:error;" {
		t.Errorf("tail: %s", got)
	}
	if got := texts(read(t, dir, logfile.Options{Tail: 1, Stream: "stdout"})); got != "stdout:without end;" {
		t.Errorf("tail of one stream: %s", got)
	}
	if err := logfile.Read(t.Context(), filepath.Join(dir, "none"), logfile.Options{}, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing log: %v", err)
	}
}

// floodWriter checks the bound before each of the logger's reads.
type floodReader struct {
	t     *testing.T
	dir   string
	lines int
	bound int64
}

func (f *floodReader) Read(p []byte) (int, error) {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		f.t.Fatal(err)
	}
	var size int64
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			size += info.Size()
		}
	}
	if size > f.bound {
		f.t.Errorf("the log has %d bytes, more than %d", size, f.bound)
	}
	if f.lines == 0 {
		return 0, io.EOF
	}
	n := 0
	for f.lines > 0 && n+100 < len(p) {
		f.lines--
		n += copy(p[n:], fmt.Sprintf("line %d\n", f.lines))
	}
	return n, nil
}

func TestAFloodStaysWithinTheBound(t *testing.T) {
	dir := t.TempDir()
	w := newWriter(t, dir, logfile.MinSize, 3)
	if err := w.Copy(logfile.Stdout, &floodReader{t: t, dir: dir, lines: 50_000, bound: 3 * logfile.MinSize}); err != nil {
		t.Fatal(err)
	}
	got := read(t, dir, logfile.Options{})
	if len(got) < 1000 || got[len(got)-1].Text != "line 0" {
		t.Fatalf("%d entries, the last %+v", len(got), got[len(got)-1])
	}
	for i, e := range got {
		if want := fmt.Sprintf("line %d", len(got)-1-i); e.Text != want {
			t.Fatalf("entry %d is %q, want %q", i, e.Text, want)
		}
	}
}

func TestAWriterContinuesWhereAnotherDied(t *testing.T) {
	dir := t.TempDir()
	w := newWriter(t, dir, logfile.MinSize, 3)
	copyAll(t, w, logfile.Stdout, "first\n")
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	f, err := os.OpenFile(files[0], os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("2026-11-29T12:00:00Z std"); err != nil { // killed in the middle of a write
		t.Fatal(err)
	}
	f.Close()
	copyAll(t, newWriter(t, dir, logfile.MinSize, 3), logfile.Stdout, "second\n")
	if got := texts(read(t, dir, logfile.Options{})); got != "stdout:first;stdout:second;" {
		t.Errorf("got %s", got)
	}
}

func TestFollow(t *testing.T) {
	dir := t.TempDir()
	w := newWriter(t, dir, logfile.MinSize, 3)
	copyAll(t, w, logfile.Stdout, "zero\none\n")
	until := make(chan struct{})
	got := make(chan logfile.Entry)
	done := make(chan error, 1)
	go func() {
		done <- logfile.Read(t.Context(), dir, logfile.Options{Follow: true, Tail: 1, Until: until}, func(e logfile.Entry) error {
			got <- e
			return nil
		})
	}()
	expect := func(text string) {
		t.Helper()
		select {
		case e := <-got:
			if e.Text != text {
				t.Fatalf("got %q, want %q", e.Text, text)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%q did not come", text)
		}
	}
	expect("one")
	// Each of these lines fills more than half a file, so each begins a new one.
	for i := range 10 {
		text := fmt.Sprintf("%d%s", i, strings.Repeat("y", logfile.MaxText-2))
		copyAll(t, w, logfile.Stdout, text+"\n")
		expect(text)
	}
	copyAll(t, w, logfile.Stderr, "last\n")
	close(until)
	expect("last")
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestFollowEndsWithTheLog(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	copyAll(t, newWriter(t, dir, logfile.MinSize, 1), logfile.Stdout, "one\n")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	entries := 0
	err := logfile.Read(ctx, dir, logfile.Options{Follow: true}, func(logfile.Entry) error {
		entries++
		return os.RemoveAll(dir)
	})
	if err != nil || entries != 1 {
		t.Errorf("%d entries, %v", entries, err)
	}
}

// A process that writes as fast as it is read does not keep who only wants to know what is there.
func TestAReadEndsAlthoughTheLogGrows(t *testing.T) {
	for name, opts := range map[string]logfile.Options{"all": {}, "tail": {Tail: 2}} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			w := newWriter(t, dir, logfile.MinSize, 3)
			copyAll(t, w, logfile.Stdout, "first\nsecond\n")
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			var got []logfile.Entry
			if err := logfile.Read(ctx, dir, opts, func(e logfile.Entry) error {
				got = append(got, e)
				if len(got) > 2 {
					cancel(errors.New("it goes on"))
				}
				copyAll(t, w, logfile.Stdout, "one more\n")
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if texts(got) != "stdout:first;stdout:second;" {
				t.Errorf("read %s", texts(got))
			}
		})
	}
}
