package grpcapi

import (
	"cmp"
	"context"
	"log/slog"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// The resources of Access beside sandboxes.
const (
	ResourceSets   = "sandboxsets"
	ResourceClaims = "sandboxclaims"
)

// Pools are the SandboxSets and SandboxClaims of a cluster.
type Pools struct {
	Sets   store.Objects[*agentsv1alpha1.SandboxSet]
	Claims store.Objects[*agentsv1alpha1.SandboxClaim]
}

// pools are the pools, for a caller who may do that to them. Whose a set or a claim is only its Namespace says, so a caller
// whom nothing but a tenant restricts may do nothing to any.
func (s *Server) pools(ctx context.Context, access Access) (*Pools, error) {
	tenant, err := s.permit(ctx, access)
	switch {
	case err != nil:
		return nil, err
	case s.options.Authorizer == nil && tenant != "":
		return nil, fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch, "%s have no tenant, and the caller acts for the tenant %q", access.Resource, tenant)
	case s.options.Pools == nil:
		return nil, fault.New(errdefs.ErrNotImplemented, fault.NotAvailable,
			"SandboxSets and SandboxClaims are for Kubernetes, and this server is standalone: make a sandbox with: fluxctl run")
	}
	return s.options.Pools()
}

// poolKey checks what a request names.
func poolKey(ctx context.Context, kind store.Kind, namespace, name string) (store.Key, error) {
	key := store.Key{Namespace: cmp.Or(namespace, DefaultNamespace), Name: name}
	annotate(ctx, slog.String("kind", kind.String()), slog.String("object", key.String()))
	if name == "" {
		return key, invalid("the request names no %s: set name (and namespace)", kind)
	}
	return key, kind.CheckKey(key)
}

// poolList is what the requests to list sets and claims have in common.
type poolList interface {
	GetNamespace() string
	GetLabelSelector() string
	GetPageSize() int32
	GetPageToken() string
}

// listPage lists objects by namespace and name. A page ends before it is too large for a message.
func listPage[T store.Object, M proto.Message](ctx context.Context, req poolList, from store.Reader[T], message func(T) M) ([]M, string, error) {
	size, err := pageSize(req.GetPageSize(), defaultSandboxPage, maxSandboxPage)
	if err != nil {
		return nil, "", err
	}
	options := store.ListOptions{Namespace: req.GetNamespace(), Continue: req.GetPageToken(), Limit: size}
	if req.GetLabelSelector() != "" {
		if options.Labels, err = labels.Parse(req.GetLabelSelector()); err != nil {
			return nil, "", invalid("label_selector %q is not valid: %v", req.GetLabelSelector(), err)
		}
	}
	page, err := from.List(ctx, options)
	if err != nil {
		return nil, "", err
	}
	var out []M
	bytes := 0
	for i, object := range page.Items {
		m := message(object)
		if bytes += proto.Size(m); bytes > maxPageBytes && len(out) > 0 {
			return out, store.After(page.Items[i-1]), nil
		}
		out = append(out, m)
	}
	return out, page.Continue, nil
}

// deleteOwner deletes a set or claim, and if asked waits until the sandboxes that it owned are gone.
func deleteOwner[T store.Object](ctx context.Context, s *Server, from store.Objects[T], key store.Key, wait bool) error {
	owner, err := from.Get(ctx, key)
	if err != nil {
		return err
	}
	waitCtx, cancel := s.waiting(ctx)
	defer cancel()
	if err := from.Delete(ctx, key, store.Preconditions{UID: owner.GetUID()}); err != nil || !wait {
		return err
	}
	return s.untilOwnedGone(ctx, waitCtx, key.Namespace, owner.GetUID())
}

// untilOwnedGone waits until no sandbox is left that a set or claim owned, which is deleted already.
func (s *Server) untilOwnedGone(ctx, waitCtx context.Context, namespace string, owner types.UID) error {
	page, err := s.store.Sandboxes().List(ctx, store.ListOptions{Namespace: namespace})
	if err != nil {
		return err
	}
	for _, sb := range page.Items {
		if ref := metav1.GetControllerOf(sb); ref == nil || ref.UID != owner {
			continue
		}
		gone := func(now *v1alpha1.Sandbox) (bool, error) { return now == nil, nil }
		if err := s.waitPhase(ctx, waitCtx, &sb, "gone", gone); err != nil {
			return err
		}
	}
	return nil
}
