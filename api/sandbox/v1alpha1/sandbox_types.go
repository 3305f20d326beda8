package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// FinalizerVolumes keeps a Sandbox until all its volumes are detached and its container is gone.
	FinalizerVolumes = "sandbox.flux.io/volumes"
	// LabelTenantID names the tenant of a Namespace, or of a PersistentVolume or claim.
	LabelTenantID = "sandbox.flux.io/tenant-id"
	// MinMemoryBytes and MinCPUMilli are the smallest limits that can be enforced: what the runtime and the sandbox's
	// PID 1 need themselves, and 1 ms in 100 ms.
	MinMemoryBytes = 8 << 20
	MinCPUMilli    = 10
	// MaxVolumes is the most entries that each volume list of a sandbox may have.
	MaxVolumes = 32
)

// RestartPolicy says when the process of a sandbox is started again after it ended.
type RestartPolicy string

// The restart policies.
const (
	RestartAlways    RestartPolicy = "Always"
	RestartOnFailure RestartPolicy = "OnFailure"
	RestartNever     RestartPolicy = "Never"
)

// EnvVar is an environment variable of the sandbox's process.
type EnvVar struct {
	Name  string `json:"name"`
	Value string `json:"value,omitempty"`
}

// SandboxSpec is what is wished of a sandbox.
type SandboxSpec struct {
	// Group is the SandboxGroup whose capacity and policy the sandbox uses; "default" when empty.
	// +optional
	Group string `json:"group,omitempty"`
	// SubGroup is the part of the group; the group's first when empty.
	// +optional
	SubGroup string `json:"subGroup,omitempty"`
	// TenantID is the owner of the sandbox and of its data ([a-z0-9-], at most 63). Immutable.
	// +kubebuilder:validation:MaxLength=63
	// +optional
	TenantID string `json:"tenantId,omitempty"`
	// Image is the container image; the sub-group's template's when empty.
	// +optional
	Image string `json:"image,omitempty"`
	// Command replaces the image's entrypoint, Args its arguments.
	// +optional
	Command []string `json:"command,omitempty"`
	// +optional
	Args []string `json:"args,omitempty"`
	// +optional
	Env []EnvVar `json:"env,omitempty"`
	// WorkingDir is the process' working directory; the image's when empty.
	// +optional
	WorkingDir string `json:"workingDir,omitempty"`
	// Resources bounds CPU and memory by limits (cpu, memory) and is accounted by requests.
	// +optional
	Resources corev1.ResourceRequirements `json:"resources,omitempty"`
	// RestartPolicy is Always, OnFailure or Never; Always when empty.
	// +optional
	RestartPolicy RestartPolicy `json:"restartPolicy,omitempty"`
	// VolumeMounts are the static volumes: bound at creation, they live as long as the sandbox.
	// +listType=map
	// +listMapKey=target
	// +kubebuilder:validation:MaxItems=32
	// +optional
	VolumeMounts []VolumeMount `json:"volumeMounts,omitempty"`
	// DynamicVolumes are attached and detached while the sandbox runs.
	// +listType=map
	// +listMapKey=target
	// +kubebuilder:validation:MaxItems=32
	// +optional
	DynamicVolumes []DynamicVolume `json:"dynamicVolumes,omitempty"`
	// ShutdownTime is when the Sandbox is deleted.
	// +optional
	ShutdownTime *metav1.Time `json:"shutdownTime,omitempty"`
	// Paused stops the sandbox's process and detaches its volumes; its root filesystem is kept.
	// +optional
	Paused bool `json:"paused,omitempty"`
}

// SandboxPhase is where a sandbox is in its life.
type SandboxPhase string

// The sandbox phases.
const (
	SandboxPending     SandboxPhase = "Pending"
	SandboxRunning     SandboxPhase = "Running"
	SandboxPaused      SandboxPhase = "Paused"
	SandboxSucceeded   SandboxPhase = "Succeeded"
	SandboxFailed      SandboxPhase = "Failed"
	SandboxTerminating SandboxPhase = "Terminating"
	// SandboxLost: the sandbox's node or container is gone and it cannot be told what became of it.
	SandboxLost SandboxPhase = "Lost"
)

// The condition types of a Sandbox.
const (
	// ConditionReady is True while the process runs and every volume of the spec is Mounted.
	ConditionReady = "Ready"
	// ConditionScheduled is True once the sandbox has a node.
	ConditionScheduled = "Scheduled"
)

// SandboxStatus is what holds of a sandbox.
type SandboxStatus struct {
	// Phase is Pending, Running, Paused, Succeeded, Failed, Terminating or Lost.
	Phase SandboxPhase `json:"phase,omitempty"`
	// Reason and Message say why, for programs and for people.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Node is where the sandbox runs.
	Node string `json:"node,omitempty"`
	// ContainerID is the id of the sandbox's container on its node.
	ContainerID string `json:"containerID,omitempty"`
	// ObservedGeneration is the generation that the status was made from.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// StartTime is when the present process was started.
	StartTime *metav1.Time `json:"startTime,omitempty"`
	// Restarts counts the starts of the process after the first.
	Restarts int32 `json:"restarts,omitempty"`
	// ExitCode is the code with which the process last ended.
	ExitCode *int32 `json:"exitCode,omitempty"`
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Volumes has a row per volume, static ones first.
	// +listType=map
	// +listMapKey=target
	// +optional
	Volumes []VolumeStatus `json:"volumes,omitempty"`
	// VolumesReady is the number of mounted volumes and of all, as in "2/3".
	VolumesReady string `json:"volumesReady,omitempty"`
}

// Sandbox is one isolated workload whose storage is elastic.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=sbx
type Sandbox struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SandboxSpec   `json:"spec,omitempty"`
	Status SandboxStatus `json:"status,omitempty"`
}

// SandboxList is a list of sandboxes.
//
// +kubebuilder:object:root=true
type SandboxList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Sandbox `json:"items"`
}
