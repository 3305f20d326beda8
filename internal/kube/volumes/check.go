package volumes

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// Place is where a volume can be used.
type Place struct {
	scheduler.Location
	// Nodes is the volume's own node affinity; nil for none.
	Nodes *corev1.NodeSelector
}

// Check says whether a sandbox could use a volume as it wishes, and where, before there is such a sandbox: of the wish's
// sandbox only namespace and tenant are looked at. What is not known in memory is asked for. Nothing is changed. Errors: as
// those of Resolve, but for what only a node can tell.
func (v *Volumes) Check(ctx context.Context, w scheduler.Wish) (Place, error) {
	v.mu.Lock()
	delete(v.asked, volumeRef(w.Volume.Source)) // it may have been made just now, and who asks here asks once
	v.mu.Unlock()
	f, err := v.find(ctx, w, true)
	if err != nil {
		return Place{}, err
	}
	p := Place{Location: v.location(f, w.TopologyKey)}
	if f.pv != nil && f.pv.Spec.NodeAffinity != nil {
		p.Nodes = f.pv.Spec.NodeAffinity.Required
	}
	return p, nil
}
