package convert

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
)

// Set makes the object of its message, with apiVersion and kind. The error says which template is none.
func Set(m *sandboxv1.SandboxSet) (*agentsv1alpha1.SandboxSet, error) {
	template, err := podTemplate(m.GetSpec().GetTemplate())
	if err != nil {
		return nil, err
	}
	if template == nil {
		template = &corev1.PodTemplateSpec{}
	}
	claims, err := claimTemplates(m.GetSpec().GetVolumeClaimTemplates())
	if err != nil {
		return nil, err
	}
	st := m.GetStatus()
	return &agentsv1alpha1.SandboxSet{
		TypeMeta:   metav1.TypeMeta{APIVersion: agentsv1alpha1.GroupVersion.String(), Kind: "SandboxSet"},
		ObjectMeta: objectMeta(m),
		Spec: agentsv1alpha1.SandboxSetSpec{
			Replicas:                             m.GetSpec().GetReplicas(),
			Runtimes:                             each(m.GetSpec().GetRuntimes(), func(name string) agentsv1alpha1.Runtime { return agentsv1alpha1.Runtime{Name: name} }),
			Template:                             *template,
			VolumeClaimTemplates:                 claims,
			PersistentVolumeClaimRetentionPolicy: retentionPolicy(m.GetSpec().GetPersistentVolumeClaimRetentionPolicy()),
			ScaleStrategy:                        agentsv1alpha1.ScaleStrategy{MaxUnavailable: numberOrPercent(m.GetSpec().GetScaleMaxUnavailable())},
			UpdateStrategy:                       agentsv1alpha1.UpdateStrategy{MaxUnavailable: numberOrPercent(m.GetSpec().GetUpdateMaxUnavailable())},
		},
		Status: agentsv1alpha1.SandboxSetStatus{
			ObservedGeneration:       st.GetObservedGeneration(),
			Replicas:                 st.GetReplicas(),
			AvailableReplicas:        st.GetAvailableReplicas(),
			UpdatedReplicas:          st.GetUpdatedReplicas(),
			UpdatedAvailableReplicas: st.GetUpdatedAvailableReplicas(),
			UpdateRevision:           st.GetUpdateRevision(),
			Selector:                 st.GetSelector(),
			Runtimes:                 each(st.GetRuntimes(), runtimeStatus),
			Conditions:               each(st.GetConditions(), condition),
		},
	}, nil
}

// SetProto is the reverse of Set. Of the metadata it has what the message has fields for.
func SetProto(s *agentsv1alpha1.SandboxSet) *sandboxv1.SandboxSet {
	return &sandboxv1.SandboxSet{
		Namespace:       s.Namespace,
		Name:            s.Name,
		Uid:             string(s.UID),
		Generation:      s.Generation,
		ResourceVersion: s.ResourceVersion,
		CreationTime:    timeProto(s.CreationTimestamp),
		DeletionTime:    TimeProto(s.DeletionTimestamp),
		Labels:          maps.Clone(s.Labels),
		Annotations:     maps.Clone(s.Annotations),
		Spec: &sandboxv1.SandboxSetSpec{
			Replicas:                             s.Spec.Replicas,
			Runtimes:                             each(s.Spec.Runtimes, func(r agentsv1alpha1.Runtime) string { return r.Name }),
			Template:                             podTemplateProto(&s.Spec.Template),
			VolumeClaimTemplates:                 each(s.Spec.VolumeClaimTemplates, claimTemplateProto),
			PersistentVolumeClaimRetentionPolicy: retentionPolicyProto(s.Spec.PersistentVolumeClaimRetentionPolicy),
			ScaleMaxUnavailable:                  numberOrPercentProto(s.Spec.ScaleStrategy.MaxUnavailable),
			UpdateMaxUnavailable:                 numberOrPercentProto(s.Spec.UpdateStrategy.MaxUnavailable),
		},
		Status: &sandboxv1.SandboxSetStatus{
			ObservedGeneration:       s.Status.ObservedGeneration,
			Replicas:                 s.Status.Replicas,
			AvailableReplicas:        s.Status.AvailableReplicas,
			UpdatedReplicas:          s.Status.UpdatedReplicas,
			UpdatedAvailableReplicas: s.Status.UpdatedAvailableReplicas,
			UpdateRevision:           s.Status.UpdateRevision,
			Selector:                 s.Status.Selector,
			Runtimes:                 each(s.Status.Runtimes, runtimeStatusProto),
			Conditions:               each(s.Status.Conditions, conditionProto),
		},
	}
}

func runtimeStatus(m *sandboxv1.RuntimeStatus) agentsv1alpha1.RuntimeStatus {
	return agentsv1alpha1.RuntimeStatus{Name: m.GetName(), State: m.GetState(), Message: m.GetMessage()}
}

func runtimeStatusProto(r agentsv1alpha1.RuntimeStatus) *sandboxv1.RuntimeStatus {
	return &sandboxv1.RuntimeStatus{Name: r.Name, State: r.State, Message: text(r.Message)}
}

// numberOrPercent is nil for an empty text.
func numberOrPercent(text string) *intstr.IntOrString {
	if text == "" {
		return nil
	}
	v := intstr.Parse(text)
	return &v
}

func numberOrPercentProto(v *intstr.IntOrString) string {
	if v == nil {
		return ""
	}
	return v.String()
}
