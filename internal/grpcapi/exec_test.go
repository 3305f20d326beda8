package grpcapi_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
)

func start(name string, command ...string) *sandboxv1.ExecRequest {
	return &sandboxv1.ExecRequest{Message: &sandboxv1.ExecRequest_Start{Start: &sandboxv1.ExecStart{Sandbox: named(name), Command: command}}}
}

func stdin(text string) *sandboxv1.ExecRequest {
	return &sandboxv1.ExecRequest{Message: &sandboxv1.ExecRequest_Stdin{Stdin: []byte(text)}}
}

// exec runs a command and returns its stdout and stderr in one and its exit code.
func exec(ctx context.Context, e *grpcapitest.Env, name, input string, command ...string) (string, int32, error) {
	first := start(name, command...)
	first.GetStart().Stdin = input != ""
	messages := []*sandboxv1.ExecRequest{first}
	if input != "" {
		messages = append(messages, stdin(input))
	}
	return talk(ctx, e, messages...)
}

// talk sends the messages, closes its side, and gathers the answers. The exit code is the last message or none.
func talk(ctx context.Context, e *grpcapitest.Env, messages ...*sandboxv1.ExecRequest) (string, int32, error) {
	stream, err := e.Sandboxes.Exec(ctx)
	if err != nil {
		return "", 0, err
	}
	for _, m := range messages {
		if err := stream.Send(m); err != nil && !errors.Is(err, io.EOF) {
			return "", 0, err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return "", 0, err
	}
	var out strings.Builder
	var code *int32
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) && code != nil {
			return out.String(), *code, nil
		}
		if err != nil {
			return out.String(), 0, err
		}
		if code != nil {
			return "", 0, errors.New("a message after the exit code")
		}
		switch x := m.Message.(type) {
		case *sandboxv1.ExecResponse_Stdout:
			out.Write(x.Stdout)
		case *sandboxv1.ExecResponse_Stderr:
			out.Write(x.Stderr)
		case *sandboxv1.ExecResponse_ExitCode:
			code = &x.ExitCode
		}
	}
}

func logs(ctx context.Context, e *grpcapitest.Env, req *sandboxv1.LogsRequest) (string, error) {
	stream, err := e.Sandboxes.Logs(ctx, req)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return out.String(), nil
		}
		if err != nil {
			return out.String(), err
		}
		out.WriteString(m.Stream + ":" + string(m.Line) + "\n")
	}
}

func TestExec(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	withEnv := start("a", "env")
	withEnv.GetStart().Env = []*sandboxv1.EnvVar{{Name: "A", Value: "1"}}
	withEnv.GetStart().WorkingDir = "/work"
	closed := start("a", "cat")
	closed.GetStart().Stdin = true
	for name, c := range map[string]struct {
		messages []*sandboxv1.ExecRequest
		output   string
		code     int32
	}{
		"output":      {[]*sandboxv1.ExecRequest{start("a", "echo", "hello", "world")}, "hello world\n", 0},
		"exit code":   {[]*sandboxv1.ExecRequest{start("a", "fail", "42")}, "failed\n", 42},
		"environment": {[]*sandboxv1.ExecRequest{withEnv}, "PWD=/work\nA=1\n", 0},
		"no stdin":    {[]*sandboxv1.ExecRequest{start("a", "cat")}, "", 0},
		"stdin closed by message": {[]*sandboxv1.ExecRequest{closed, stdin("one "), stdin("two"),
			{Message: &sandboxv1.ExecRequest_StdinClosed{StdinClosed: true}}}, "one two", 0},
		"stdin closed by stream": {[]*sandboxv1.ExecRequest{closed, stdin(strings.Repeat("0123456789", 100_000))}, strings.Repeat("0123456789", 100_000), 0},
	} {
		t.Run(name, func(t *testing.T) {
			out, code, err := talk(t.Context(), e, c.messages...)
			noError(t, err)
			if out != c.output || code != c.code {
				t.Errorf("got %.80q and %d, want %.80q and %d", out, code, c.output, c.code)
			}
		})
	}
}

func TestExecIsCancelledWithItsClient(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, _, err := exec(ctx, e, "a", "", "hang")
		done <- err
	}()
	<-e.Agent.Started()
	cancel()
	<-e.Agent.Cancelled()
	if err := <-done; err == nil {
		t.Error("a cancelled command succeeded")
	}
}

func TestExecPassesBackPressureOn(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := e.Sandboxes.Exec(ctx)
	noError(t, err)
	noError(t, stream.Send(start("a", "flood")))
	<-e.Agent.Started()
	// What the agent can be ahead of the reader is bounded by what gRPC holds on each of the two connections:
	// the windows, which the test fixes at 64 KiB, and the quota of each writer.
	const most = 32
	for read := range 500 {
		if ahead := e.Agent.Flooded() - read; ahead > most {
			t.Fatalf("the agent is %d messages of 32 KiB ahead of its reader: somebody buffers", ahead)
		}
		_, err := stream.Recv()
		noError(t, err)
	}
	cancel()
	<-e.Agent.Cancelled()
}

func TestExecRefusals(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	e.Run(sandbox("paused", func(sb *sandboxv1.Sandbox) { sb.Spec.Paused = true }))
	e.Scheduler.Set("ends:1", grpcapitest.Fate{Phase: v1alpha1.SandboxFailed})
	e.Run(sandbox("ended", func(sb *sandboxv1.Sandbox) { sb.Spec.Image = "ends:1" }))
	e.Scheduler.Set("late:1", grpcapitest.Fate{Hold: true})
	_, err := e.Sandboxes.CreateSandbox(t.Context(), &sandboxv1.CreateSandboxRequest{Sandbox: sandbox("late", func(sb *sandboxv1.Sandbox) { sb.Spec.Image = "late:1" })})
	noError(t, err)

	for name, c := range map[string]struct {
		messages []*sandboxv1.ExecRequest
		code     codes.Code
		reason   fault.Reason
		word     string
	}{
		"paused":            {[]*sandboxv1.ExecRequest{start("paused", "echo")}, codes.FailedPrecondition, fault.SandboxNotRunning, "resume it"},
		"ended":             {[]*sandboxv1.ExecRequest{start("ended", "echo")}, codes.FailedPrecondition, fault.SandboxNotRunning, "anew"},
		"pending":           {[]*sandboxv1.ExecRequest{start("late", "echo")}, codes.FailedPrecondition, fault.SandboxNotRunning, "wait"},
		"unknown":           {[]*sandboxv1.ExecRequest{start("nobody", "echo")}, codes.NotFound, fault.SandboxNotFound, "nobody"},
		"no such program":   {[]*sandboxv1.ExecRequest{start("a", "nonsense")}, codes.NotFound, fault.InvalidRequest, "no such program"},
		"agent vanishes":    {[]*sandboxv1.ExecRequest{start("a", "vanish")}, codes.Unavailable, fault.AgentUnavailable, "not known"},
		"stdin not asked":   {[]*sandboxv1.ExecRequest{start("a", "hang"), stdin("x")}, codes.InvalidArgument, fault.InvalidRequest, "start.stdin"},
		"started twice":     {[]*sandboxv1.ExecRequest{start("a", "hang"), start("a", "echo")}, codes.InvalidArgument, fault.InvalidRequest, "after start"},
		"nothing":           {nil, codes.InvalidArgument, fault.InvalidRequest, "start first"},
		"stdin before":      {[]*sandboxv1.ExecRequest{stdin("x")}, codes.InvalidArgument, fault.InvalidRequest, "must be start"},
		"message of no use": {[]*sandboxv1.ExecRequest{start("a", "hang"), {}}, codes.InvalidArgument, fault.InvalidRequest, "after start"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := talk(t.Context(), e, c.messages...)
			wantError(t, err, c.code, c.reason, c.word)
		})
	}
}

func TestLogs(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	out, err := logs(t.Context(), e, &sandboxv1.LogsRequest{Sandbox: named("a")})
	noError(t, err)
	if out != "stdout:one\nstderr:two\nstdout:three\n" {
		t.Errorf("got %q", out)
	}
	out, err = logs(t.Context(), e, &sandboxv1.LogsRequest{Sandbox: named("a"), Tail: 1})
	noError(t, err)
	if out != "stdout:three\n" {
		t.Errorf("tail: got %q", out)
	}

	ctx, cancel := context.WithCancel(t.Context())
	stream, err := e.Sandboxes.Logs(ctx, &sandboxv1.LogsRequest{Sandbox: named("a"), Follow: true})
	noError(t, err)
	_, err = stream.Recv()
	noError(t, err)
	cancel()
	<-e.Agent.Cancelled()
}

func TestImages(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	imported := func(chunks ...string) (*sandboxv1.ImportImageResponse, error) {
		stream, err := e.Images.ImportImage(t.Context())
		noError(t, err)
		for _, c := range chunks {
			if err := stream.Send(&sandboxv1.ImportImageRequest{Chunk: []byte(c)}); err != nil && !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
		}
		return stream.CloseAndRecv()
	}
	resp, err := imported("busy", "box:1")
	noError(t, err)
	if len(resp.Images) != 1 || resp.Images[0].Name != "busybox:1" || resp.Images[0].SizeBytes != 3<<20 {
		t.Errorf("imported %v", resp)
	}
	list, err := e.Images.ListImages(t.Context(), &sandboxv1.ListImagesRequest{})
	noError(t, err)
	if len(list.Images) != 1 || list.Images[0].Digest == "" {
		t.Errorf("listed %v", list)
	}
	_, err = imported("bro", "ken")
	wantError(t, err, codes.InvalidArgument, fault.InvalidImage, "archive")
	_, err = imported()
	wantError(t, err, codes.InvalidArgument, fault.InvalidImage, "empty")
	_, err = e.Images.PullImage(t.Context(), &sandboxv1.PullImageRequest{Name: "nowhere:1"})
	wantError(t, err, codes.NotFound, fault.ImageNotFound, "nowhere:1")
}

func TestDoctor(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	resp, err := e.Nodes.Doctor(t.Context(), &sandboxv1.DoctorRequest{})
	noError(t, err)
	if len(resp.Checks) != 2 || !resp.Checks[0].Required || resp.Checks[1].Status != "MISSING" {
		t.Errorf("got %v", resp)
	}
}
