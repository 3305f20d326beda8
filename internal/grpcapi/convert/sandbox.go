package convert

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// Sandbox makes the object of its message, with apiVersion and kind. The error says which quantity of
// spec.resources is none.
func Sandbox(m *sandboxv1.Sandbox) (*v1alpha1.Sandbox, error) {
	spec, err := Spec(m.GetSpec())
	if err != nil {
		return nil, err
	}
	return &v1alpha1.Sandbox{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "Sandbox"},
		ObjectMeta: objectMeta(m),
		Spec:       spec,
		Status:     status(m.GetStatus()),
	}, nil
}

// SandboxProto is the reverse of Sandbox. Of the metadata it has what the message has fields for.
func SandboxProto(s *v1alpha1.Sandbox) *sandboxv1.Sandbox {
	return &sandboxv1.Sandbox{
		Namespace:       s.Namespace,
		Name:            s.Name,
		Uid:             string(s.UID),
		Generation:      s.Generation,
		ResourceVersion: s.ResourceVersion,
		CreationTime:    timeProto(s.CreationTimestamp),
		DeletionTime:    TimeProto(s.DeletionTimestamp),
		Labels:          maps.Clone(s.Labels),
		Annotations:     maps.Clone(s.Annotations),
		Spec:            SpecProto(s.Spec),
		Status:          statusProto(s.Status),
	}
}

// Spec makes a SandboxSpec of its message. The error says which quantity is none.
func Spec(m *sandboxv1.SandboxSpec) (v1alpha1.SandboxSpec, error) {
	limits, err := resourceList("spec.resources.limits", m.GetResources().GetLimits())
	if err != nil {
		return v1alpha1.SandboxSpec{}, err
	}
	requests, err := resourceList("spec.resources.requests", m.GetResources().GetRequests())
	if err != nil {
		return v1alpha1.SandboxSpec{}, err
	}
	template, err := podTemplate(m.GetTemplate())
	if err != nil {
		return v1alpha1.SandboxSpec{}, err
	}
	claims, err := claimTemplates(m.GetVolumeClaimTemplates())
	if err != nil {
		return v1alpha1.SandboxSpec{}, err
	}
	return v1alpha1.SandboxSpec{
		VolumeClaimTemplates:                 claims,
		PersistentVolumeClaimRetentionPolicy: retentionPolicy(m.GetPersistentVolumeClaimRetentionPolicy()),
		Runtimes:                             each(m.GetRuntimes(), func(r string) v1alpha1.RuntimeName { return v1alpha1.RuntimeName(r) }),

		Template:       template,
		PodRef:         podReference(m.GetPodRef()),
		Group:          m.GetGroup(),
		SubGroup:       m.GetSubGroup(),
		TenantID:       m.GetTenantId(),
		Image:          m.GetImage(),
		Command:        slices.Clone(m.GetCommand()),
		Args:           slices.Clone(m.GetArgs()),
		Env:            each(m.GetEnv(), envVar),
		WorkingDir:     m.GetWorkingDir(),
		Resources:      corev1.ResourceRequirements{Limits: limits, Requests: requests},
		RestartPolicy:  v1alpha1.RestartPolicy(m.GetRestartPolicy()),
		VolumeMounts:   each(m.GetVolumeMounts(), VolumeMount),
		DynamicVolumes: each(m.GetDynamicVolumes(), DynamicVolume),
		ShutdownTime:   TimePtr(m.GetShutdownTime()),
		Paused:         m.GetPaused(),
	}, nil
}

// SpecProto is the reverse of Spec.
func SpecProto(s v1alpha1.SandboxSpec) *sandboxv1.SandboxSpec {
	m := &sandboxv1.SandboxSpec{
		VolumeClaimTemplates:                 each(s.VolumeClaimTemplates, claimTemplateProto),
		PersistentVolumeClaimRetentionPolicy: retentionPolicyProto(s.PersistentVolumeClaimRetentionPolicy),
		Runtimes:                             each(s.Runtimes, func(r v1alpha1.RuntimeName) string { return string(r) }),

		Template:       podTemplateProto(s.Template),
		PodRef:         podReferenceProto(s.PodRef),
		Group:          s.Group,
		SubGroup:       s.SubGroup,
		TenantId:       s.TenantID,
		Image:          s.Image,
		Command:        slices.Clone(s.Command),
		Args:           slices.Clone(s.Args),
		Env:            each(s.Env, envVarProto),
		WorkingDir:     s.WorkingDir,
		RestartPolicy:  string(s.RestartPolicy),
		VolumeMounts:   each(s.VolumeMounts, VolumeMountProto),
		DynamicVolumes: each(s.DynamicVolumes, DynamicVolumeProto),
		ShutdownTime:   TimeProto(s.ShutdownTime),
		Paused:         s.Paused,
	}
	if len(s.Resources.Limits)+len(s.Resources.Requests) > 0 {
		m.Resources = &sandboxv1.Resources{
			Limits:   resourceListProto(s.Resources.Limits),
			Requests: resourceListProto(s.Resources.Requests),
		}
	}
	return m
}

func status(m *sandboxv1.SandboxStatus) v1alpha1.SandboxStatus {
	var exitCode *int32
	if m != nil && m.ExitCode != nil {
		code := m.GetExitCode()
		exitCode = &code
	}
	return v1alpha1.SandboxStatus{
		Phase:              v1alpha1.SandboxPhase(m.GetPhase()),
		Reason:             m.GetReason(),
		Message:            m.GetMessage(),
		Node:               m.GetNode(),
		ContainerID:        m.GetContainerId(),
		ObservedGeneration: m.GetObservedGeneration(),
		StartTime:          TimePtr(m.GetStartTime()),
		Restarts:           m.GetRestarts(),
		ExitCode:           exitCode,
		Conditions:         each(m.GetConditions(), condition),
		Volumes:            each(m.GetVolumes(), VolumeStatus),
		VolumesReady:       m.GetVolumesReady(),
	}
}

func statusProto(s v1alpha1.SandboxStatus) *sandboxv1.SandboxStatus {
	var exitCode *int32
	if s.ExitCode != nil {
		code := *s.ExitCode
		exitCode = &code
	}
	return &sandboxv1.SandboxStatus{
		Phase:              string(s.Phase),
		Reason:             s.Reason,
		Message:            text(s.Message),
		Node:               s.Node,
		ContainerId:        s.ContainerID,
		ObservedGeneration: s.ObservedGeneration,
		StartTime:          TimeProto(s.StartTime),
		Restarts:           s.Restarts,
		ExitCode:           exitCode,
		Conditions:         each(s.Conditions, conditionProto),
		Volumes:            each(s.Volumes, VolumeStatusProto),
		VolumesReady:       s.VolumesReady,
	}
}

func condition(m *sandboxv1.Condition) metav1.Condition {
	return metav1.Condition{
		Type:               m.GetType(),
		Status:             metav1.ConditionStatus(m.GetStatus()),
		Reason:             m.GetReason(),
		Message:            m.GetMessage(),
		LastTransitionTime: Time(m.GetLastTransitionTime()),
		ObservedGeneration: m.GetObservedGeneration(),
	}
}

func conditionProto(c metav1.Condition) *sandboxv1.Condition {
	return &sandboxv1.Condition{
		Type:               c.Type,
		Status:             string(c.Status),
		Reason:             c.Reason,
		Message:            text(c.Message),
		LastTransitionTime: timeProto(c.LastTransitionTime),
		ObservedGeneration: c.ObservedGeneration,
	}
}

func envVar(m *sandboxv1.EnvVar) v1alpha1.EnvVar {
	return v1alpha1.EnvVar{Name: m.GetName(), Value: m.GetValue()}
}

func envVarProto(e v1alpha1.EnvVar) *sandboxv1.EnvVar {
	return &sandboxv1.EnvVar{Name: e.Name, Value: e.Value}
}

func resourceList(field string, m map[string]string) (corev1.ResourceList, error) {
	if len(m) == 0 {
		return nil, nil
	}
	out := corev1.ResourceList{}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		q, err := resource.ParseQuantity(m[name])
		if err != nil {
			return nil, fmt.Errorf("%s[%q]: %q is not a quantity such as 500m or 1Gi", field, name, m[name])
		}
		out[corev1.ResourceName(name)] = q
	}
	return out, nil
}

func resourceListProto(l corev1.ResourceList) map[string]string {
	if len(l) == 0 {
		return nil
	}
	out := map[string]string{}
	for name, q := range l {
		out[string(name)] = q.String()
	}
	return out
}

// text is what a message can carry: words that came from a sandbox, as the name of a file, may be any bytes, and one that
// is no UTF-8 would cost the whole answer, be it a list of all sandboxes.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
