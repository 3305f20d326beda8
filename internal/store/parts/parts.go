// Package parts has what every backend must know of a kind of objects: how to take it apart into what UpdateSpec and
// what UpdateStatus write, so that code for all kinds can.
package parts

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Kind is one kind of objects.
type Kind[T store.Object] struct {
	store.Kind
	GVK schema.GroupVersionKind
	// Empty makes an object.
	Empty func() T
	// Spec and Status point to these parts of an object.
	Spec, Status func(T) any

	copySpec, copyStatus func(to, from T)
}

// The kinds.
var (
	Sandboxes = Kind[*v1alpha1.Sandbox]{
		Kind:       store.SandboxKind,
		GVK:        v1alpha1.GroupVersion.WithKind("Sandbox"),
		Empty:      func() *v1alpha1.Sandbox { return &v1alpha1.Sandbox{} },
		Spec:       func(o *v1alpha1.Sandbox) any { return &o.Spec },
		Status:     func(o *v1alpha1.Sandbox) any { return &o.Status },
		copySpec:   func(to, from *v1alpha1.Sandbox) { to.Spec = from.Spec },
		copyStatus: func(to, from *v1alpha1.Sandbox) { to.Status = from.Status },
	}
	Groups = Kind[*v1alpha1.SandboxGroup]{
		Kind:       store.GroupKind,
		GVK:        v1alpha1.GroupVersion.WithKind("SandboxGroup"),
		Empty:      func() *v1alpha1.SandboxGroup { return &v1alpha1.SandboxGroup{} },
		Spec:       func(o *v1alpha1.SandboxGroup) any { return &o.Spec },
		Status:     func(o *v1alpha1.SandboxGroup) any { return &o.Status },
		copySpec:   func(to, from *v1alpha1.SandboxGroup) { to.Spec = from.Spec },
		copyStatus: func(to, from *v1alpha1.SandboxGroup) { to.Status = from.Status },
	}
	Sets = Kind[*agentsv1alpha1.SandboxSet]{
		Kind:       store.SetKind,
		GVK:        agentsv1alpha1.GroupVersion.WithKind("SandboxSet"),
		Empty:      func() *agentsv1alpha1.SandboxSet { return &agentsv1alpha1.SandboxSet{} },
		Spec:       func(o *agentsv1alpha1.SandboxSet) any { return &o.Spec },
		Status:     func(o *agentsv1alpha1.SandboxSet) any { return &o.Status },
		copySpec:   func(to, from *agentsv1alpha1.SandboxSet) { to.Spec = from.Spec },
		copyStatus: func(to, from *agentsv1alpha1.SandboxSet) { to.Status = from.Status },
	}
	Claims = Kind[*agentsv1alpha1.SandboxClaim]{
		Kind:       store.ClaimKind,
		GVK:        agentsv1alpha1.GroupVersion.WithKind("SandboxClaim"),
		Empty:      func() *agentsv1alpha1.SandboxClaim { return &agentsv1alpha1.SandboxClaim{} },
		Spec:       func(o *agentsv1alpha1.SandboxClaim) any { return &o.Spec },
		Status:     func(o *agentsv1alpha1.SandboxClaim) any { return &o.Status },
		copySpec:   func(to, from *agentsv1alpha1.SandboxClaim) { to.Spec = from.Spec },
		copyStatus: func(to, from *agentsv1alpha1.SandboxClaim) { to.Status = from.Status },
	}
)

// TakeSpec gives an object another's spec and that metadata which a writer may change. It shares memory.
func (k Kind[T]) TakeSpec(to, from T) {
	k.copySpec(to, from)
	to.SetLabels(from.GetLabels())
	to.SetAnnotations(from.GetAnnotations())
	to.SetFinalizers(from.GetFinalizers())
	to.SetOwnerReferences(from.GetOwnerReferences())
}

// TakeStatus gives an object another's status. It shares memory.
func (k Kind[T]) TakeStatus(to, from T) { k.copyStatus(to, from) }

// SpecPart encodes as the members of an object that UpdateSpec writes.
func (k Kind[T]) SpecPart(o T) any {
	return struct {
		Metadata metav1.Object `json:"metadata"`
		Spec     any           `json:"spec"`
	}{metadata(o), k.Spec(o)}
}

// StatusPart encodes as the member of an object that UpdateStatus writes.
func (k Kind[T]) StatusPart(o T) any {
	return struct {
		Status any `json:"status"`
	}{k.Status(o)}
}

// metadata is the object's ObjectMeta.
func metadata(o store.Object) metav1.Object { return o.(metav1.ObjectMetaAccessor).GetObjectMeta() }
