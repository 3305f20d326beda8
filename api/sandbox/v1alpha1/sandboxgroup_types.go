package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// DefaultGroup is the group of a sandbox that names none; DefaultSubGroup likewise.
const (
	DefaultGroup    = "default"
	DefaultSubGroup = "default"
)

// FeatureGates turns features on for a group. Each is off by default.
type FeatureGates struct {
	// DynamicVolumeMount allows dynamic volumes. Turned off, new attaches are refused at once, and
	// what is attached stays until its sandbox ends.
	// +optional
	DynamicVolumeMount bool `json:"dynamicVolumeMount,omitempty"`
}

// SandboxTemplate gives the defaults of a sub-group's sandboxes.
type SandboxTemplate struct {
	// +optional
	Image string `json:"image,omitempty"`
	// +optional
	Command []string `json:"command,omitempty"`
	// +optional
	Args []string `json:"args,omitempty"`
	// +optional
	Env []EnvVar `json:"env,omitempty"`
	// +optional
	Resources corev1.ResourceRequirements `json:"resources,omitempty"`
}

// SubSandboxGroup is a named part of a group, with a scheduler runtime of its own.
type SubSandboxGroup struct {
	// Name is unique in the group, say "prefill" or "decode".
	Name string `json:"name"`
	// Template gives the defaults of its sandboxes.
	// +optional
	Template SandboxTemplate `json:"template,omitempty"`
	// Capacity is the most sandboxes that it may have; no bound when zero.
	// +optional
	Capacity int32 `json:"capacity,omitempty"`
	// NodeSelector restricts it to nodes that carry these labels.
	// +optional
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
}

// TopologyAffinity places sandboxes near their volumes and each other.
type TopologyAffinity struct {
	// +optional
	Enabled bool `json:"enabled,omitempty"`
	// Key is the node label that names a topology domain; unifiedbus.com/superpod when empty.
	// +optional
	Key string `json:"key,omitempty"`
}

// SchedulingWeights weighs the scores of placement; a weight of zero leaves its score out.
type SchedulingWeights struct {
	// +optional
	Load int32 `json:"load,omitempty"`
	// +optional
	Topology int32 `json:"topology,omitempty"`
	// +optional
	VolumeLocality int32 `json:"volumeLocality,omitempty"`
	// +optional
	Image int32 `json:"image,omitempty"`
}

// SchedulingPolicy says how a group's sandboxes are placed.
type SchedulingPolicy struct {
	// Strategy is Spread or Pack; Spread when empty.
	// +optional
	Strategy string `json:"strategy,omitempty"`
	// +optional
	TopologyAffinity TopologyAffinity `json:"topologyAffinity,omitempty"`
	// Weights replaces the default weights as a whole.
	// +optional
	Weights *SchedulingWeights `json:"weights,omitempty"`
}

// VolumePolicy restricts the volumes of a group's sandboxes. It can only tighten what the operator
// of the nodes configured.
type VolumePolicy struct {
	// AllowedTypes are the volume types that may be used; all when empty.
	// +optional
	AllowedTypes []VolumeType `json:"allowedTypes,omitempty"`
	// DeniedTargets are paths in the sandbox that no volume may cover, beside the built-in ones.
	// +optional
	DeniedTargets []string `json:"deniedTargets,omitempty"`
	// MaxVolumes is the most dynamic volumes of one sandbox; 32 when zero.
	// +optional
	MaxVolumes int32 `json:"maxVolumes,omitempty"`
	// RequireSizeLimit refuses read-write volumes that have no sizeLimit.
	// +optional
	RequireSizeLimit bool `json:"requireSizeLimit,omitempty"`
}

// SandboxGroupSpec is what is wished of a group.
type SandboxGroupSpec struct {
	// +optional
	FeatureGates FeatureGates `json:"featureGates,omitempty"`
	// SubGroups are the parts of the group; one named "default" when empty.
	// +listType=map
	// +listMapKey=name
	// +optional
	SubGroups []SubSandboxGroup `json:"subGroups,omitempty"`
	// +optional
	SchedulingPolicy SchedulingPolicy `json:"schedulingPolicy,omitempty"`
	// +optional
	VolumePolicy VolumePolicy `json:"volumePolicy,omitempty"`
}

// SandboxGroupStatus is what holds of a group.
type SandboxGroupStatus struct {
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Sandboxes is the number of sandboxes in the group.
	Sandboxes int32 `json:"sandboxes,omitempty"`
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// SandboxGroup is a pool of capacity and policy for container-backed sandboxes.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=sbg
type SandboxGroup struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SandboxGroupSpec   `json:"spec,omitempty"`
	Status SandboxGroupStatus `json:"status,omitempty"`
}

// SandboxGroupList is a list of groups.
//
// +kubebuilder:object:root=true
type SandboxGroupList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SandboxGroup `json:"items"`
}
