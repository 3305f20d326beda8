//go:build failpoint

package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestContainerdKilledAtEveryStepThatTouchesIt(t *testing.T) {
	disturb(t, disturbance{
		operations: []string{"container", "sandbox"},
		do:         func(ctx context.Context, w *world) error { return w.containerd.Kill(ctx) },
	})
}

func TestProcessKilledAtEveryStepThatTouchesIt(t *testing.T) {
	disturb(t, disturbance{
		operations:  []string{"attach", "detach", "container/start"},
		do:          killFirstProcess,
		processDies: true,
	})
}

// disturbance is what happens to the server's surroundings while it stands at a point of certain operations.
type disturbance struct {
	operations  []string
	do          func(ctx context.Context, w *world) error
	processDies bool
}

func (d disturbance) touches(g target) bool {
	return g.scenario.also == nil && slices.ContainsFunc(d.operations, func(o string) bool { return strings.HasPrefix(g.point, o+"/") })
}

// disturb stops the server at every point, has something happen, and lets it go on.
func disturb(t *testing.T, d disturbance) {
	w := newWorld(t)
	for _, g := range targets(w.Failpoints(t)) {
		if !d.touches(g) {
			continue
		}
		w = eachOn(t, w, g.String(), func(t *testing.T) {
			w.processDies = d.processDies
			w.restart(t, g.arm(w, "pause("+w.pauseFile()+")"))
			reached := w.atPause(t, func() error { return d.do(t.Context(), w) })
			w.insist(t, g.scenario.steps)
			if err := reached(); err != nil {
				t.Fatalf("%s: %v", g.point, err)
			}
			w.checkNothingLeft(t)
		})
	}
}

// atPause does something once, when the server pauses at a failpoint, and lets it go on. The function that it returns
// waits for that.
func (w *world) atPause(t *testing.T, do func() error) (reached func() error) {
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() {
		if err := w.awaitPauseOr(ctx, func() bool { return false }); err != nil {
			result <- errors.New("was never reached")
			return
		}
		result <- errors.Join(do(), os.Remove(w.pauseFile()))
	}()
	return func() error {
		defer cancel()
		select {
		case err := <-result:
			return err
		case <-time.After(backgroundWait):
			cancel()
			return <-result
		}
	}
}

// insist runs the steps to their end. Each may fail for a while, and is then tried again; the server may not die.
func (w *world) insist(t *testing.T, steps []step) {
	t.Helper()
	for _, s := range steps {
		var failures []error
		if err := await(t.Context(), func(ctx context.Context) error {
			err := w.try(ctx, s)
			if err != nil {
				failures = append(failures, err)
			}
			return err
		}); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		for _, err := range failures {
			t.Logf("%s, before it succeeded: %s", s.name, fmt.Sprint(err))
		}
		if w.Ended(time.Millisecond) {
			t.Fatalf("%s: the server died", s.name)
		}
	}
}
