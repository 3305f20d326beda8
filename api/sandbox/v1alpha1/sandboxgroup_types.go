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
	// Image is the container image.
	// +optional
	Image Image `json:"image,omitempty"`
	// Command replaces the image's entrypoint, Args its arguments.
	// +kubebuilder:validation:MaxItems=4096
	// +optional
	Command []string `json:"command,omitempty"`
	// Args are the arguments.
	// +kubebuilder:validation:MaxItems=4096
	// +optional
	Args []string `json:"args,omitempty"`
	// Env is the environment of the process; a sandbox adds to it.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=512
	// +optional
	Env []EnvVar `json:"env,omitempty"`
	// Resources bounds CPU and memory.
	// +kubebuilder:validation:XValidation:rule=`(!has(self.limits) || size(self.limits) == ('cpu' in self.limits ? 1 : 0) + ('memory' in self.limits ? 1 : 0)) && (!has(self.requests) || size(self.requests) == ('cpu' in self.requests ? 1 : 0) + ('memory' in self.requests ? 1 : 0))`,message="only cpu and memory can be set in limits and requests"
	// +optional
	Resources corev1.ResourceRequirements `json:"resources,omitempty"`
}

// SubSandboxGroup is a named part of a group, with a scheduler runtime of its own.
type SubSandboxGroup struct {
	// Name is unique in the group, say "prefill" or "decode".
	// +kubebuilder:validation:MinLength=1
	Name GroupPart `json:"name"`
	// Template gives the defaults of its sandboxes.
	// +optional
	Template SandboxTemplate `json:"template,omitempty"`
	// Capacity is the most sandboxes that it may have; no bound when zero.
	// +kubebuilder:validation:Minimum=0
	// +optional
	Capacity int32 `json:"capacity,omitempty"`
	// NodeSelector restricts it to nodes that carry these labels.
	// +kubebuilder:validation:MaxProperties=64
	// +optional
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
}

// DefaultTopologyKey is the node label that names a topology domain where nobody names one (design, section 2).
const DefaultTopologyKey = "unifiedbus.com/superpod"

// TopologyAffinity places sandboxes near their volumes and each other.
type TopologyAffinity struct {
	// Enabled turns it on.
	// +optional
	Enabled bool `json:"enabled,omitempty"`
	// Key is the node label that names a topology domain; unifiedbus.com/superpod when empty.
	// +kubebuilder:validation:MaxLength=317
	// +optional
	Key string `json:"key,omitempty"`
}

// SchedulingWeights weighs the scores of placement; a weight of zero leaves its score out.
type SchedulingWeights struct {
	// Load prefers nodes with little to do, or with strategy Pack those with much.
	// +kubebuilder:validation:Minimum=0
	// +optional
	Load int32 `json:"load,omitempty"`
	// Topology prefers the domain in which the group's sandboxes are.
	// +kubebuilder:validation:Minimum=0
	// +optional
	Topology int32 `json:"topology,omitempty"`
	// VolumeLocality prefers nodes that have the sandbox's volumes, or are near them.
	// +kubebuilder:validation:Minimum=0
	// +optional
	VolumeLocality int32 `json:"volumeLocality,omitempty"`
	// Image prefers nodes that have the image.
	// +kubebuilder:validation:Minimum=0
	// +optional
	Image int32 `json:"image,omitempty"`
}

// SchedulingPolicy says how a group's sandboxes are placed.
type SchedulingPolicy struct {
	// Strategy is Spread or Pack; Spread when empty.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self in ["", 'Spread', 'Pack']`,messageExpression=`'strategy "' + self + '" is not known: write Spread or Pack'`
	// +optional
	Strategy string `json:"strategy,omitempty"`
	// TopologyAffinity places sandboxes near their volumes and each other.
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
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self.all(t, t in ['local', 'pvc', 'pv', 'snapshot', 'oss'])`,message="a volume type is not known: write local, pvc, pv, snapshot or oss"
	// +optional
	AllowedTypes []VolumeType `json:"allowedTypes,omitempty"`
	// DeniedTargets are paths in the sandbox that no volume may cover, beside the built-in ones.
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=1024
	// +optional
	DeniedTargets []string `json:"deniedTargets,omitempty"`
	// MaxVolumes is the most dynamic volumes of one sandbox; 32 when zero.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=32
	// +optional
	MaxVolumes int32 `json:"maxVolumes,omitempty"`
	// RequireSizeLimit refuses read-write volumes that have no sizeLimit.
	// +optional
	RequireSizeLimit bool `json:"requireSizeLimit,omitempty"`
}

// SandboxGroupSpec is what is wished of a group.
type SandboxGroupSpec struct {
	// FeatureGates turns features on.
	// +optional
	FeatureGates FeatureGates `json:"featureGates,omitempty"`
	// SubGroups are the parts of the group; one named "default" when empty.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=32
	// +optional
	SubGroups []SubSandboxGroup `json:"subGroups,omitempty"`
	// SchedulingPolicy says how the sandboxes are placed.
	// +optional
	SchedulingPolicy SchedulingPolicy `json:"schedulingPolicy,omitempty"`
	// VolumePolicy restricts the sandboxes' volumes.
	// +optional
	VolumePolicy VolumePolicy `json:"volumePolicy,omitempty"`
}

// SandboxGroupStatus is what holds of a group.
type SandboxGroupStatus struct {
	// ObservedGeneration is the generation that the status was made from.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Sandboxes is the number of sandboxes in the group.
	Sandboxes int32 `json:"sandboxes,omitempty"`
	// Conditions of the group.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// SandboxGroup is a pool of capacity and policy for container-backed sandboxes.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=sbg,categories=flux
// +kubebuilder:printcolumn:name=Sandboxes,type=integer,JSONPath=.status.sandboxes
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=.metadata.creationTimestamp
// +kubebuilder:printcolumn:name=Dynamic Volumes,type=boolean,priority=1,JSONPath=.spec.featureGates.dynamicVolumeMount
// +kubebuilder:printcolumn:name=Strategy,type=string,priority=1,JSONPath=.spec.schedulingPolicy.strategy
// +kubebuilder:validation:XValidation:rule=`self.metadata.name.size() <= 63 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')`,messageExpression=`'the name "' + self.metadata.name + '" is not valid: write at most 63 lower-case letters, digits and -'`,message="the name is not valid: write at most 63 lower-case letters, digits and -"
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
