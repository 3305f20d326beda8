package volumes

import (
	"context"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corev1listers "k8s.io/client-go/listers/core/v1"
	storagev1listers "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/anchors"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Volumes are the claims and PersistentVolumes of a cluster. Start it once, with Run.
type Volumes struct {
	client  kubernetes.Interface
	options Options

	claimInformer, volumeInformer cache.SharedIndexInformer
	claims                        corev1listers.PersistentVolumeClaimLister
	volumes                       corev1listers.PersistentVolumeLister
	// classInformer and classes are nil without anchors, driverInformer and drivers without drivers that agents call.
	classInformer, driverInformer cache.SharedIndexInformer
	classes                       storagev1listers.StorageClassLister
	drivers                       storagev1listers.CSIDriverLister
	synced                        chan struct{}

	mu sync.Mutex // guards the fields below
	// asked is what the API server said is not there, after the informers had all.
	asked map[scheduler.VolumeRef]struct{}
	// followers are the queues of what changed, one for each Changes.
	followers map[workqueue.TypedInterface[scheduler.VolumeRef]]struct{}
	// own are our patches of which the watch has not told yet, turns the patches that are under way.
	own   map[scheduler.VolumeRef]ownPatch
	turns map[scheduler.VolumeRef]chan struct{}
}

var _ scheduler.Resolver = (*Volumes)(nil)

// maxAsked bounds what is remembered to be missing.
const maxAsked = 4096

// Options say what is allowed.
type Options struct {
	// DirectDrivers are the CSI drivers whose volumes the agents publish themselves.
	DirectDrivers []string
	// Anchors have kubelet mount what the agents cannot publish themselves; nil for none: such volumes are refused.
	Anchors *anchors.Anchors
	// Tenant is the tenant of a namespace, as far as it is known in memory; empty for none. Nobody is told of another namespace
	// when nil.
	Tenant func(namespace string) string
}

// New makes Volumes.
func New(client kubernetes.Interface, options Options) (*Volumes, error) {
	factory := informers.NewSharedInformerFactory(client, 0)
	claims, volumes := factory.Core().V1().PersistentVolumeClaims(), factory.Core().V1().PersistentVolumes()
	v := &Volumes{
		client: client, options: options,
		claimInformer: claims.Informer(), volumeInformer: volumes.Informer(),
		claims: claims.Lister(), volumes: volumes.Lister(),
		synced: make(chan struct{}), asked: map[scheduler.VolumeRef]struct{}{}, followers: map[workqueue.TypedInterface[scheduler.VolumeRef]]struct{}{},
		own: map[scheduler.VolumeRef]ownPatch{}, turns: map[scheduler.VolumeRef]chan struct{}{},
	}
	all := []cache.SharedIndexInformer{v.claimInformer, v.volumeInformer}
	if options.Anchors != nil {
		classes := factory.Storage().V1().StorageClasses()
		v.classInformer, v.classes = classes.Informer(), classes.Lister()
		all = append(all, v.classInformer)
		options.Anchors.Follow(v.anchorChanged)
	}
	if len(options.DirectDrivers) > 0 {
		drivers := factory.Storage().V1().CSIDrivers()
		v.driverInformer, v.drivers = drivers.Informer(), drivers.Lister()
		all = append(all, v.driverInformer)
	}
	for _, i := range all {
		if err := i.SetTransform(strip); err != nil {
			return nil, fmt.Errorf("volumes: %w", err)
		}
		if _, err := i.AddEventHandler(v.handler()); err != nil {
			return nil, fmt.Errorf("volumes: %w", err)
		}
	}
	return v, nil
}

// strip drops what is not needed of an object before it is kept.
func strip(o any) (any, error) {
	if meta, ok := o.(metav1.Object); ok {
		meta.SetManagedFields(nil)
		path := meta.GetAnnotations()[v1alpha1.AnnotationPath]
		meta.SetAnnotations(nil)
		if path != "" {
			meta.SetAnnotations(map[string]string{v1alpha1.AnnotationPath: path})
		}
	}
	return o, nil
}

// Run follows the claims and volumes until ctx ends.
func (v *Volumes) Run(ctx context.Context) {
	var running sync.WaitGroup
	running.Go(func() { v.claimInformer.RunWithContext(ctx) })
	running.Go(func() { v.volumeInformer.RunWithContext(ctx) })
	known := []cache.InformerSynced{v.claimInformer.HasSynced, v.volumeInformer.HasSynced}
	if v.options.Anchors != nil {
		running.Go(func() { v.classInformer.RunWithContext(ctx) })
		running.Go(func() { v.options.Anchors.Run(ctx) })
		known = append(known, v.classInformer.HasSynced, v.options.Anchors.HasSynced)
	}
	if v.driverInformer != nil {
		running.Go(func() { v.driverInformer.RunWithContext(ctx) })
		known = append(known, v.driverInformer.HasSynced)
	}
	if cache.WaitForCacheSync(ctx.Done(), known...) {
		close(v.synced)
	}
	running.Wait()
}

// Synced is closed when everything that existed at first is known.
func (v *Volumes) Synced() <-chan struct{} { return v.synced }

// claim is a claim from memory or, with ask, from the API server if it is new.
func (v *Volumes) claim(ctx context.Context, namespace, name string, ask bool) (*corev1.PersistentVolumeClaim, error) {
	claim, err := v.claims.PersistentVolumeClaims(namespace).Get(name)
	if apierrors.IsNotFound(err) && ask {
		claim, err = askFor(v, claimRef(namespace, name), func() (*corev1.PersistentVolumeClaim, error) {
			return v.client.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, name, metav1.GetOptions{})
		})
	}
	if apierrors.IsNotFound(err) {
		return nil, missing(claimRef(namespace, name))
	}
	return claim, unanswered(ctx, err, "read", "claim "+namespace+"/"+name)
}

// volume is a PersistentVolume, likewise.
func (v *Volumes) volume(ctx context.Context, name string, ask bool) (*corev1.PersistentVolume, error) {
	pv, err := v.volumes.Get(name)
	if apierrors.IsNotFound(err) && ask {
		pv, err = askFor(v, volumeRef(name), func() (*corev1.PersistentVolume, error) {
			return v.client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
		})
	}
	if apierrors.IsNotFound(err) {
		return nil, missing(volumeRef(name))
	}
	return pv, unanswered(ctx, err, "read", "PersistentVolume "+name)
}

// askFor asks the API server for what is not in memory, once: what was not there either will be told by the watch.
func askFor[T any](v *Volumes, ref scheduler.VolumeRef, get func() (T, error)) (T, error) {
	v.mu.Lock()
	_, asked := v.asked[ref]
	v.mu.Unlock()
	if asked {
		var none T
		return none, apierrors.NewNotFound(corev1.Resource(string(ref.Type)), ref.Source)
	}
	o, err := get()
	if apierrors.IsNotFound(err) && v.hasSynced() {
		v.mu.Lock()
		if len(v.asked) >= maxAsked {
			clear(v.asked)
		}
		v.asked[ref] = struct{}{}
		v.mu.Unlock()
	}
	return o, err
}

func (v *Volumes) hasSynced() bool {
	select {
	case <-v.synced:
		return true
	default:
		return false
	}
}

// unanswered is the error of a call of the API server that failed or has no answer; nil for nil.
func unanswered(ctx context.Context, err error, what, about string) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("%s %s: %w", what, about, context.Cause(ctx))
	}
	return fault.New(errdefs.ErrUnavailable, store.Unavailable, "%s %s: %w", what, about, err)
}
