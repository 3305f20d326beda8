package scheduler

import (
	"context"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// slowClaims wait for what they are told to, until they are let go on.
type slowClaims struct {
	claims
	why  chan error
	done chan struct{}
}

func (c slowClaims) Resolve(ctx context.Context, w Wish, node string) (*ResolvedVolume, error) {
	for {
		select {
		case why := <-c.why:
			w.Wait(why)
		case <-c.done:
			return c.claims.Resolve(ctx, w, node)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// What a volume waits for is in its row long before the attempt ends, and is no longer when the volume is with the agent.
func TestWhatASlowAttachWaitsForIsShown(t *testing.T) {
	w := emptyWorld(t)
	slow := slowClaims{why: make(chan error), done: make(chan struct{})}
	w.resolver = slow
	w.group("default", nil)
	w.start()
	w.addAgent("n0", nil)
	w.eventually("the agent", func() bool { return w.s.registry.agent("n0").connected })
	w.running("a", nil)
	w.agents["n0"].with(func() { w.agents["n0"].hang["attach /data"] = true })
	w.add("a", v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: "c", Target: "/data"})
	pending := func(reason fault.Reason, message string) error {
		return fault.New(errdefs.ErrUnavailable, reason, "%s", message)
	}
	shows := func(reason fault.Reason, message string) {
		t.Helper()
		w.eventually("it is shown that "+message, func() bool {
			row := w.row("a", "/data")
			return row != nil && row.Phase == v1alpha1.VolumeAttaching && row.Reason == string(reason) && row.Message == message
		})
	}
	slow.why <- pending(fault.VolumeNotBound, "there is no volume yet")
	w.look("a")
	if row := w.row("a", "/data"); row != nil {
		t.Fatalf("an attach is shown before it is slow: %+v", row)
	}
	w.clock.Step(slowAfter)
	shows(fault.VolumeNotBound, "there is no volume yet")
	// Other words are no change, and cost no write.
	writes := w.store.status.Load()
	slow.why <- pending(fault.VolumeNotBound, "there is no volume yet, nor will there be soon")
	w.look("a")
	if n := w.store.status.Load() - writes; n != 0 {
		t.Errorf("%d writes for other words", n)
	}
	slow.why <- pending(fault.AnchorPending, "it is not mounted yet")
	shows(fault.AnchorPending, "it is not mounted yet")
	close(slow.done)
	w.eventually("the agent has it", func() bool { return w.agents["n0"].count("attach /data") == 1 })
	w.clock.Step(slowAfter)
	shows("", "")
}
