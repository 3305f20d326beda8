package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// DefaultClaimTimeout is claimTimeout when it is left out.
const DefaultClaimTimeout = "1m"

// DynamicVolumeMount is a PersistentVolume that is mounted into the sandboxes of a claim.
type DynamicVolumeMount struct {
	// PVName is the name of a PersistentVolume that exists.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PVName string `json:"pvName"`
	// MountPath is where it is mounted in the sandbox: an empty directory, or one that does not exist.
	MountPath v1alpha1.Target `json:"mountPath"`
	// SubPath is a directory inside the volume, relative to its root. It is never created.
	// +kubebuilder:validation:MaxLength=4095
	// +kubebuilder:validation:XValidation:rule=`self == "" || bytes(self).size() <= 4095 && self.matches('^[^/\\p{Cc}]+(/[^/\\p{Cc}]+)*$') && !self.matches('(^|/)[.]{1,2}(/|$)') && !self.matches('[^/]{256}')`,message="the subPath is not valid: write a clean relative path such as models/v1"
	// +optional
	SubPath string `json:"subPath,omitempty"`
	// ReadOnly mounts it read-only; it can be written to when it is left out.
	// +optional
	ReadOnly bool `json:"readOnly,omitempty"`
}

// InplaceUpdate is what is changed in a sandbox when it is claimed, without making its Pod again.
type InplaceUpdate struct {
	// Image is the image of the container that gets the volumes, the first unless the template's annotation
	// sandbox.flux.io/container names another. That container is restarted.
	// +optional
	Image v1alpha1.Image `json:"image,omitempty"`
	// Resources are CPU and memory of that container; what is not named stays as it is.
	// +kubebuilder:validation:XValidation:rule=`!has(self.claims) && (!has(self.limits) || size(self.limits) == ('cpu' in self.limits ? 1 : 0) + ('memory' in self.limits ? 1 : 0)) && (!has(self.requests) || size(self.requests) == ('cpu' in self.requests ? 1 : 0) + ('memory' in self.requests ? 1 : 0))`,message="a container that runs can be given only cpu and memory, in limits and requests: leave the rest out"
	// +optional
	Resources *corev1.ResourceRequirements `json:"resources,omitempty"`
}

// SandboxClaimSpec is what is asked for. What takes effect when a sandbox is taken cannot be changed.
//
// +kubebuilder:validation:XValidation:rule=`self.templateName == oldSelf.templateName`,message="templateName cannot be changed, as sandboxes of it may have been taken: delete the claim and create another",fieldPath=.templateName,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`self.replicas == oldSelf.replicas`,message="replicas cannot be changed: create another claim for more sandboxes, or delete sandboxes of this one",fieldPath=.replicas,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.dynamicVolumesMount) ? self.dynamicVolumesMount : []) == (has(oldSelf.dynamicVolumesMount) ? oldSelf.dynamicVolumesMount : [])`,message="dynamicVolumesMount cannot be changed: add and remove volumes of the claimed sandboxes, in their spec.dynamicVolumes",fieldPath=.dynamicVolumesMount,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.labels) ? self.labels : {}) == (has(oldSelf.labels) ? oldSelf.labels : {}) && (has(self.annotations) ? self.annotations : {}) == (has(oldSelf.annotations) ? oldSelf.annotations : {})`,message="labels and annotations cannot be changed, as they were given to the claimed sandboxes: change them there",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.envVars) ? self.envVars : {}) == (has(oldSelf.envVars) ? oldSelf.envVars : {})`,message="envVars cannot be changed, as the containers were made with them: delete the claim and create another",fieldPath=.envVars,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`has(self.shutdownTime) == has(oldSelf.shutdownTime) && (!has(self.shutdownTime) || self.shutdownTime == oldSelf.shutdownTime)`,message="shutdownTime cannot be changed, as it was given to the claimed sandboxes: change it there",fieldPath=.shutdownTime,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`has(self.inplaceUpdate) == has(oldSelf.inplaceUpdate) && (!has(self.inplaceUpdate) || self.inplaceUpdate == oldSelf.inplaceUpdate)`,message="inplaceUpdate cannot be changed: delete the claim and create another",fieldPath=.inplaceUpdate,reason=FieldValueForbidden
type SandboxClaimSpec struct {
	// TemplateName is the SandboxSet, of the claim's namespace, whose sandboxes are taken. Immutable.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	TemplateName string `json:"templateName"`
	// Replicas is how many sandboxes are taken; 1 when it is left out. Immutable.
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	// +optional
	Replicas *int32 `json:"replicas,omitempty"`
	// ClaimTimeout is how long the claim may take, from when it was first seen, as in 30s or 5m (1s to 168h); 1m when it is
	// left out. Then it is over: with what has been claimed, or Failed with nothing.
	// +kubebuilder:default="1m"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule=`self.matches('^([0-9]+([.][0-9]+)?(ms|s|m|h))+$') && duration(self) >= duration('1s') && duration(self) <= duration('168h')`,message="claimTimeout is not valid: write a time from 1s to 168h such as 30s or 5m"
	// +optional
	ClaimTimeout *metav1.Duration `json:"claimTimeout,omitempty"`
	// TTLAfterCompleted is how long the claim is kept when it is over, as in 30s or 24h; it is never deleted when left out,
	// or negative. The sandboxes that it was given stay, without an owner: shutdownTime is what ends them.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule=`self.matches('^-?([0-9]+([.][0-9]+)?(ms|s|m|h))+$|^0$') && duration(self == '0' ? '0s' : self) <= duration('8760h')`,message="ttlAfterCompleted is not valid: write a time such as 30s, 5m or 24h"
	// +optional
	TTLAfterCompleted *metav1.Duration `json:"ttlAfterCompleted,omitempty"`
	// ShutdownTime is when the claimed sandboxes are deleted, as in 2030-01-31T18:00:00Z; never when it is left out.
	// +optional
	ShutdownTime *metav1.Time `json:"shutdownTime,omitempty"`
	// CreateOnNoStock makes a sandbox for the claim when the set has none that could be taken; true when it is left out. With
	// false the claim waits.
	// +kubebuilder:default=true
	// +optional
	CreateOnNoStock *bool `json:"createOnNoStock,omitempty"`
	// Labels are given to the claimed sandboxes. Those of agents.kruise.io and sandbox.flux.io are not for claims. Immutable.
	// +kubebuilder:validation:MaxProperties=64
	// +kubebuilder:validation:XValidation:rule=`self.all(k, !k.matches('^([^/]*[.])?(agents[.]kruise[.]io|sandbox[.]flux[.]io)/'))`,message="labels of agents.kruise.io and sandbox.flux.io say whose a sandbox is, and cannot be given by a claim: use names of your own"
	// +kubebuilder:validation:XValidation:rule=`self.all(k, self[k].size() <= 63)`,message="the value of a label is not valid: write at most 63 letters, digits, -, _ and ."
	// +optional
	Labels map[string]string `json:"labels,omitempty"`
	// Annotations are given to the claimed sandboxes. Those of agents.kruise.io and sandbox.flux.io are not for claims.
	// Immutable.
	// +kubebuilder:validation:MaxProperties=64
	// +kubebuilder:validation:XValidation:rule=`self.all(k, !k.matches('^([^/]*[.])?(agents[.]kruise[.]io|sandbox[.]flux[.]io)/'))`,message="annotations of agents.kruise.io and sandbox.flux.io are instructions to the system, and cannot be given by a claim: use names of your own"
	// +optional
	Annotations map[string]string `json:"annotations,omitempty"`
	// EnvVars are added to the environment of every container. A process that runs cannot be given any, so a claim with
	// envVars gets sandboxes that are made for it (createOnNoStock has to be true), and leaves warm ones alone. Immutable.
	// +kubebuilder:validation:MaxProperties=256
	// +kubebuilder:validation:XValidation:rule=`self.all(k, k.matches('^[!-<>-~]+$'))`,message="the name of an environment variable must not be empty or have spaces, control characters, = or characters that are not ASCII"
	// +optional
	EnvVars map[string]string `json:"envVars,omitempty"`
	// InplaceUpdate changes image and resources of the claimed sandboxes, whose Pods are not made again. Immutable.
	// +optional
	InplaceUpdate *InplaceUpdate `json:"inplaceUpdate,omitempty"`
	// DynamicVolumesMount are PersistentVolumes that are mounted into every claimed sandbox, at most 32. The set has to have
	// the runtime csi. Immutable.
	// +listType=map
	// +listMapKey=mountPath
	// +kubebuilder:validation:MaxItems=32
	// +optional
	DynamicVolumesMount []DynamicVolumeMount `json:"dynamicVolumesMount,omitempty"`
}

// SandboxClaimPhase is where a claim is in its life.
type SandboxClaimPhase string

// The claim phases.
const (
	ClaimPending   SandboxClaimPhase = "Pending"
	ClaimClaiming  SandboxClaimPhase = "Claiming"
	ClaimCompleted SandboxClaimPhase = "Completed"
	ClaimFailed    SandboxClaimPhase = "Failed"
)

// The condition types of a SandboxClaim.
const (
	// ClaimClaimed is True when every sandbox that was asked for runs with all its volumes. If not, its reason and message
	// say what is waited for, or why there will be none.
	ClaimClaimed = "Claimed"
	// ClaimPartially is True when the time was over before all sandboxes were claimed, or there can be no more (the set is
	// gone), and some were.
	ClaimPartially = "PartiallyClaimed"
	// ClaimSandboxesReady is of a Completed claim: False while a sandbox that it was given is not Ready, or is gone. Its reason
	// is that sandbox's, and its message names it.
	ClaimSandboxesReady = "SandboxesReady"
)

// SandboxClaimStatus is what holds of a claim.
type SandboxClaimStatus struct {
	// Phase is Pending, Claiming, Completed or Failed; the last two are final.
	Phase SandboxClaimPhase `json:"phase,omitempty"`
	// ObservedGeneration is the generation that the status was made from.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// ClaimedReplicas is the number of sandboxes that run for the claim with all their volumes.
	ClaimedReplicas int32 `json:"claimedReplicas"`
	// SandboxNames are the sandboxes that were taken; when the claim is over, those that it was given.
	// +listType=atomic
	// +optional
	SandboxNames []string `json:"sandboxNames,omitempty"`
	// StartTime is when the claim was first seen: claimTimeout counts from then.
	StartTime *metav1.Time `json:"startTime,omitempty"`
	// CompletionTime is when it was over.
	CompletionTime *metav1.Time `json:"completionTime,omitempty"`
	// Conditions are Claimed (every sandbox that was asked for runs with all its volumes; else what is waited for), PartiallyClaimed
	// (the time was over before all were claimed), and, when the claim is Completed, SandboxesReady: False while one of the sandboxes
	// that it was given is not Ready, or is gone, with that one's reason.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// SandboxClaim takes sandboxes of a SandboxSet, with volumes mounted into them.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=sbc,categories=flux
// +kubebuilder:printcolumn:name=Phase,type=string,JSONPath=.status.phase
// +kubebuilder:printcolumn:name=Template,type=string,JSONPath=.spec.templateName
// +kubebuilder:printcolumn:name=Desired,type=integer,JSONPath=.spec.replicas
// +kubebuilder:printcolumn:name=Claimed,type=integer,JSONPath=.status.claimedReplicas
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=.metadata.creationTimestamp
// +kubebuilder:printcolumn:name=Message,type=string,priority=1,JSONPath=.status.conditions[?(@.type=='Claimed')].message
// +kubebuilder:validation:XValidation:rule=`self.metadata.name.size() <= 63 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')`,messageExpression=`'the name "' + self.metadata.name + '" is not valid: it becomes a label of the claimed sandboxes; write at most 63 characters'`,message="the name is not valid: it becomes a label of the claimed sandboxes; write at most 63 characters"
type SandboxClaim struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   SandboxClaimSpec   `json:"spec"`
	Status SandboxClaimStatus `json:"status,omitempty"`
}

// SandboxClaimList is a list of claims.
//
// +kubebuilder:object:root=true
type SandboxClaimList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SandboxClaim `json:"items"`
}
