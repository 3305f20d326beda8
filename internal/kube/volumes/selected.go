package volumes

import (
	"context"
	"encoding/json"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// selectedNode is the annotation by which the scheduler says where an unbound claim's volume is to be provisioned. It takes no
// other node from then on, and the node's provisioner alone takes it back.
const selectedNode = "volume.kubernetes.io/selected-node"

// selectable has an unbound claim provisioned for a node: it is given back by a node that does not exist any more, whose
// provisioner never will. That of a node which exists is waited for.
func (v *Volumes) selectable(ctx context.Context, claim *corev1.PersistentVolumeClaim, node string) error {
	about := name(claimRef(claim.Namespace, claim.Name))
	// In memory claims have no such annotations.
	now, err := v.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	if err != nil {
		return unanswered(ctx, err, "read", about)
	}
	selected := now.Annotations[selectedNode]
	if now.Spec.VolumeName != "" || selected == "" || selected == node {
		return nil
	}
	_, err = v.client.CoreV1().Nodes().Get(ctx, selected, metav1.GetOptions{})
	if err == nil {
		return notBound("%s is being provisioned on node %s, which was chosen for another Pod: it is tried again when that is done", about, selected)
	}
	if !apierrors.IsNotFound(err) {
		return unanswered(ctx, err, "read", "node "+selected)
	}
	// Nothing but the word that was read is taken away.
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": now.UID, "resourceVersion": now.ResourceVersion, "annotations": map[string]any{selectedNode: nil}}})
	if err != nil {
		return err
	}
	if _, err := v.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Patch(ctx, claim.Name, types.MergePatchType, data, metav1.PatchOptions{}); err != nil {
		return unanswered(ctx, err, "take node "+selected+", which does not exist any more, from", about)
	}
	return nil
}
