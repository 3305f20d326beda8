//go:build failpoint

package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

func TestContainerdKilledAtEveryStepThatTouchesIt(t *testing.T) {
	disturb(t, func(w *world, ctx context.Context) error { return w.containerd.Kill(ctx) }, func(g target) bool {
		return strings.HasPrefix(g.point, "container/") || strings.HasPrefix(g.point, "sandbox/")
	})
}

func TestProcessKilledAtEveryStepThatTouchesIt(t *testing.T) {
	disturb(t, func(w *world, ctx context.Context) error {
		w.processDies = true
		return killFirstProcess(ctx, w)
	}, func(g target) bool {
		return g.scenario.also == nil && (strings.HasPrefix(g.point, "attach/") || strings.HasPrefix(g.point, "detach/") ||
			strings.HasPrefix(g.point, "container/start/"))
	})
}

// disturb stops the server at every point that is chosen, does something to what it works with, and lets it go on.
func disturb(t *testing.T, do func(*world, context.Context) error, chosen func(target) bool) {
	w := newWorld(t)
	for _, g := range targets(w.Failpoints(t)) {
		if !chosen(g) || g.scenario.also != nil {
			continue
		}
		w = eachOn(t, w, g.String(), func(t *testing.T) {
			w.restart(t, g.arm(w, "pause("+w.pauseFile()+")"))
			reached := w.atPause(t, func() error { return do(w, t.Context()) })
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
