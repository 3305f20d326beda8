package kube

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Pools are the SandboxSets and SandboxClaims, kept as a Store keeps sandboxes.
type Pools struct {
	sets   *collection[*set]
	claims *collection[*claim]

	stop    context.CancelFunc
	watches sync.WaitGroup
}

// OpenPools returns when it has read all sets and claims. The user needs get, list, watch and delete on both, patch on
// their status, and create on claims. log hears of watches that fail; slog's default when nil. Errors: as Open's.
func OpenPools(ctx context.Context, config *rest.Config, log *slog.Logger) (*Pools, error) {
	if log == nil {
		log = slog.Default()
	}
	api, err := newRESTClientOf(config, agentsv1alpha1.GroupVersion)
	if err != nil {
		return nil, fmt.Errorf("make a client of the API server %s: %w", config.Host, err)
	}
	p := &Pools{sets: newCollection(api, setKind), claims: newCollection(api, claimKind)}
	watching, stop := context.WithCancel(context.Background())
	p.stop = stop
	p.watches.Go(func() { p.sets.watch(watching, log) })
	p.watches.Go(func() { p.claims.watch(watching, log) })
	if err = p.sets.awaitList(ctx); err == nil {
		err = p.claims.awaitList(ctx)
	}
	if err != nil {
		p.Close()
		return nil, fmt.Errorf("read the sets and claims on the API server %s: %w", config.Host, err)
	}
	return p, nil
}

// Sets are the SandboxSets.
func (p *Pools) Sets() store.Objects[*agentsv1alpha1.SandboxSet] { return p.sets }

// Claims are the SandboxClaims.
func (p *Pools) Claims() *Claims { return &Claims{p.claims} }

// Claims are SandboxClaims, with a way to delete them that is theirs.
type Claims struct{ *collection[*claim] }

// Refresh reads all sets and claims from the API server, as Store.Refresh does sandboxes.
func (p *Pools) Refresh(ctx context.Context) error {
	if err := p.sets.refresh(ctx); err != nil {
		return err
	}
	return p.claims.refresh(ctx)
}

// DeleteClaim deletes a claim and leaves its sandboxes, without an owner.
func (c *Claims) DeleteClaim(ctx context.Context, key store.Key, pre store.Preconditions) error {
	return c.deleteWith(ctx, key, pre, metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationOrphan)})
}

// Close ends the watches and every Follow.
func (p *Pools) Close() {
	p.stop()
	p.watches.Wait()
	p.sets.objects.hub.Close()
	p.claims.objects.hub.Close()
}
