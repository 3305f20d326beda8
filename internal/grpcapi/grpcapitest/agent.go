package grpcapitest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strconv"
	"sync"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Agent plays a node's agent. Its commands are:
//
//	echo WORD…   writes the words to stdout
//	cat          copies stdin to stdout
//	fail CODE    writes "failed" to stderr and ends with the code
//	hang         runs until it is cancelled
//	flood        writes to stdout without end
//	vanish       ends the stream without an exit code
//	env          writes its environment and working directory
type Agent struct {
	agentv1.UnimplementedAgentServiceServer

	mu sync.Mutex // guards the fields below
	// images by name, in the order of their import.
	images []*agentv1.Image
	// started and cancelled get a word for each hanging command.
	started, cancelled chan string
	// flooded counts the messages that flood has handed to gRPC.
	flooded int
}

// Started yields a word when a command of hang or flood has begun, Cancelled when it was cancelled.
func (a *Agent) Started() <-chan string   { return a.started }
func (a *Agent) Cancelled() <-chan string { return a.cancelled }

// Flooded is the number of messages that flood has got rid of so far.
func (a *Agent) Flooded() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.flooded
}

func stdout(b []byte) *agentv1.ExecResponse {
	return &agentv1.ExecResponse{Message: &agentv1.ExecResponse_Stdout{Stdout: b}}
}

func exit(code int) *agentv1.ExecResponse {
	return &agentv1.ExecResponse{Message: &agentv1.ExecResponse_ExitCode{ExitCode: int32(code)}}
}

// Exec implements the commands.
func (a *Agent) Exec(stream grpc.BidiStreamingServer[agentv1.ExecRequest, agentv1.ExecResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	args := start.GetCommand()[1:]
	switch start.GetCommand()[0] {
	case "echo":
		for i, word := range args {
			if i > 0 {
				word = " " + word
			}
			if err := stream.Send(stdout([]byte(word))); err != nil {
				return err
			}
		}
		return errors.Join(stream.Send(stdout([]byte("\n"))), stream.Send(exit(0)))
	case "cat":
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) || m.GetStdinClosed() {
				return stream.Send(exit(0))
			}
			if err != nil {
				return err
			}
			if err := stream.Send(stdout(m.GetStdin())); err != nil {
				return err
			}
		}
	case "fail":
		code, err := strconv.Atoi(args[0])
		if err != nil {
			return err
		}
		out := &agentv1.ExecResponse{Message: &agentv1.ExecResponse_Stderr{Stderr: []byte("failed\n")}}
		return errors.Join(stream.Send(out), stream.Send(exit(code)))
	case "hang":
		a.started <- "hang"
		<-stream.Context().Done()
		a.cancelled <- "hang"
		return stream.Context().Err()
	case "flood":
		a.started <- "flood"
		block := bytes.Repeat([]byte("x"), 32<<10)
		for {
			if err := stream.Send(stdout(block)); err != nil {
				a.cancelled <- "flood"
				return err
			}
			a.mu.Lock()
			a.flooded++
			a.mu.Unlock()
		}
	case "vanish":
		return nil
	case "env":
		var out bytes.Buffer
		out.WriteString("PWD=" + start.GetWorkingDir() + "\n")
		for _, e := range start.GetEnv() {
			out.WriteString(e.GetName() + "=" + e.GetValue() + "\n")
		}
		return errors.Join(stream.Send(stdout(out.Bytes())), stream.Send(exit(0)))
	}
	return fault.ToGRPC(fault.New(errdefs.ErrNotFound, fault.InvalidRequest, "no such program: %s", start.GetCommand()[0]))
}

// Logs writes three lines, the last so many of them if asked, and with follow goes on until it is cancelled.
func (a *Agent) Logs(req *agentv1.LogsRequest, stream grpc.ServerStreamingServer[agentv1.LogEntry]) error {
	lines := []*agentv1.LogEntry{
		{Time: timestamppb.New(Epoch), Stream: "stdout", Line: []byte("one")},
		{Time: timestamppb.New(Epoch), Stream: "stderr", Line: []byte("two")},
		{Time: timestamppb.New(Epoch), Stream: "stdout", Line: []byte("three")},
	}
	if n := int(req.GetTail()); n > 0 && n < len(lines) {
		lines = lines[len(lines)-n:]
	}
	for _, line := range lines {
		if err := stream.Send(line); err != nil {
			return err
		}
	}
	if req.GetFollow() {
		<-stream.Context().Done()
		a.cancelled <- "logs"
	}
	return nil
}

// ImportImage takes an archive that is the name of an image; "broken" is none.
func (a *Agent) ImportImage(stream grpc.ClientStreamingServer[agentv1.ImportImageRequest, agentv1.ImagesResponse]) error {
	var archive bytes.Buffer
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		archive.Write(m.GetChunk())
	}
	if archive.String() == "broken" {
		return fault.ToGRPC(fault.New(errdefs.ErrInvalidArgument, fault.InvalidImage, "the archive is neither a docker nor an OCI archive"))
	}
	image := &agentv1.Image{Name: archive.String(), Digest: "sha256:0123456789abcdef", SizeBytes: 3 << 20}
	a.mu.Lock()
	a.images = append(a.images, image)
	a.mu.Unlock()
	return stream.SendAndClose(&agentv1.ImagesResponse{Images: []*agentv1.Image{image}})
}

// ListImages lists what was imported.
func (a *Agent) ListImages(context.Context, *agentv1.ListImagesRequest) (*agentv1.ImagesResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return &agentv1.ImagesResponse{Images: a.images}, nil
}

// PullImage finds nothing.
func (a *Agent) PullImage(_ context.Context, req *agentv1.PullImageRequest) (*agentv1.ImagesResponse, error) {
	return nil, fault.ToGRPC(fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no registry has the image %s", req.GetName()))
}

// Probe finds a node that can nearly everything.
func (a *Agent) Probe(context.Context, *agentv1.ProbeRequest) (*agentv1.ProbeResponse, error) {
	return &agentv1.ProbeResponse{Checks: []*agentv1.ProbeCheck{
		{Name: "move_mount", Status: "OK", Detail: "kernel 6.18", Required: true},
		{Name: "project quota", Status: "MISSING", Detail: "the kernel has no XFS_QUOTA: limits by quota are refused"},
	}}, nil
}
