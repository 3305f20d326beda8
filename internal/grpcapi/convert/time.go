package convert

import (
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Time makes a time of its message; the zero time of nil.
func Time(m *timestamppb.Timestamp) metav1.Time {
	if m == nil {
		return metav1.Time{}
	}
	return metav1.NewTime(m.AsTime())
}

// TimePtr makes a time of its message; nil of nil.
func TimePtr(m *timestamppb.Timestamp) *metav1.Time {
	if m == nil {
		return nil
	}
	t := Time(m)
	return &t
}

// TimeProto is the reverse of TimePtr.
func TimeProto(t *metav1.Time) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	return timestamppb.New(t.Time)
}

func timeProto(t metav1.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t.Time)
}

func durationPtr(m *durationpb.Duration) *metav1.Duration {
	if m == nil {
		return nil
	}
	return &metav1.Duration{Duration: m.AsDuration()}
}

func durationProto(d *metav1.Duration) *durationpb.Duration {
	if d == nil {
		return nil
	}
	return durationpb.New(d.Duration)
}

// each converts every element; nil of an empty list.
func each[A, B any](in []A, f func(A) B) []B {
	if len(in) == 0 {
		return nil
	}
	out := make([]B, len(in))
	for i, a := range in {
		out[i] = f(a)
	}
	return out
}
