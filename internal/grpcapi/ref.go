package grpcapi

import (
	"context"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/types"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// DefaultNamespace is the namespace of a reference and of a new sandbox that name none.
const DefaultNamespace = "default"

// uidPattern is a UUID, the form of every UID that Kubernetes and the embedded store give out.
var uidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// ref is a checked SandboxRef: a key, a UID, or both.
type ref struct {
	key store.Key
	uid types.UID
}

func (r ref) String() string {
	if r.key.Name == "" {
		return string(r.uid)
	}
	return r.key.String()
}

// parseRef checks a SandboxRef for itself.
func parseRef(m *sandboxv1.SandboxRef) (ref, error) {
	if m.GetId() != "" {
		if m.GetNamespace() != "" || m.GetName() != "" || m.GetUid() != "" {
			return ref{}, invalid("sandbox.id stands alone: leave out namespace, name and uid, or the id")
		}
		return parseID(m.GetId())
	}
	r := ref{uid: types.UID(m.GetUid())}
	if r.uid != "" && !uidPattern.MatchString(string(r.uid)) {
		return ref{}, invalid("sandbox.uid %q is not a UID such as 0b9f6d3e-4c1a-4f5e-9d7e-2f6a1c8b7e55", r.uid)
	}
	if m.GetName() == "" {
		if r.uid == "" || m.GetNamespace() != "" {
			return ref{}, invalid("the request names no sandbox: set sandbox.name (and namespace), sandbox.uid or sandbox.id")
		}
		return r, nil
	}
	r.key = store.Key{Namespace: m.GetNamespace(), Name: m.GetName()}
	if r.key.Namespace == "" {
		r.key.Namespace = DefaultNamespace
	}
	return r, store.SandboxKind.CheckKey(r.key)
}

// parseID reads what a person types: "namespace/name" or a UID.
func parseID(id string) (ref, error) {
	if namespace, name, ok := strings.Cut(id, "/"); ok {
		r := ref{key: store.Key{Namespace: namespace, Name: name}}
		return r, store.SandboxKind.CheckKey(r.key)
	}
	if !uidPattern.MatchString(id) {
		return ref{}, invalid("sandbox.id %q is neither namespace/name nor a UID", id)
	}
	return ref{uid: types.UID(id)}, nil
}

// resolve reads the sandbox that a request is about, and checks that its caller may do to it what it wants. With a
// key, nobody learns what exists who may not know it; a UID is known to those only who were told it.
func (s *Server) resolve(ctx context.Context, r ref, verb, subresource string) (*v1alpha1.Sandbox, error) {
	var sb *v1alpha1.Sandbox
	var tenant string
	var err error
	access := Access{Verb: verb, Subresource: subresource, Namespace: r.key.Namespace, Name: r.key.Name}
	if r.key.Name == "" {
		if sb, err = s.store.Sandboxes().GetByUID(ctx, r.uid); err != nil {
			return nil, err
		}
		access.Namespace, access.Name = sb.Namespace, sb.Name
		tenant, err = s.permit(ctx, access)
	} else if tenant, err = s.permit(ctx, access); err == nil {
		sb, err = s.store.Sandboxes().Get(ctx, r.key)
	}
	if err != nil {
		return nil, err
	}
	if r.uid != "" && sb.UID != r.uid {
		return nil, store.SandboxKind.Replaced(r.key, r.uid, sb.UID)
	}
	annotateSandbox(ctx, sb)
	return sb, holdTo(tenant, sb)
}

// resolveMessage is parseRef and resolve.
func (s *Server) resolveMessage(ctx context.Context, m *sandboxv1.SandboxRef, verb, subresource string) (*v1alpha1.Sandbox, error) {
	r, err := parseRef(m)
	if err != nil {
		return nil, err
	}
	return s.resolve(ctx, r, verb, subresource)
}

// invalid is the error of a request that cannot be meant as it is.
func invalid(format string, args ...any) error {
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, format, args...)
}
