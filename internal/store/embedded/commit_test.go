package embedded

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// gate is a fault that holds the committer before its commit until it is told to go on.
type gate struct {
	commits atomic.Int64
	at      chan struct{} // the committer has come
	proceed chan error    // it goes on with this result
}

func newGate() *gate { return &gate{at: make(chan struct{}), proceed: make(chan error)} }

func (g *gate) hold(at stage) error {
	if at != written {
		return nil
	}
	g.commits.Add(1)
	g.at <- struct{}{}
	return <-g.proceed
}

// Writers that come while a commit is under way share the next one.
func TestWritersShareACommit(t *testing.T) {
	g := newGate()
	s := open(t, filepath.Join(t.TempDir(), "state.db"), Options{fault: g.hold})
	const writers = 100
	var group sync.WaitGroup
	write := func(name string) {
		group.Go(func() {
			if err := createErr(t, s, name); err != nil {
				t.Error(err)
			}
		})
	}
	write("first")
	<-g.at
	for i := range writers {
		write(fmt.Sprint("w", i))
	}
	waitStaged(s, writers)
	g.proceed <- nil
	<-g.at
	g.proceed <- nil
	group.Wait()
	if n := g.commits.Load(); n != 2 {
		t.Errorf("%d writers took %d commits; want 2", writers+1, n)
	}
}

// waitStaged waits until that many writes are in the batch that gathers.
func waitStaged(s *Store, n int) {
	staged := func() int {
		s.mu.RLock()
		defer s.mu.RUnlock()
		if s.batch == nil {
			return 0
		}
		return len(s.batch.writes)
	}
	for staged() < n {
		// The writers are on their way and nothing else holds them up.
		runtime.Gosched()
	}
}

// What is not durable is not shown, and no answer rests on it: neither a success, nor a "nothing to do",
// nor a refusal.
func TestAnswersWaitForTheirBasis(t *testing.T) {
	g := newGate()
	s := open(t, filepath.Join(t.TempDir(), "state.db"), Options{fault: g.hold})
	all := s.Sandboxes()
	results := make(chan error)
	refused := errors.New("it has an image already")
	setImage := func(o *sandbox) error {
		if o.Spec.Image != "" {
			return refused
		}
		o.Spec.Image = "x"
		return nil
	}
	call := func(f func() error) { go func() { results <- f() }() }

	call(func() error { return createErr(t, s, "a") })
	<-g.at
	// Staged, not durable: another Create would have to say that it exists.
	call(func() error { return createErr(t, s, "a") })
	if _, err := all.Get(t.Context(), key("a")); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("an object that is not durable is shown: %v", err)
	}
	g.proceed <- errors.New("injected")
	// The first has failed; so the second has found nothing, and makes the object.
	if err := <-results; !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("the Create whose commit failed: %v", err)
	}
	<-g.at
	g.proceed <- nil
	if err := <-results; err != nil {
		t.Errorf("the other Create: %v", err)
	}

	// The same with an update that refuses what it finds staged.
	call(func() error {
		_, err := all.UpdateSpec(t.Context(), key("a"), store.Preconditions{}, setImage)
		return err
	})
	<-g.at
	called := make(chan struct{}, 10)
	call(func() error {
		_, err := all.UpdateSpec(t.Context(), key("a"), store.Preconditions{}, func(o *sandbox) error {
			called <- struct{}{}
			return setImage(o)
		})
		return err
	})
	<-called
	g.proceed <- nil
	first, second := <-results, <-results
	if (first == nil) == (second == nil) || !errors.Is(errors.Join(first, second), refused) {
		t.Errorf("of two updates: %v, %v", first, second)
	}
}

func createErr(t *testing.T, s *Store, name string) error {
	o := &sandbox{}
	o.Namespace, o.Name = "default", name
	_, err := s.Sandboxes().Create(t.Context(), o)
	return err
}

// A write that was staged on top of one that fails starts over from what is durable.
func TestFailedCommitTakesWhatRestsOnIt(t *testing.T) {
	g := newGate()
	s := open(t, filepath.Join(t.TempDir(), "state.db"), Options{fault: g.hold})
	results := make(chan error, 2)
	go func() { results <- createErr(t, s, "a") }()
	<-g.at
	g.proceed <- nil
	<-results

	add := func(label string) {
		_, err := s.Sandboxes().UpdateSpec(t.Context(), key("a"), store.Preconditions{}, func(o *sandbox) error {
			if o.Labels == nil {
				o.Labels = map[string]string{}
			}
			o.Labels[label] = "1"
			return nil
		})
		results <- err
	}
	go add("lost")
	<-g.at
	go add("kept")
	waitStaged(s, 1)
	g.proceed <- errors.New("injected")
	if err := <-results; !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("the write that failed: %v", err)
	}
	<-g.at
	g.proceed <- nil
	if err := <-results; err != nil {
		t.Errorf("the write on top of it: %v", err)
	}
	got, err := s.Sandboxes().Get(t.Context(), key("a"))
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Labels) != 1 || got.Labels["kept"] != "1" {
		t.Errorf("the labels are %v; want only the one that was acknowledged", got.Labels)
	}
}

// A commit that fails after it may have reached the disk: the store writes no more, reads on, and after it
// is opened again has the object as it was before or after.
func TestDoubtfulCommit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s, err := Open(path, Options{fault: func(at stage) error {
		if at == committed {
			return errors.New("sync failed")
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"doubtful", "later"} {
		if err := createErr(t, s, name); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "restart") {
			t.Errorf("Create of %s: %v", name, err)
		}
		if _, err := s.Sandboxes().Get(t.Context(), key(name)); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("Get of %s: %v", name, err)
		}
	}
	if _, err := s.NextEpoch(t.Context()); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("NextEpoch: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, path, Options{})
	if _, err := s.Sandboxes().Get(t.Context(), key("later")); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("what was refused is there: %v", err)
	}
	create(t, s, "later")
}
