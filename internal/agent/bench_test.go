package agent_test

import (
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
)

func BenchmarkAttachDetachThroughGRPC(b *testing.B) {
	n := agenttest.New(b, nil)
	sb := n.Run(b, agenttest.Sandbox{Tenant: "t1"})
	v := agenttest.Volume{Source: n.Dir(b, "t1", "data"), Target: "/data"}
	for b.Loop() {
		sb.Attach(b, v)
		sb.Detach(b, v.Target, false)
	}
}
