package store

import "context"

// LateWriter is what a Writer can be besides: one that answers a write before it is durable. Everybody who reads sees
// the write then. It is durable no later than the next durable write of the same object, and soon; a crash before that
// takes it back, and nothing else. So it is for what follows from something else, and is made again by whoever makes it:
// for what was observed, never for an answer that must not be forgotten.
type LateWriter[T Object] interface {
	// UpdateSpecLate is UpdateSpec. What removes the object is durable before it is answered.
	UpdateSpecLate(ctx context.Context, key Key, pre Preconditions, change func(T) error) (T, error)
	// UpdateStatusLate is UpdateStatus.
	UpdateStatusLate(ctx context.Context, key Key, pre Preconditions, change func(T) error) (T, error)
}

// UpdateSpecLate is w's UpdateSpecLate; its UpdateSpec if it has none.
func UpdateSpecLate[T Object](ctx context.Context, w Writer[T], key Key, pre Preconditions, change func(T) error) (T, error) {
	if late, ok := w.(LateWriter[T]); ok {
		return late.UpdateSpecLate(ctx, key, pre, change)
	}
	return w.UpdateSpec(ctx, key, pre, change)
}

// UpdateStatusLate is w's UpdateStatusLate; its UpdateStatus if it has none.
func UpdateStatusLate[T Object](ctx context.Context, w Writer[T], key Key, pre Preconditions, change func(T) error) (T, error) {
	if late, ok := w.(LateWriter[T]); ok {
		return late.UpdateStatusLate(ctx, key, pre, change)
	}
	return w.UpdateStatus(ctx, key, pre, change)
}
