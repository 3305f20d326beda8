package standalone

import (
	"context"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
)

// echo is an agent that knows two calls.
type echo struct {
	agentv1.UnimplementedAgentServiceServer
	release chan struct{}
}

func (e *echo) StartSandbox(_ context.Context, r *agentv1.StartSandboxRequest) (*agentv1.SandboxState, error) {
	uid := r.GetCommand().GetSandboxUid()
	r.Command.SandboxUid = "changed"
	return &agentv1.SandboxState{Uid: uid}, nil
}

// StopSandbox does not look at its context.
func (e *echo) StopSandbox(context.Context, *agentv1.StopSandboxRequest) (*agentv1.SandboxState, error) {
	<-e.release
	return &agentv1.SandboxState{}, nil
}

func TestDirect(t *testing.T) {
	service := &echo{release: make(chan struct{})}
	around := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if r, ok := req.(*agentv1.StartSandboxRequest); ok && r.GetCommand().GetSandboxUid() == "refused" {
			return nil, status.Error(codes.FailedPrecondition, "refused")
		}
		return next(ctx, req)
	}
	d := newDirect(nil, &agentv1.AgentService_ServiceDesc, service, around)
	defer d.close()
	client := agentv1.NewAgentServiceClient(d)

	request := &agentv1.StartSandboxRequest{Command: &agentv1.Command{SandboxUid: "u"}}
	state, err := client.StartSandbox(t.Context(), request)
	if err != nil || state.GetUid() != "u" {
		t.Errorf("answer %v, %v", state, err)
	}
	if request.GetCommand().GetSandboxUid() != "u" {
		t.Error("the service changed its caller's request")
	}
	request.Command.SandboxUid = "refused"
	if _, err := client.StartSandbox(t.Context(), request); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a call that is refused on its way: %v", err)
	}
	if _, err := client.CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("a call that the service does not have: %v", err)
	}

	// A call ends with its context although its handler does not; others are not held up by as many as there may be.
	ctx, cancel := context.WithCancel(t.Context())
	const hanging = 2 * directWorkers
	ended := make(chan error)
	for range hanging {
		go func() {
			_, err := client.StopSandbox(ctx, &agentv1.StopSandboxRequest{})
			ended <- err
		}()
	}
	request.Command.SandboxUid = "u"
	if _, err := client.StartSandbox(t.Context(), request); err != nil {
		t.Error(err)
	}
	cancel()
	for range hanging {
		if err := <-ended; status.Code(err) != codes.Canceled {
			t.Errorf("a call that was given up: %v", err)
		}
	}
	close(service.release)
	if _, err := client.StartSandbox(ctx, request); status.Code(err) != codes.Canceled {
		t.Errorf("a call with an ended context: %v", err)
	}
}
