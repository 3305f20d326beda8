package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// VolumeType says what kind of source a volume comes from.
type VolumeType string

// The volume types.
const (
	// VolumeTypeLocal is a directory of the node below a root that its operator allowed.
	VolumeTypeLocal VolumeType = "local"
	// VolumeTypePVC is a PersistentVolumeClaim; in standalone, a named volume.
	VolumeTypePVC VolumeType = "pvc"
	// VolumeTypePV is a PersistentVolume by name.
	VolumeTypePV VolumeType = "pv"
	// VolumeTypeSnapshot is a dataset or sandbox snapshot kept as an OCI image.
	VolumeTypeSnapshot VolumeType = "snapshot"
	// VolumeTypeOSS is an S3-compatible bucket or prefix.
	VolumeTypeOSS VolumeType = "oss"
)

// VolumeMode says whether a sandbox may write to a volume.
type VolumeMode string

// The volume modes.
const (
	VolumeModeReadOnly  VolumeMode = "ro"
	VolumeModeReadWrite VolumeMode = "rw"
)

// OnFailure says what becomes of an entry whose volume cannot be attached.
type OnFailure string

// The failure policies (design, ruling 10).
const (
	// OnFailureKeep keeps the entry, Failed with its reason; transient errors are retried with
	// backoff, permanent ones not before the spec changes. The default.
	OnFailureKeep OnFailure = "Keep"
	// OnFailureRemove rolls everything back, the entry too, and retries nothing. What was mounted once is kept, as by Keep.
	OnFailureRemove OnFailure = "Remove"
)

// Target is the path in a sandbox at which a volume is mounted: absolute, clean, at most 1,024 bytes, and outside of
// the directories that the system needs (package volume, DeniedTargets). Rules count characters where they cannot count
// bytes: a component of more than 255 bytes in fewer characters is refused by the scheduler.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=1024
// +kubebuilder:validation:XValidation:rule=`self == '/' || bytes(self).size() <= 1024 && self.matches('^(/[^/\\p{Cc}]+)+$') && !self.matches('/[.]{1,2}(/|$)') && !self.matches('[^/]{256}')`,message="the target is not valid: write a clean absolute path such as /data"
// +kubebuilder:validation:XValidation:rule=`!self.matches('^/((etc|proc|sys|dev|bin|sbin|usr|lib|lib32|lib64|libx32|boot|run/secrets|var/run/secrets)(/.*)?|run|var|var/run)?$')`,messageExpression=`'no volume may be mounted at ' + self + ': it is, is in, or contains a directory of the system; choose another directory such as /data'`,message="no volume may be mounted there: it is, is in, or contains a directory of the system; choose another directory such as /data",reason=FieldValueForbidden
type Target = string

// HostPath is a path on a node: absolute, clean, not /, at most 4,095 bytes.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=4095
// +kubebuilder:validation:XValidation:rule=`self != '/' && bytes(self).size() <= 4095 && self.matches('^(/[^/\\p{Cc}]+)+$') && !self.matches('/[.]{1,2}(/|$)') && !self.matches('[^/]{256}')`,message="the source is not valid: write a clean absolute path of the node such as /srv/data"
type HostPath = string

// RequestID is the id of a request: printable ASCII without spaces.
//
// +kubebuilder:validation:MaxLength=128
// +kubebuilder:validation:XValidation:rule=`self.matches('^[!-~]*$')`,message="the requestId is not valid: write at most 128 printable ASCII characters without spaces"
type RequestID = string

// TenantID is the name of a tenant, empty for none.
//
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:XValidation:rule=`self.matches('^[a-z0-9-]*$')`,message="the tenant is not valid: write 1 to 63 of the characters a-z, 0-9 and -"
type TenantID = string

// VolumeMount is a static volume: a local source bound when the sandbox is created.
type VolumeMount struct {
	// Source is an absolute path on the node, below an allowed root.
	Source HostPath `json:"source"`
	// Target is the absolute, clean path in the sandbox.
	Target Target `json:"target"`
	// Mode is ro or rw; rw when empty.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self in ["", 'ro', 'rw']`,messageExpression=`'mode "' + self + '" is not valid: write ro or rw'`
	// +kubebuilder:default=rw
	// +optional
	Mode VolumeMode `json:"mode,omitempty"`
}

// DynamicVolume is a volume that can be attached to and detached from a running sandbox. Entries are
// keyed by target. Everything but forceMount, onFailure and detach is immutable: to change a volume,
// remove its entry and add another. A new requestId makes an entry another one: the same volume, removed
// and added in one write, and tried from the beginning.
//
// +kubebuilder:validation:XValidation:rule=`self.volumeType != 'local' || self.source != '/' && self.source.matches('^(/[^/\\p{Cc}]+)+$') && !self.source.matches('/[.]{1,2}(/|$)') && !self.source.matches('[^/]{256}')`,message="the source of type local is not valid: write a clean absolute path of the node such as /srv/data",fieldPath=.source
// +kubebuilder:validation:XValidation:rule=`!(self.volumeType in ['pvc', 'pv']) || size(self.source) <= 253 && self.source.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')`,messageExpression=`'the source of type ' + self.volumeType + ' is not valid: write the name of a claim or volume (lower-case letters, digits, - and ., at most 253)'`,fieldPath=.source
// +kubebuilder:validation:XValidation:rule=`self.volumeType in ['local', 'pvc', 'pv'] || !self.source.matches('[\\p{Cc}\\p{Z}]')`,messageExpression=`'the source of type ' + self.volumeType + ' is not valid: write it without spaces and control characters'`,fieldPath=.source
// +kubebuilder:validation:XValidation:rule=`self.volumeType == oldSelf.volumeType`,messageExpression=`'volumeType of the volume at ' + self.target + ' cannot be changed: remove the volume and add it again'`,fieldPath=.volumeType,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`self.source == oldSelf.source`,messageExpression=`'source of the volume at ' + self.target + ' cannot be changed: remove the volume and add it again'`,fieldPath=.source,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.mode) && self.mode == 'ro') == (has(oldSelf.mode) && oldSelf.mode == 'ro')`,messageExpression=`'mode of the volume at ' + self.target + ' cannot be changed: remove the volume and add it again'`,fieldPath=.mode,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.subPath) ? self.subPath : "") == (has(oldSelf.subPath) ? oldSelf.subPath : "")`,messageExpression=`'subPath of the volume at ' + self.target + ' cannot be changed: remove the volume and add it again'`,fieldPath=.subPath,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`(has(self.sizeLimit) ? self.sizeLimit : "") == (has(oldSelf.sizeLimit) ? oldSelf.sizeLimit : "") || has(self.sizeLimit) && has(oldSelf.sizeLimit) && isQuantity(self.sizeLimit) && isQuantity(oldSelf.sizeLimit) && quantity(self.sizeLimit).compareTo(quantity(oldSelf.sizeLimit)) == 0`,messageExpression=`'sizeLimit of the volume at ' + self.target + ' cannot be changed: remove the volume and add it again'`,fieldPath=.sizeLimit,reason=FieldValueForbidden
// +kubebuilder:validation:XValidation:rule=`!has(self.tenantId) || !has(oldSelf.tenantId) || self.tenantId in ["", oldSelf.tenantId] || oldSelf.tenantId == ""`,messageExpression=`'tenantId of the volume at ' + self.target + ' cannot be changed: remove the volume and add it again'`,fieldPath=.tenantId,reason=FieldValueForbidden
type DynamicVolume struct {
	// VolumeType is local, pvc, pv, snapshot or oss.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self in ['local', 'pvc', 'pv', 'snapshot', 'oss']`,messageExpression=`'volumeType "' + self + '" is not known: write local, pvc, pv, snapshot or oss'`
	VolumeType VolumeType `json:"volumeType"`
	// Source names the data: a path, a claim, a volume, an image or a bucket, by volumeType.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4095
	// +kubebuilder:validation:XValidation:rule=`bytes(self).size() <= 4095`,message="the source is not valid: it has more than 4095 bytes"
	Source string `json:"source"`
	// Target is the absolute, clean path in the sandbox, at most 1,024 bytes.
	Target Target `json:"target"`
	// Mode is ro or rw; rw when empty.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self in ["", 'ro', 'rw']`,messageExpression=`'mode "' + self + '" is not valid: write ro or rw'`
	// +kubebuilder:default=rw
	// +optional
	Mode VolumeMode `json:"mode,omitempty"`
	// SizeLimit is the most that the volume may hold, as a Kubernetes quantity such as 50Gi. It is a
	// hard limit: where nothing can enforce it the volume is refused.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self == "" || self.matches('^[0-9]{1,19}([.][0-9]{1,19})?([KMGTPE]i|[kMGTPE]|[eE][+]?[0-9]{1,2})?$') && isQuantity(self) && quantity(self).compareTo(quantity('1Mi')) >= 0 && quantity(self).compareTo(quantity('1Ei')) <= 0 && (quantity(self).isInteger() || quantity(self).sub(int(quantity(self).asApproximateFloat())).compareTo(quantity('0')) == 0)`,messageExpression=`'size "' + self + '" is not valid: write a quantity of whole bytes from 1Mi to 1Ei such as 500Mi or 50Gi'`
	// +optional
	SizeLimit string `json:"sizeLimit,omitempty"`
	// TenantID is the tenant whose data it is; the sandbox's tenant when empty, and never another.
	// +optional
	TenantID TenantID `json:"tenantId,omitempty"`
	// SubPath is a directory inside the volume, relative to its root. It is never created.
	// +kubebuilder:validation:MaxLength=4095
	// +kubebuilder:validation:XValidation:rule=`self == "" || bytes(self).size() <= 4095 && self.matches('^[^/\\p{Cc}]+(/[^/\\p{Cc}]+)*$') && !self.matches('(^|/)[.]{1,2}(/|$)') && !self.matches('[^/]{256}')`,message="the subPath is not valid: write a clean relative path such as models/v1"
	// +optional
	SubPath string `json:"subPath,omitempty"`
	// ForceMount attaches a volume of another topology domain, with a warning.
	// +optional
	ForceMount bool `json:"forceMount,omitempty"`
	// OnFailure is Keep or Remove; Keep when empty.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self in ["", 'Keep', 'Remove']`,messageExpression=`'onFailure "' + self + '" is not valid: write Keep or Remove'`
	// +kubebuilder:default=Keep
	// +optional
	OnFailure OnFailure `json:"onFailure,omitempty"`
	// RequestID is the id of the request that added the entry, for its caller to find it again.
	// +optional
	RequestID RequestID `json:"requestId,omitempty"`
	// Detach asks for the volume to be detached, and the entry then to be deleted. It is cleared when
	// the volume is busy and detach.force is not set.
	// +optional
	Detach *DetachRequest `json:"detach,omitempty"`
}

// DetachRequest asks for a dynamic volume to be detached.
type DetachRequest struct {
	// Force detaches a volume that is in use: new look-ups no longer find it, open files go on.
	// +optional
	Force bool `json:"force,omitempty"`
	// RequestID is the id of the request, for its caller to find its result.
	// +optional
	RequestID RequestID `json:"requestId,omitempty"`
}

// VolumeKind tells static volumes from dynamic ones.
type VolumeKind string

// The volume kinds.
const (
	VolumeKindStatic  VolumeKind = "Static"
	VolumeKindDynamic VolumeKind = "Dynamic"
)

// VolumePhase is where a volume is in its life.
type VolumePhase string

// The volume phases.
const (
	VolumePending   VolumePhase = "Pending"
	VolumeAttaching VolumePhase = "Attaching"
	VolumeMounted   VolumePhase = "Mounted"
	VolumeDetaching VolumePhase = "Detaching"
	VolumeFailed    VolumePhase = "Failed"
)

// VolumePath is the way by which a volume's source was prepared on the node.
type VolumePath string

// The paths (design, section 7).
const (
	VolumePathLocal    VolumePath = "Local"
	VolumePathDirect   VolumePath = "Direct"
	VolumePathAnchor   VolumePath = "Anchor"
	VolumePathSnapshot VolumePath = "Snapshot"
	VolumePathFUSE     VolumePath = "FUSE"
)

// LimitEnforcement is what holds a volume to its sizeLimit.
type LimitEnforcement string

// The ways of holding a limit (design, section 7, "Size limits").
const (
	// LimitImage: the volume is a filesystem of its own, made at the limit's size.
	LimitImage LimitEnforcement = "Image"
	// LimitCapacity: the volume's filesystem is no larger than the limit.
	LimitCapacity LimitEnforcement = "Capacity"
	// LimitQuota: a project quota of the filesystem.
	LimitQuota LimitEnforcement = "Quota"
	// LimitBestEffort: nothing; the operator's policy allows it.
	LimitBestEffort LimitEnforcement = "BestEffort"
	// LimitNone: no limit was asked for.
	LimitNone LimitEnforcement = "None"
)

// AttachTime says when in a container's life its volume became visible.
type AttachTime string

// The attach times.
const (
	// AttachedBeforeStart: before the first instruction of the user's process.
	AttachedBeforeStart AttachTime = "BeforeStart"
	// AttachedAfterStart: it should have been there at the start, but came right after it.
	AttachedAfterStart AttachTime = "AfterStart"
	// AttachedLive: into the running process, as asked.
	AttachedLive AttachTime = "Live"
)

// DetachState is what is left of a detach that is not over.
type DetachState string

// The detach states.
const (
	// DetachBusy: the volume is in use and force was not asked for.
	DetachBusy DetachState = "Busy"
	// DetachLazy: detached, but processes still hold open files on it.
	DetachLazy DetachState = "Lazy"
	// DetachReleasePending: gone from the sandbox, its source not yet released.
	DetachReleasePending DetachState = "ReleasePending"
)

// Topology is how a volume's topology domain compares with its sandbox's.
type Topology string

// The topology results.
const (
	TopologyUnknown  Topology = "Unknown"
	TopologyMatch    Topology = "Match"
	TopologyMismatch Topology = "Mismatch"
	TopologyForced   Topology = "Forced"
)

// VolumeStatus is what holds of one volume: a row of status.volumes, and the answer of the RPCs.
type VolumeStatus struct {
	// Kind is Static or Dynamic.
	Kind       VolumeKind `json:"kind,omitempty"`
	VolumeType VolumeType `json:"volumeType,omitempty"`
	// Source is the spec's.
	Source string `json:"source,omitempty"`
	// Target is the spec's.
	Target string     `json:"target"`
	Mode   VolumeMode `json:"mode,omitempty"`
	// SizeLimit is the spec's.
	SizeLimit string `json:"sizeLimit,omitempty"`
	// TenantID is the tenant whose data it is: the spec's, or the sandbox's.
	TenantID string `json:"tenantId,omitempty"`
	// SubPath is the spec's.
	SubPath string `json:"subPath,omitempty"`
	// ForceMount is the spec's.
	ForceMount bool      `json:"forceMount,omitempty"`
	OnFailure  OnFailure `json:"onFailure,omitempty"`
	// RequestID is the id of the last request about the volume that was answered: the one that added
	// it, or the one that asked for its detach.
	RequestID string `json:"requestId,omitempty"`

	// EntryHash identifies the entry that this row speaks of: an entry that is removed and added
	// again has another.
	EntryHash string `json:"entryHash,omitempty"`
	// OperationID is the id of the last operation, as it stands in the logs of every component.
	OperationID string `json:"operationId,omitempty"`
	// ObservedGeneration is the generation of the sandbox that the row was made from.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Phase is Pending, Attaching, Mounted, Detaching or Failed.
	Phase VolumePhase `json:"phase,omitempty"`
	// Reason is a word in CamelCase or UPPER_SNAKE_CASE for programs.
	Reason string `json:"reason,omitempty"`
	// Message says the same for people.
	Message string `json:"message,omitempty"`
	// Since is when the phase was entered.
	Since metav1.Time `json:"since,omitempty"`
	// Attempts counts the failed attempts since the last success.
	Attempts int32 `json:"attempts,omitempty"`
	// NextRetryTime is when a transient failure is tried again.
	NextRetryTime *metav1.Time `json:"nextRetryTime,omitempty"`
	// PVCName is the claim whose volume it is.
	PVCName string `json:"pvcName,omitempty"`
	// PVName is the PersistentVolume that it is.
	PVName string `json:"pvName,omitempty"`
	// Path is the way by which the source was prepared.
	Path VolumePath `json:"path,omitempty"`
	// PathReason is why it was that way.
	PathReason string `json:"pathReason,omitempty"`
	// LimitEnforcement is what holds the volume to its sizeLimit.
	LimitEnforcement LimitEnforcement `json:"limitEnforcement,omitempty"`
	// CapacityBytes is the real size of the volume's filesystem where it is a filesystem of its own.
	CapacityBytes int64 `json:"capacityBytes,omitempty"`
	// Topology compares VolumeDomain with SandboxDomain.
	Topology Topology `json:"topology,omitempty"`
	// VolumeDomain is the topology domain of the volume, as far as it is known.
	VolumeDomain string `json:"volumeDomain,omitempty"`
	// SandboxDomain is that of the sandbox's node.
	SandboxDomain string `json:"sandboxDomain,omitempty"`
	// Attached is BeforeStart, AfterStart or Live.
	Attached AttachTime `json:"attached,omitempty"`
	// HasBeenMounted says that the volume was mounted for this entry, now or before: the request that added it has succeeded,
	// and onFailure Remove, which is about that request, does not apply any more.
	HasBeenMounted bool `json:"hasBeenMounted,omitempty"`
	// DetachState is Busy, Lazy or ReleasePending while a detach is not over.
	DetachState DetachState `json:"detachState,omitempty"`
	// Holders are processes that kept the volume busy when it was last asked to be detached.
	Holders []VolumeHolder `json:"holders,omitempty"`
}

// VolumeHolder is a process that uses a volume.
type VolumeHolder struct {
	// PID is the process id as the node sees it.
	PID int32 `json:"pid"`
	// Command is the name of its program.
	Command string `json:"command,omitempty"`
	// Kind is cwd, root, exe, fd, map or mount (a nested mount namespace).
	Kind string `json:"kind,omitempty"`
}
