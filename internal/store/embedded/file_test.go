package embedded

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

func key(name string) store.Key { return store.Key{Namespace: "default", Name: name} }

func create(t testing.TB, s *Store, name string) *sandbox {
	t.Helper()
	made, err := s.Sandboxes().Create(t.Context(), &sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// closed makes a store file with some objects, and closes it.
func closed(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "state.db")
	s, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b", "c"} {
		create(t, s, name)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

// change writes into a closed file, past the store.
func change(t *testing.T, path string, f func(tx *bolt.Tx) error) {
	t.Helper()
	file, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(file.Update(f), file.Close()); err != nil {
		t.Fatal(err)
	}
}

func TestReopen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	now := time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)
	clock := clocktesting.NewFakePassiveClock(now)
	s, err := Open(path, Options{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	made := create(t, s, "a")
	if !made.CreationTimestamp.Time.Equal(now) {
		t.Errorf("created at %v; want %v", made.CreationTimestamp, now)
	}
	create(t, s, "gone")
	if err := s.Sandboxes().Delete(t.Context(), key("gone"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sandboxes().UpdateSpec(t.Context(), key("a"), store.Preconditions{}, func(o *sandbox) error {
		o.Finalizers = []string{"example.com/hold"}
		o.Spec.Image = "x"
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	editRaw(t, s, key("a"), func(o map[string]any) { o["future"] = "kept" })
	clock.SetTime(now.Add(time.Hour))
	if err := s.Sandboxes().Delete(t.Context(), key("a"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}
	before, err := s.Sandboxes().Get(t.Context(), key("a"))
	if err != nil {
		t.Fatal(err)
	}
	if !before.DeletionTimestamp.Time.Equal(now.Add(time.Hour)) {
		t.Errorf("deleted at %v", before.DeletionTimestamp)
	}
	epoch, err := s.NextEpoch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	following := make(chan struct{})
	go func() {
		defer close(ended)
		for e := range s.Sandboxes().Follow(t.Context()) {
			if e.Type == store.Synced {
				close(following)
			}
		}
	}()
	<-following
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Fatal(err)
	}
	<-ended // Close ends every Follow
	for range s.Sandboxes().Follow(t.Context()) {
		t.Error("a closed store is followed")
	}
	_, err = s.Sandboxes().UpdateStatus(t.Context(), key("a"), store.Preconditions{}, func(o *sandbox) error { o.Status.Node = "n"; return nil })
	if !errors.Is(err, errdefs.ErrUnavailable) || fault.ReasonOf(err) != store.Unavailable {
		t.Errorf("a write to a closed store: %v", err)
	}

	s = open(t, path, Options{})
	after, err := s.Sandboxes().Get(t.Context(), key("a"))
	if err != nil {
		t.Fatal(err)
	}
	if a, b := rawText(t, after), rawText(t, before); a != b {
		t.Errorf("after opening again:\n%s\nbefore:\n%s", a, b)
	}
	if rawOf(t, s, key("a"))["future"] != "kept" {
		t.Error("an unknown field is lost")
	}
	if _, err := s.Sandboxes().GetByUID(t.Context(), made.UID); err != nil {
		t.Error(err)
	}
	if _, err := s.Sandboxes().Get(t.Context(), key("gone")); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("a deleted object is back: %v", err)
	}
	if next, err := s.NextEpoch(t.Context()); err != nil || next <= epoch {
		t.Errorf("epoch %d after %d: %v", next, epoch, err)
	}
	old, _ := parseNumber([]byte(after.ResourceVersion))
	if now, _ := parseNumber([]byte(create(t, s, "new").ResourceVersion)); now <= old {
		t.Errorf("version %d after %d", now, old)
	}
}

func rawText(t *testing.T, o *sandbox) string {
	t.Helper()
	raw, err := sandboxKind.encode(o)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestSecondOpenIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s := open(t, path, Options{})
	create(t, s, "a")
	_, err := Open(path, Options{LockTimeout: time.Millisecond})
	if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second Open: %v", err)
	}
	create(t, s, "b")
}

func TestFileMode(t *testing.T) {
	info, err := os.Stat(closed(t))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("the file has mode %v", info.Mode())
	}
}

// What cannot be read is refused with a name and a reason, and the file stays as it is.
func TestUnreadableFiles(t *testing.T) {
	truncate := func(size int64) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			if err := os.Truncate(path, size); err != nil {
				t.Fatal(err)
			}
		}
	}
	put := func(bucket, key []byte, value string) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			change(t, path, func(tx *bolt.Tx) error { return tx.Bucket(bucket).Put(key, []byte(value)) })
		}
	}
	sandboxes := sandboxKind.bucket
	good := func(name, uid, version string) string {
		return `{"metadata":{"namespace":"default","name":"` + name + `","uid":"` + uid + `","resourceVersion":"` + version + `"}}`
	}
	for name, c := range map[string]struct {
		damage func(t *testing.T, path string)
		kind   error
		says   []string
	}{
		"newer format": {put(metaBucket, formatKey, "2"), errdefs.ErrFailedPrecondition, []string{"format 2", "up to 1"}},
		"no format":    {put(metaBucket, formatKey, "x"), errdefs.ErrDataLoss, []string{`"x"`}},
		"bad version":  {put(metaBucket, versionKey, "x"), errdefs.ErrDataLoss, []string{"resource version"}},
		"bad epoch":    {put(metaBucket, epochKey, "-1"), errdefs.ErrDataLoss, []string{"epoch"}},
		"not JSON":     {put(sandboxes, []byte("default/b"), "{"), errdefs.ErrDataLoss, []string{"sandbox default/b"}},
		"wrong type":   {put(sandboxes, []byte("default/b"), `{"spec":{"image":7}}`), errdefs.ErrDataLoss, []string{"sandbox default/b", "image"}},
		"wrong name":   {put(sandboxes, []byte("default/b"), good("x", "u", "1")), errdefs.ErrDataLoss, []string{"sandbox default/b", "default/x"}},
		"no UID":       {put(sandboxes, []byte("default/b"), good("b", "", "1")), errdefs.ErrDataLoss, []string{"sandbox default/b", "UID"}},
		"no number":    {put(sandboxes, []byte("default/b"), good("b", "u", "x")), errdefs.ErrDataLoss, []string{"sandbox default/b", "resourceVersion"}},
		"several": {func(t *testing.T, path string) {
			put(sandboxes, []byte("default/a"), "1")(t, path)
			put(sandboxes, []byte("default/c"), "[]")(t, path)
		}, errdefs.ErrDataLoss, []string{"sandbox default/a", "sandbox default/c"}},
		"one UID twice": {func(t *testing.T, path string) {
			put(sandboxes, []byte("default/b"), good("b", "u", "1"))(t, path)
			put(sandboxes, []byte("default/c"), good("c", "u", "1"))(t, path)
		}, errdefs.ErrDataLoss, []string{"sandbox default/c", "default/b"}},
		"bucket missing": {func(t *testing.T, path string) {
			change(t, path, func(tx *bolt.Tx) error { return tx.DeleteBucket(groupKind.bucket) })
		}, errdefs.ErrDataLoss, []string{"groups"}},
		"another program's": {func(t *testing.T, path string) {
			change(t, path, func(tx *bolt.Tx) error {
				_, err := tx.CreateBucket([]byte("theirs"))
				return errors.Join(err, tx.DeleteBucket(metaBucket))
			})
		}, errdefs.ErrDataLoss, []string{"other program"}},
		"cut short":        {truncate(2 * 4096), errdefs.ErrDataLoss, []string{"cut short"}},
		"cut within pages": {truncate(3*4096 + 100), errdefs.ErrDataLoss, []string{"cut short"}},
		"cut to bits":      {truncate(100), errdefs.ErrDataLoss, nil},
		"no database": {func(t *testing.T, path string) {
			if err := os.WriteFile(path, []byte(strings.Repeat("hello ", 10000)), 0o600); err != nil {
				t.Fatal(err)
			}
		}, errdefs.ErrDataLoss, nil},
		"pages overwritten": {func(t *testing.T, path string) {
			content, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for i := 2 * os.Getpagesize(); i < len(content); i++ {
				content[i] = 0xa5
			}
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
		}, errdefs.ErrDataLoss, nil},
	} {
		t.Run(name, func(t *testing.T) {
			path := closed(t)
			c.damage(t, path)
			before, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			s, err := Open(path, Options{})
			if err == nil {
				_ = s.Close()
				t.Fatal("it was opened")
			}
			if !errors.Is(err, c.kind) {
				t.Errorf("error %v; want kind %v", err, c.kind)
			}
			for _, word := range append(c.says, path) {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("error %q does not say %q", err, word)
				}
			}
			after, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if string(after) != string(before) {
				t.Error("the file was changed")
			}
		})
	}
}

// The system's own errors are passed on, and are not taken for damage.
func TestOpenErrors(t *testing.T) {
	directory := t.TempDir()
	_, err := Open(filepath.Join(directory, "missing", "state.db"), Options{})
	if !errors.Is(err, os.ErrNotExist) || errors.Is(err, errdefs.ErrDataLoss) {
		t.Errorf("in a missing directory: %v", err)
	}
	_, err = Open(directory, Options{})
	if err == nil || errors.Is(err, errdefs.ErrDataLoss) {
		t.Errorf("a directory: %v", err)
	}
	empty := filepath.Join(directory, "empty.db")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	create(t, open(t, empty, Options{}), "a")
}

// A file that may not grow any more: writes fail and change nothing, reads go on.
func TestFullDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s, err := Open(path, Options{maxFileBytes: 256 << 10})
	if err != nil {
		t.Fatal(err)
	}
	big := &sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default"}}
	big.Spec.Image = strings.Repeat("x", 20<<10)
	n := 0
	for ; err == nil && n < 100; n++ {
		big.Name = "big-" + string(rune('a'+n))
		_, err = s.Sandboxes().Create(t.Context(), big)
	}
	if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), path) {
		t.Fatalf("after %d objects: %v", n, err)
	}
	if _, err := s.Sandboxes().Get(t.Context(), store.KeyOf(big)); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("the object that was refused: %v", err)
	}
	page, err := s.Sandboxes().List(t.Context(), store.ListOptions{})
	if err != nil || len(page.Items) != n-1 {
		t.Errorf("%d objects are left of %d: %v", len(page.Items), n-1, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, path, Options{})
	if again, err := s.Sandboxes().List(t.Context(), store.ListOptions{}); err != nil || len(again.Items) != n-1 {
		t.Errorf("opened again, %d objects are left of %d: %v", len(again.Items), n-1, err)
	}
	if _, err := s.Sandboxes().Create(t.Context(), big); err != nil {
		t.Errorf("with more room: %v", err)
	}
}
