package kube

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// record is one state of an object: its JSON as the API server sent it, and what this build understands of it. It is
// never changed once it is decoded. It is a runtime.Object, so that client-go decodes the API server's answers and
// events into it.
type record[T store.Object] struct {
	object  T
	raw     []byte
	version uint64 // the resourceVersion
	// unreadable is why nothing but the metadata is understood of it; nil as a rule.
	unreadable error
}

// UnmarshalJSON implements json.Unmarshaler. What the API server accepts and this build cannot read (a quantity or a time that
// Go takes for none) makes that object unreadable, and is no error: it would be one of the list or the watch that all others
// are in.
func (r *record[T]) UnmarshalJSON(data []byte) error {
	object := reflect.New(reflect.TypeFor[T]().Elem()).Interface().(T)
	unreadable := utiljson.Unmarshal(data, object)
	if unreadable != nil {
		var meta metav1.PartialObjectMetadata
		if err := utiljson.Unmarshal(data, &meta); err != nil {
			return errors.Join(unreadable, err)
		}
		object = reflect.New(reflect.TypeFor[T]().Elem()).Interface().(T)
		object.SetNamespace(meta.Namespace)
		object.SetName(meta.Name)
		object.SetUID(meta.UID)
		object.SetResourceVersion(meta.ResourceVersion)
	}
	version, err := strconv.ParseUint(object.GetResourceVersion(), 10, 64)
	if err != nil {
		return fmt.Errorf("%s has the resourceVersion %q, which is no number as Kubernetes gives it", store.KeyOf(object), object.GetResourceVersion())
	}
	// They are half of many objects, and nobody here reads them. The JSON keeps them.
	object.SetManagedFields(nil)
	*r = record[T]{object: object, raw: bytes.Clone(data), version: version, unreadable: unreadable}
	return nil
}

func (r *record[T]) key() store.Key { return store.KeyOf(r.object) }
func (r *record[T]) uid() types.UID { return r.object.GetUID() }

// gone says that this is the last state of an object, which a write returns that removed the last finalizer.
func (r *record[T]) gone() bool {
	return r.object.GetDeletionTimestamp() != nil && len(r.object.GetFinalizers()) == 0
}

// GetObjectMeta implements metav1.ObjectMetaAccessor.
func (r *record[T]) GetObjectMeta() metav1.Object { return r.object }

// GetObjectKind implements runtime.Object. The kind is in the object and stays as it is.
func (r *record[T]) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject implements runtime.Object. A record is never changed, so it is its own copy.
func (r *record[T]) DeepCopyObject() runtime.Object { return r }

// recordList is a list of records, as the API server sends it.
type recordList[T store.Object] struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []*record[T] `json:"items"`
}

// DeepCopyObject implements runtime.Object.
func (l *recordList[T]) DeepCopyObject() runtime.Object {
	copied := *l
	return &copied
}

// scheme has the kinds as records.
func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	addKind(s, sandboxKind)
	addKind(s, groupKind)
	addKind(s, setKind)
	addKind(s, claimKind)
	metav1.AddToGroupVersion(s, v1alpha1.GroupVersion)
	metav1.AddToGroupVersion(s, agentsv1alpha1.GroupVersion)
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	return s
}

func addKind[T store.Object](s *runtime.Scheme, k kind[T]) {
	s.AddKnownTypeWithName(k.GVK, &record[T]{})
	s.AddKnownTypeWithName(k.GVK.GroupVersion().WithKind(k.GVK.Kind+"List"), &recordList[T]{})
}

var (
	scheme         = newScheme()
	codecs         = serializer.NewCodecFactory(scheme).WithoutConversion()
	parameterCodec = runtime.NewParameterCodec(scheme)
)
