package agent

import (
	"context"
	"errors"
	"io"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// maxChunk bounds one message of a stream, below gRPC's limit of 4 MiB.
const maxChunk = 64 << 10

func (s *server) Exec(stream agentv1.AgentService_ExecServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "exec: the first message must be the start")
	}
	sb, err := s.known(start.GetSandboxUid())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	// Two streams of one command share the gRPC stream, which takes one sender at a time.
	var send lockedSend
	streams := containers.ExecIO{
		Stdout: &chunks{send: &send, each: func(p []byte) error {
			return stream.Send(&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Stdout{Stdout: p}})
		}},
		Stderr: &chunks{send: &send, each: func(p []byte) error {
			return stream.Send(&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Stderr{Stderr: p}})
		}},
	}
	if start.GetStdin() {
		r, w := io.Pipe()
		defer r.Close()
		streams.Stdin = r
		go func() { w.CloseWithError(receiveStdin(stream, w)) }()
	}
	code, err := s.config.Containers.Exec(ctx, sb.uid, containers.ExecSpec{Command: start.GetCommand(), Env: env(start.GetEnv()),
		WorkingDir: start.GetWorkingDir()}, streams)
	if err != nil {
		return err
	}
	return stream.Send(&agentv1.ExecResponse{Message: &agentv1.ExecResponse_ExitCode{ExitCode: int32(code)}})
}

// receiveStdin copies the client's input until its end. The error is what the reader of w gets.
func receiveStdin(stream agentv1.AgentService_ExecServer, w *io.PipeWriter) error {
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) || m.GetStdinClosed() {
			return io.EOF
		}
		if err != nil {
			return err
		}
		if _, err := w.Write(m.GetStdin()); err != nil {
			return err
		}
	}
}

func (s *server) Logs(r *agentv1.LogsRequest, stream agentv1.AgentService_LogsServer) error {
	return s.config.Containers.Logs(stream.Context(), r.GetSandboxUid(), containers.LogOptions{Follow: r.GetFollow(), Tail: int(r.GetTail()), Until: s.stopping.Done()},
		func(e containers.LogEntry) error {
			return stream.Send(&agentv1.LogEntry{Time: timestamppb.New(e.Time), Stream: e.Stream, Line: []byte(e.Text), Partial: e.Partial})
		})
}

func (s *server) ImportImage(stream agentv1.AgentService_ImportImageServer) error {
	r, w := io.Pipe()
	go func() {
		for {
			m, err := stream.Recv()
			if err != nil {
				w.CloseWithError(err) // io.EOF is the archive's end
				return
			}
			if _, err := w.Write(m.GetChunk()); err != nil {
				return
			}
		}
	}()
	images, err := s.config.Containers.ImportImage(stream.Context(), r, containers.ImportOptions{})
	r.CloseWithError(io.ErrClosedPipe)
	if err != nil {
		return err
	}
	return stream.SendAndClose(imagesResponse(images))
}

func (s *server) PullImage(ctx context.Context, r *agentv1.PullImageRequest) (*agentv1.ImagesResponse, error) {
	image, err := s.config.Containers.PullImage(ctx, r.GetName())
	if err != nil {
		return nil, err
	}
	return imagesResponse([]containers.Image{image}), nil
}

func (s *server) ListImages(ctx context.Context, _ *agentv1.ListImagesRequest) (*agentv1.ImagesResponse, error) {
	images, err := s.config.Containers.ListImages(ctx)
	if err != nil {
		return nil, err
	}
	return imagesResponse(images), nil
}

func imagesResponse(images []containers.Image) *agentv1.ImagesResponse {
	out := &agentv1.ImagesResponse{}
	for _, i := range images {
		out.Images = append(out.Images, &agentv1.Image{Name: i.Name, Digest: i.Digest, SizeBytes: i.SizeBytes})
	}
	return out
}
