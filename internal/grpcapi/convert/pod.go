package convert

import (
	"encoding/json"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// podTemplate reads a template in JSON; nil for none. A field that Kubernetes does not know is an error.
func podTemplate(text string) (*corev1.PodTemplateSpec, error) {
	if text == "" {
		return nil, nil
	}
	var t corev1.PodTemplateSpec
	if err := yaml.UnmarshalStrict([]byte(text), &t); err != nil {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "spec.template is not the JSON of a PodTemplateSpec: %v", err)
	}
	return &t, nil
}

func podTemplateProto(t *corev1.PodTemplateSpec) string {
	if t == nil {
		return ""
	}
	return jsonOf(t)
}

func jsonOf(object any) string {
	text, err := json.Marshal(object)
	if err != nil {
		panic(err) // an API type of Kubernetes always has a JSON
	}
	return string(text)
}

// claimTemplates reads claim templates in JSON. A field that Kubernetes does not know is an error.
func claimTemplates(texts []string) ([]corev1.PersistentVolumeClaim, error) {
	var out []corev1.PersistentVolumeClaim
	for i, text := range texts {
		var c corev1.PersistentVolumeClaim
		if err := yaml.UnmarshalStrict([]byte(text), &c); err != nil {
			return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "spec.volumeClaimTemplates[%d] is not the JSON of a PersistentVolumeClaim: %v", i, err)
		}
		out = append(out, c)
	}
	return out, nil
}

func claimTemplateProto(c corev1.PersistentVolumeClaim) string { return jsonOf(c) }

func retentionPolicy(m *sandboxv1.ClaimRetentionPolicy) *v1alpha1.PersistentVolumeClaimRetentionPolicy {
	if m == nil {
		return nil
	}
	return &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: v1alpha1.RetentionPolicy(m.GetWhenDeleted()), WhenScaled: v1alpha1.RetentionPolicy(m.GetWhenScaled())}
}

func retentionPolicyProto(p *v1alpha1.PersistentVolumeClaimRetentionPolicy) *sandboxv1.ClaimRetentionPolicy {
	if p == nil {
		return nil
	}
	return &sandboxv1.ClaimRetentionPolicy{WhenDeleted: string(p.WhenDeleted), WhenScaled: string(p.WhenScaled)}
}

func podReference(m *sandboxv1.PodReference) *v1alpha1.PodReference {
	if m == nil {
		return nil
	}
	return &v1alpha1.PodReference{Name: m.GetName(), UID: types.UID(m.GetUid()), Container: m.GetContainer()}
}

func podReferenceProto(r *v1alpha1.PodReference) *sandboxv1.PodReference {
	if r == nil {
		return nil
	}
	return &sandboxv1.PodReference{Name: r.Name, Uid: string(r.UID), Container: r.Container}
}
