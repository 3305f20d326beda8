package convert

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
)

// Claim makes the object of its message, with apiVersion and kind. The error says which quantity is none.
func Claim(m *sandboxv1.SandboxClaim) (*agentsv1alpha1.SandboxClaim, error) {
	spec, err := claimSpec(m.GetSpec())
	if err != nil {
		return nil, err
	}
	return &agentsv1alpha1.SandboxClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: agentsv1alpha1.GroupVersion.String(), Kind: "SandboxClaim"},
		ObjectMeta: objectMeta(m),
		Spec:       spec,
		Status: agentsv1alpha1.SandboxClaimStatus{
			Phase:              agentsv1alpha1.SandboxClaimPhase(m.GetStatus().GetPhase()),
			ObservedGeneration: m.GetStatus().GetObservedGeneration(),
			ClaimedReplicas:    m.GetStatus().GetClaimedReplicas(),
			SandboxNames:       slices.Clone(m.GetStatus().GetSandboxNames()),
			StartTime:          TimePtr(m.GetStatus().GetStartTime()),
			CompletionTime:     TimePtr(m.GetStatus().GetCompletionTime()),
			Conditions:         each(m.GetStatus().GetConditions(), condition),
		},
	}, nil
}

// ClaimProto is the reverse of Claim. Of the metadata it has what the message has fields for.
func ClaimProto(c *agentsv1alpha1.SandboxClaim) *sandboxv1.SandboxClaim {
	return &sandboxv1.SandboxClaim{
		Namespace:       c.Namespace,
		Name:            c.Name,
		Uid:             string(c.UID),
		Generation:      c.Generation,
		ResourceVersion: c.ResourceVersion,
		CreationTime:    timeProto(c.CreationTimestamp),
		DeletionTime:    TimeProto(c.DeletionTimestamp),
		Labels:          maps.Clone(c.Labels),
		Annotations:     maps.Clone(c.Annotations),
		Spec: &sandboxv1.SandboxClaimSpec{
			TemplateName:        c.Spec.TemplateName,
			Replicas:            pointer(c.Spec.Replicas),
			ClaimTimeout:        durationProto(c.Spec.ClaimTimeout),
			TtlAfterCompleted:   durationProto(c.Spec.TTLAfterCompleted),
			ShutdownTime:        TimeProto(c.Spec.ShutdownTime),
			CreateOnNoStock:     pointer(c.Spec.CreateOnNoStock),
			Labels:              maps.Clone(c.Spec.Labels),
			Annotations:         maps.Clone(c.Spec.Annotations),
			EnvVars:             maps.Clone(c.Spec.EnvVars),
			InplaceUpdate:       inplaceUpdateProto(c.Spec.InplaceUpdate),
			DynamicVolumesMount: each(c.Spec.DynamicVolumesMount, volumeOfClaimProto),
		},
		Status: &sandboxv1.SandboxClaimStatus{
			Phase:              string(c.Status.Phase),
			ObservedGeneration: c.Status.ObservedGeneration,
			ClaimedReplicas:    c.Status.ClaimedReplicas,
			SandboxNames:       slices.Clone(c.Status.SandboxNames),
			StartTime:          TimeProto(c.Status.StartTime),
			CompletionTime:     TimeProto(c.Status.CompletionTime),
			Conditions:         each(c.Status.Conditions, conditionProto),
		},
	}
}

func claimSpec(m *sandboxv1.SandboxClaimSpec) (agentsv1alpha1.SandboxClaimSpec, error) {
	update, err := inplaceUpdate(m.GetInplaceUpdate())
	if err != nil {
		return agentsv1alpha1.SandboxClaimSpec{}, err
	}
	spec := agentsv1alpha1.SandboxClaimSpec{
		TemplateName:        m.GetTemplateName(),
		ClaimTimeout:        durationPtr(m.GetClaimTimeout()),
		TTLAfterCompleted:   durationPtr(m.GetTtlAfterCompleted()),
		ShutdownTime:        TimePtr(m.GetShutdownTime()),
		Labels:              maps.Clone(m.GetLabels()),
		Annotations:         maps.Clone(m.GetAnnotations()),
		EnvVars:             maps.Clone(m.GetEnvVars()),
		InplaceUpdate:       update,
		DynamicVolumesMount: each(m.GetDynamicVolumesMount(), volumeOfClaim),
	}
	if m != nil {
		spec.Replicas, spec.CreateOnNoStock = pointer(m.Replicas), pointer(m.CreateOnNoStock)
	}
	return spec, nil
}

func volumeOfClaim(m *sandboxv1.DynamicVolumeMount) agentsv1alpha1.DynamicVolumeMount {
	return agentsv1alpha1.DynamicVolumeMount{PVName: m.GetPvName(), MountPath: m.GetMountPath(), SubPath: m.GetSubPath(), ReadOnly: m.GetReadOnly()}
}

func volumeOfClaimProto(v agentsv1alpha1.DynamicVolumeMount) *sandboxv1.DynamicVolumeMount {
	return &sandboxv1.DynamicVolumeMount{PvName: v.PVName, MountPath: v.MountPath, SubPath: v.SubPath, ReadOnly: v.ReadOnly}
}

func inplaceUpdate(m *sandboxv1.InplaceUpdate) (*agentsv1alpha1.InplaceUpdate, error) {
	if m == nil {
		return nil, nil
	}
	out := &agentsv1alpha1.InplaceUpdate{Image: m.GetImage()}
	if m.GetResources() == nil {
		return out, nil
	}
	limits, err := resourceList("spec.inplaceUpdate.resources.limits", m.GetResources().GetLimits())
	if err != nil {
		return nil, err
	}
	requests, err := resourceList("spec.inplaceUpdate.resources.requests", m.GetResources().GetRequests())
	out.Resources = &corev1.ResourceRequirements{Limits: limits, Requests: requests}
	return out, err
}

func inplaceUpdateProto(u *agentsv1alpha1.InplaceUpdate) *sandboxv1.InplaceUpdate {
	if u == nil {
		return nil
	}
	m := &sandboxv1.InplaceUpdate{Image: u.Image}
	if u.Resources != nil {
		m.Resources = &sandboxv1.Resources{Limits: resourceListProto(u.Resources.Limits), Requests: resourceListProto(u.Resources.Requests)}
	}
	return m
}

// pointer copies what a pointer points to.
func pointer[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}
