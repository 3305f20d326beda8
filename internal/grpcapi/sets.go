package grpcapi

import (
	"context"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// setService serves SandboxSetService.
type setService struct {
	sandboxv1.UnimplementedSandboxSetServiceServer
	*Server
}

// GetSandboxSet reads a set.
func (s *setService) GetSandboxSet(ctx context.Context, req *sandboxv1.GetSandboxSetRequest) (*sandboxv1.SandboxSet, error) {
	key, err := poolKey(ctx, store.SetKind, req.GetNamespace(), req.GetName())
	if err != nil {
		return nil, err
	}
	pools, err := s.pools(ctx, Access{Verb: "get", Resource: ResourceSets, Namespace: key.Namespace, Name: key.Name})
	if err != nil {
		return nil, err
	}
	set, err := pools.Sets.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	return convert.SetProto(set), nil
}

// ListSandboxSets lists sets by namespace and name.
func (s *setService) ListSandboxSets(ctx context.Context, req *sandboxv1.ListSandboxSetsRequest) (*sandboxv1.ListSandboxSetsResponse, error) {
	if err := checkNamespace(req.GetNamespace()); err != nil {
		return nil, err
	}
	pools, err := s.pools(ctx, Access{Verb: "list", Resource: ResourceSets, Namespace: req.GetNamespace()})
	if err != nil {
		return nil, err
	}
	sets, next, err := listPage(ctx, req, pools.Sets, convert.SetProto)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.ListSandboxSetsResponse{Sets: sets, NextPageToken: next}, nil
}

// DeleteSandboxSet deletes a set, with its sandboxes that nobody has claimed, and if asked waits until these are gone.
func (s *setService) DeleteSandboxSet(ctx context.Context, req *sandboxv1.DeleteSandboxSetRequest) (*sandboxv1.DeleteSandboxSetResponse, error) {
	key, err := poolKey(ctx, store.SetKind, req.GetNamespace(), req.GetName())
	if err != nil {
		return nil, err
	}
	pools, err := s.pools(ctx, Access{Verb: "delete", Resource: ResourceSets, Namespace: key.Namespace, Name: key.Name})
	if err != nil {
		return nil, err
	}
	if err := deleteOwner(ctx, s.Server, pools.Sets, key, req.GetWait()); err != nil {
		return nil, err
	}
	return &sandboxv1.DeleteSandboxSetResponse{}, nil
}
