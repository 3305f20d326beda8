package convert

import (
	"maps"

	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// metadata is what the messages of objects have of them.
type metadata interface {
	GetNamespace() string
	GetName() string
	GetUid() string
	GetGeneration() int64
	GetResourceVersion() string
	GetCreationTime() *timestamppb.Timestamp
	GetDeletionTime() *timestamppb.Timestamp
	GetLabels() map[string]string
	GetAnnotations() map[string]string
}

func objectMeta(m metadata) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace:         m.GetNamespace(),
		Name:              m.GetName(),
		UID:               types.UID(m.GetUid()),
		Generation:        m.GetGeneration(),
		ResourceVersion:   m.GetResourceVersion(),
		CreationTimestamp: Time(m.GetCreationTime()),
		DeletionTimestamp: TimePtr(m.GetDeletionTime()),
		Labels:            maps.Clone(m.GetLabels()),
		Annotations:       maps.Clone(m.GetAnnotations()),
	}
}
