package volumes

import (
	"context"
	"iter"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/reconcile"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// Changes implements scheduler.Resolver.
func (v *Volumes) Changes(ctx context.Context) iter.Seq[scheduler.VolumeRef] {
	return func(yield func(scheduler.VolumeRef) bool) {
		changed, stop := v.follow(ctx)
		defer stop()
		reconcile.Changes(ctx, changed)(yield)
	}
}

// follow is a queue of what changes from now on, until stop is called or ctx ends.
func (v *Volumes) follow(ctx context.Context) (changed workqueue.TypedInterface[scheduler.VolumeRef], stop func()) {
	changed = workqueue.NewTyped[scheduler.VolumeRef]()
	ended := context.AfterFunc(ctx, changed.ShutDown)
	v.mu.Lock()
	v.followers[changed] = struct{}{}
	v.mu.Unlock()
	return changed, func() {
		ended()
		changed.ShutDown()
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.followers, changed)
	}
}

func (v *Volumes) handler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { v.changed(o) },
		UpdateFunc: func(_, o any) { v.changed(o) },
		DeleteFunc: func(o any) {
			if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = last.Obj
			}
			if ref, o := refOf(o); o != nil {
				v.seen(ref, o, true)
			}
		},
	}
}

// changed tells the followers of a claim or volume, by all names by which a sandbox may ask for it, and makes it one that
// is asked for again should it go.
func (v *Volumes) changed(o any) {
	var refs []scheduler.VolumeRef
	switch o := o.(type) {
	case *corev1.PersistentVolumeClaim:
		refs = append(refs, claimRef(o.Namespace, o.Name))
		if o.Spec.VolumeName != "" {
			refs = append(refs, volumeRef(o.Spec.VolumeName))
		}
	case *corev1.PersistentVolume:
		refs = append(refs, volumeRef(o.Name))
		if c := o.Spec.ClaimRef; c != nil {
			refs = append(refs, claimRef(c.Namespace, c.Name))
		}
	default:
		return
	}
	if ref, o := refOf(o); o != nil {
		v.seen(ref, o, false)
	}
	v.mu.Lock()
	delete(v.asked, refs[0])
	v.mu.Unlock()
	v.tell(refs...)
}

// anchorChanged tells the followers of a claim of whose anchors something changed.
func (v *Volumes) anchorChanged(namespace, claim string) {
	ref := claimRef(namespace, claim)
	refs := []scheduler.VolumeRef{ref}
	if other, _ := v.About(ref); other != (scheduler.VolumeRef{}) {
		refs = append(refs, other)
	}
	v.tell(refs...)
}

func (v *Volumes) tell(refs ...scheduler.VolumeRef) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for changed := range v.followers {
		for _, ref := range refs {
			changed.Add(ref)
		}
	}
}

func claimRef(namespace, name string) scheduler.VolumeRef {
	return scheduler.VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: namespace, Source: name}
}

func volumeRef(name string) scheduler.VolumeRef {
	return scheduler.VolumeRef{Type: v1alpha1.VolumeTypePV, Source: name}
}
