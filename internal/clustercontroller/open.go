package clustercontroller

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/kube"
)

// poolResources are the resources of SandboxSets and SandboxClaims.
var poolResources = []string{"sandboxsets", "sandboxclaims"}

// errNoPools is what callers are told where the kinds are not served, or are OpenKruise's.
var errNoPools = fault.New(errdefs.ErrNotImplemented, fault.NotAvailable,
	"this cluster has no SandboxSets and SandboxClaims of FluxSandbox: apply config/crd and config/admission/sets.yaml, or, where OpenKruise Agents runs, use its own with kubectl")

// The pauses between two looks, after a change of the definitions, and after an error.
const (
	firstLook = 250 * time.Millisecond
	lastLook  = 30 * time.Second
)

// The times that reading all sets and claims may take before it is told why it does not come to an end, and begun again.
const (
	firstRead = 5 * time.Second
	lastRead  = 2 * time.Minute
)

// opener opens the pools from when their kinds are served: they are an option. Whatever fails is tried again.
type opener struct {
	// watch begins to tell of changes of the definitions of the kinds, until ctx ends; running hears of what runs then.
	watch func(ctx context.Context, running *sync.WaitGroup, changed func()) error
	// served says whether the kinds are there, and ours.
	served func(ctx context.Context) (bool, error)
	// open reads all that there is, and gives up when ctx ends.
	open func(ctx context.Context) (*kube.Pools, error)
	// are hears of the pools, once, and before that of why there are none.
	are func(all *kube.Pools, why error)
	log *slog.Logger
}

// openPools reads SandboxSets and SandboxClaims, and returns when they are read or ctx ends.
func (c *controller) openPools(ctx context.Context) {
	o := &opener{watch: c.watchDefinitions, served: c.servesPools, are: c.pools.are, log: c.log,
		open: func(ctx context.Context) (*kube.Pools, error) {
			return kube.OpenPools(ctx, c.rest, c.log.With("component", "store"))
		}}
	o.run(ctx)
}

// run returns when the pools are open, or ctx has ended.
func (o *opener) run(ctx context.Context) {
	changed := make(chan struct{}, 1)
	tell := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	watching, stop := context.WithCancel(ctx)
	var watches sync.WaitGroup
	defer watches.Wait()
	defer stop()
	watched := false
	again := time.NewTimer(0)
	defer again.Stop()
	read := firstRead
	for wait := firstLook; ; {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			wait = firstLook
		case <-again.C:
		}
		if !watched {
			if err := o.watch(watching, &watches, tell); err != nil {
				o.failed(ctx, fmt.Errorf("watch the definitions of SandboxSet and SandboxClaim: %w", err))
				again.Reset(wait)
				wait = min(2*wait, lastLook)
				continue
			}
			watched = true
		}
		served, err := o.served(ctx)
		if err == nil && served {
			var all *kube.Pools
			reading, cancel := context.WithTimeout(ctx, read)
			all, err = o.open(reading)
			cancel()
			if err == nil {
				o.are(all, nil)
				return
			}
			read = min(2*read, lastRead)
		}
		switch {
		case err != nil:
			o.failed(ctx, err)
			again.Reset(wait)
			wait = min(2*wait, lastLook)
		default:
			o.are(nil, errNoPools)
			// What is served follows the definitions within seconds, and is told nowhere: a change is looked at a few times.
			if wait <= lastLook {
				again.Reset(wait)
				wait *= 2
			}
		}
	}
}

// failed tells of what is tried again.
func (o *opener) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	o.log.Warn("SandboxSets and SandboxClaims are not worked on: what failed is tried again", "error", err)
	o.are(nil, fault.New(errdefs.ErrUnavailable, store.Unavailable, "SandboxSets and SandboxClaims are not read yet: try again; the controller goes on trying, and says: %w", err))
}

// watchDefinitions has the definitions of the two kinds watched.
func (c *controller) watchDefinitions(ctx context.Context, running *sync.WaitGroup, changed func()) error {
	client, err := metadata.NewForConfig(c.rest)
	if err != nil {
		return fmt.Errorf("make a client of the API server: %w", err)
	}
	definitions := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	var informers []cache.SharedIndexInformer
	for _, resource := range poolResources {
		informer := metadatainformer.NewFilteredMetadataInformer(client, definitions, "", 0, cache.Indexers{}, func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, resource+"."+agentsv1alpha1.GroupName).String()
		}).Informer()
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(any) { changed() }, UpdateFunc: func(any, any) { changed() }}); err != nil {
			return err
		}
		// Who cannot hear of changes looks, as often as the watch is tried.
		if err := informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
			cache.DefaultWatchErrorHandler(ctx, r, err)
			changed()
		}); err != nil {
			return err
		}
		informers = append(informers, informer)
	}
	for _, informer := range informers {
		running.Go(func() { informer.RunWithContext(ctx) })
	}
	return nil
}

// servesPools says whether the API server has both kinds, and they are ours.
func (c *controller) servesPools(ctx context.Context) (bool, error) {
	list, err := discovery.ToServerResourcesInterfaceWithContext(c.client.Discovery()).ServerResourcesForGroupVersionWithContext(ctx, agentsv1alpha1.GroupVersion.String())
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("ask for the resources of %s: %w", agentsv1alpha1.GroupVersion, err)
	}
	ours := 0
	for _, r := range list.APIResources {
		for _, name := range poolResources {
			if r.Name != name {
				continue
			}
			for _, category := range r.Categories {
				if category == agentsv1alpha1.Category {
					ours++
				}
			}
		}
	}
	if ours < len(poolResources) && len(list.APIResources) > 0 {
		c.log.Debug("the SandboxSets and SandboxClaims of this cluster are not (all) ours: they are left alone", "group", agentsv1alpha1.GroupName)
	}
	return ours == len(poolResources), nil
}
