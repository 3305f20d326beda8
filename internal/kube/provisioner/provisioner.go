package provisioner

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v11/controller"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v11/controller/metrics"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Config is what a Provisioner works with. Every field must be set.
type Config struct {
	// Client is the API server's. Its limit on calls is the provisioner's.
	Client kubernetes.Interface
	// Node is the name of the node.
	Node string
	// Driver is the node's driver. It may be called by others at the same time.
	Driver csi.ControllerServer
	// DomainKey is the node label of the topology domain.
	DomainKey string
	// Labels, if set, is told the node's labels, at first and after each change, one call at a time.
	Labels func(labels map[string]string)
	// Metrics takes the library's metrics.
	Metrics prometheus.Registerer
}

// How long calls of the driver may take, and how soon what failed is tried again. A failure that lasts is most often one
// that waits for a person.
const (
	provisionTimeout = 2 * time.Minute
	deletionTimeout  = time.Minute
	firstRetry       = 500 * time.Millisecond
	lastRetry        = 5 * time.Minute
)

var (
	provisionSteps = failpoint.Steps("csi-provision", []string{"volume"})
	reclaimSteps   = failpoint.Steps("csi-reclaim", []string{"volume"})
)

// Provisioner makes and deletes one node's volumes. Start it once: with Follow, then with Run.
type Provisioner struct {
	config     Config
	controller *controller.ProvisionController
	nodes, all informers.SharedInformerFactory
	synced     chan struct{}

	// calls is held for reading while the driver is called, and for writing once none may be called any more: the library
	// does not wait for its workers.
	calls sync.RWMutex
}

var (
	_ controller.Qualifier        = (*Provisioner)(nil)
	_ controller.DeletionGuard    = (*Provisioner)(nil)
	_ controller.BlockProvisioner = (*Provisioner)(nil)
)

// New makes a Provisioner, whose Events are sent until ctx ends. Call it before the first client is used: the library
// writes to client-go's table of types, which clients read.
func New(ctx context.Context, config Config) (*Provisioner, error) {
	p := &Provisioner{config: config, nodes: followed(config.Client, config.Node), synced: make(chan struct{})}
	p.all = informers.NewSharedInformerFactoryWithOptions(config.Client, 0, informers.WithTransform(p.strip))
	retry := func() workqueue.TypedRateLimiter[any] {
		return workqueue.NewTypedItemExponentialFailureRateLimiter[any](firstRetry, lastRetry)
	}
	m := metrics.New("flux_csi")
	for _, c := range []prometheus.Collector{
		m.PersistentVolumeClaimProvisionTotal, m.PersistentVolumeClaimProvisionFailedTotal, m.PersistentVolumeClaimProvisionDurationSeconds,
		m.PersistentVolumeDeleteTotal, m.PersistentVolumeDeleteFailedTotal, m.PersistentVolumeDeleteDurationSeconds,
	} {
		if err := config.Metrics.Register(c); err != nil {
			return nil, fmt.Errorf("provisioner: %w", err)
		}
	}
	claims, volumes, classes := p.informers()
	p.controller = controller.NewProvisionController(ctx, config.Client, csidriver.Name, p,
		controller.LeaderElection(false),
		controller.ResyncPeriod(0),
		controller.ClaimsInformer(filtered{claims, p.isOwn}),
		controller.VolumesInformer(filtered{volumes, p.isOwn}),
		controller.ClassesInformer(classes),
		controller.NodesLister(p.nodes.Core().V1().Nodes().Lister()),
		controller.AddFinalizer(true),
		controller.RateLimiter(retry()),
		controller.CreateProvisionedPVLimiter(retry()),
		controller.FailedProvisionThreshold(0), // never given up
		controller.FailedDeleteThreshold(0),
		controller.ProvisionTimeout(provisionTimeout),
		controller.DeletionTimeout(deletionTimeout),
		controller.MetricsInstance(m),
	)
	return p, nil
}

func (p *Provisioner) informers() (claims, volumes, classes cache.SharedIndexInformer) {
	return p.all.Core().V1().PersistentVolumeClaims().Informer(), p.all.Core().V1().PersistentVolumes().Informer(),
		p.all.Storage().V1().StorageClasses().Informer()
}

// Follow watches the node until ctx ends, and tells Config.Labels. It returns once the node is known.
func (p *Provisioner) Follow(ctx context.Context) error {
	tell := func(o any) {
		if node, ok := o.(*corev1.Node); ok && p.config.Labels != nil {
			p.config.Labels(node.Labels)
		}
	}
	handler, err := p.nodes.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: tell, UpdateFunc: func(_, o any) { tell(o) }})
	if err != nil {
		return fmt.Errorf("follow node %s: %w", p.config.Node, err)
	}
	p.nodes.StartWithContext(ctx)
	cache.WaitForCacheSync(ctx.Done(), handler.HasSynced)
	return ctx.Err()
}

// Run provisions until ctx ends; then no call of the driver is under way. What the API server cannot be told in time is told
// by the next Run.
func (p *Provisioner) Run(ctx context.Context) {
	claims, volumes, classes := p.informers()
	p.all.StartWithContext(ctx)
	go func() {
		if cache.WaitForCacheSync(ctx.Done(), claims.HasSynced, volumes.HasSynced, classes.HasSynced) {
			close(p.synced)
		}
	}()
	p.controller.Run(ctx)
	p.calls.Lock()
	defer p.calls.Unlock()
	p.all.Shutdown()
	p.nodes.Shutdown()
}

// Synced is closed when everything that existed at first is known.
func (p *Provisioner) Synced() <-chan struct{} { return p.synced }

// Unclaimed is how many of the driver's volumes no PersistentVolume of the node names: those whose PersistentVolume was
// removed without its data (Retain), and what a crash just before a claim's deletion left. It is 0 until Synced.
func (p *Provisioner) Unclaimed(volumes []string) int {
	select {
	case <-p.synced:
	default:
		return 0
	}
	named := map[string]bool{}
	_, known, _ := p.informers()
	for _, object := range known.GetStore().List() {
		if volume, ok := object.(*corev1.PersistentVolume); ok && p.isOwn(volume) {
			named[volume.Spec.CSI.VolumeHandle] = true
		}
	}
	n := 0
	for _, id := range volumes {
		if !named[id] {
			n++
		}
	}
	return n
}

// call calls the driver, unless the provisioner has ended.
func (p *Provisioner) call(ctx context.Context, f func() error) error {
	p.calls.RLock()
	defer p.calls.RUnlock()
	if ctx.Err() != nil {
		return fmt.Errorf("the provisioner of node %s ends: %w", p.config.Node, context.Cause(ctx))
	}
	return f()
}

// ShouldProvision implements controller.Qualifier.
func (p *Provisioner) ShouldProvision(_ context.Context, claim *corev1.PersistentVolumeClaim) bool {
	return p.isOwn(claim)
}

// ShouldDelete implements controller.DeletionGuard.
func (p *Provisioner) ShouldDelete(_ context.Context, volume *corev1.PersistentVolume) bool {
	return p.isOwn(volume)
}

// SupportsBlock implements controller.BlockProvisioner. It says yes, so that Provision can refuse block volumes in the words
// in which it refuses everything else.
func (p *Provisioner) SupportsBlock(context.Context) bool { return true }

// Provision implements controller.Provisioner.
func (p *Provisioner) Provision(ctx context.Context, o controller.ProvisionOptions) (*corev1.PersistentVolume, controller.ProvisioningState, error) {
	if !p.isOwn(o.PVC) || o.SelectedNode == nil || o.SelectedNode.Name != p.config.Node {
		return nil, controller.ProvisioningFinished, &controller.IgnoredError{Reason: "the claim is for another node"}
	}
	if isPopulated(o.PVC) {
		return nil, controller.ProvisioningFinished, &controller.IgnoredError{Reason: "a volume populator fills the claim"}
	}
	request, err := p.request(o)
	if err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	var volume *csi.Volume
	err = p.call(ctx, func() error {
		return failpoint.Step(provisionSteps, "volume", func() error {
			response, err := p.config.Driver.CreateVolume(ctx, request)
			volume = response.GetVolume()
			return err
		})
	})
	if errdefs.IsResourceExhausted(err) {
		return nil, controller.ProvisioningReschedule, fault.New(errdefs.ErrResourceExhausted, fault.ReasonOf(err),
			"node %s has no room for it, another is looked for: %w: free space there, or ask for less", p.config.Node, err)
	}
	if err != nil {
		// The driver does nothing behind the back of a call: whatever it was, it has ended.
		return nil, controller.ProvisioningFinished, err
	}
	return p.persistentVolume(o, request, volume), controller.ProvisioningFinished, nil
}

// Delete implements controller.Provisioner.
func (p *Provisioner) Delete(ctx context.Context, volume *corev1.PersistentVolume) error {
	if !p.isOwn(volume) {
		return &controller.IgnoredError{Reason: "the volume lies on another node"}
	}
	return p.call(ctx, func() error {
		return failpoint.Step(reclaimSteps, "volume", func() error {
			_, err := p.config.Driver.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: volume.Spec.CSI.VolumeHandle})
			return err
		})
	})
}
