package grpcapitest

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
)

// NamedVolumes keeps named volumes in memory. The zero value is ready.
type NamedVolumes struct {
	mu   sync.Mutex // guards list
	list []grpcapi.NamedVolume
}

// Create implements grpcapi.NamedVolumes.
func (n *NamedVolumes) Create(_ context.Context, v grpcapi.NamedVolume) (grpcapi.NamedVolume, error) {
	v.Filesystem = cmp.Or(v.Filesystem, "ext4")
	n.mu.Lock()
	defer n.mu.Unlock()
	i := n.index(v.Namespace, v.Name)
	switch {
	case i < 0:
		n.list = append(n.list, v)
	case n.list[i] != v:
		return v, fault.New(errdefs.ErrAlreadyExists, fault.Conflict, "a volume %s exists with other properties", v.Name)
	}
	return v, nil
}

// List implements grpcapi.NamedVolumes.
func (n *NamedVolumes) List(context.Context) ([]grpcapi.NamedVolume, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.list), nil
}

// Delete implements grpcapi.NamedVolumes.
func (n *NamedVolumes) Delete(_ context.Context, namespace, name string) (bool, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	i := n.index(namespace, name)
	if i < 0 {
		return false, nil
	}
	n.list = slices.Delete(n.list, i, i+1)
	return true, nil
}

func (n *NamedVolumes) index(namespace, name string) int {
	return slices.IndexFunc(n.list, func(v grpcapi.NamedVolume) bool { return v.Namespace == namespace && v.Name == name })
}
