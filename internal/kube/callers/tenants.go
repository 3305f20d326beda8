package callers

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/tokens"
)

// tenant reads a namespace's tenant off its label, from the lister's cache. A Namespace that is not there, as it is new or
// the cache is behind, is asked for, and what was said of it holds while the API server is away. Errors: ErrNotFound,
// reason NAMESPACE_NOT_FOUND; ErrUnavailable, reason AUTH_UNAVAILABLE.
func (c *Callers) tenant(ctx context.Context, name string) (string, error) {
	if ns, err := c.options.Namespaces.Get(name); err == nil {
		return ns.Labels[v1alpha1.LabelTenantID], nil
	}
	return c.tenants.get(ctx, []byte(name), func(ctx context.Context) (answer[string], error) {
		ns, err := c.options.NamespaceClient.Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return answer[string]{}, fault.New(errdefs.ErrNotFound, fault.NamespaceNotFound, "namespace %q does not exist: create it, or name another", name)
		case err != nil:
			return answer[string]{}, tokens.Unavailable(err, fmt.Sprintf("the tenant of namespace %q could not be read, as the API server did not answer: try again", name))
		}
		return answer[string]{value: ns.Labels[v1alpha1.LabelTenantID], away: keepWhileAway}, nil
	})
}
