package kube

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

type (
	sandbox = v1alpha1.Sandbox
	group   = v1alpha1.SandboxGroup
)

// kind is what the code for all kinds must know of one.
type kind[T store.Object] struct {
	store.Kind
	gvk        schema.GroupVersionKind
	resource   string // its plural, as in URLs
	empty      func() T
	copySpec   func(to, from T) // shares memory
	copyStatus func(to, from T) // shares memory
	// The two parts that are written apart, so that a write compares its own part only.
	specPart, statusPart func(T) any
}

// specPart and statusPart encode as the members of an object that UpdateSpec and UpdateStatus write.
type (
	specPart struct {
		Metadata *metav1.ObjectMeta `json:"metadata"`
		Spec     any                `json:"spec"`
	}
	statusPart struct {
		Status any `json:"status"`
	}
)

var (
	sandboxKind = kind[*sandbox]{
		Kind:       store.SandboxKind,
		gvk:        v1alpha1.GroupVersion.WithKind("Sandbox"),
		resource:   "sandboxes",
		empty:      func() *sandbox { return &sandbox{} },
		copySpec:   func(to, from *sandbox) { to.Spec = from.Spec },
		copyStatus: func(to, from *sandbox) { to.Status = from.Status },
		specPart:   func(o *sandbox) any { return specPart{&o.ObjectMeta, &o.Spec} },
		statusPart: func(o *sandbox) any { return statusPart{&o.Status} },
	}
	groupKind = kind[*group]{
		Kind:       store.GroupKind,
		gvk:        v1alpha1.GroupVersion.WithKind("SandboxGroup"),
		resource:   "sandboxgroups",
		empty:      func() *group { return &group{} },
		copySpec:   func(to, from *group) { to.Spec = from.Spec },
		copyStatus: func(to, from *group) { to.Status = from.Status },
		specPart:   func(o *group) any { return specPart{&o.ObjectMeta, &o.Spec} },
		statusPart: func(o *group) any { return statusPart{&o.Status} },
	}
)

// copyMeta copies the metadata that a writer may change. It shares memory.
func copyMeta(to, from metav1.Object) {
	to.SetLabels(from.GetLabels())
	to.SetAnnotations(from.GetAnnotations())
	to.SetFinalizers(from.GetFinalizers())
	to.SetOwnerReferences(from.GetOwnerReferences())
}
