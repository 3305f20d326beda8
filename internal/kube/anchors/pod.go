package anchors

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

const (
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "flux-sandbox-controller"
	namePrefix     = "flux-anchor-"
	// goesOn is how long an anchor that somebody deletes goes on, for its successor to come; goesOnAlone that of a volume that
	// is one Pod's, whose successor has to wait for its end. graceSeconds keeps kubelet from ending it before.
	goesOn, goesOnAlone = 30 * time.Second, time.Second
	graceSeconds        = 3600
	volumeName          = "volume"
	// AnnotationAbout tells a person who finds an anchor what it is.
	AnnotationAbout = "sandbox.flux.io/about"

	about = "This Pod has kubelet mount the claim on this node for sandboxes. It does nothing else, and goes when none uses the claim here any more. " +
		"Deleted meanwhile, it is replaced."
)

// podOf is the anchor of a claim on a node.
func podOf(w Want, image string, pullSecrets []string) *corev1.Pod {
	annotations := map[string]string{AnnotationAbout: about}
	if w.Sandbox != "" {
		annotations[v1alpha1.AnnotationAnchorSandbox] = w.Sandbox
	}
	user, wait := int64(65532), goesOn
	if w.Sandbox != "" {
		wait = goesOnAlone
	}
	var secrets []corev1.LocalObjectReference
	for _, name := range pullSecrets {
		secrets = append(secrets, corev1.LocalObjectReference{Name: name})
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.Claim.Namespace, GenerateName: namePrefix, Annotations: annotations,
			Labels: map[string]string{
				"app.kubernetes.io/name": "flux-sandbox-anchor", labelManagedBy: managedBy,
				v1alpha1.LabelAnchor: labelOf(w.Claim.Name),
			},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "PersistentVolumeClaim", Name: w.Claim.Name, UID: w.Claim.UID}},
		},
		Spec: corev1.PodSpec{
			Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
					{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{w.Node}}}}},
			}}},
			Tolerations:                   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			RestartPolicy:                 corev1.RestartPolicyAlways,
			TerminationGracePeriodSeconds: ptr.To(int64(graceSeconds)),
			AutomountServiceAccountToken:  ptr.To(false),
			EnableServiceLinks:            ptr.To(false),
			ImagePullSecrets:              secrets,
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot: ptr.To(true), RunAsUser: &user, RunAsGroup: &user,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{{
				Name: "anchor", Image: image, Command: []string{"/flux-sandbox-init", "-wait", wait.String()},
				Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1m"), corev1.ResourceMemory: resource.MustParse("4Mi")},
					Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("32Mi")},
				},
				// kubelet mounts only what a container has.
				VolumeMounts: []corev1.VolumeMount{{Name: volumeName, MountPath: "/volume", ReadOnly: true}},
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true),
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
			Volumes: []corev1.Volume{{Name: volumeName, VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: w.Claim.Name, ReadOnly: w.ReadOnly}}}},
		},
	}
}

// labelOf is a claim's name as a label takes it. Which claim it is, the Pod's volume says.
func labelOf(claim string) string {
	const most = 63
	if len(claim) > most {
		claim = claim[:most]
	}
	return strings.TrimRight(claim, "-.")
}
