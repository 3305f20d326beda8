package sets

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

var setGVK = agentsv1alpha1.GroupVersion.WithKind("SandboxSet")

// Revision is the revision of a set's spec: 8 hexadecimal digits.
func Revision(set *agentsv1alpha1.SandboxSet) (string, error) {
	data, err := json.Marshal(struct {
		Template  corev1.PodTemplateSpec
		Claims    []corev1.PersistentVolumeClaim
		Resources []string
	}{set.Spec.Template, set.Spec.VolumeClaimTemplates, runtimes(set)})
	if err != nil {
		return "", fmt.Errorf("encode the template of set %s/%s: %w", set.Namespace, set.Name, err)
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:4]), nil
}

// runtimes are the names of a set's runtimes, in one order whatever theirs is.
func runtimes(set *agentsv1alpha1.SandboxSet) []string {
	var names []string
	for _, r := range set.Spec.Runtimes {
		names = append(names, r.Name)
	}
	slices.Sort(names)
	return names
}

// HasCSI says whether a set's sandboxes may have dynamic volumes.
func HasCSI(set *agentsv1alpha1.SandboxSet) bool {
	return slices.Contains(runtimes(set), agentsv1alpha1.RuntimeCSI)
}

// NewSandbox is a sandbox of a set, as its pool has them.
func NewSandbox(set *agentsv1alpha1.SandboxSet, name, revision string) *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: set.Namespace, Name: name,
			Labels:          map[string]string{agentsv1alpha1.LabelSandboxSet: set.Name, agentsv1alpha1.LabelRevision: revision},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(set, setGVK)},
		},
		Spec: v1alpha1.SandboxSpec{
			Template:                             set.Spec.Template.DeepCopy(),
			VolumeClaimTemplates:                 set.DeepCopy().Spec.VolumeClaimTemplates,
			PersistentVolumeClaimRetentionPolicy: set.Spec.PersistentVolumeClaimRetentionPolicy.DeepCopy(),
			Runtimes:                             runtimes(set),
		},
	}
}

// InPool says whether a sandbox is one of the set's that nobody has claimed.
func InPool(set *agentsv1alpha1.SandboxSet, sb *v1alpha1.Sandbox) bool {
	return metav1.IsControlledBy(sb, set)
}

// Over says whether nothing more comes of a sandbox. One that was lost with its node is not over: its Pod is made again
// elsewhere, and a set that replaced it would have one too many then.
func Over(sb *v1alpha1.Sandbox) bool {
	return sb.Status.Phase == v1alpha1.SandboxFailed || sb.Status.Phase == v1alpha1.SandboxSucceeded
}

// Removing says whether the set has begun to remove a sandbox.
func Removing(sb *v1alpha1.Sandbox) bool {
	return sb.Annotations[agentsv1alpha1.AnnotationRemoving] != ""
}

// Used says whether a sandbox that nobody has claimed is not as its set made it any more: somebody has mounted a volume
// into it, or paused it, or changed its template. The API server counts such changes (metadata.generation), so it can be
// told also when all of them were taken back: what was left in it is nobody's to find. Or it has the label of a claim, and is
// none's.
func Used(sb *v1alpha1.Sandbox) bool {
	return sb.Generation > 1 || sb.Labels[agentsv1alpha1.LabelClaimName] != ""
}

// inUse says whether somebody still has something of a sandbox that nobody has claimed.
func inUse(sb *v1alpha1.Sandbox) bool {
	return len(sb.Spec.DynamicVolumes) > 0 || sb.Spec.Paused || sb.Spec.ShutdownTime != nil || sb.Labels[agentsv1alpha1.LabelClaimName] != ""
}

// Doomed says why a sandbox is to lose its data: the condition that tells that a claim of its own is gone, or goes with the
// Pod; nil for others.
func Doomed(sb *v1alpha1.Sandbox) *metav1.Condition {
	c := meta.FindStatusCondition(sb.Status.Conditions, v1alpha1.ConditionVolumeClaimsBound)
	if c == nil || !slices.Contains([]string{scheduler.ReasonClaimLost, scheduler.ReasonClaimTerminating, scheduler.ReasonClaimVolumeLost}, c.Reason) {
		return nil
	}
	return c
}

// Takable says whether a sandbox of a pool is as it was made, and can be given to a claim. It may not run yet.
func Takable(sb *v1alpha1.Sandbox) bool {
	return sb.DeletionTimestamp == nil && !Over(sb) && !Removing(sb) && !Used(sb) && Doomed(sb) == nil
}

// Available says whether a sandbox runs with all that it needs.
func Available(sb *v1alpha1.Sandbox) bool {
	return sb.DeletionTimestamp == nil && sb.Status.Phase == v1alpha1.SandboxRunning &&
		meta.IsStatusConditionTrue(sb.Status.Conditions, v1alpha1.ConditionReady)
}
