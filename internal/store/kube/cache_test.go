package kube

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// state is "name@uid:version".
func state(t *testing.T, text string) *record[*sandbox] {
	t.Helper()
	name, rest, _ := strings.Cut(text, "@")
	uid, version, _ := strings.Cut(rest, ":")
	r := &record[*sandbox]{}
	if err := r.UnmarshalJSON(fmt.Appendf(nil, `{"metadata":{"namespace":"default","name":%q,"uid":%q,"resourceVersion":%q}}`, name, uid, version)); err != nil {
		t.Fatal(err)
	}
	return r
}

// What is known of the objects follows from all that is heard of them, in whichever order that comes.
func TestObjectsAreAsTheNewestSaysWhoeverSaysIt(t *testing.T) {
	for _, tc := range []struct {
		name   string
		steps  string // list, watch(ed), deleted (by the watch), saw (an answer), end (an answer: it is gone), bookmark
		events string // + is Changed, - Deleted
		known  string
		gone   int // UIDs that are remembered
	}{
		{"the watch alone", "list:1 watch:a@u:2 watch:a@u:3 deleted:a@u:4", "+a@u:2 +a@u:3 -a@u:4", "", 0},
		{"an answer before its event", "list:1 saw:a@u:2 watch:a@u:2 watch:a@u:3", "+a@u:2 +a@u:3", "a@u:3", 0},
		{"an answer after later events", "list:1 watch:a@u:2 watch:a@u:3 saw:a@u:2", "+a@u:2 +a@u:3", "a@u:3", 0},
		{"answers in another order", "list:1 saw:a@u:3 saw:a@u:2", "+a@u:3", "a@u:3", 0},
		{"an answer after the object's end", "list:1 watch:a@u:2 deleted:a@u:4 saw:a@u:3", "+a@u:2 -a@u:4", "", 0},
		{"an answer about an object that came and went", "list:1 watch:b@v:9 saw:a@u:3", "+b@v:9", "b@v:9", 0},
		{"the same with a bookmark", "list:1 bookmark:9 saw:a@u:3", "", "", 0},
		{"an end before its events", "list:1 saw:a@u:2 end:a@u:2 watch:a@u:2 watch:a@u:3", "+a@u:2 -a@u:2", "", 1},
		{"an end, and then the watch's", "list:1 saw:a@u:2 end:a@u:2 watch:a@u:2 deleted:a@u:4", "+a@u:2 -a@u:2", "", 0},
		{"the watch's end, and then an answer's", "list:1 watch:a@u:2 deleted:a@u:4 end:a@u:2", "+a@u:2 -a@u:4", "", 0},
		{"a name passes on", "list:1 watch:a@u:2 saw:a@v:5 watch:a@u:3 deleted:a@u:4 watch:a@v:5", "+a@u:2 -a@u:2 +a@v:5", "a@v:5", 0},
		{"a name passes on and ends", "list:1 watch:a@u:2 saw:a@v:5 end:a@v:5 watch:a@u:3", "+a@u:2 -a@u:2 +a@v:5 -a@v:5", "", 2},
		{"a list after a gap", "list:1 watch:a@u:2 watch:b@v:3 list:9,b@v:7,c@w:8", "+a@u:2 +b@v:3 -a@u:2 +b@v:7 +c@w:8", "b@v:7 c@w:8", 0},
		{"a list in which a name has passed on", "list:1 watch:a@u:2 list:9,a@v:7", "+a@u:2 -a@u:2 +a@v:7", "a@v:7", 0},
		{"a list from before an answer", "list:1 saw:a@u:5 list:4", "+a@u:5", "a@u:5", 0},
		{"a list from before an end", "list:1 saw:a@u:3 end:a@u:3 list:4,a@u:3", "+a@u:3 -a@u:3", "", 1},
		{"a list from after an end", "list:1 saw:a@u:3 end:a@u:3 list:9", "+a@u:3 -a@u:3", "", 0},
		{"a refresh is ahead of the watch", "list:1 watch:a@u:2 watch:b@v:3 refresh:9,b@v:7,c@w:8 watch:a@u:4 watch:d@x:5 deleted:d@x:6 watch:b@v:7 watch:c@w:10", "+a@u:2 +b@v:3 -a@u:2 +b@v:7 +c@w:8 +c@w:10", "b@v:7 c@w:10", 0},
		{"a refresh, and an answer from before", "list:1 refresh:9 saw:a@u:8 saw:a@u:10", "+a@u:10", "a@u:10", 0},
		{"a list from before the object that ended", "list:1 saw:a@u:3 end:a@u:3 list:2", "+a@u:3 -a@u:3", "", 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := newObjects[*sandbox]()
			next, stop := iter.Pull(o.hub.Follow(t.Context(), nil, func(f func(iter.Seq[*sandbox])) { o.each(nil, f) }))
			defer stop()
			if e, _ := next(); e.Type != store.Synced {
				t.Fatalf("the first event is %s", e.Type)
			}
			var events []string
			take := func() {
				// The hub tells in order: what comes before this one is what the step was heard of.
				end := state(t, fmt.Sprintf("end@%d:1", len(events)))
				o.hub.Changed(end.object)
				for {
					e, _ := next()
					if e.Object.Name == "end" {
						break
					}
					sign := map[store.EventType]string{store.Changed: "+", store.Deleted: "-"}[e.Type]
					events = append(events, sign+text(e.Object))
				}
			}
			for step := range strings.FieldsSeq(tc.steps) {
				verb, arg, _ := strings.Cut(step, ":")
				var err error
				switch verb {
				case "list":
					version, items, _ := strings.Cut(arg, ",")
					var list []any
					for item := range strings.SplitSeq(items, ",") {
						if item != "" {
							list = append(list, state(t, item))
						}
					}
					err = o.Replace(list, version)
				case "refresh":
					version, items, _ := strings.Cut(arg, ",")
					var list []*record[*sandbox]
					for item := range strings.SplitSeq(items, ",") {
						if item != "" {
							list = append(list, state(t, item))
						}
					}
					err = o.refreshed(list, version)
				case "watch":
					err = o.Update(state(t, arg))
				case "deleted":
					err = o.Delete(state(t, arg))
				case "bookmark":
					err = o.Bookmark(arg)
				case "saw":
					o.saw(state(t, arg))
				case "end":
					o.sawEnd(state(t, arg))
				default:
					t.Fatal(step)
				}
				if err != nil {
					t.Fatal(err)
				}
				take()
			}
			var known []string
			for _, r := range o.byKey {
				known = append(known, text(r.object))
			}
			slices.Sort(known)
			if got := strings.Join(events, " "); got != tc.events {
				t.Errorf("events %s; want %s", got, tc.events)
			}
			if got := strings.Join(known, " "); got != tc.known || len(o.keys) != len(known) || len(o.gone) != tc.gone {
				t.Errorf("known %s by %d UIDs, %d remembered; want %s, %d", got, len(o.keys), len(o.gone), tc.known, tc.gone)
			}
		})
	}
}

func text(s *sandbox) string { return fmt.Sprintf("%s@%s:%s", s.Name, s.UID, s.ResourceVersion) }

// A record has all of the JSON, and what this build knows of it.
func TestRecord(t *testing.T) {
	r := &record[*sandbox]{}
	const text = `{"metadata":{"name":"a","resourceVersion":"7","managedFields":[{"manager":"x"}]},"spec":{"future":{"b":1},"workingDir":"/w"}}`
	if err := r.UnmarshalJSON([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if string(r.raw) != text || r.version != 7 || r.object.Spec.WorkingDir != "/w" || r.object.ManagedFields != nil {
		t.Errorf("got %+v", r)
	}
	for _, bad := range []string{`{"metadata":{"resourceVersion":"x"}}`, `{"metadata":{}}`, `[]`, `{"spec":{"paused":"yes"}}`} {
		if err := (&record[*sandbox]{}).UnmarshalJSON([]byte(bad)); err == nil {
			t.Errorf("%s decodes", bad)
		}
	}
}

// Turns are taken one at a time, and nothing is kept of those that are over.
func TestTurns(t *testing.T) {
	var turns turns
	a, b := store.Key{Name: "a"}, store.Key{Name: "b"}
	release, err := turns.take(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	other, err := turns.take(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	other()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := turns.take(ctx, a); err != context.Canceled {
		t.Errorf("a turn that is taken was given, or %v", err)
	}
	next := make(chan func())
	go func() {
		release, err := turns.take(t.Context(), a)
		if err != nil {
			t.Error(err)
		}
		next <- release
	}()
	select {
	case <-next:
		t.Error("two have the turn")
	default:
	}
	release()
	(<-next)()
	if len(turns.byKey) != 0 {
		t.Errorf("%d turns are kept", len(turns.byKey))
	}
}
