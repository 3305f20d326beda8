package agent

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
)

// allowKeepAlive lets a controller find out that a node is gone.
func allowKeepAlive() grpc.ServerOption {
	return grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: agentv1.KeepAlive / 2, PermitWithoutStream: true})
}
