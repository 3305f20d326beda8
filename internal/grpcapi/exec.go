package grpcapi

import (
	"context"
	"errors"
	"io"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Exec passes a command on to the sandbox's agent, and its streams in both directions. Neither direction
// buffers: a side that does not read holds up the other by gRPC's flow control. When one side goes away the
// other's stream is cancelled.
func (s *sandboxService) Exec(stream grpc.BidiStreamingServer[sandboxv1.ExecRequest, sandboxv1.ExecResponse]) error {
	first, err := stream.Recv()
	if errors.Is(err, io.EOF) {
		return invalid("the stream ended before its start: send start first")
	}
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil {
		return invalid("the first message of a stream must be start")
	}
	if len(start.GetCommand()) == 0 || start.GetCommand()[0] == "" {
		return invalid("start.command is empty: name the program to run")
	}
	env := make([]v1alpha1.EnvVar, len(start.GetEnv()))
	agentEnv := make([]*agentv1.EnvVar, len(env))
	for i, e := range start.GetEnv() {
		env[i] = v1alpha1.EnvVar{Name: e.GetName(), Value: e.GetValue()}
		agentEnv[i] = &agentv1.EnvVar{Name: e.GetName(), Value: e.GetValue()}
	}
	if err := checkCommand("start.command", start.GetCommand(), env, start.GetWorkingDir()); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	sb, err := s.resolveMessage(ctx, start.GetSandbox(), "create", "exec")
	if err != nil {
		return err
	}
	if err := checkOwnContainer(sb, "exec", "runs no command here"); err != nil {
		return err
	}
	if err := checkRuns(sb); err != nil {
		return err
	}
	agent, err := s.options.Agents.Client(sb.Status.Node)
	if err != nil {
		return err
	}
	up, err := agent.Exec(ctx)
	if err != nil {
		return fromAgent(sb.Status.Node, err)
	}
	err = up.Send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Start{Start: &agentv1.ExecStart{
		SandboxUid: string(sb.UID), Command: start.GetCommand(), Env: agentEnv, WorkingDir: start.GetWorkingDir(), Stdin: start.GetStdin(),
	}}})
	if err != nil && !errors.Is(err, io.EOF) { // EOF: what went wrong comes from Recv.
		return fromAgent(sb.Status.Node, err)
	}
	// The goroutine ends with its Recv, at the latest when this call returns.
	input := make(chan error, 1)
	go func() {
		err := passInput(stream, up, start.GetStdin())
		input <- err
		if err != nil {
			cancel()
		}
	}()
	err = passOutput(stream, up, sb.Status.Node)
	select {
	case inputErr := <-input:
		if inputErr != nil && err != nil {
			return inputErr
		}
	default:
	}
	return err
}

// passInput passes on what the client sends. The client may close its side at any time; without stdin it has
// nothing more to say.
func passInput(stream grpc.BidiStreamingServer[sandboxv1.ExecRequest, sandboxv1.ExecResponse], up grpc.BidiStreamingClient[agentv1.ExecRequest, agentv1.ExecResponse], stdin bool) error {
	open := stdin
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return up.CloseSend()
		}
		if err != nil {
			return err
		}
		out := &agentv1.ExecRequest{}
		switch x := m.GetMessage().(type) {
		case *sandboxv1.ExecRequest_Stdin:
			if !open {
				return invalid("stdin was sent though start.stdin is not set or stdin was closed")
			}
			out.Message = &agentv1.ExecRequest_Stdin{Stdin: x.Stdin}
		case *sandboxv1.ExecRequest_StdinClosed:
			if !x.StdinClosed || !open {
				continue
			}
			open = false
			out.Message = &agentv1.ExecRequest_StdinClosed{StdinClosed: true}
		default:
			return invalid("after start only stdin and stdin_closed can be sent")
		}
		if err := up.Send(out); err != nil {
			// The agent's stream has ended; passOutput says how.
			return nil
		}
	}
}

// passOutput passes on what the agent sends, up to and including the exit code.
func passOutput(stream grpc.BidiStreamingServer[sandboxv1.ExecRequest, sandboxv1.ExecResponse], up grpc.BidiStreamingClient[agentv1.ExecRequest, agentv1.ExecResponse], node string) error {
	for {
		m, err := up.Recv()
		if errors.Is(err, io.EOF) {
			return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable,
				"the agent of node %s ended the command's streams without its exit code: what became of the command is not known", node)
		}
		if err != nil {
			return fromAgent(node, err)
		}
		out := &sandboxv1.ExecResponse{}
		switch x := m.GetMessage().(type) {
		case *agentv1.ExecResponse_Stdout:
			out.Message = &sandboxv1.ExecResponse_Stdout{Stdout: x.Stdout}
		case *agentv1.ExecResponse_Stderr:
			out.Message = &sandboxv1.ExecResponse_Stderr{Stderr: x.Stderr}
		case *agentv1.ExecResponse_ExitCode:
			out.Message = &sandboxv1.ExecResponse_ExitCode{ExitCode: x.ExitCode}
			return stream.Send(out)
		default:
			continue // From a newer agent.
		}
		if err := stream.Send(out); err != nil {
			return err
		}
	}
}

// Logs passes on what the sandbox's process has written.
func (s *sandboxService) Logs(req *sandboxv1.LogsRequest, stream grpc.ServerStreamingServer[sandboxv1.LogEntry]) error {
	if req.GetTail() < 0 {
		return invalid("tail %d is negative: set 0 for everything", req.GetTail())
	}
	ctx, cancel := s.untilStop(stream.Context())
	defer cancel()
	sb, err := s.resolveMessage(ctx, req.GetSandbox(), "get", "log")
	if err != nil {
		return err
	}
	if err := checkOwnContainer(sb, "logs", "has its logs at the API server"); err != nil {
		return err
	}
	if sb.Status.Node == "" {
		return fault.New(errdefs.ErrFailedPrecondition, fault.SandboxNotRunning,
			"sandbox %s has no logs: it has not been given a node yet (%s)", keyOf(sb), sb.Status.Message)
	}
	agent, err := s.options.Agents.Client(sb.Status.Node)
	if err != nil {
		return err
	}
	up, err := agent.Logs(ctx, &agentv1.LogsRequest{SandboxUid: string(sb.UID), Follow: req.GetFollow(), Tail: req.GetTail()})
	if err != nil {
		return fromAgent(sb.Status.Node, err)
	}
	for {
		m, err := up.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case ctx.Err() != nil:
			return s.streamEnd(stream.Context(), "ask for the logs again")
		case err != nil:
			return fromAgent(sb.Status.Node, err)
		}
		if err := stream.Send(&sandboxv1.LogEntry{Time: m.GetTime(), Stream: m.GetStream(), Line: m.GetLine()}); err != nil {
			return err
		}
	}
}

// checkOwnContainer refuses sandboxes that are Pods: who may run something in a Pod, or read what it wrote, is Kubernetes'
// to decide.
func checkOwnContainer(sb *v1alpha1.Sandbox, verb, what string) error {
	pod := sb.Name
	switch {
	case sb.Spec.PodRef != nil:
		pod = sb.Spec.PodRef.Name
	case sb.Spec.Template == nil:
		return nil
	}
	return fault.New(errdefs.ErrNotImplemented, fault.InvalidRequest, "sandbox %s is Pod %s and %s: use kubectl %s -n %s %s",
		keyOf(sb), pod, what, verb, sb.Namespace, pod)
}

// checkRuns refuses sandboxes in which no command can be run.
func checkRuns(sb *v1alpha1.Sandbox) error {
	if sb.DeletionTimestamp != nil {
		return fault.New(errdefs.ErrFailedPrecondition, fault.SandboxTerminating, "sandbox %s is being deleted", keyOf(sb))
	}
	if sb.Status.Phase == v1alpha1.SandboxRunning {
		return nil
	}
	phase, hint := sb.Status.Phase, "wait until it is Running"
	switch phase {
	case "":
		phase = v1alpha1.SandboxPending
	case v1alpha1.SandboxPaused:
		hint = "resume it"
	case v1alpha1.SandboxSucceeded, v1alpha1.SandboxFailed, v1alpha1.SandboxLost:
		hint = "create it anew"
	}
	why := ""
	if sb.Status.Message != "" {
		why = " (" + sb.Status.Message + ")"
	}
	return fault.New(errdefs.ErrFailedPrecondition, fault.SandboxNotRunning, "sandbox %s is %s%s and runs no command: %s", keyOf(sb), phase, why, hint)
}

// fromAgent makes an error of ours of what an agent, or the connection to it, answered.
func fromAgent(node string, err error) error {
	at := "the agent"
	if node != "" {
		at += " of node " + node
	}
	switch st := status.Convert(err); {
	case len(st.Details()) == 0 && st.Code() == codes.Unavailable:
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "%s cannot be reached: try again; %s", at, st.Message())
	case len(st.Details()) == 0 && st.Code() == codes.Unimplemented:
		return fault.New(errdefs.ErrNotImplemented, fault.VersionSkew, "%s is too old for that: %s", at, st.Message())
	}
	return fault.FromGRPC(err)
}
