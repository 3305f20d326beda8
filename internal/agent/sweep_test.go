package agent_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// stuck are containers of which something cannot be swept, for a while.
type stuck struct {
	agent.Containers
	fails, sweeps atomic.Int32
}

func (s *stuck) Sweep(ctx context.Context) ([]containers.Leftover, error) {
	s.sweeps.Add(1)
	if s.fails.Load() > 0 {
		s.fails.Add(-1)
		return nil, errors.New("a shim does not answer")
	}
	return s.Containers.Sweep(ctx)
}

// What one sandbox has left behind keeps no other from being served, and is not forgotten.
func TestWhatCannotBeSweptKeepsNobody(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	s := &stuck{}
	s.fails.Store(2)
	n := agenttest.New(t, func(c *agent.Config) {
		s.Containers = c.Containers
		c.Containers, c.Clock = s, clock
	})
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"})
	if got := s.sweeps.Load(); got != 1 {
		t.Errorf("%d sweeps before its time", got)
	}
	testenv.Eventually(t, time.Minute, "it is swept again until it is done", func() bool {
		clock.Step(time.Second)
		return s.sweeps.Load() == 3
	})
}
