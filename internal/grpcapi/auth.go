package grpcapi

import (
	"context"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Identity is who calls.
type Identity struct {
	// Name is for logs.
	Name string
	// Tenant restricts the caller to the sandboxes of one tenant; an operator of everything when empty. An Authorizer
	// has the say instead where there is one.
	Tenant string
	// UID, Groups and Extra are what an Authorizer may want to know besides.
	UID    string
	Groups []string
	Extra  map[string][]string
}

// Access is what a call does to sandboxes, or to sets and claims of them, in the words of Kubernetes' RBAC.
type Access struct {
	// Verb is get, list, watch, create, update or delete.
	Verb string
	// Resource is empty for sandboxes, or ResourceSets or ResourceClaims.
	Resource string
	// Subresource is empty for sandboxes themselves, or volumes, exec, log, or node for what concerns a node as a
	// whole.
	Subresource string
	// Namespace is empty for all of them.
	Namespace string
	// Name is the object's; empty for none in particular.
	Name string
}

// Authorizer says what callers may do, where that is not settled by who they are. It is asked before anything is
// looked up, and for a sandbox that is named by its UID alone as soon as its namespace is known.
type Authorizer interface {
	// Authorize returns the tenant that the caller acts for in the namespace; empty for any. Its error ends the call;
	// it should be of the kind ErrPermissionDenied.
	Authorize(ctx context.Context, caller Identity, access Access) (tenant string, err error)
}

// Authenticator says who calls. It is asked once per call, with the call's context, which carries gRPC's
// peer and metadata. Its error ends the call; it should be of the kind ErrUnauthenticated.
type Authenticator interface {
	Authenticate(ctx context.Context) (Identity, error)
}

// SocketPermissions is the Authenticator of standalone: whoever the permissions of the socket's file let
// open it is the operator.
type SocketPermissions struct{}

// Authenticate never fails.
func (SocketPermissions) Authenticate(context.Context) (Identity, error) {
	return Identity{Name: "socket"}, nil
}

type identityKey struct{}

func identityOf(ctx context.Context) Identity {
	id, _ := ctx.Value(identityKey{}).(Identity)
	return id
}

// open says whether a method answers without authentication: the health service, so that whoever starts
// the server can see that it is up.
func open(method string) bool { return strings.HasPrefix(method, "/grpc.health.v1.Health/") }

// permit asks whether the caller may do something, and returns the tenant that it acts for there.
func (s *Server) permit(ctx context.Context, access Access) (string, error) {
	caller := identityOf(ctx)
	if s.options.Authorizer == nil {
		return caller.Tenant, nil
	}
	return s.options.Authorizer.Authorize(ctx, caller, access)
}

// holdTo holds a caller that acts for a tenant to the tenant's sandboxes.
func holdTo(tenant string, sb *v1alpha1.Sandbox) error {
	if tenant == "" || tenant == sb.Spec.TenantID {
		return nil
	}
	return fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch,
		"sandbox %s/%s does not belong to the tenant %q that the caller acts for", sb.Namespace, sb.Name, tenant)
}

// permitOperator refuses callers with a tenant what concerns the node as a whole.
func (s *Server) permitOperator(ctx context.Context, what string) error {
	tenant, err := s.permit(ctx, Access{Verb: "update", Subresource: "node"})
	if err != nil || tenant == "" {
		return err
	}
	return fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch,
		"%s is for operators; the caller acts for the tenant %q", what, tenant)
}
