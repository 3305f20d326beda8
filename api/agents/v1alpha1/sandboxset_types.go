package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

const (
	// LabelSandboxSet is on every Sandbox of a set, claimed or not, with the set's name.
	LabelSandboxSet = "agents.kruise.io/sandbox-set"
	// LabelRevision is on every Sandbox of a set, with the revision of the set that it was made from.
	LabelRevision = "agents.kruise.io/revision"
	// LabelClaimName is on every Sandbox that was claimed, with the claim's name.
	LabelClaimName = "agents.kruise.io/claim-name"
	// AnnotationRemoving is on a sandbox of a pool that its set removes, from a write before its deletion on, where what becomes
	// of its claims differs from other deletions. It is claimed by nobody any more.
	AnnotationRemoving = "agents.kruise.io/removing"
	// RandomSuffix is the length of what a sandbox's name has after its set's name and "-".
	RandomSuffix = 5
	// MaxSetName is the longest name of a set: with what is added it is the longest name of a sandbox, 63.
	MaxSetName = 63 - 1 - RandomSuffix
)

// The runtimes that a set may name.
const (
	// RuntimeCSI lets the set's sandboxes have dynamic volumes. The node's agent attaches them: nothing is added to the Pod.
	RuntimeCSI = v1alpha1.RuntimeCSI
	// RuntimeAgent is the in-sandbox service. It is accepted, and not there yet.
	RuntimeAgent = "agent-runtime"
)

// Runtime is something that the sandboxes of a set can do beside running their containers.
type Runtime struct {
	// Name is csi (dynamic volumes) or agent-runtime (the in-sandbox service).
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self in ['csi', 'agent-runtime']`,messageExpression=`'runtime "' + self + '" is not known: write csi (dynamic volumes) or agent-runtime'`
	Name string `json:"name"`
}

// ScaleStrategy bounds how fast the number of sandboxes changes.
type ScaleStrategy struct {
	// MaxUnavailable is how many sandboxes may be on their way at once: made and not available yet, or being deleted. A
	// number, or a percentage of replicas, rounded up; at least 1. All (100%) when it is left out.
	// +kubebuilder:validation:XValidation:rule=`type(self) == int ? int(self) >= 0 && int(self) <= 2147483647 : string(self).matches('^([0-9]|[1-9][0-9]|100)%$')`,message="maxUnavailable is not valid: write a number such as 2, or a percentage of replicas such as 20%"
	// +optional
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
}

// UpdateStrategy bounds how fast sandboxes of an older revision are replaced.
type UpdateStrategy struct {
	// MaxUnavailable is how many of replicas may be missing or not available while unclaimed sandboxes of an older
	// revision are replaced. A number, or a percentage of replicas, rounded up; 20% when it is left out. 0 replaces none.
	// +kubebuilder:validation:XValidation:rule=`type(self) == int ? int(self) >= 0 && int(self) <= 2147483647 : string(self).matches('^([0-9]|[1-9][0-9]|100)%$')`,message="maxUnavailable is not valid: write a number such as 2, or a percentage of replicas such as 20%"
	// +optional
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
}

// Rules about containers and claim templates are in an admission policy (config/admission/sets.yaml): lists in a Pod have no
// bounds, so that a rule here could cost more than the API server allows.

// SandboxSetSpec is what is wished of a set.
type SandboxSetSpec struct {
	// Replicas is how many sandboxes that nobody has claimed are kept; 1 when it is left out.
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	// +optional
	Replicas int32 `json:"replicas"`
	// Runtimes are csi, which lets claims mount volumes, and agent-runtime.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	// +optional
	Runtimes []Runtime `json:"runtimes,omitempty"`
	// Template is the Pod of each sandbox (kubectl explain podtemplate.template). A change makes a new revision: sandboxes
	// that nobody has claimed are replaced, claimed ones stay as they are.
	Template corev1.PodTemplateSpec `json:"template"`
	// VolumeClaimTemplates are claims that each sandbox has for itself, as a StatefulSet's: <template>-<sandbox> (kubectl
	// explain persistentvolumeclaim.spec). Each has to be mounted by a container of template. A change makes a new revision.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +optional
	VolumeClaimTemplates []corev1.PersistentVolumeClaim `json:"volumeClaimTemplates,omitempty"`
	// PersistentVolumeClaimRetentionPolicy says what becomes of these claims: whenDeleted with the sandbox, its claim or
	// its set; whenScaled when the set removes a sandbox that nobody has claimed, as it is one too many or of an older
	// revision. Both Delete when it is left out.
	// +optional
	PersistentVolumeClaimRetentionPolicy *v1alpha1.PersistentVolumeClaimRetentionPolicy `json:"persistentVolumeClaimRetentionPolicy,omitempty"`
	// ScaleStrategy bounds how fast the number of sandboxes changes.
	// +optional
	ScaleStrategy ScaleStrategy `json:"scaleStrategy,omitempty"`
	// UpdateStrategy bounds how fast sandboxes of an older revision are replaced.
	// +optional
	UpdateStrategy UpdateStrategy `json:"updateStrategy,omitempty"`
}

// The condition types of a SandboxSet.
const (
	// SetReady is True while as many sandboxes are available as replicas says. If not, its reason and message are those
	// of what keeps them: the API server's refusal, or the first sandbox's own.
	SetReady = "Ready"
)

// RuntimeStatus is what holds of a runtime.
type RuntimeStatus struct {
	// Name of the runtime.
	Name string `json:"name"`
	// State is Enabled or Accepted (it has no effect in this version).
	State string `json:"state,omitempty"`
	// Message is for people.
	Message string `json:"message,omitempty"`
}

// SandboxSetStatus is what holds of a set. Claimed sandboxes are not counted.
type SandboxSetStatus struct {
	// ObservedGeneration is the generation that the status was made from.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Replicas is the number of sandboxes that nobody has claimed.
	Replicas int32 `json:"replicas"`
	// AvailableReplicas of them run, with all that they need, and can be claimed at once.
	AvailableReplicas int32 `json:"availableReplicas"`
	// UpdatedReplicas of them are of the update revision.
	UpdatedReplicas int32 `json:"updatedReplicas"`
	// UpdatedAvailableReplicas of these can be claimed at once.
	UpdatedAvailableReplicas int32 `json:"updatedAvailableReplicas"`
	// UpdateRevision is the revision of the spec: a hash of template, claim templates and runtimes.
	UpdateRevision string `json:"updateRevision,omitempty"`
	// Selector selects the sandboxes that nobody has claimed, for the scale subresource.
	Selector string `json:"selector,omitempty"`
	// Runtimes says what each runtime of the spec does.
	// +listType=map
	// +listMapKey=name
	// +optional
	Runtimes []RuntimeStatus `json:"runtimes,omitempty"`
	// Conditions are Ready, whose reason and message say what keeps the set from being whole.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// SandboxSet keeps sandboxes warm, for SandboxClaims to take.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:resource:shortName=sbs,categories=flux
// +kubebuilder:printcolumn:name=Replicas,type=integer,JSONPath=.spec.replicas,description="How many unclaimed sandboxes are kept."
// +kubebuilder:printcolumn:name=Available,type=integer,JSONPath=.status.availableReplicas,description="How many of them can be claimed at once."
// +kubebuilder:printcolumn:name=UpdateRevision,type=string,JSONPath=.status.updateRevision
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=.metadata.creationTimestamp
// +kubebuilder:printcolumn:name=Message,type=string,priority=1,JSONPath=.status.conditions[?(@.type=='Ready')].message
// +kubebuilder:validation:XValidation:rule=`self.metadata.name.size() <= 57 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')`,messageExpression=`'the name "' + self.metadata.name + '" is not valid: sandboxes are named after it with six characters more, and have host names; write at most 57 lower-case letters, digits and -'`,message="the name is not valid: write at most 57 lower-case letters, digits and -"
type SandboxSet struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SandboxSetSpec   `json:"spec"`
	Status SandboxSetStatus `json:"status,omitempty"`
}

// SandboxSetList is a list of sets.
//
// +kubebuilder:object:root=true
type SandboxSetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SandboxSet `json:"items"`
}
