package embedded

import (
	"encoding/json"
	"errors"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/storetest"
)

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Backend {
		var countdown atomic.Int64
		s := open(t, filepath.Join(t.TempDir(), "state.db"), Options{flushAfter: never, Logger: slog.New(slog.DiscardHandler), fault: func(at stage) error {
			if at == written && countdown.Add(-1) == 0 {
				return errors.New("injected")
			}
			return nil
		}})
		return storetest.Backend{
			Store:     s,
			FailWrite: func(n int) { countdown.Store(int64(n)) },
			Raw:       func(key store.Key) map[string]any { return rawOf(t, s, key) },
			EditRaw:   func(key store.Key, edit func(map[string]any)) { editRaw(t, s, key, edit) },
		}
	})
}

// never is a time for status to wait for the next commit of something else, or Close.
const never = time.Hour

// open opens a store that is closed with the test.
func open(t testing.TB, path string, options Options) *Store {
	t.Helper()
	s, err := Open(path, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func rawOf(t *testing.T, s *Store, key store.Key) map[string]any {
	t.Helper()
	var object map[string]any
	if err := json.Unmarshal(s.sandboxes.newest(key).raw, &object); err != nil {
		t.Fatal(err)
	}
	return object
}

// editRaw writes the JSON of a sandbox as it comes, through the committer.
func editRaw(t *testing.T, s *Store, key store.Key, edit func(map[string]any)) {
	t.Helper()
	object := rawOf(t, s, key)
	edit(object)
	raw, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.sandboxes.mutate(t.Context(), key, "edit", func(now *state[*sandbox]) (*state[*sandbox], error) {
		return s.sandboxes.newState(key, raw)
	}); err != nil {
		t.Fatal(err)
	}
}
