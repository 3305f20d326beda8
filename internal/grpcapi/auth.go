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
	// Tenant restricts the caller to the sandboxes of one tenant; an operator of everything when empty.
	Tenant string
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

// authorize holds a caller with a tenant to its own sandboxes.
func authorize(ctx context.Context, sb *v1alpha1.Sandbox) error {
	tenant := identityOf(ctx).Tenant
	if tenant == "" || tenant == sb.Spec.TenantID {
		return nil
	}
	return fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch,
		"sandbox %s/%s does not belong to the tenant %q that the caller acts for", sb.Namespace, sb.Name, tenant)
}

// authorizeOperator refuses callers with a tenant what concerns the node as a whole.
func authorizeOperator(ctx context.Context, what string) error {
	tenant := identityOf(ctx).Tenant
	if tenant == "" {
		return nil
	}
	return fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch,
		"%s is for operators; the caller acts for the tenant %q", what, tenant)
}
