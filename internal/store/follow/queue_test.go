package follow

import (
	"fmt"
	"iter"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

func object(name, uid string) *v1alpha1.Sandbox {
	o := &v1alpha1.Sandbox{}
	o.Namespace, o.Name, o.UID = "default", name, types.UID(uid)
	return o
}

// What waits for a reader that takes nothing is bounded by the objects that exist, however many changes
// and short-lived objects there are.
func TestQueueIsBounded(t *testing.T) {
	q := newQueue[*v1alpha1.Sandbox]()
	q.changed(object("seen", "seen"))
	q.synced()
	for range 2 {
		if _, ok := q.next(t.Context()); !ok {
			t.Fatal("the queue ended")
		}
	}
	for i := range 10_000 {
		q.changed(object("seen", "seen"))
		q.changed(object("alive", "alive"))
		flash := object("flash", fmt.Sprint("flash", i))
		q.changed(flash)
		q.deleted(flash)
	}
	q.deleted(object("seen", "seen"))
	if n := q.waiting.Len(); n != 2 || len(q.place) != n || len(q.seen) != 1 {
		t.Errorf("%d events wait, %d places, %d seen; want 2, 2, 1", n, len(q.place), len(q.seen))
	}
	for _, want := range []store.EventType{store.Deleted, store.Changed} {
		if e, _ := q.next(t.Context()); e.Type != want {
			t.Errorf("got %s; want %s", e.Type, want)
		}
	}
	q.deleted(object("alive", "alive"))
	if e, _ := q.next(t.Context()); e.Type != store.Deleted || len(q.seen) != 0 || len(q.place) != 0 {
		t.Errorf("got %s, %d seen, %d places", e.Type, len(q.seen), len(q.place))
	}
}

// A reader that has left is forgotten.
func TestHubForgetsReaders(t *testing.T) {
	var h Hub[*v1alpha1.Sandbox]
	one := object("a", "a")
	snapshot := func(follow func(iter.Seq[*v1alpha1.Sandbox])) {
		follow(func(yield func(*v1alpha1.Sandbox) bool) { yield(one) })
	}
	for _, keys := range [][]store.Key{nil, {store.KeyOf(one), {Namespace: "default", Name: "b"}}} {
		for range h.Follow(t.Context(), keys, snapshot) {
			if len(h.all)+len(h.byKey) == 0 {
				t.Error("the reader is not known")
			}
			break
		}
		if len(h.all)+len(h.byKey) != 0 {
			t.Errorf("readers are left: %d, %d", len(h.all), len(h.byKey))
		}
	}
}
