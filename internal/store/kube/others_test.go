package kube

import (
	"context"
	"errors"
	"io"
	"iter"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// watches is a way for requests on which what watches bring can be held back or cut off.
type watches struct {
	mu     sync.Mutex
	held   bool // guarded by mu, as the fields below
	cut    bool
	change *sync.Cond
	bodies map[*heldBody]struct{}
}

func newWatches() *watches {
	w := &watches{bodies: map[*heldBody]struct{}{}}
	w.change = sync.NewCond(&w.mu)
	return w
}

func (w *watches) way(next http.RoundTripper) http.RoundTripper {
	return transport(func(r *http.Request) (*http.Response, error) {
		collection := strings.HasSuffix(r.URL.Path, "sandboxes") || strings.HasSuffix(r.URL.Path, "sandboxgroups")
		if r.Method != http.MethodGet || !collection {
			return next.RoundTrip(r)
		}
		w.mu.Lock()
		cut := w.cut
		w.mu.Unlock()
		if cut {
			return nil, errors.New("cut off")
		}
		response, err := next.RoundTrip(r)
		if err == nil && r.URL.Query().Get("watch") != "" {
			body := &heldBody{ReadCloser: response.Body, watches: w}
			w.mu.Lock()
			w.bodies[body] = struct{}{}
			w.mu.Unlock()
			response.Body = body
		}
		return response, err
	})
}

// set holds what watches bring back, or cuts them off and makes new ones fail.
func (w *watches) set(held, cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.held, w.cut = held, cut
	if cut {
		for b := range w.bodies {
			_ = b.ReadCloser.Close()
		}
	}
	w.change.Broadcast()
}

type heldBody struct {
	io.ReadCloser
	*watches
	closed bool // guarded by watches.mu
}

func (b *heldBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.held && !b.closed {
		b.change.Wait()
	}
	return n, err
}

func (b *heldBody) Close() error {
	b.mu.Lock()
	b.closed = true
	delete(b.bodies, b)
	b.change.Broadcast()
	b.mu.Unlock()
	return b.ReadCloser.Close()
}

var none = store.Preconditions{}

func newSandbox(name string) *sandbox {
	s := &sandbox{}
	s.Namespace, s.Name = "default", name
	return s
}

func keyOf(name string) store.Key { return store.Key{Namespace: "default", Name: name} }

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func setDir(dir string) func(*sandbox) error {
	return func(s *sandbox) error { s.Spec.WorkingDir = dir; return nil }
}

// Who wrote something reads it, also when the watch is far behind, and the watch that comes later brings nothing
// back.
func TestOwnWritesAreReadAtOnce(t *testing.T) {
	c := newCluster(t)
	w := newWatches()
	mine := c.open(w.way).Sandboxes()
	must := must[*sandbox](t)
	next, stop := iter.Pull(mine.Follow(t.Context()))
	defer stop()
	expect := func(want string) {
		t.Helper()
		e, _ := next()
		got := e.Type.String()
		if e.Object != nil {
			got += " " + e.Object.Name + " " + e.Object.Spec.WorkingDir
		}
		if got != want {
			t.Fatalf("got %q; want %q", got, want)
		}
	}
	expect("Synced")
	w.set(true, false)

	a := must(mine.Create(t.Context(), newSandbox("a")))
	expect("Changed a ")
	updated := must(mine.UpdateSpec(t.Context(), keyOf("a"), none, setDir("/1")))
	expect("Changed a /1")
	if got := must(mine.GetByUID(t.Context(), a.UID)); got.ResourceVersion != updated.ResourceVersion {
		t.Errorf("version %s; want %s", got.ResourceVersion, updated.ResourceVersion)
	}
	if err := mine.Delete(t.Context(), keyOf("a"), none); err != nil {
		t.Fatal(err)
	}
	expect("Deleted a /1")
	if _, err := mine.Get(t.Context(), keyOf("a")); !errdefs.IsNotFound(err) {
		t.Errorf("a deleted object is found: %v", err)
	}
	must(mine.Create(t.Context(), newSandbox("a")))
	expect("Changed a ")
	must(mine.Create(t.Context(), newSandbox("b")))
	expect("Changed b ")
	if err := mine.Delete(t.Context(), keyOf("b"), none); err != nil {
		t.Fatal(err)
	}
	expect("Deleted b ")

	w.set(false, false)
	// Somebody else's write is behind all of these in the watch.
	must(c.open(nil).Sandboxes().Create(t.Context(), newSandbox("other")))
	expect("Changed other ")
	if page, err := mine.List(t.Context(), store.ListOptions{}); err != nil || len(page.Items) != 2 {
		t.Errorf("listed: %v (%v)", page.Items, err)
	}
}

// What other processes did counts, also when the watch has not brought it yet.
func TestOthersWritesCount(t *testing.T) {
	c := newCluster(t)
	w := newWatches()
	mine, other := c.open(w.way).Sandboxes(), c.open(nil).Sandboxes()
	must := must[*sandbox](t)
	for _, name := range []string{"changed", "replaced", "deleted", "paused"} {
		o := newSandbox(name)
		o.Spec.Paused = name == "paused"
		must(mine.Create(t.Context(), o))
	}
	for i, e := range slices.Collect(firstEvents(t, other, 4)) {
		if e.Type != store.Changed {
			t.Fatalf("event %d is %s", i, e.Type)
		}
	}
	w.set(true, false)

	// A change is computed again from what is there now.
	must(other.UpdateSpec(t.Context(), keyOf("changed"), none, func(s *sandbox) error { s.Labels = map[string]string{"n": "1"}; return nil }))
	got := must(mine.UpdateSpec(t.Context(), keyOf("changed"), none, func(s *sandbox) error {
		s.Spec.WorkingDir = "/after-" + s.Labels["n"]
		return nil
	}))
	if got.Spec.WorkingDir != "/after-1" || got.Labels["n"] != "1" {
		t.Errorf("got %+v", got)
	}
	// So is one of the status, and a deletion.
	must(other.UpdateStatus(t.Context(), keyOf("changed"), none, func(s *sandbox) error { s.Status.Restarts = 4; return nil }))
	if got := must(mine.UpdateStatus(t.Context(), keyOf("changed"), none, func(s *sandbox) error { s.Status.Restarts++; return nil })); got.Status.Restarts != 5 {
		t.Errorf("%d restarts; want 5", got.Status.Restarts)
	}
	must(other.UpdateSpec(t.Context(), keyOf("changed"), none, setDir("/2")))
	if err := mine.Delete(t.Context(), keyOf("changed"), none); err != nil {
		t.Error(err)
	}

	// A refusal rests on what is there now: the caller's own, and that of preconditions.
	refuse := func(s *sandbox) error {
		if s.Spec.Paused {
			return errors.New("it is paused")
		}
		return setDir("/1")(s)
	}
	if _, err := mine.UpdateSpec(t.Context(), keyOf("paused"), none, refuse); err == nil || err.Error() != "it is paused" {
		t.Errorf("the caller's refusal became %v", err)
	}
	resumed := must(other.UpdateSpec(t.Context(), keyOf("paused"), none, func(s *sandbox) error { s.Spec.Paused = false; return nil }))
	must(mine.UpdateSpec(t.Context(), keyOf("paused"), store.Preconditions{ResourceVersion: resumed.ResourceVersion}, refuse))

	// And so does that there is nothing to do.
	must(other.UpdateSpec(t.Context(), keyOf("paused"), none, setDir("/2")))
	if got := must(mine.UpdateSpec(t.Context(), keyOf("paused"), none, setDir("/1"))); got.Spec.WorkingDir != "/1" {
		t.Errorf("a change that was undone by somebody is not made again: %+v", got)
	}

	// Another object of the same name is another object.
	first := must(other.Get(t.Context(), keyOf("replaced")))
	if err := other.Delete(t.Context(), keyOf("replaced"), none); err != nil {
		t.Fatal(err)
	}
	second := must(other.Create(t.Context(), newSandbox("replaced")))
	if _, err := mine.UpdateSpec(t.Context(), keyOf("replaced"), store.Preconditions{UID: first.UID}, setDir("/1")); !errdefs.IsNotFound(err) {
		t.Errorf("the successor was changed: %v", err)
	}
	must(mine.UpdateSpec(t.Context(), keyOf("replaced"), store.Preconditions{UID: second.UID}, setDir("/1")))

	// What is gone, is gone; and what is new, is there.
	if err := other.Delete(t.Context(), keyOf("deleted"), none); err != nil {
		t.Fatal(err)
	}
	if _, err := mine.UpdateSpec(t.Context(), keyOf("deleted"), none, setDir("/1")); !errdefs.IsNotFound(err) {
		t.Errorf("a deleted object was changed: %v", err)
	}
	if err := mine.Delete(t.Context(), keyOf("deleted"), none); !errdefs.IsNotFound(err) {
		t.Errorf("a deleted object was deleted: %v", err)
	}
	must(other.Create(t.Context(), newSandbox("new")))
	must(mine.Get(t.Context(), keyOf("new")))
	must(mine.UpdateSpec(t.Context(), keyOf("new"), none, setDir("/1")))
	w.set(false, false)
}

func firstEvents(t *testing.T, objects store.Sandboxes, n int) iter.Seq[store.Event[*sandbox]] {
	return func(yield func(store.Event[*sandbox]) bool) {
		for e := range objects.Follow(t.Context()) {
			if e.Type == store.Synced {
				continue
			}
			if n--; !yield(e) || n == 0 {
				return
			}
		}
	}
}

// A follower hears of what happened while the API server could not be watched, of each object once.
func TestAWatchThatWasCut(t *testing.T) {
	c := newCluster(t)
	w := newWatches()
	mine, other := c.open(w.way).Sandboxes(), c.open(nil).Sandboxes()
	must := must[*sandbox](t)
	for _, name := range []string{"stays", "changes", "goes", "passes on"} {
		must(other.Create(t.Context(), newSandbox(strings.ReplaceAll(name, " ", "-"))))
	}
	next, stop := iter.Pull(mine.Follow(t.Context()))
	defer stop()
	for seen := 0; seen < 4; {
		if e, _ := next(); e.Type == store.Changed {
			seen++
		}
	}
	w.set(false, true)
	must(other.UpdateSpec(t.Context(), keyOf("changes"), none, setDir("/1")))
	must(other.UpdateSpec(t.Context(), keyOf("changes"), none, setDir("/2")))
	for _, name := range []string{"goes", "passes-on"} {
		if err := other.Delete(t.Context(), keyOf(name), none); err != nil {
			t.Fatal(err)
		}
	}
	must(other.Create(t.Context(), newSandbox("passes-on")))
	must(other.Create(t.Context(), newSandbox("comes")))
	if page, err := mine.List(t.Context(), store.ListOptions{}); err != nil || len(page.Items) != 4 {
		t.Errorf("reads do not go on: %v, %v", page.Items, err)
	}
	w.set(false, false)

	got := map[string][]string{}
	for len(got["comes"]) == 0 || len(got["goes"]) == 0 || len(got["passes-on"]) < 2 || len(got["changes"]) == 0 {
		e, ok := next()
		if !ok {
			t.Fatal("the Follow ended")
		}
		if e.Type != store.Synced {
			got[e.Object.Name] = append(got[e.Object.Name], e.Type.String()+e.Object.Spec.WorkingDir)
		}
	}
	for name, want := range map[string]string{"changes": "Changed/2", "goes": "Deleted", "passes-on": "Deleted Changed", "comes": "Changed", "stays": ""} {
		if events := strings.Join(got[name], " "); events != want {
			t.Errorf("%s: %q; want %q", name, events, want)
		}
	}
}

// Two processes that count in one object count every time.
func TestTwoProcesses(t *testing.T) {
	c := newCluster(t)
	must := must[*sandbox](t)
	must(c.open(nil).Sandboxes().Create(t.Context(), newSandbox("counter")))
	const processes, writers, writes = 2, 3, 10
	var group sync.WaitGroup
	for range processes {
		s := c.open(nil).Sandboxes()
		for range writers {
			group.Go(func() {
				for range writes {
					if _, err := s.UpdateStatus(t.Context(), keyOf("counter"), none, func(s *sandbox) error { s.Status.Restarts++; return nil }); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	group.Wait()
	if got := must(c.open(nil).Sandboxes().Get(t.Context(), keyOf("counter"))); got.Status.Restarts != processes*writers*writes {
		t.Errorf("counted %d", got.Status.Restarts)
	}
}

// Each write is one request, and reading is none. A write that finds nothing to do makes sure of that.
func TestRequests(t *testing.T) {
	c := newCluster(t)
	var mu sync.Mutex // guards requests
	var requests []string
	mine := c.open(func(next http.RoundTripper) http.RoundTripper {
		return transport(func(r *http.Request) (*http.Response, error) {
			if r.URL.Query().Get("watch") == "" {
				mu.Lock()
				requests = append(requests, r.Method)
				mu.Unlock()
			}
			return next.RoundTrip(r)
		})
	}).Sandboxes()
	must := must[*sandbox](t)
	o := newSandbox("a")
	o.Finalizers = []string{v1alpha1.FinalizerVolumes}
	must(mine.Create(t.Context(), o))
	for range 2 { // the second time there is nothing to do
		must(mine.UpdateSpec(t.Context(), keyOf("a"), none, setDir("/1")))
		must(mine.UpdateStatus(t.Context(), keyOf("a"), none, func(s *sandbox) error { s.Status.Phase = "Running"; return nil }))
	}
	must(mine.Get(t.Context(), keyOf("a")))
	if _, err := mine.List(t.Context(), store.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := mine.Delete(t.Context(), keyOf("a"), none); err != nil {
		t.Fatal(err)
	}
	must(mine.UpdateSpec(t.Context(), keyOf("a"), none, func(s *sandbox) error { s.Finalizers = nil; return nil }))
	mu.Lock()
	defer mu.Unlock()
	if want := []string{"POST", "PATCH", "PATCH", "GET", "GET", "DELETE", "PATCH"}; !slices.Equal(requests, want) {
		t.Errorf("requests %v; want %v", requests, want)
	}
}

// A write whose answer is lost took effect, and its error says that it may have.
func TestLostAnswer(t *testing.T) {
	c := newCluster(t)
	lose := false // not while a request is under way
	mine := c.open(func(next http.RoundTripper) http.RoundTripper {
		return transport(func(r *http.Request) (*http.Response, error) {
			response, err := next.RoundTrip(r)
			if err == nil && isWrite(r) && lose {
				_ = response.Body.Close()
				return nil, io.ErrUnexpectedEOF
			}
			return response, err
		})
	}).Sandboxes()
	must := must[*sandbox](t)
	made := must(mine.Create(t.Context(), newSandbox("a")))
	next, stop := iter.Pull(mine.Follow(t.Context(), keyOf("a")))
	defer stop()
	next()
	next()
	lose = true
	_, err := mine.UpdateSpec(t.Context(), keyOf("a"), none, setDir("/1"))
	if !errdefs.IsUnavailable(err) || fault.ReasonOf(err) != store.Unavailable || !strings.Contains(err.Error(), "may still take effect") {
		t.Errorf("the error is %v", err)
	}
	if e, _ := next(); e.Type != store.Changed || e.Object.Spec.WorkingDir != "/1" || e.Object.Generation != made.Generation+1 {
		t.Errorf("the event is %s of %+v", e.Type, e.Object)
	}
	ctx, cancel := context.WithCancel(t.Context())
	lose = false
	_, err = mine.UpdateSpec(ctx, keyOf("a"), none, func(s *sandbox) error { cancel(); return setDir("/2")(s) })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("the error is %v", err)
	}
}
