package callers

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	corev1listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/tokens"
)

// NamespaceTenants reads tenants off the label of Namespaces, from a lister's cache; a Namespace that is not there, as
// it is new or the cache is behind, is asked for, and what was said of it holds while the API server is away, as that of
// who calls. Errors: ErrNotFound, reason NAMESPACE_NOT_FOUND; ErrUnavailable, reason AUTH_UNAVAILABLE.
func NamespaceTenants(lister corev1listers.NamespaceLister, namespaces corev1client.NamespaceInterface) func(context.Context, string) (string, error) {
	asked := newAnswers[string](maxTenants, clock.RealClock{}, &outage{})
	return func(ctx context.Context, name string) (string, error) {
		if ns, err := lister.Get(name); err == nil {
			return ns.Labels[v1alpha1.LabelTenantID], nil
		}
		return asked.get(ctx, []byte(name), func(ctx context.Context) (answer[string], error) {
			ns, err := namespaces.Get(ctx, name, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err):
				return answer[string]{}, fault.New(errdefs.ErrNotFound, fault.NamespaceNotFound, "namespace %q does not exist: create it, or name another", name)
			case err != nil:
				return answer[string]{}, tokens.Unavailable(err, fmt.Sprintf("the tenant of namespace %q could not be read, as the API server did not answer: try again", name))
			}
			return answer[string]{value: ns.Labels[v1alpha1.LabelTenantID], away: keepWhileAway}, nil
		})
	}
}
