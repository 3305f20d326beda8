package embedded

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/patch"
)

func setNode(node string) func(*sandbox) error {
	return func(o *sandbox) error { o.Status.Node = node; return nil }
}

func setImage(image string) func(*sandbox) error {
	return func(o *sandbox) error { o.Spec.Image = image; return nil }
}

func updateLate(t *testing.T, s *Store, name string, change func(*sandbox) error) *sandbox {
	t.Helper()
	o, err := store.UpdateStatusLate(t.Context(), s.Sandboxes(), key(name), store.Preconditions{}, change)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func updateSpec(t *testing.T, s *Store, name string, change func(*sandbox) error) *sandbox {
	t.Helper()
	o, err := s.Sandboxes().UpdateSpec(t.Context(), key(name), store.Preconditions{}, change)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func get(t *testing.T, s *Store, name string) *sandbox {
	t.Helper()
	o, err := s.Sandboxes().Get(t.Context(), key(name))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// crashed opens what a crash at this moment would leave of a store's file.
func crashed(t *testing.T, s *Store) *Store {
	t.Helper()
	data, err := os.ReadFile(s.file.Path())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state.db")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return open(t, path, Options{flushAfter: never})
}

func lateCount(s *Store) int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.late.count
}

func version(t *testing.T, o *sandbox) uint64 {
	t.Helper()
	v, err := parseNumber([]byte(o.ResourceVersion))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// Status is answered and shown before it is written; the next durable write takes it along.
func TestStatusIsShownBeforeItIsDurable(t *testing.T) {
	var commits atomic.Int64
	s := open(t, filepath.Join(t.TempDir(), "state.db"), Options{flushAfter: never, fault: func(at stage) error {
		if at == written {
			commits.Add(1)
		}
		return nil
	}})
	create(t, s, "a")
	create(t, s, "b")
	next, stop := iter.Pull(s.Sandboxes().Follow(t.Context(), key("a")))
	defer stop()
	next()
	next() // Synced
	before := commits.Load()
	var shown *sandbox
	for i := range 3 {
		shown = updateLate(t, s, "a", setNode(fmt.Sprint("n", i)))
		if e, _ := next(); e.Object.Status.Node != shown.Status.Node || e.Object.ResourceVersion != shown.ResourceVersion {
			t.Errorf("a follower got version %s, node %s; want %s, %s", e.Object.ResourceVersion, e.Object.Status.Node, shown.ResourceVersion, shown.Status.Node)
		}
		if got := get(t, s, "a"); got.ResourceVersion != shown.ResourceVersion {
			t.Errorf("Get returned version %s; want %s", got.ResourceVersion, shown.ResourceVersion)
		}
	}
	if n := commits.Load() - before; n != 0 {
		t.Fatalf("status took %d commits; want none yet", n)
	}

	lost := crashed(t, s)
	if got := get(t, lost, "a"); got.Status.Node != "" {
		t.Errorf("after a crash the node is %q: the test does not test what it should", got.Status.Node)
	}
	// A version that was shown is never another state's, though what it named is lost.
	if again := updateLate(t, lost, "a", setNode("x")); version(t, again) <= version(t, shown) {
		t.Errorf("version %s after a crash; %s was shown before", again.ResourceVersion, shown.ResourceVersion)
	}

	// Another object's write takes it along.
	updateSpec(t, s, "b", setImage("i"))
	if n := commits.Load() - before; n != 1 {
		t.Errorf("%d commits; want 1", n)
	}
	kept := crashed(t, s)
	if got := get(t, kept, "a"); got.ResourceVersion != shown.ResourceVersion || got.Status.Node != "n2" {
		t.Errorf("after the commit and a crash a is at version %s, node %q; want %s, n2", got.ResourceVersion, got.Status.Node, shown.ResourceVersion)
	}
	if n := lateCount(s); n != 0 {
		t.Errorf("%d states are late after the commit", n)
	}

	// The object's own write has it too; and what was late of an object that is deleted does not come back.
	updateLate(t, s, "a", setNode("n9"))
	if got := updateSpec(t, s, "a", setImage("i")); got.Status.Node != "n9" {
		t.Errorf("the write of spec lost the status: %q", got.Status.Node)
	}
	if got := get(t, crashed(t, s), "a"); got.Status.Node != "n9" || got.Spec.Image != "i" {
		t.Errorf("after the write of spec and a crash: node %q, image %q", got.Status.Node, got.Spec.Image)
	}
	updateLate(t, s, "a", setNode("n10"))
	if err := s.Sandboxes().Delete(t.Context(), key("a"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := crashed(t, s).Sandboxes().Get(t.Context(), key("a")); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("after its deletion and a crash: %v", err)
	}
	if n := lateCount(s); n != 0 {
		t.Errorf("%d states are late after the deletion", n)
	}
}

// When nothing else is written, status becomes durable by itself; at the latest when the store is closed.
func TestStatusBecomesDurable(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "state.db"), Options{flushAfter: time.Millisecond})
	create(t, s, "a")
	for i := range 3 {
		node := fmt.Sprint("n", i)
		updateLate(t, s, "a", setNode(node))
		for lateCount(s) > 0 {
			runtime.Gosched()
		}
		if got := get(t, crashed(t, s), "a"); got.Status.Node != node {
			t.Errorf("node %q; want %q", got.Status.Node, node)
		}
	}

	path := filepath.Join(t.TempDir(), "state.db")
	s, err := Open(path, Options{flushAfter: never})
	if err != nil {
		t.Fatal(err)
	}
	create(t, s, "a")
	updateLate(t, s, "a", setNode("n"))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if got := get(t, open(t, path, Options{}), "a"); got.Status.Node != "n" {
		t.Errorf("Close lost the status: node %q", got.Status.Node)
	}
}

// Status on top of a spec that is not durable is not shown before it.
func TestStatusWaitsForItsSpec(t *testing.T) {
	g := newGate()
	s := open(t, filepath.Join(t.TempDir(), "state.db"), Options{flushAfter: never, fault: g.hold})
	results, status := make(chan error), make(chan error)
	go func() { results <- createErr(t, s, "a") }()
	<-g.at
	g.proceed <- nil
	<-results
	go func() {
		_, err := s.Sandboxes().UpdateSpec(t.Context(), key("a"), store.Preconditions{}, setImage("i"))
		results <- err
	}()
	<-g.at
	go func() {
		_, err := store.UpdateStatusLate(t.Context(), s.Sandboxes(), key("a"), store.Preconditions{}, setNode("n"))
		status <- err
	}()
	waitStaged(s, 1)
	if got := get(t, s, "a"); got.Spec.Image != "" || got.Status.Node != "" {
		t.Errorf("shown before they are durable: image %q, node %q", got.Spec.Image, got.Status.Node)
	}
	g.proceed <- errors.New("injected")
	if err := <-results; !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("the write of spec: %v", err)
	}
	// The status starts over, and rests on nothing that is not durable any more.
	if err := <-status; err != nil {
		t.Errorf("the write of status: %v", err)
	}
	if got := get(t, s, "a"); got.Spec.Image != "" || got.Status.Node != "n" {
		t.Errorf("image %q, node %q; want only the node", got.Spec.Image, got.Status.Node)
	}
	go func() { // what is left to Close
		<-g.at
		g.proceed <- nil
	}()
}

// A flush that fails is tried again; until one succeeds, writers of status wait for theirs and hear of it.
func TestAFlushThatFails(t *testing.T) {
	var fail atomic.Bool
	var log slogLines
	options := Options{flushAfter: time.Millisecond, Logger: slog.New(slog.NewTextHandler(&log, nil)), fault: func(at stage) error {
		if at == written && fail.Load() {
			return errors.New("no space")
		}
		return nil
	}}
	path := filepath.Join(t.TempDir(), "state.db")
	s, err := Open(path, options)
	if err != nil {
		t.Fatal(err)
	}
	create(t, s, "a")
	behind := func() bool {
		s.mu.RLock()
		defer s.mu.RUnlock()
		return s.late.behind != nil
	}
	fail.Store(true)
	updateLate(t, s, "a", setNode("kept"))
	for !behind() {
		runtime.Gosched()
	}
	if log.count.Load() != 1 {
		t.Errorf("the log has %d lines; want 1", log.count.Load())
	}
	_, err = store.UpdateStatusLate(t.Context(), s.Sandboxes(), key("a"), store.Preconditions{}, setNode("refused"))
	if !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("a write of status while the file cannot be written: %v", err)
	}
	if got := get(t, s, "a"); got.Status.Node != "kept" {
		t.Errorf("node %q; want what was acknowledged", got.Status.Node)
	}
	fail.Store(false)
	updateLate(t, s, "a", func(o *sandbox) error { o.Status.Restarts = 1; return nil })
	if behind() || lateCount(s) != 0 {
		t.Error("the store is behind after a write that succeeded")
	}
	if got := get(t, crashed(t, s), "a"); got.Status.Node != "kept" || got.Status.Restarts != 1 {
		t.Errorf("after the file can be written again: node %q, %d restarts", got.Status.Node, got.Status.Restarts)
	}

	fail.Store(true)
	updateLate(t, s, "a", setNode("lost"))
	if err := s.Close(); err == nil {
		t.Error("Close lost a status without a word")
	}
}

// slogLines counts the lines of a log.
type slogLines struct{ count atomic.Int64 }

func (l *slogLines) Write(line []byte) (int, error) {
	l.count.Add(1)
	return len(line), nil
}

// When no reserved version is left, a late write waits for the commit that reserves more.
func TestVersionsAreReservedBeforeTheyAreShown(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "state.db"), Options{flushAfter: never})
	create(t, s, "a")
	updateLate(t, s, "a", setNode("n1"))
	if lateCount(s) != 1 {
		t.Fatal("the status is not late")
	}
	s.version.Store(s.reserved)
	o := updateLate(t, s, "a", setNode("n2"))
	if lateCount(s) != 0 || version(t, get(t, crashed(t, s), "a")) != version(t, o) {
		t.Error("a version was shown that a later process may give out again")
	}
	updateLate(t, s, "a", setNode("n3"))
	if lateCount(s) != 1 {
		t.Error("no versions were reserved")
	}
}

// A late write of spec is like one of status, but the end of an object is durable before it is answered.
func TestLateWriteOfSpec(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "state.db"), Options{flushAfter: never})
	create(t, s, "a")
	late := func(change func(*sandbox) error) *sandbox {
		t.Helper()
		o, err := store.UpdateSpecLate(t.Context(), s.Sandboxes(), key("a"), store.Preconditions{}, change)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	if o := late(setImage("i")); o.Generation != 2 || get(t, s, "a").Spec.Image != "i" || lateCount(s) != 1 {
		t.Errorf("generation %d, image %q, %d late", o.Generation, get(t, s, "a").Spec.Image, lateCount(s))
	}
	if got := get(t, crashed(t, s), "a"); got.Spec.Image != "" {
		t.Errorf("after a crash the image is %q", got.Spec.Image)
	}
	updateSpec(t, s, "a", func(o *sandbox) error { o.Finalizers = []string{"example.com/hold"}; return nil })
	if got := get(t, crashed(t, s), "a"); got.Spec.Image != "i" {
		t.Errorf("the write that followed is durable without the late one: image %q", got.Spec.Image)
	}
	if err := s.Sandboxes().Delete(t.Context(), key("a"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}
	late(func(o *sandbox) error { o.Finalizers = nil; return nil })
	if _, err := crashed(t, s).Sandboxes().Get(t.Context(), key("a")); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("after its end and a crash: %v", err)
	}
}

// The short way to write an object that this build knows all of gives what the patch gives.
func TestRewriteIsThePatch(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "state.db"), Options{flushAfter: never})
	for _, name := range []string{"known", "newer"} {
		if _, err := s.Sandboxes().Create(t.Context(), full(name)); err != nil {
			t.Fatal(err)
		}
	}
	editRaw(t, s, key("newer"), func(o map[string]any) { o["future"] = true })
	if known, newer := s.sandboxes.newest(key("known")), s.sandboxes.newest(key("newer")); !known.plain || newer.plain {
		t.Fatalf("plain: %v, %v; want true, false", known.plain, newer.plain)
	}
	sameSoFar := func(what string) {
		t.Helper()
		known, newer := rawOf(t, s, key("known")), rawOf(t, s, key("newer"))
		if newer["future"] != true {
			t.Errorf("%s lost what it does not know", what)
		}
		delete(newer, "future")
		for _, o := range []map[string]any{known, newer} {
			meta := o["metadata"].(map[string]any)
			for _, own := range []string{"name", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp"} {
				delete(meta, own)
			}
		}
		a, _ := json.Marshal(known)
		b, _ := json.Marshal(newer)
		if !patch.Equal(a, b) {
			t.Errorf("after %s:\n%s\n%s", what, a, b)
		}
	}
	now := time.Now()
	for _, c := range []struct {
		what   string
		status bool
		change func(*sandbox) error
	}{
		{"rows", true, func(o *sandbox) error { o.Status = full("").Status; return nil }},
		{"a new entry", false, func(o *sandbox) error {
			o.Spec.DynamicVolumes = append(o.Spec.DynamicVolumes, v1alpha1.DynamicVolume{VolumeType: "local", Source: "/s", Target: "/t"})
			return nil
		}},
		{"a change of an entry", false, func(o *sandbox) error {
			o.Spec.DynamicVolumes[2].Detach = &v1alpha1.DetachRequest{Force: true, RequestID: "r"}
			return nil
		}},
		{"the end of an entry", false, func(o *sandbox) error {
			o.Spec.DynamicVolumes = o.Spec.DynamicVolumes[1:]
			return nil
		}},
		{"labels", false, func(o *sandbox) error { o.Labels = map[string]string{"a": "b"}; return nil }},
		{"no labels", false, func(o *sandbox) error { o.Labels = nil; return nil }},
		{"empty lists", false, func(o *sandbox) error { o.Spec.Command, o.Finalizers = []string{}, []string{}; return nil }},
		{"what is the other part's", false, func(o *sandbox) error { o.Status.Node = "x"; o.Generation = 99; return nil }},
		{"a finalizer", false, func(o *sandbox) error { o.Finalizers = []string{"example.com/hold"}; return nil }},
		{"status", true, func(o *sandbox) error {
			o.Status.Node, o.Status.Restarts = "n", 3
			start := metav1.NewTime(now)
			o.Status.StartTime = &start
			o.Status.Volumes[1].Phase = v1alpha1.VolumeFailed
			o.Status.Volumes = append(o.Status.Volumes[:3], o.Status.Volumes[4:]...)
			return nil
		}},
		{"an empty status", true, func(o *sandbox) error { o.Status = v1alpha1.SandboxStatus{}; return nil }},
	} {
		for _, name := range []string{"known", "newer"} {
			if c.status {
				updateLate(t, s, name, c.change)
			} else {
				updateSpec(t, s, name, c.change)
			}
		}
		sameSoFar(c.what)
	}
	for _, name := range []string{"known", "newer"} {
		if err := s.Sandboxes().Delete(t.Context(), key(name), store.Preconditions{}); err != nil {
			t.Fatal(err)
		}
	}
	sameSoFar("Delete")
	if known, newer := s.sandboxes.newest(key("known")), s.sandboxes.newest(key("newer")); !known.plain || newer.plain {
		t.Errorf("plain at the end: %v, %v", known.plain, newer.plain)
	}
	// It is found out again when the file is opened, whatever the order of the members.
	again := crashed(t, s)
	if known, newer := again.sandboxes.newest(key("known")), again.sandboxes.newest(key("newer")); !known.plain || newer.plain {
		t.Errorf("plain after opening: %v, %v", known.plain, newer.plain)
	}
	before := get(t, again, "known").ResourceVersion
	if got := updateLate(t, again, "known", func(*sandbox) error { return nil }); got.ResourceVersion != before {
		t.Error("a change of nothing was written")
	}
}
