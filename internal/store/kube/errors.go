package kube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// ended is the error of a call whose context ended before it did anything.
func (c *collection[T]) ended(verb string, key store.Key, cause error) error {
	return fmt.Errorf("%s %s %s: %w", verb, c.kind, key, cause)
}

// writeFault is fault for a write, whose outcome may be open.
func (c *collection[T]) writeFault(ctx context.Context, verb string, key store.Key, err error) error {
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return store.OpenOutcome(fmt.Sprintf("%s %s %s", verb, c.kind, key), ctx.Err())
	}
	if open(err) {
		return fault.New(errdefs.ErrUnavailable, store.Unavailable,
			"%s %s %s: the API server gave no answer, the write may still take effect: %w", verb, c.kind, key, err)
	}
	return c.fault(ctx, verb, key, err)
}

// open says that a request may have taken effect although it failed.
func open(err error) bool {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return status.Status().Code >= 500
	}
	var op *net.OpError
	return !errors.As(err, &op) || op.Op != "dial"
}

// fault gives an error of the API server its kind and reason.
func (c *collection[T]) fault(ctx context.Context, verb string, key store.Key, err error) error {
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return c.ended(verb, key, ctx.Err())
	}
	refuse := func(kind error, reason fault.Reason, why string) error {
		return fault.New(kind, reason, "%s %s %s: %s", verb, c.kind, key, why)
	}
	details := &metav1.StatusDetails{}
	var status apierrors.APIStatus
	if errors.As(err, &status) && status.Status().Details != nil {
		details = status.Status().Details
	}
	switch {
	case apierrors.IsNotFound(err):
		switch {
		case details.Kind == "namespaces":
			return refuse(errdefs.ErrFailedPrecondition, store.NoNamespace, "there is no Namespace "+key.Namespace+": create it first")
		case details.Name == "":
			return refuse(errdefs.ErrUnavailable, store.Unavailable, "the API server does not know the kind: install the CRDs of config/crd")
		}
		return c.kind.NotFound(key)
	case apierrors.IsAlreadyExists(err):
		return c.kind.Exists(key)
	case apierrors.IsConflict(err):
		return refuse(errdefs.ErrConflict, fault.Conflict, sentence(err))
	case apierrors.IsRequestEntityTooLargeError(err), strings.Contains(err.Error(), "request is too large"): // etcd's words
		return refuse(errdefs.ErrInvalidArgument, store.TooLarge, "it is larger than the API server takes: shorten its annotations, environment or messages")
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return refuse(errdefs.ErrInvalidArgument, fault.InvalidRequest, sentence(err))
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return refuse(errdefs.ErrFailedPrecondition, store.NoNamespace, "the Namespace "+key.Namespace+" is being deleted")
	case apierrors.IsForbidden(err):
		return refuse(errdefs.ErrPermissionDenied, store.Forbidden, sentence(err))
	}
	return fault.New(errdefs.ErrUnavailable, store.Unavailable, "%s %s %s: %w", verb, c.kind, key, err)
}

// sentence is what the API server says of why it refused something: the causes, if it names them, else the whole.
// What admission policies write before their message is left out.
func sentence(err error) string {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return err.Error()
	}
	s := status.Status()
	if s.Details != nil {
		var causes []string
		for _, cause := range s.Details.Causes {
			m := afterPolicy(cause.Message)
			if cause.Field != "" {
				m = cause.Field + ": " + m
			}
			if !slices.Contains(causes, m) { // each part of the API server that looks at it may say so
				causes = append(causes, m)
			}
		}
		if len(causes) > 0 {
			return strings.Join(causes, "; ")
		}
	}
	return afterPolicy(s.Message)
}

func afterPolicy(message string) string {
	if _, after, ok := strings.Cut(message, " denied request: "); ok {
		return after
	}
	return message
}
