package claims

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

var claimGVK = agentsv1alpha1.GroupVersion.WithKind("SandboxClaim")

// apply makes a sandbox the claim's, with all that the claim gives it while it may run already.
func apply(claim *agentsv1alpha1.SandboxClaim, sb *v1alpha1.Sandbox) {
	sb.OwnerReferences = slices.DeleteFunc(sb.OwnerReferences, func(r metav1.OwnerReference) bool { return r.Controller != nil && *r.Controller })
	sb.OwnerReferences = append(sb.OwnerReferences, *metav1.NewControllerRef(claim, claimGVK))
	sb.Labels = merged(sb.Labels, claim.Spec.Labels)
	sb.Labels[agentsv1alpha1.LabelClaimName] = claim.Name
	if len(claim.Spec.Annotations) > 0 {
		sb.Annotations = merged(sb.Annotations, claim.Spec.Annotations)
	}
	sb.Spec.DynamicVolumes = append(sb.Spec.DynamicVolumes, entries(claim)...)
	if t := claim.Spec.ShutdownTime; t != nil {
		sb.Spec.ShutdownTime = t.DeepCopy()
	}
	if u := claim.Spec.InplaceUpdate; u != nil && sb.Spec.Template != nil {
		update(u, sb.Spec.Template)
	}
}

// update changes the container that gets the volumes: its image, and those of its resources that are named.
func update(u *agentsv1alpha1.InplaceUpdate, template *corev1.PodTemplateSpec) {
	i := mainOf(template)
	if i < 0 {
		return
	}
	c := &template.Spec.Containers[i]
	if u.Image != "" {
		c.Image = u.Image
	}
	if r := u.Resources; r != nil {
		c.Resources.Limits, c.Resources.Requests = overlaid(c.Resources.Limits, r.Limits), overlaid(c.Resources.Requests, r.Requests)
	}
}

func overlaid(to, from corev1.ResourceList) corev1.ResourceList {
	if len(from) == 0 {
		return to
	}
	all := maps.Clone(to)
	if all == nil {
		all = corev1.ResourceList{}
	}
	maps.Copy(all, from)
	return all
}

// mainOf is the container of a Pod that gets the volumes; -1 for none.
func mainOf(template *corev1.PodTemplateSpec) int {
	i := slices.IndexFunc(template.Spec.Containers, func(c corev1.Container) bool { return c.Name == template.Annotations[v1alpha1.AnnotationContainer] })
	if i < 0 && len(template.Spec.Containers) > 0 {
		return 0
	}
	return i
}

func merged(to, from map[string]string) map[string]string {
	all := maps.Clone(to)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, from)
	return all
}

// entries are the volumes that a claim asks for.
func entries(claim *agentsv1alpha1.SandboxClaim) []v1alpha1.DynamicVolume {
	var all []v1alpha1.DynamicVolume
	for _, m := range claim.Spec.DynamicVolumesMount {
		mode := v1alpha1.VolumeModeReadWrite
		if m.ReadOnly {
			mode = v1alpha1.VolumeModeReadOnly
		}
		all = append(all, v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePV, Source: m.PVName, Target: m.MountPath, SubPath: m.SubPath,
			Mode: mode, OnFailure: v1alpha1.OnFailureKeep})
	}
	return all
}

// onlyFresh says whether what the claim asks for can only be given to a sandbox that is made for it: a process that runs
// gets no other environment.
func onlyFresh(claim *agentsv1alpha1.SandboxClaim) bool { return len(claim.Spec.EnvVars) > 0 }

// tailor gives a sandbox that is not made yet what one that runs cannot be given.
func tailor(claim *agentsv1alpha1.SandboxClaim, sb *v1alpha1.Sandbox, nodes []*corev1.NodeSelector) {
	pod := &sb.Spec.Template.Spec
	for i := range pod.Containers {
		pod.Containers[i].Env = withEnv(pod.Containers[i].Env, claim.Spec.EnvVars)
	}
	for _, n := range nodes {
		require(pod, n)
	}
}

// withEnv is an environment with variables added, in the order of their names, in place of those of the same name.
func withEnv(env []corev1.EnvVar, more map[string]string) []corev1.EnvVar {
	env = slices.DeleteFunc(slices.Clone(env), func(e corev1.EnvVar) bool { _, is := more[e.Name]; return is })
	for _, name := range slices.Sorted(maps.Keys(more)) {
		env = append(env, corev1.EnvVar{Name: name, Value: more[name]})
	}
	return env
}

// maxTerms bounds the node affinity of a Pod. What does not fit is left out: the volume's own check has the last word.
const maxTerms = 64

// require restricts a Pod to the nodes of a selector, too. Terms are alternatives, so those of both sides are combined.
func require(pod *corev1.PodSpec, n *corev1.NodeSelector) {
	if n == nil || len(n.NodeSelectorTerms) == 0 {
		return
	}
	if pod.Affinity == nil {
		pod.Affinity = &corev1.Affinity{}
	}
	if pod.Affinity.NodeAffinity == nil {
		pod.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	of := pod.Affinity.NodeAffinity
	if of.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		of.RequiredDuringSchedulingIgnoredDuringExecution = n.DeepCopy()
		return
	}
	have := of.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	if len(have)*len(n.NodeSelectorTerms) > maxTerms {
		return
	}
	var both []corev1.NodeSelectorTerm
	for _, a := range have {
		for _, b := range n.NodeSelectorTerms {
			both = append(both, corev1.NodeSelectorTerm{
				MatchExpressions: slices.Concat(a.MatchExpressions, b.MatchExpressions),
				MatchFields:      slices.Concat(a.MatchFields, b.MatchFields),
			})
		}
	}
	of.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms = both
}

// nameOf is the name of the n-th sandbox that is made for a claim: as random as others, and the same each time.
func nameOf(set string, claim types.UID, n int) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d", claim, n))
	return set + "-" + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:agentsv1alpha1.RandomSuffix]
}
