package agent

import (
	"slices"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// attachment checks an attach request, as if nobody had before.
func (a *Agent) attachment(r *agentv1.AttachRequest, tenant string) (Attachment, error) {
	if r.GetTenantId() != tenant {
		return Attachment{}, fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch,
			"the request is for tenant %q, sandbox %s belongs to %q", r.GetTenantId(), r.GetCommand().GetSandboxUid(), tenant)
	}
	persistentVolume := ""
	var csi *volume.CSIVolume
	var anchor *volume.AnchorVolume
	entry := v1alpha1.DynamicVolume{Target: r.GetTarget(), Mode: v1alpha1.VolumeMode(r.GetMode()), SubPath: r.GetSubPath(), TenantID: tenant}
	switch s := r.GetSource().(type) {
	case *agentv1.AttachRequest_Local:
		entry.VolumeType, entry.Source = v1alpha1.VolumeTypeLocal, s.Local.GetPath()
		persistentVolume = s.Local.GetPersistentVolume()
	case *agentv1.AttachRequest_Csi:
		// A claim or a volume by its name: on a node they are one thing.
		entry.VolumeType, entry.Source = v1alpha1.VolumeTypePV, s.Csi.GetPersistentVolume()
		persistentVolume, csi = s.Csi.GetPersistentVolume(), csiVolume(s.Csi)
	case *agentv1.AttachRequest_Anchor:
		// What kubelet mounts is always a claim's.
		entry.VolumeType, entry.Source = v1alpha1.VolumeTypePVC, s.Anchor.GetClaim()
		persistentVolume, anchor = s.Anchor.GetPvName(), anchorVolume(s.Anchor)
	case *agentv1.AttachRequest_Snapshot:
		return Attachment{}, unavailableType(v1alpha1.VolumeTypeSnapshot)
	case *agentv1.AttachRequest_Oss:
		return Attachment{}, unavailableType(v1alpha1.VolumeTypeOSS)
	default:
		return Attachment{}, fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource, "the request names no source")
	}
	if r.GetSizeLimitBytes() < 0 {
		return Attachment{}, fault.New(errdefs.ErrInvalidArgument, fault.InvalidSize, "sizeLimitBytes is %d: must not be negative", r.GetSizeLimitBytes())
	}
	policy := v1alpha1.VolumePolicy{DeniedTargets: slices.Concat(a.config.DeniedTargets, r.GetPolicy().GetDeniedTargets())}
	if err := volume.ValidateEntry(&entry, volume.SandboxContext{TenantID: tenant, Policy: policy}); err != nil {
		return Attachment{}, err
	}
	if persistentVolume != "" {
		named := entry
		named.VolumeType, named.Source = v1alpha1.VolumeTypePV, persistentVolume
		if err := volume.ValidateEntry(&named, volume.SandboxContext{TenantID: tenant}); err != nil {
			return Attachment{}, err
		}
	}
	if r.GetEntryHash() == "" {
		return Attachment{}, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "the request has no entry hash")
	}
	kind := v1alpha1.VolumeKind(r.GetKind())
	if kind == "" {
		kind = v1alpha1.VolumeKindDynamic
	}
	return Attachment{
		OperationID: r.GetCommand().GetOperationId(),
		AtCreate:    r.GetWhen() == agentv1.When_AT_CREATE,
		Kind:        kind,
		Target:      entry.Target,
		EntryHash:   r.GetEntryHash(),
		Request: volume.Request{
			Type: entry.VolumeType, Source: entry.Source, PersistentVolume: persistentVolume, CSI: csi, Anchor: anchor,
			TenantID: tenant, ReadOnly: entry.Mode == v1alpha1.VolumeModeReadOnly, SubPath: entry.SubPath, SizeLimitBytes: r.GetSizeLimitBytes(),
			BestEffort: a.config.BestEffortLimits,
		},
	}, nil
}

// containerSpec makes a container's specification of a create request.
func containerSpec(r *agentv1.CreateSandboxRequest) containers.Spec {
	spec := containers.Spec{
		Descriptor: containers.Descriptor{UID: r.GetCommand().GetSandboxUid(), Namespace: r.GetNamespace(), Name: r.GetName(),
			TenantID: r.GetTenantId(), Group: r.GetGroup(), SubGroup: r.GetSubGroup(), RestartPolicy: r.GetRestartPolicy()},
		Image: r.GetImage(), Command: r.GetEntrypoint(), Args: r.GetArgs(), Env: env(r.GetEnv()), WorkingDir: r.GetWorkingDir(),
		Hostname:  r.GetName(),
		Resources: containers.Resources{CPUMilli: r.GetCpuMilli(), MemoryBytes: r.GetMemoryBytes()},
	}
	return spec
}

func csiVolume(s *agentv1.CSISource) *volume.CSIVolume {
	return &volume.CSIVolume{Driver: s.GetDriver(), Handle: s.GetVolumeHandle(), Attributes: s.GetAttributes(), FSType: s.GetFsType(),
		MountOptions: s.GetMountOptions(), AccessMode: s.GetAccessMode(), ReadOnly: s.GetReadOnly(),
		Secrets: s.GetSecrets(), NeedsSecrets: len(s.GetSecrets()) > 0}
}

func anchorVolume(s *agentv1.AnchorSource) *volume.AnchorVolume {
	return &volume.AnchorVolume{PodUID: s.GetPodUid(), Pod: s.GetPodNamespace() + "/" + s.GetPodName(), Plugin: s.GetPlugin(),
		Driver: s.GetDriver(), Handle: s.GetVolumeHandle()}
}

func env(vars []*agentv1.EnvVar) []containers.EnvVar {
	out := make([]containers.EnvVar, 0, len(vars))
	for _, v := range vars {
		out = append(out, containers.EnvVar{Name: v.GetName(), Value: v.GetValue()})
	}
	return out
}
