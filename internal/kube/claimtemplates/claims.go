package claimtemplates

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"sync"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1informers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/reconcile"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Claims implements scheduler.Claims.
type Claims struct {
	client   kubernetes.Interface
	log      *slog.Logger
	base     context.Context
	informer cache.SharedIndexInformer
	synced   <-chan struct{}
	running  sync.WaitGroup
	// changed are the sandboxes of whose claims something changed.
	changed workqueue.TypedInterface[store.Key]
}

// facts is what is kept of a claim.
type facts struct {
	// The name and the deletion.
	metav1.ObjectMeta
	sandbox  string
	of       types.UID // the sandbox whose it is
	phase    corev1.PersistentVolumeClaimPhase
	kept     bool
	adopting string // what the label says
}

// New follows the claims of sandboxes until ctx ends; Wait returns when that is over. log is slog's default when nil.
func New(ctx context.Context, client kubernetes.Interface, log *slog.Logger) (*Claims, error) {
	if client == nil {
		return nil, errors.New("claimtemplates: a client is required")
	}
	if log == nil {
		log = slog.Default()
	}
	c := &Claims{client: client, log: log, base: ctx, changed: workqueue.NewTyped[store.Key]()}
	c.informer = corev1informers.NewFilteredPersistentVolumeClaimInformer(client, "", 0, cache.Indexers{},
		func(o *metav1.ListOptions) { o.LabelSelector = v1alpha1.LabelSandboxUID })
	if err := c.informer.SetTransform(strip); err != nil {
		return nil, fmt.Errorf("follow claims: %w", err)
	}
	handler, err := c.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: c.tell, DeleteFunc: c.tell,
		UpdateFunc: func(was, now any) {
			if a, b := *was.(*facts), *now.(*facts); !a.same(&b) {
				c.tell(was) // whose it was, should the label have changed
				c.tell(now)
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("follow claims: %w", err)
	}
	c.synced = handler.HasSyncedChecker().Done()
	c.running.Go(func() { c.informer.RunWithContext(ctx) })
	return c, nil
}

// Wait returns when the watch has ended.
func (c *Claims) Wait() { c.running.Wait() }

// strip reduces a claim to its facts before it is kept.
func strip(o any) (any, error) {
	if claim, ok := o.(*corev1.PersistentVolumeClaim); ok {
		return factsOf(claim), nil
	}
	return o, nil
}

func factsOf(claim *corev1.PersistentVolumeClaim) *facts {
	return &facts{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID, ResourceVersion: claim.ResourceVersion, DeletionTimestamp: claim.DeletionTimestamp,
		},
		sandbox: claim.Labels[v1alpha1.LabelSandbox], of: types.UID(claim.Labels[v1alpha1.LabelSandboxUID]),
		phase:    claim.Status.Phase,
		kept:     !hasOwner(claim, types.UID(claim.Labels[v1alpha1.LabelSandboxUID])),
		adopting: claim.Labels[v1alpha1.LabelAdopt],
	}
}

// same says whether nothing that matters changed.
func (f *facts) same(other *facts) bool {
	return f.UID == other.UID && (f.DeletionTimestamp == nil) == (other.DeletionTimestamp == nil) && f.sandbox == other.sandbox && f.of == other.of &&
		f.phase == other.phase && f.kept == other.kept && f.adopting == other.adopting
}

func (c *Claims) tell(o any) {
	if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = gone.Obj
	}
	if f, ok := o.(*facts); ok && f.sandbox != "" {
		c.changed.Add(store.Key{Namespace: f.Namespace, Name: f.sandbox})
	}
}

// Follow implements scheduler.Claims. It is called once.
func (c *Claims) Follow(ctx context.Context) iter.Seq[store.Key] {
	return reconcile.Changes(ctx, c.changed)
}

// errNotRead says that the watch has not told yet what there is.
var errNotRead = fault.New(errdefs.ErrUnavailable, store.Unavailable, "the claims are not read yet")

// Get implements scheduler.Claims.
func (c *Claims) Get(sb *v1alpha1.Sandbox) ([]scheduler.Claim, error) {
	select {
	case <-c.synced:
	default:
		key := store.KeyOf(sb)
		c.running.Go(func() {
			select {
			case <-c.base.Done():
			case <-c.synced:
				c.changed.Add(key)
			}
		})
		return nil, errNotRead
	}
	claims := make([]scheduler.Claim, 0, len(sb.Spec.VolumeClaimTemplates))
	for i := range sb.Spec.VolumeClaimTemplates {
		claim := scheduler.Claim{Name: v1alpha1.ClaimName(&sb.Spec.VolumeClaimTemplates[i], sb.Name)}
		o, _, err := c.informer.GetStore().GetByKey(store.Key{Namespace: sb.Namespace, Name: claim.Name}.String())
		if f, ok := o.(*facts); ok && err == nil && f.of == sb.UID {
			claim.Phase, claim.Deleting, claim.Kept, claim.Adopted = f.phase, f.DeletionTimestamp != nil, f.kept, f.adopting == sb.Name
			if claim.Phase == "" {
				claim.Phase = corev1.ClaimPending // nobody has looked at it yet
			}
		}
		claims = append(claims, claim)
	}
	return claims, nil
}
