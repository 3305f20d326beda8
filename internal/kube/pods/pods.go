package pods

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"sync"

	"github.com/containerd/errdefs"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
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

// Pods implements scheduler.Pods.
type Pods struct {
	client kubernetes.Interface
	log    *slog.Logger
	base   context.Context
	// watches are the goroutines of all watches.
	watches sync.WaitGroup
	owned   *watch
	// changed are the sandboxes of whose Pods something changed.
	changed workqueue.TypedInterface[store.Key]

	mu      sync.Mutex                // guards all below
	adopted map[store.Key]*watch      // by the Pod's name
	users   map[types.UID]store.Key   // the adopted Pod of each sandbox
	names   map[types.UID]store.Key   // the name of each sandbox that has one
	byPod   map[store.Key][]types.UID // the sandboxes of each adopted Pod
}

// watch follows Pods: all owned ones, or one.
type watch struct {
	informer cache.SharedIndexInformer
	synced   <-chan struct{}
	// ended is closed by stop, and when all watches end.
	ended <-chan struct{}
	stop  context.CancelFunc
}

// New follows the Pods of sandboxes until ctx ends; Wait returns when that is over. log is slog's default when nil.
func New(ctx context.Context, client kubernetes.Interface, log *slog.Logger) (*Pods, error) {
	if client == nil {
		return nil, errors.New("pods: a client is required")
	}
	if log == nil {
		log = slog.Default()
	}
	p := &Pods{
		client: client, log: log, base: ctx, changed: workqueue.NewTyped[store.Key](),
		adopted: map[store.Key]*watch{}, users: map[types.UID]store.Key{},
		names: map[types.UID]store.Key{}, byPod: map[store.Key][]types.UID{},
	}
	var err error
	p.owned, err = p.watch("", func(o *metav1.ListOptions) { o.LabelSelector = v1alpha1.LabelSandbox }, p.ownedChanged)
	return p, err
}

// Wait returns when all watches have ended.
func (p *Pods) Wait() { p.watches.Wait() }

// watch begins to follow Pods. changed is called for each that changed, and for those that are there at first.
func (p *Pods) watch(namespace string, choose func(*metav1.ListOptions), changed func(*facts)) (*watch, error) {
	w := &watch{informer: corev1informers.NewFilteredPodInformer(p.client, namespace, 0, cache.Indexers{}, choose)}
	if err := w.informer.SetTransform(strip); err != nil {
		return nil, fmt.Errorf("follow Pods: %w", err)
	}
	handler, err := w.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			if f, ok := o.(*facts); ok {
				changed(f)
			}
		},
		UpdateFunc: func(was, now any) {
			f, ok := now.(*facts)
			if old, known := was.(*facts); ok && !(known && old.same(f)) {
				changed(f)
			}
		},
		DeleteFunc: func(o any) {
			if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			if f, ok := o.(*facts); ok {
				changed(f)
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("follow Pods: %w", err)
	}
	ctx, stop := context.WithCancel(p.base)
	w.synced, w.ended, w.stop = handler.HasSyncedChecker().Done(), ctx.Done(), stop
	p.watches.Go(func() { w.informer.RunWithContext(ctx) })
	return w, nil
}

func (w *watch) isSynced() bool {
	select {
	case <-w.synced:
		return true
	default:
		return false
	}
}

// get is what is known of a Pod, nil when there is none.
func (w *watch) get(key store.Key) *facts {
	o, _, err := w.informer.GetStore().GetByKey(key.String())
	if f, ok := o.(*facts); ok && err == nil {
		return f
	}
	return nil
}

// ownedChanged tells of the sandbox that has, or should have, a Pod: the two have one name.
func (p *Pods) ownedChanged(f *facts) {
	p.changed.Add(store.Key{Namespace: f.Namespace, Name: f.Name})
}

func (p *Pods) adoptedChanged(f *facts) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tellUsers(store.Key{Namespace: f.Namespace, Name: f.Name})
}

// tellUsers tells of the sandboxes of an adopted Pod. The caller holds mu.
func (p *Pods) tellUsers(pod store.Key) {
	for _, uid := range p.byPod[pod] {
		p.changed.Add(p.names[uid])
	}
}

// Follow implements scheduler.Pods. It is called once.
func (p *Pods) Follow(ctx context.Context) iter.Seq[store.Key] {
	return reconcile.Changes(ctx, p.changed)
}

// errNotRead says that a watch has not told yet what there is.
var errNotRead = fault.New(errdefs.ErrUnavailable, store.Unavailable, "the Pods are not read yet")

// Get implements scheduler.Pods.
func (p *Pods) Get(sb *v1alpha1.Sandbox) (*scheduler.Pod, error) {
	w, key := p.owned, store.KeyOf(sb)
	if ref := sb.Spec.PodRef; ref != nil {
		var err error
		key.Name = ref.Name
		if w, err = p.adopt(sb, key); err != nil {
			return nil, err
		}
	}
	if !w.isSynced() {
		p.tellSynced(w, store.KeyOf(sb))
		return nil, errNotRead
	}
	return viewOf(w.get(key), sb), nil
}

// viewOf is what the sandbox may see of a Pod that has the right name.
func viewOf(f *facts, sb *v1alpha1.Sandbox) *scheduler.Pod {
	if f == nil || sb.Spec.PodRef == nil && !f.ownedBy(sb) {
		return nil
	}
	return f.view(sb)
}

// tellSynced tells of a sandbox when what its Pod is known by is read.
func (p *Pods) tellSynced(w *watch, sandbox store.Key) {
	p.watches.Go(func() {
		select {
		case <-w.ended:
		case <-w.synced:
			p.changed.Add(sandbox)
		}
	})
}

// adopt follows the Pod of a sandbox's podRef, by that name, if nobody does yet.
func (p *Pods) adopt(sb *v1alpha1.Sandbox, pod store.Key) (*watch, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.adopted[pod]
	if w == nil {
		var err error
		w, err = p.watch(pod.Namespace, func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, pod.Name).String()
		}, p.adoptedChanged)
		if err != nil {
			return nil, err
		}
		p.adopted[pod] = w
	}
	if _, known := p.users[sb.UID]; !known {
		p.users[sb.UID], p.names[sb.UID] = pod, store.KeyOf(sb)
		p.byPod[pod] = append(p.byPod[pod], sb.UID)
	}
	return w, nil
}

// Forget implements scheduler.Pods. The watch of an adopted Pod ends with the last sandbox that names it.
func (p *Pods) Forget(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod, known := p.users[uid]
	if !known {
		return
	}
	delete(p.users, uid)
	delete(p.names, uid)
	if rest := slices.DeleteFunc(p.byPod[pod], func(u types.UID) bool { return u == uid }); len(rest) > 0 {
		p.byPod[pod] = rest
		return
	}
	p.adopted[pod].stop()
	delete(p.byPod, pod)
	delete(p.adopted, pod)
}
