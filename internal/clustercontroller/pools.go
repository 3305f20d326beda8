package clustercontroller

import (
	"context"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	corev1listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/claims"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/reconcile"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/sets"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/kube"
)

// pools are the SandboxSets and SandboxClaims. Every replica reads them, for the API; the leader works on them.
type pools struct {
	// opened is closed when they are there.
	opened chan struct{}

	mu sync.Mutex // guards what follows
	// why is why they are not there.
	why error
	all *kube.Pools
}

func newPools() *pools {
	return &pools{opened: make(chan struct{}), why: fault.New(errdefs.ErrUnavailable, store.Unavailable, "SandboxSets and SandboxClaims are not read yet: try again")}
}

// get is for the API.
func (p *pools) get() (*grpcapi.Pools, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all == nil {
		return nil, p.why
	}
	return &grpcapi.Pools{Sets: p.all.Sets(), Claims: p.all.Claims()}, nil
}

func (p *pools) are(all *kube.Pools, why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all, p.why = all, why
	if all != nil {
		close(p.opened)
	}
}

func (p *pools) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all != nil {
		p.all.Close()
	}
}

// keepPools works on SandboxSets and SandboxClaims until ctx ends, from when they are there, as the leader of that identity.
// keeper holds the volumes of claims.
func (c *controller) keepPools(ctx context.Context, identity string, keeper claims.Keeper, metrics prometheus.Registerer) {
	select {
	case <-c.pools.opened:
	case <-ctx.Done():
		return
	}
	pools := c.pools.all
	fresh := reconcile.NewFresh(func(ctx context.Context) error {
		if err := pools.Refresh(ctx); err != nil {
			return err
		}
		return c.store.Refresh(ctx)
	})
	ofSets := sets.New(sets.Options{Sandboxes: c.store.Sandboxes(), Sets: pools.Sets(), Tenant: c.tenants.of, Fresh: fresh, Events: c.events, Clock: clock.RealClock{},
		Leads: func(ctx context.Context) error { return c.store.Leads(ctx, identity) }, Log: c.log.With("component", "sets"), Metrics: metrics})
	ofClaims := claims.New(claims.Options{Sandboxes: c.store.Sandboxes(), Sets: pools.Sets(), Claims: pools.Claims(), Volumes: c.volumes, Keeper: keeper, Nodes: c.agents,
		Tenant: c.tenants.of, Fresh: fresh, Events: c.events, Clock: clock.RealClock{}, Log: c.log.With("component", "claims"), Metrics: metrics})
	c.log.Info("working on SandboxSets and SandboxClaims")
	var running sync.WaitGroup
	running.Go(func() { ofSets.Run(ctx) })
	running.Go(func() { ofClaims.Run(ctx) })
	running.Wait()
}

// tenants tells the tenant of a Namespace.
type tenants struct {
	lister corev1listers.NamespaceLister
	client typedcorev1.NamespaceInterface
}

// of is the tenant of a Namespace; empty for none. One that is not known yet is asked for.
func (t *tenants) of(ctx context.Context, namespace string) (string, error) {
	ns, err := t.lister.Get(namespace)
	if apierrors.IsNotFound(err) {
		ns, err = t.client.Get(ctx, namespace, metav1.GetOptions{})
	}
	if err != nil {
		return "", fmt.Errorf("read Namespace %s: %w", namespace, err)
	}
	return ns.Labels[v1alpha1.LabelTenantID], nil
}

// known is the tenant of a Namespace as far as it is in memory; empty for none.
func (t *tenants) known(namespace string) string {
	ns, err := t.lister.Get(namespace)
	if err != nil {
		return ""
	}
	return ns.Labels[v1alpha1.LabelTenantID]
}
