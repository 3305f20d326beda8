package embedded

import (
	"bytes"
	"encoding/json"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/patch"
)

type (
	sandbox = v1alpha1.Sandbox
	group   = v1alpha1.SandboxGroup
)

// kind is what the code for all kinds must know of one.
type kind[T store.Object] struct {
	store.Kind
	bucket     []byte
	gvk        schema.GroupVersionKind
	empty      func() T
	copySpec   func(to, from T) // shares memory
	copyStatus func(to, from T) // shares memory
	spec       func(T) any
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
		bucket:     []byte("sandboxes"),
		gvk:        v1alpha1.GroupVersion.WithKind("Sandbox"),
		empty:      func() *sandbox { return &sandbox{} },
		copySpec:   func(to, from *sandbox) { to.Spec = from.Spec },
		spec:       func(o *sandbox) any { return &o.Spec },
		copyStatus: func(to, from *sandbox) { to.Status = from.Status },
		specPart:   func(o *sandbox) any { return specPart{&o.ObjectMeta, &o.Spec} },
		statusPart: func(o *sandbox) any { return statusPart{&o.Status} },
	}
	groupKind = kind[*group]{
		Kind:       store.GroupKind,
		bucket:     []byte("groups"),
		gvk:        v1alpha1.GroupVersion.WithKind("SandboxGroup"),
		empty:      func() *group { return &group{} },
		copySpec:   func(to, from *group) { to.Spec = from.Spec },
		spec:       func(o *group) any { return &o.Spec },
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

// encode gives an object its apiVersion and kind, and encodes it.
func (k kind[T]) encode(object T) ([]byte, error) {
	object.GetObjectKind().SetGroupVersionKind(k.gvk)
	return json.Marshal(object)
}

// decode decodes an object. Fields that this build does not know are left out; names are compared with
// their case, as Kubernetes does.
func (k kind[T]) decode(raw []byte) (T, error) {
	object := k.empty()
	if err := utiljson.Unmarshal(raw, object); err != nil {
		return object, err
	}
	object.GetObjectKind().SetGroupVersionKind(k.gvk)
	return object, nil
}

// read makes a state of a stored object.
func (k kind[T]) read(raw []byte) (*state[T], error) {
	object, err := k.decode(raw)
	if err != nil {
		return &state[T]{object: object}, err
	}
	s := &state[T]{object: object, raw: raw}
	plain, err := k.encode(object)
	if err != nil {
		return s, err
	}
	if bytes.Equal(plain, raw) || patch.Equal(plain, raw) {
		s.raw, s.plain = plain, true
	}
	return s, nil
}

// specDiffers says whether the specs of two objects are stored differently.
func (k kind[T]) specDiffers(a, b T) (bool, error) {
	x, err := json.Marshal(k.spec(a))
	if err != nil {
		return false, err
	}
	y, err := json.Marshal(k.spec(b))
	return !bytes.Equal(x, y), err
}
