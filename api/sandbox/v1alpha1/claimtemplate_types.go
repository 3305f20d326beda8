package v1alpha1

import corev1 "k8s.io/api/core/v1"

const (
	// LabelSandboxUID is on every claim that a Sandbox has of its volumeClaimTemplates, with the Sandbox's UID: it says whose
	// the claim is, also when there is no ownerReference (Retain). LabelSandbox is beside it, with the name.
	LabelSandboxUID = "sandbox.flux.io/sandbox-uid"
	// LabelAdopt, on a claim that somebody else made, names the Sandbox that may use it as that of its volumeClaimTemplates
	// (<template>-<sandbox>). Without it a claim of that name is refused. A claim that is used so is never deleted with its
	// sandbox, whatever the retention policy says.
	LabelAdopt = "sandbox.flux.io/adopt"
	// MaxClaimTemplates is the most volumeClaimTemplates that a sandbox may have.
	MaxClaimTemplates = 16
)

// RetentionPolicy says what becomes of the claims made from volumeClaimTemplates.
type RetentionPolicy string

// The retention policies.
const (
	// RetentionDelete deletes the claims with their sandbox. What the StorageClass says (reclaimPolicy) becomes of the data.
	RetentionDelete RetentionPolicy = "Delete"
	// RetentionRetain leaves the claims where they are.
	RetentionRetain RetentionPolicy = "Retain"
)

// PersistentVolumeClaimRetentionPolicy says what becomes of the claims made from volumeClaimTemplates when their sandbox
// goes.
type PersistentVolumeClaimRetentionPolicy struct {
	// WhenDeleted is for the deletion of the Sandbox: Delete or Retain; Delete when empty.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self in ["", 'Delete', 'Retain']`,messageExpression=`'whenDeleted "' + self + '" is not valid: write Delete or Retain'`
	// +kubebuilder:default=Delete
	// +optional
	WhenDeleted RetentionPolicy `json:"whenDeleted,omitempty"`
	// WhenScaled is for the deletion of the Sandbox by what keeps a number of them, when it is one too many: Delete or
	// Retain; Delete when empty. The sandbox alone cannot tell the two: who scales down writes the value to whenDeleted
	// before it deletes.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self in ["", 'Delete', 'Retain']`,messageExpression=`'whenScaled "' + self + '" is not valid: write Delete or Retain'`
	// +kubebuilder:default=Delete
	// +optional
	WhenScaled RetentionPolicy `json:"whenScaled,omitempty"`
}

// Deleted is what becomes of the claims when the Sandbox is deleted: Delete unless something else was asked for.
func (p *PersistentVolumeClaimRetentionPolicy) Deleted() RetentionPolicy {
	if p == nil || p.WhenDeleted == "" {
		return RetentionDelete
	}
	return p.WhenDeleted
}

// Scaled is the same for a Sandbox that is one too many.
func (p *PersistentVolumeClaimRetentionPolicy) Scaled() RetentionPolicy {
	if p == nil || p.WhenScaled == "" {
		return RetentionDelete
	}
	return p.WhenScaled
}

// ClaimName is the name of the claim that a sandbox has of a claim template.
func ClaimName(template *corev1.PersistentVolumeClaim, sandbox string) string {
	return template.Name + "-" + sandbox
}
