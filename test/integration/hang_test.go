package integration

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// hung is a call that hangs for ever, whatever its context says, for the volume whose source ends in "dead".
type hung struct {
	entered chan struct{} // receives once for every call that hangs
	end     chan struct{} // closed with the test, so that nothing stays
}

func newHung(t *testing.T) *hung {
	h := &hung{entered: make(chan struct{}, 100), end: make(chan struct{})}
	t.Cleanup(func() { close(h.end) })
	return h
}

func (h *hung) call(_ context.Context, source string) error {
	if !strings.HasSuffix(source, "dead") {
		return nil
	}
	h.entered <- struct{}{}
	<-h.end
	return context.Canceled
}

// others attaches and detaches other volumes, of this sandbox and of another, which must go as if nothing was wrong.
func others(t *testing.T, n *agenttest.Node, sandboxes ...*agenttest.Sandbox) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, sb := range sandboxes {
		if _, err := sb.TryAttach(ctx, agenttest.Volume{Source: n.Dir(t, "t1", "alive"), Target: "/alive"}); err != nil {
			t.Fatal("another volume:", err)
		}
		if _, ok := sb.Mounts(t)["/alive"]; !ok {
			t.Error("another volume is not there")
		}
		if _, err := sb.TryDetach(ctx, "/alive", false); err != nil {
			t.Fatal("another volume:", err)
		}
	}
}

func TestSourceThatHangsDelaysNobodyElse(t *testing.T) {
	for name, hook := range map[string]func(*hooks, *hung){
		"prepare": func(h *hooks, d *hung) {
			h.prepare = func(ctx context.Context, r volume.Request) error { return d.call(ctx, r.Source) }
		},
		"tree": func(h *hooks, d *hung) {
			h.tree = func(ctx context.Context, p volume.Prepared) error { return d.call(ctx, sourceOf(p)) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			var h hooks
			dead := newHung(t)
			hook(&h, dead)
			n := agenttest.New(t, h.install)
			one, two := n.Run(t, agenttest.Sandbox{Tenant: "t1"}), n.Run(t, agenttest.Sandbox{Tenant: "t1"})
			volume := agenttest.Volume{Source: n.Dir(t, "t1", "dead"), Target: "/dead"}
			before := one.Mounts(t)

			// Waits for the volume until it is told not to.
			ctx, giveUp := context.WithTimeout(t.Context(), 5*time.Minute)
			waiting := make(chan error, 1)
			go func() {
				_, err := one.TryAttach(ctx, volume)
				waiting <- err
			}()
			<-dead.entered
			others(t, n, one, two)
			select {
			case err := <-waiting:
				t.Fatal("the attach of the dead volume ended:", err)
			default:
			}
			giveUp()
			if err := <-waiting; err == nil {
				t.Fatal("it was attached")
			}
			// One with a deadline ends at it and says why, whether it is the first or comes behind it.
			for _, sb := range []*agenttest.Sandbox{one, two} {
				short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
				r, err := sb.TryAttach(short, volume)
				cancel()
				if err == nil || fault.ReasonOf(err) != fault.DeadlineExceeded && fault.ReasonOf(err) != fault.OperationPending {
					t.Errorf("%v, %v (reason %s), want the end of the deadline", r, err, fault.ReasonOf(err))
				}
			}
			sameMounts(t, one, before)

			// A sandbox that waits for it can be deleted, at once.
			go func() {
				_, err := two.TryAttach(t.Context(), volume)
				waiting <- err
			}()
			agenttest.Eventually(t, "the attach waits", func() bool { return len(dead.entered) > 0 || name == "prepare" })
			two.Delete(t)
			if err := <-waiting; fault.ReasonOf(err) != fault.SandboxTerminating && fault.ReasonOf(err) != fault.SandboxNotFound {
				t.Errorf("the attach to a deleted sandbox: %v (reason %s)", err, fault.ReasonOf(err))
			}

			// The agent stops, starts, and works.
			n.Restart(t)
			others(t, n, one)
			one.Delete(t)
		})
	}
}

func TestReleaseThatHangsDelaysNobodyElse(t *testing.T) {
	dead := newHung(t)
	h := hooks{release: func(ctx context.Context, p volume.Prepared) error { return dead.call(ctx, sourceOf(p)) }}
	n := agenttest.New(t, h.install)
	one, two := n.Run(t, agenttest.Sandbox{Tenant: "t1"}), n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	v := agenttest.Volume{Source: n.Dir(t, "t1", "dead"), Target: "/dead"}
	one.Attach(t, v)
	one.Detach(t, v.Target, false)
	<-dead.entered
	others(t, n, one, two)
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := one.TryAttach(short, v); err == nil {
		t.Error("a volume that is being released was attached")
	}
	one.Delete(t)
	n.Restart(t)
	others(t, n, two)
	two.Delete(t)
}

// A restart of a sandbox's process that waits for a dead volume keeps the sandbox from nothing but running.
func TestRestartThatHangsCanBeDeleted(t *testing.T) {
	dead := newHung(t)
	var mu sync.Mutex // guards dying
	dying := false
	h := hooks{tree: func(ctx context.Context, p volume.Prepared) error {
		mu.Lock()
		defer mu.Unlock()
		if !dying {
			return nil
		}
		mu.Unlock()
		defer mu.Lock()
		return dead.call(ctx, sourceOf(p))
	}}
	n := agenttest.New(t, h.install)
	sb, other := n.Run(t, agenttest.Sandbox{Tenant: "t1"}), n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "dead"), Target: "/dead"})
	mu.Lock()
	dying = true
	mu.Unlock()
	process, err := os.FindProcess(sb.PID(t))
	must(t, err)
	must(t, process.Kill())
	<-dead.entered
	others(t, n, other)
	sb.Delete(t)
	if _, err := os.Stat(n.Dir(t, "t1", "dead")); err != nil {
		t.Error(err)
	}
}
