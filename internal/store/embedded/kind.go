package embedded

import (
	"bytes"
	"encoding/json"

	utiljson "k8s.io/apimachinery/pkg/util/json"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/parts"
	"github.com/flux-sandbox/flux-sandbox/internal/store/patch"
)

type (
	sandbox = v1alpha1.Sandbox
	group   = v1alpha1.SandboxGroup
)

// kind is what the code for all kinds must know of one.
type kind[T store.Object] struct {
	parts.Kind[T]
	bucket []byte
}

var (
	sandboxKind = kind[*sandbox]{parts.Sandboxes, []byte("sandboxes")}
	groupKind   = kind[*group]{parts.Groups, []byte("groups")}
)

// encode gives an object its apiVersion and kind, and encodes it.
func (k kind[T]) encode(object T) ([]byte, error) {
	object.GetObjectKind().SetGroupVersionKind(k.GVK)
	return json.Marshal(object)
}

// decode decodes an object. Fields that this build does not know are left out; names are compared with
// their case, as Kubernetes does.
func (k kind[T]) decode(raw []byte) (T, error) {
	object := k.Empty()
	if err := utiljson.Unmarshal(raw, object); err != nil {
		return object, err
	}
	object.GetObjectKind().SetGroupVersionKind(k.GVK)
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
	x, err := json.Marshal(k.Spec(a))
	if err != nil {
		return false, err
	}
	y, err := json.Marshal(k.Spec(b))
	return !bytes.Equal(x, y), err
}
