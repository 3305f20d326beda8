package callers

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	corev1listers "k8s.io/client-go/listers/core/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// NamespaceTenants reads tenants off the label of Namespaces, from a lister's cache; a Namespace that is not there,
// as it is new, is asked for. Errors: ErrNotFound, reason NAMESPACE_NOT_FOUND; the API server's.
func NamespaceTenants(lister corev1listers.NamespaceLister, namespaces corev1client.NamespaceInterface) func(context.Context, string) (string, error) {
	return func(ctx context.Context, name string) (string, error) {
		ns, err := lister.Get(name)
		if apierrors.IsNotFound(err) {
			ns, err = namespaces.Get(ctx, name, metav1.GetOptions{})
		}
		switch {
		case apierrors.IsNotFound(err):
			return "", fault.New(errdefs.ErrNotFound, fault.NamespaceNotFound, "namespace %q does not exist: create it, or name another", name)
		case err != nil:
			return "", fmt.Errorf("read the tenant of namespace %q: %w", name, err)
		}
		return ns.Labels[v1alpha1.LabelTenantID], nil
	}
}
