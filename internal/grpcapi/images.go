package grpcapi

import (
	"context"
	"errors"
	"io"
	"log/slog"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// onlyNode is the name for Agents.Client of the one agent that there is.
const onlyNode = ""

// imageService serves ImageService by the only agent.
type imageService struct {
	sandboxv1.UnimplementedImageServiceServer
	*Server
}

// ImportImage passes an archive on to the agent.
func (s *imageService) ImportImage(stream grpc.ClientStreamingServer[sandboxv1.ImportImageRequest, sandboxv1.ImportImageResponse]) error {
	ctx := stream.Context()
	agent, err := s.nodeAgent(ctx, "importing images")
	if err != nil {
		return err
	}
	up, err := agent.ImportImage(ctx)
	if err != nil {
		return fromAgent(onlyNode, err)
	}
	size := 0
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		size += len(m.GetChunk())
		if err := up.Send(&agentv1.ImportImageRequest{Chunk: m.GetChunk()}); err != nil {
			break // CloseAndRecv says why.
		}
	}
	if size == 0 {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidImage, "the image archive is empty: send a docker or OCI archive")
	}
	annotate(ctx, slog.Int("bytes", size))
	resp, err := up.CloseAndRecv()
	if err != nil {
		return fromAgent(onlyNode, err)
	}
	return stream.SendAndClose(&sandboxv1.ImportImageResponse{Images: images(resp)})
}

// ListImages asks the agent.
func (s *imageService) ListImages(ctx context.Context, _ *sandboxv1.ListImagesRequest) (*sandboxv1.ListImagesResponse, error) {
	agent, err := s.nodeAgent(ctx, "listing images")
	if err != nil {
		return nil, err
	}
	resp, err := agent.ListImages(ctx, &agentv1.ListImagesRequest{})
	if err != nil {
		return nil, fromAgent(onlyNode, err)
	}
	return &sandboxv1.ListImagesResponse{Images: images(resp)}, nil
}

// PullImage asks the agent.
func (s *imageService) PullImage(ctx context.Context, req *sandboxv1.PullImageRequest) (*sandboxv1.ImportImageResponse, error) {
	if name := req.GetName(); len(name) > maxImage || !imagePattern.MatchString(name) {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidImage, "%q is not an image reference such as docker.io/library/busybox:latest", name)
	}
	annotate(ctx, slog.String("image", req.GetName()))
	agent, err := s.nodeAgent(ctx, "pulling images")
	if err != nil {
		return nil, err
	}
	resp, err := agent.PullImage(ctx, &agentv1.PullImageRequest{Name: req.GetName()})
	if err != nil {
		return nil, fromAgent(onlyNode, err)
	}
	return &sandboxv1.ImportImageResponse{Images: images(resp)}, nil
}

func images(resp *agentv1.ImagesResponse) []*sandboxv1.Image {
	out := make([]*sandboxv1.Image, len(resp.GetImages()))
	for i, m := range resp.GetImages() {
		out[i] = &sandboxv1.Image{Name: m.GetName(), Digest: m.GetDigest(), SizeBytes: m.GetSizeBytes()}
	}
	return out
}

// nodeService serves NodeService by the only agent.
type nodeService struct {
	sandboxv1.UnimplementedNodeServiceServer
	*Server
}

// Doctor asks the agent what its node can do.
func (s *nodeService) Doctor(ctx context.Context, _ *sandboxv1.DoctorRequest) (*sandboxv1.DoctorResponse, error) {
	agent, err := s.nodeAgent(ctx, "probing the node")
	if err != nil {
		return nil, err
	}
	probe, err := agent.Probe(ctx, &agentv1.ProbeRequest{})
	if err != nil {
		return nil, fromAgent(onlyNode, err)
	}
	resp := &sandboxv1.DoctorResponse{}
	for _, c := range probe.GetChecks() {
		resp.Checks = append(resp.Checks, &sandboxv1.DoctorCheck{Name: c.GetName(), Status: c.GetStatus(), Detail: c.GetDetail(), Required: c.GetRequired()})
	}
	return resp, nil
}

// nodeAgent is the only agent, for operators.
func (s *Server) nodeAgent(ctx context.Context, what string) (agentv1.AgentServiceClient, error) {
	if err := s.permitOperator(ctx, what); err != nil {
		return nil, err
	}
	return s.options.Agents.Client(onlyNode)
}
