package cli

import (
	"context"
	"os"
	"strings"
)

// Cluster is a Kubernetes cluster as a kubeconfig names it.
type Cluster interface {
	// Namespace is that of the kubeconfig's context.
	Namespace() string
	// Connect opens a way to the cluster's server, whose namespace is system, and calls as the ServiceAccount account of namespace;
	// with the kubeconfig's own token when account is empty.
	Connect(ctx context.Context, system, namespace, account string) (*Way, error)
}

// Way is an open way to a cluster's server.
type Way struct {
	// Address is where to dial, ServerName the name that the certificate there must have, and CA the PEM of whom to trust.
	Address, ServerName string
	CA                  []byte
	// Token is the caller's token. It is asked for before every call.
	Token func() (string, error)
	// Close ends the way.
	Close func()
}

// The defaults of the flags of a cluster.
const (
	defaultSystemNamespace = "flux-sandbox"
	defaultServiceAccount  = "default"
)

// chooseServer decides where the server is: at --address, or FLUX_ADDRESS; in the cluster of --kubeconfig and --context; on this
// machine where its socket is; else in the kubeconfig's cluster. namespaced says that -n was given.
func (a *app) chooseServer(addressed, namespaced bool) error {
	named := a.kubeconfig != "" || a.context != ""
	switch {
	case named && addressed:
		return usagef("--address says where the server is, and so do --kubeconfig and --context: leave one out")
	case named && a.Cluster == nil:
		return usagef("this fluxctl knows no clusters")
	case addressed || a.Getenv(AddressEnv) != "" && !named || a.Cluster == nil:
		return nil
	case !named:
		if _, err := os.Stat(strings.TrimPrefix(DefaultAddress, "unix://")); err == nil {
			return nil
		}
	}
	cluster, found, err := a.Cluster(a.kubeconfig, a.context)
	if err != nil {
		return usageError{err}
	}
	if !found {
		return nil
	}
	a.cluster = cluster
	if !namespaced && cluster.Namespace() != "" {
		a.namespace = cluster.Namespace()
	}
	return nil
}
