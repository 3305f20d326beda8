package provisioner

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
)

// selectedNode is the annotation by which the scheduler says where a claim's volume is wanted.
const selectedNode = "volume.kubernetes.io/selected-node"

// isOwn says whether a claim's volume is wanted on this node, or a volume of the driver lies on it and on no other.
func (p *Provisioner) isOwn(object any) bool {
	switch o := object.(type) {
	case *corev1.PersistentVolumeClaim:
		return o.Annotations[selectedNode] == p.config.Node
	case *corev1.PersistentVolume:
		return o.Spec.CSI != nil && o.Spec.CSI.Driver == csidriver.Name && liesOn(o.Spec.NodeAffinity, p.config.Node)
	case cache.DeletedFinalStateUnknown:
		return p.isOwn(o.Obj)
	}
	return false
}

// liesOn says whether an affinity lets exactly one node in, by the driver's own label.
func liesOn(affinity *corev1.VolumeNodeAffinity, node string) bool {
	if affinity == nil || affinity.Required == nil || len(affinity.Required.NodeSelectorTerms) == 0 {
		return false
	}
	for _, term := range affinity.Required.NodeSelectorTerms { // any of them lets a node in
		if !slices.ContainsFunc(term.MatchExpressions, func(e corev1.NodeSelectorRequirement) bool {
			return e.Key == csidriver.TopologyNode && e.Operator == corev1.NodeSelectorOpIn && len(e.Values) == 1 && e.Values[0] == node
		}) {
			return false
		}
	}
	return true
}

func affinityTo(node string) *corev1.VolumeNodeAffinity {
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: csidriver.TopologyNode, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}}}}
}

// filtered is an informer that tells its handlers of some of its objects only.
type filtered struct {
	cache.SharedIndexInformer
	of func(object any) bool
}

// AddEventHandlerWithResyncPeriod implements cache.SharedInformer; it is the one that the library calls.
func (f filtered) AddEventHandlerWithResyncPeriod(handler cache.ResourceEventHandler, resync time.Duration) (cache.ResourceEventHandlerRegistration, error) {
	return f.SharedIndexInformer.AddEventHandlerWithResyncPeriod(cache.FilteringResourceEventHandler{FilterFunc: f.of, Handler: once{handler}}, resync)
}

// once tells that a volume is due to be deleted when it becomes so, and not with each change that its deletion makes of it:
// the library would delete it a second time, and complain that it is not there. What fails it tries again by itself.
type once struct{ cache.ResourceEventHandler }

// OnUpdate implements cache.ResourceEventHandler.
func (h once) OnUpdate(before, after any) {
	if !isDue(before) || !isDue(after) {
		h.ResourceEventHandler.OnUpdate(before, after)
	}
}

func isDue(object any) bool {
	pv, ok := object.(*corev1.PersistentVolume)
	return ok && pv.Status.Phase == corev1.VolumeReleased && pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete
}

// strip drops what is not needed of an object before it is kept: of what is not our own, all but the name.
func (p *Provisioner) strip(object any) (any, error) {
	switch o := object.(type) {
	case *corev1.PersistentVolumeClaim:
		if !p.isOwn(o) {
			return &corev1.PersistentVolumeClaim{ObjectMeta: nameOf(o)}, nil
		}
	case *corev1.PersistentVolume:
		if !p.isOwn(o) {
			return &corev1.PersistentVolume{ObjectMeta: nameOf(o)}, nil
		}
	}
	if o, ok := object.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return object, nil
}

func nameOf(o metav1.Object) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUID(), ResourceVersion: o.GetResourceVersion()}
}

// followed are the informers of one node, of which little more than the labels is kept: the images alone are most of it.
func followed(client kubernetes.Interface, node string) informers.SharedInformerFactory {
	return informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, node).String()
		}),
		informers.WithTransform(func(object any) (any, error) {
			if o, ok := object.(*corev1.Node); ok {
				return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion, Labels: o.Labels}}, nil
			}
			return object, nil
		}))
}
