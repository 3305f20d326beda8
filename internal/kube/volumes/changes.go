package volumes

import (
	"context"
	"iter"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// follower is one Changes. Its fields are guarded by the mutex of Volumes.
type follower struct {
	signal  chan struct{}
	pending map[scheduler.VolumeRef]struct{}
}

// Changes implements scheduler.Resolver.
func (v *Volumes) Changes(ctx context.Context) iter.Seq[scheduler.VolumeRef] {
	return func(yield func(scheduler.VolumeRef) bool) {
		f := &follower{signal: make(chan struct{}, 1), pending: map[scheduler.VolumeRef]struct{}{}}
		v.mu.Lock()
		v.followers[f] = struct{}{}
		v.mu.Unlock()
		defer func() {
			v.mu.Lock()
			delete(v.followers, f)
			v.mu.Unlock()
		}()
		for {
			select {
			case <-ctx.Done():
				return
			case <-f.signal:
			}
			v.mu.Lock()
			refs := maps.Clone(f.pending)
			clear(f.pending)
			v.mu.Unlock()
			for ref := range refs {
				if !yield(ref) {
					return
				}
			}
		}
	}
}

func (v *Volumes) handler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { v.changed(o) },
		UpdateFunc: func(_, o any) { v.changed(o) },
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
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.asked, refs[0])
	for f := range v.followers {
		for _, ref := range refs {
			f.pending[ref] = struct{}{}
		}
		select {
		case f.signal <- struct{}{}:
		default:
		}
	}
}

func claimRef(namespace, name string) scheduler.VolumeRef {
	return scheduler.VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: namespace, Source: name}
}

func volumeRef(name string) scheduler.VolumeRef {
	return scheduler.VolumeRef{Type: v1alpha1.VolumeTypePV, Source: name}
}
