package containers

import (
	"context"
	"errors"
	"sync"
	"testing"
)

func TestKeyedLocks(t *testing.T) {
	var locks keyedLocks
	counters := map[string]*int{"a": new(int), "b": new(int)}
	var clients sync.WaitGroup
	for range 100 {
		for key, counter := range counters {
			clients.Go(func() {
				unlock, err := locks.lock(t.Context(), key)
				if err != nil {
					t.Error(err)
					return
				}
				defer unlock()
				*counter++
			})
		}
	}
	clients.Wait()
	if *counters["a"] != 100 || *counters["b"] != 100 {
		t.Errorf("%d and %d", *counters["a"], *counters["b"])
	}

	unlock, err := locks.lock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := locks.lock(ended, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("waiting with an ended context: %v", err)
	}
	unlock()
	if len(locks.held) != 0 {
		t.Errorf("locks are kept: %v", locks.held)
	}
}
