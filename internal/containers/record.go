package containers

import (
	"context"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// VolumesExtension is the extension of a container that records its volumes, as JSON (design section 3, ruling 3).
const VolumesExtension = "sandbox.flux.io/volumes"

// RecordVolumes replaces the record of a sandbox's volumes on its container. Nothing else of the container is read or
// written: the update carries a field mask, as without one it would undo whatever happened since the read.
func (r *Runtime) RecordVolumes(ctx context.Context, uid string, json []byte) error {
	unlock, err := r.lock(ctx, uid)
	if err != nil {
		return err
	}
	defer unlock()
	_, err = r.client.ContainerService().Update(r.context(ctx), containers.Container{
		ID:         uid,
		Extensions: map[string]typeurl.Any{VolumesExtension: &anypb.Any{TypeUrl: VolumesExtension, Value: json}},
	}, "extensions."+VolumesExtension)
	if errdefs.IsNotFound(err) {
		return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "record the volumes of sandbox %s: containerd has no container of this UID", uid)
	}
	return errorf(err, "record the volumes of sandbox %s", uid)
}
