package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// FinalizerVolumes keeps a Sandbox until all its volumes are detached and its container is gone.
	FinalizerVolumes = "sandbox.flux.io/volumes"
	// FinalizerInUse keeps a claim, or a PersistentVolume without one, while a sandbox uses it.
	FinalizerInUse = "sandbox.flux.io/in-use"
	// LabelTenantID names the tenant of a Namespace, or of a PersistentVolume or claim.
	LabelTenantID = "sandbox.flux.io/tenant-id"
	// LabelSandbox is on the Pod that a Sandbox makes from its template, and on the claims of its volumeClaimTemplates, with
	// the Sandbox's name.
	LabelSandbox = "sandbox.flux.io/sandbox"
	// LabelAnchor is on anchors, the Pods that have kubelet mount a claim for sandboxes, with the claim's name (shortened to
	// what a label takes).
	LabelAnchor = "sandbox.flux.io/anchor"
	// AnnotationAnchorSandbox, on an anchor, is the UID of the one sandbox that it is for (ReadWriteOncePod).
	AnnotationAnchorSandbox = "sandbox.flux.io/anchor-sandbox"
	// AnnotationPath, on a claim or a StorageClass, with the value "anchor", has volumes mounted by kubelet for an anchor
	// although the agent could publish them itself.
	AnnotationPath = "sandbox.flux.io/path"
	// AnnotationTemplate, on a Pod that a Sandbox made, tells the images and resources that it has from those of a template
	// that was changed. AnnotationReplaces beside it has the ids of the containers, joined by commas, that go as their images
	// changed.
	AnnotationTemplate = "sandbox.flux.io/template"
	AnnotationReplaces = "sandbox.flux.io/replaces"
	// AnnotationContainer, on a Pod, names the container that gets the volumes, unless podRef does; it is the Pod's first
	// without it.
	AnnotationContainer = "sandbox.flux.io/container"
	// AnnotationRequiredVolumes, on a Pod, are targets, joined by commas, without whose volumes the container that
	// AnnotationContainer names does not start: it waits for them, and fails to start with the reason when they do not
	// come within a minute, as often as kubelet tries. Without it a container starts whatever becomes of its volumes.
	AnnotationRequiredVolumes = "sandbox.flux.io/required-volumes"
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
	// Name of the variable.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule=`!self.matches('[=\\p{Cc}\\p{Z}]')`,message="the name of an environment variable must not have spaces, control characters or ="
	Name string `json:"name"`
	// Value of the variable; empty when left out.
	// +optional
	Value string `json:"value,omitempty"`
}

// Image is the reference of a container image.
//
// +kubebuilder:validation:MaxLength=1024
// +kubebuilder:validation:XValidation:rule=`self.matches('^([a-zA-Z0-9][a-zA-Z0-9._/:@+-]*)?$')`,messageExpression=`'the image "' + self + '" is not valid: write a reference such as docker.io/library/busybox:latest'`
type Image = string

// GroupPart is the name of a SandboxGroup or of a part of one: a DNS label.
//
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:XValidation:rule=`self.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$')`,message="the name is not valid: write lower-case letters, digits and -"
type GroupPart = string

// RuntimeCSI is the runtime that lets a sandbox have dynamic volumes.
const RuntimeCSI = "csi"

// RuntimeName is the name of a runtime of a SandboxSet.
//
// +kubebuilder:validation:MaxLength=63
type RuntimeName = string

// PodReference names a Pod that somebody else owns, in the Sandbox's namespace.
//
// +kubebuilder:validation:XValidation:rule=`self.name == oldSelf.name && (has(self.container) ? self.container : "") == (has(oldSelf.container) ? oldSelf.container : "") && (!has(oldSelf.uid) || oldSelf.uid == "" || has(self.uid) && self.uid == oldSelf.uid)`,message="podRef cannot be changed, as the sandbox is that Pod: create another Sandbox for another Pod",reason=FieldValueForbidden
type PodReference struct {
	// Name of the Pod.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// UID of the Pod that is meant. When it is left out, the Pod that has the name when the Sandbox is first seen is
	// meant, and its UID is filled in. A successor of the same name is not followed.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=63
	// +optional
	UID types.UID `json:"uid,omitempty"`
	// Container gets the volumes; the Pod's first when empty.
	// +kubebuilder:validation:MaxLength=63
	// +optional
	Container string `json:"container,omitempty"`
}

// SandboxSpec is what is wished of a sandbox. It is run by a container of its own (image, command, … or nothing of
// these: the group's template), by a Pod made from template, or by the Pod of podRef. While it lives, dynamicVolumes,
// shutdownTime, paused, persistentVolumeClaimRetentionPolicy and the images and resources of template can be changed.
//
// That no volume lies in another is checked by an admission policy (config/admission/targets.yaml): a rule here would
// compare all with all at every write, those of the status too. So are the claim templates (claims.yaml), and what of a
// template can be changed (templates.yaml).
//
// +kubebuilder:validation:XValidation:rule=`!(has(self.template) && has(self.podRef))`,message="a sandbox is made from template or is the Pod of podRef, not both: leave one out",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`!has(self.template) && !has(self.podRef) || !(has(self.image) && self.image != "" || has(self.command) && size(self.command) > 0 || has(self.args) && size(self.args) > 0 || has(self.env) && size(self.env) > 0 || has(self.workingDir) && self.workingDir != "" || has(self.restartPolicy) && self.restartPolicy != "" || has(self.resources) && (has(self.resources.limits) || has(self.resources.requests)))`,message="image, command, args, env, workingDir, resources and restartPolicy are of a sandbox with a container of its own: with template or podRef leave them out",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`!has(self.podRef) || !has(self.paused) || !self.paused`,message="a sandbox with podRef cannot be paused, as its Pod belongs to somebody else: stop the Pod instead",fieldPath=.paused,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`!has(self.tenantId) || self.tenantId == "" || !has(self.dynamicVolumes) || self.dynamicVolumes.all(v, !has(v.tenantId) || v.tenantId in ["", self.tenantId])`,messageExpression=`'a volume is of another tenant than the sandbox, which is of tenant "' + self.tenantId + '": a sandbox uses its own tenant\'s volumes only'`,fieldPath=.dynamicVolumes,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`has(self.tenantId) && self.tenantId != "" || !has(self.dynamicVolumes) || self.dynamicVolumes.all(a, !has(a.tenantId) || a.tenantId == "" || self.dynamicVolumes.all(b, !has(b.tenantId) || b.tenantId in ["", a.tenantId]))`,message="the volumes are of different tenants: a sandbox uses its own tenant's volumes only",fieldPath=.dynamicVolumes,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`!has(oldSelf.tenantId) || oldSelf.tenantId == "" || has(self.tenantId) && self.tenantId == oldSelf.tenantId`,message="tenantId cannot be changed: delete the sandbox and create another",fieldPath=.tenantId,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.group) ? self.group : "") == (has(oldSelf.group) ? oldSelf.group : "") && (has(self.subGroup) ? self.subGroup : "") == (has(oldSelf.subGroup) ? oldSelf.subGroup : "")`,message="group and subGroup cannot be changed: delete the sandbox and create another",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.image) ? self.image : "") == (has(oldSelf.image) ? oldSelf.image : "")`,message="image cannot be changed, as the container is made of it: delete the sandbox and create another",fieldPath=.image,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.command) ? self.command : []) == (has(oldSelf.command) ? oldSelf.command : []) && (has(self.args) ? self.args : []) == (has(oldSelf.args) ? oldSelf.args : []) && (has(self.env) ? self.env : []) == (has(oldSelf.env) ? oldSelf.env : []) && (has(self.workingDir) ? self.workingDir : "") == (has(oldSelf.workingDir) ? oldSelf.workingDir : "") && (has(self.restartPolicy) ? self.restartPolicy : "") == (has(oldSelf.restartPolicy) ? oldSelf.restartPolicy : "")`,message="command, args, env, workingDir and restartPolicy cannot be changed, as the container is made of them: delete the sandbox and create another",reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.resources) && has(self.resources.limits) ? self.resources.limits : {}) == (has(oldSelf.resources) && has(oldSelf.resources.limits) ? oldSelf.resources.limits : {}) && (has(self.resources) && has(self.resources.requests) ? self.resources.requests : {}) == (has(oldSelf.resources) && has(oldSelf.resources.requests) ? oldSelf.resources.requests : {})`,message="resources cannot be changed, as the container is made with them: delete the sandbox and create another",fieldPath=.resources,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.volumeMounts) ? self.volumeMounts : []) == (has(oldSelf.volumeMounts) ? oldSelf.volumeMounts : [])`,message="volumeMounts cannot be changed, as static volumes live as long as the sandbox: use dynamicVolumes",fieldPath=.volumeMounts,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`has(self.template) == has(oldSelf.template)`,message="template cannot be added or removed: delete the sandbox and create another",fieldPath=.template,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`has(self.template) || !has(self.volumeClaimTemplates) || size(self.volumeClaimTemplates) == 0`,message="volumeClaimTemplates are of a sandbox with template, as its Pod mounts them: use volumeMounts or dynamicVolumes",fieldPath=.volumeClaimTemplates,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.volumeClaimTemplates) ? self.volumeClaimTemplates : []) == (has(oldSelf.volumeClaimTemplates) ? oldSelf.volumeClaimTemplates : [])`,message="volumeClaimTemplates cannot be changed, as the claims are made from them: delete the sandbox and create another",fieldPath=.volumeClaimTemplates,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.runtimes) ? self.runtimes : []) == (has(oldSelf.runtimes) ? oldSelf.runtimes : [])`,message="runtimes cannot be changed: delete the sandbox and create another",fieldPath=.runtimes,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`has(self.template) || !has(self.runtimes) || size(self.runtimes) == 0`,message="runtimes are of a sandbox with template: leave them out",fieldPath=.runtimes,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`has(self.podRef) == has(oldSelf.podRef)`,message="podRef cannot be added or removed: delete the sandbox and create another",fieldPath=.podRef,reason=FieldValueForbidden
type SandboxSpec struct {
	// Group is the SandboxGroup whose capacity and policy the sandbox uses; "default" when empty. Immutable.
	// +kubebuilder:default=default
	// +optional
	Group GroupPart `json:"group,omitempty"`
	// SubGroup is the part of the group; the group's first when empty. Immutable.
	// +optional
	SubGroup GroupPart `json:"subGroup,omitempty"`
	// TenantID is the owner of the sandbox and of its data. In a Namespace with the label sandbox.flux.io/tenant-id it is
	// that tenant, also when it is left out. Immutable once it is set.
	// +optional
	TenantID TenantID `json:"tenantId,omitempty"`
	// Image is the container image; the sub-group's template's when empty. Immutable.
	// +optional
	Image Image `json:"image,omitempty"`
	// Command replaces the image's entrypoint, Args its arguments. Immutable.
	// +kubebuilder:validation:MaxItems=4096
	// +optional
	Command []string `json:"command,omitempty"`
	// Args are the arguments. Immutable.
	// +kubebuilder:validation:MaxItems=4096
	// +optional
	Args []string `json:"args,omitempty"`
	// Env is the environment of the process, added to the image's. Immutable.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=1024
	// +optional
	Env []EnvVar `json:"env,omitempty"`
	// WorkingDir is the process' working directory; the image's when empty. Immutable.
	// +kubebuilder:validation:MaxLength=4095
	// +kubebuilder:validation:XValidation:rule=`self in ["", '/'] || self.matches('^(/[^/\\p{Cc}]+)+$') && !self.matches('/[.]{1,2}(/|$)')`,message="the working directory is not valid: write a clean absolute path such as /work"
	// +optional
	WorkingDir string `json:"workingDir,omitempty"`
	// Resources bounds CPU and memory by limits (cpu, memory) and is accounted by requests. Immutable.
	// +kubebuilder:validation:XValidation:rule=`(!has(self.limits) || size(self.limits) == ('cpu' in self.limits ? 1 : 0) + ('memory' in self.limits ? 1 : 0)) && (!has(self.requests) || size(self.requests) == ('cpu' in self.requests ? 1 : 0) + ('memory' in self.requests ? 1 : 0))`,message="only cpu and memory can be set in limits and requests"
	// +optional
	Resources corev1.ResourceRequirements `json:"resources,omitempty"`
	// RestartPolicy is Always, OnFailure or Never; Always when empty. Immutable.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self in ["", 'Always', 'OnFailure', 'Never']`,messageExpression=`'restartPolicy "' + self + '" is not valid: write Always, OnFailure or Never'`
	// +optional
	RestartPolicy RestartPolicy `json:"restartPolicy,omitempty"`
	// Template makes the sandbox a Pod of its own name, owned by it (kubectl explain podtemplate.template). The images of its containers, and their CPU and memory,
	// can be changed: the Pod gets them in place, and a container whose image changed is restarted, with its volumes. The
	// rest is immutable.
	// +optional
	Template *corev1.PodTemplateSpec `json:"template,omitempty"`
	// VolumeClaimTemplates are claims that the sandbox has for itself, as a StatefulSet's: one named <template>-<sandbox>
	// of each, made before the Pod and mounted by every Pod of the sandbox. Each is the Pod's volume of the template's name
	// and has to be mounted by a container of template; a volume of that name in template is replaced. Only the name,
	// labels, annotations and spec are used. Immutable; only with template.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +optional
	VolumeClaimTemplates []corev1.PersistentVolumeClaim `json:"volumeClaimTemplates,omitempty"`
	// PersistentVolumeClaimRetentionPolicy says what becomes of the claims made from volumeClaimTemplates when the sandbox
	// goes; they are deleted with it when it is left out.
	// +optional
	PersistentVolumeClaimRetentionPolicy *PersistentVolumeClaimRetentionPolicy `json:"persistentVolumeClaimRetentionPolicy,omitempty"`
	// Runtimes are what a SandboxSet turned on for its sandboxes: with csi the sandbox may have dynamic volumes, whatever
	// its group says. Only who may create SandboxSets can set it (config/admission/runtimes.yaml). Immutable; only with
	// template.
	// +listType=set
	// +kubebuilder:validation:MaxItems=8
	// +optional
	Runtimes []RuntimeName `json:"runtimes,omitempty"`
	// PodRef makes the sandbox a Pod that somebody else owns and that is never deleted by us. Immutable.
	// +optional
	PodRef *PodReference `json:"podRef,omitempty"`
	// VolumeMounts are the static volumes: bound at creation, they live as long as the sandbox. Immutable.
	// +listType=map
	// +listMapKey=target
	// +kubebuilder:validation:MaxItems=32
	// +optional
	VolumeMounts []VolumeMount `json:"volumeMounts,omitempty"`
	// DynamicVolumes are attached and detached while the sandbox runs. A manifest that names them and is applied by the
	// client ("kubectl apply" without --server-side) replaces the list: what others added is detached. Leave them out of
	// such manifests, or apply them on the server side, which merges by target.
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
	// ConditionVolumeClaimsBound is True while every claim of volumeClaimTemplates is there and bound. A sandbox without
	// claim templates does not have it.
	ConditionVolumeClaimsBound = "VolumeClaimsBound"
	// ConditionUpdated is True once the Pod runs with the images, CPU and memory of a template that was changed. A sandbox
	// whose template is as it was created does not have it.
	ConditionUpdated = "Updated"
)

// SandboxStatus is what holds of a sandbox.
type SandboxStatus struct {
	// Phase is Pending, Running, Paused, Succeeded, Failed, Terminating or Lost.
	Phase SandboxPhase `json:"phase,omitempty"`
	// Reason says why, in a word for programs.
	Reason string `json:"reason,omitempty"`
	// Message says why, for people.
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
	// Conditions are Ready and Scheduled; VolumeClaimsBound of a sandbox with volumeClaimTemplates, Updated of one whose
	// template was changed.
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
// +kubebuilder:resource:shortName=sbx,categories=flux
// +kubebuilder:selectablefield:JSONPath=.spec.group
// +kubebuilder:selectablefield:JSONPath=.spec.subGroup
// +kubebuilder:selectablefield:JSONPath=.spec.tenantId
// +kubebuilder:selectablefield:JSONPath=.status.node
// +kubebuilder:selectablefield:JSONPath=.status.phase
// +kubebuilder:printcolumn:name=Status,type=string,JSONPath=.status.phase,description="Where the sandbox is in its life."
// +kubebuilder:printcolumn:name=Age,type=date,JSONPath=.metadata.creationTimestamp
// +kubebuilder:printcolumn:name=Group,type=string,priority=1,JSONPath=.spec.group
// +kubebuilder:printcolumn:name=Node,type=string,priority=1,JSONPath=.status.node
// +kubebuilder:printcolumn:name=Volumes,type=string,priority=1,JSONPath=.status.volumesReady,description="Mounted volumes, of all."
// +kubebuilder:printcolumn:name=Tenant,type=string,priority=1,JSONPath=.spec.tenantId
// +kubebuilder:printcolumn:name=Message,type=string,priority=1,JSONPath=.status.message
// +kubebuilder:validation:XValidation:rule=`self.metadata.name.size() <= 63 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')`,messageExpression=`'the name "' + self.metadata.name + '" is not valid: it becomes a host name; write at most 63 lower-case letters, digits and -'`,message="the name is not valid: it becomes a host name; write at most 63 lower-case letters, digits and -"
type Sandbox struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +kubebuilder:default={}
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
