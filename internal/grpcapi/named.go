package grpcapi

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/util/validation"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// NamedVolumes keeps volumes that are made by name, where there are no claims. Its errors are faults.
type NamedVolumes interface {
	// Create makes a volume, and is a no-op for one that is there with the same properties. ErrAlreadyExists says that there
	// is another of that name.
	Create(ctx context.Context, v NamedVolume) (NamedVolume, error)
	// List lists all, by namespace and name.
	List(ctx context.Context) ([]NamedVolume, error)
	// Delete deletes a volume that no sandbox names. It waits until the node has let go of it. deleted says whether there was
	// one.
	Delete(ctx context.Context, namespace, name string) (deleted bool, err error)
}

// NamedVolume is a volume with a name of its own.
type NamedVolume struct {
	Namespace, Name, TenantID string
	Size                      int64
	Filesystem                string
	Preallocated              bool
}

// namedService serves VolumeService.
type namedService struct {
	sandboxv1.UnimplementedVolumeServiceServer
	*Server
}

// namedVolumes is what keeps them, for a caller that may.
func (s *namedService) namedVolumes(ctx context.Context) (NamedVolumes, error) {
	if s.options.NamedVolumes == nil {
		return nil, fault.New(errdefs.ErrNotImplemented, fault.NotAvailable,
			"named volumes are a standalone server's: here, make a PersistentVolumeClaim (kubectl apply), say of StorageClass flux-local, and name that")
	}
	return s.options.NamedVolumes, s.permitOperator(ctx, "keeping named volumes")
}

// named checks a volume's name.
func named(ctx context.Context, namespace, name string) (string, error) {
	namespace = cmp.Or(namespace, DefaultNamespace)
	annotate(ctx, slog.String("namespace", namespace), slog.String("volume", name))
	if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
		return "", fault.New(errdefs.ErrInvalidArgument, fault.InvalidName, "namespace %q: %s", namespace, strings.Join(problems, "; "))
	}
	if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
		return "", fault.New(errdefs.ErrInvalidArgument, fault.InvalidName, "volume name %q: %s", name, strings.Join(problems, "; "))
	}
	return namespace, nil
}

// CreateVolume makes a volume.
func (s *namedService) CreateVolume(ctx context.Context, req *sandboxv1.CreateVolumeRequest) (*sandboxv1.NamedVolume, error) {
	volumes, err := s.namedVolumes(ctx)
	if err != nil {
		return nil, err
	}
	namespace, err := named(ctx, req.GetNamespace(), req.GetName())
	if err != nil {
		return nil, err
	}
	if req.GetSize() == "" {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.SizeRequired, "volume %s: a size is needed, such as 10Gi", req.GetName())
	}
	size, err := volume.ParseSize(req.GetSize())
	if err != nil {
		return nil, err
	}
	if req.GetTenantId() != "" {
		if err := volume.ValidateTenant(req.GetTenantId()); err != nil {
			return nil, err
		}
	}
	v, err := volumes.Create(ctx, NamedVolume{Namespace: namespace, Name: req.GetName(), TenantID: req.GetTenantId(), Size: size,
		Filesystem: req.GetFilesystem(), Preallocated: req.GetPreallocate()})
	if err != nil {
		return nil, err
	}
	return v.proto(nil), nil
}

// ListVolumes lists the volumes, with the sandboxes that name them.
func (s *namedService) ListVolumes(ctx context.Context, req *sandboxv1.ListVolumesRequest) (*sandboxv1.ListVolumesResponse, error) {
	volumes, err := s.namedVolumes(ctx)
	if err != nil {
		return nil, err
	}
	list, err := volumes.List(ctx)
	if err != nil {
		return nil, err
	}
	sandboxes, err := s.store.Sandboxes().List(ctx, store.ListOptions{Namespace: req.GetNamespace()})
	if err != nil {
		return nil, err
	}
	resp := &sandboxv1.ListVolumesResponse{}
	for _, v := range list {
		if req.GetNamespace() == "" || req.GetNamespace() == v.Namespace {
			resp.Volumes = append(resp.Volumes, v.proto(naming(sandboxes.Items, v.Namespace, v.Name)))
		}
	}
	return resp, nil
}

// DeleteVolume deletes a volume that no sandbox names.
func (s *namedService) DeleteVolume(ctx context.Context, req *sandboxv1.DeleteVolumeRequest) (*sandboxv1.DeleteVolumeResponse, error) {
	volumes, err := s.namedVolumes(ctx)
	if err != nil {
		return nil, err
	}
	namespace, err := named(ctx, req.GetNamespace(), req.GetName())
	if err != nil {
		return nil, err
	}
	sandboxes, err := s.store.Sandboxes().List(ctx, store.ListOptions{Namespace: namespace})
	if err != nil {
		return nil, err
	}
	if users := naming(sandboxes.Items, namespace, req.GetName()); len(users) > 0 {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.Busy, "volume %s is in use by %s: remove it there first (fluxctl volume rm SANDBOX TARGET), or delete the sandbox",
			req.GetName(), strings.Join(users, ", "))
	}
	waitCtx, cancel := s.waiting(ctx)
	defer cancel()
	deleted, err := volumes.Delete(waitCtx, namespace, req.GetName())
	return &sandboxv1.DeleteVolumeResponse{Deleted: deleted}, err
}

// naming are the names of the sandboxes that name a volume in their spec, or still have it by their status.
func naming(sandboxes []*v1alpha1.Sandbox, namespace, name string) []string {
	var users []string
	for _, sb := range sandboxes {
		means := func(t v1alpha1.VolumeType, source string) bool { return t == v1alpha1.VolumeTypePVC && source == name }
		if sb.Namespace == namespace && (slices.ContainsFunc(sb.Spec.DynamicVolumes, func(e v1alpha1.DynamicVolume) bool { return means(e.VolumeType, e.Source) }) ||
			slices.ContainsFunc(sb.Status.Volumes, func(row v1alpha1.VolumeStatus) bool {
				// One that failed is kept for its caller to read, and is no use.
				return row.Phase != v1alpha1.VolumeFailed && means(row.VolumeType, row.Source)
			})) {
			users = append(users, sb.Name)
		}
	}
	slices.Sort(users)
	return users
}

func (v NamedVolume) proto(sandboxes []string) *sandboxv1.NamedVolume {
	return &sandboxv1.NamedVolume{Namespace: v.Namespace, Name: v.Name, TenantId: v.TenantID, SizeBytes: v.Size, Filesystem: v.Filesystem,
		Preallocated: v.Preallocated, Sandboxes: sandboxes}
}
