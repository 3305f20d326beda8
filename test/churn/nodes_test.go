package churn

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/internal/kube/certificates"
)

// taintDrained is how a node is emptied here.
const taintDrained = "churn.example.com/drained"

func nodeName(i int) string { return fmt.Sprintf("n%02d", i) }

// addNode makes a node with its agent, which is found by the endpoints of the agents' Service.
func (w *world) addNode(name string, authority *certificates.Authority) {
	w.Helper()
	a := w.fleet.add(name, authority)
	w.makeNode(name)
	must(w.client.DiscoveryV1().EndpointSlices(system).Create(w.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "agent-" + name, Labels: map[string]string{discoveryv1.LabelServiceName: "flux-sandbox-agent"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{w.fleet.address}, NodeName: &name, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}}},
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("grpc"), Port: &a.port, Protocol: ptr.To(corev1.ProtocolTCP)}},
	}, metav1.CreateOptions{}))
}

func (w *world) makeNode(name string) {
	w.Helper()
	room := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("256Gi"), corev1.ResourcePods: resource.MustParse("110")}
	_, err := w.client.CoreV1().Nodes().Create(w.ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}},
		Status:     corev1.NodeStatus{Capacity: room, Allocatable: room, Conditions: []corev1.NodeCondition{ready(corev1.ConditionTrue)}},
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) && w.ctx.Err() == nil {
		w.Errorf("make node %s: %v", name, err)
	}
}

func ready(is corev1.ConditionStatus) corev1.NodeCondition {
	return corev1.NodeCondition{Type: corev1.NodeReady, Status: is, Reason: "Churned", LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}
}

// disturbNode has something happen to a node, and undoes it later.
func (w *world) disturbNode() {
	node := w.fleet.nodes()[w.dice.IntN(nodes)]
	if w.disturbed[node] {
		return
	}
	w.disturbed[node] = true
	var undo func()
	switch w.dice.IntN(5) {
	case 0:
		w.count("agents cut off")
		w.fleet.setDown(node, true, false)
		undo = func() { w.fleet.setDown(node, false, false) }
	case 1:
		w.count("nodes drained")
		w.taint(node, corev1.Taint{Key: taintDrained, Effect: corev1.TaintEffectNoExecute})
		undo = func() { w.untaint(node) }
	case 2:
		w.count("nodes not ready")
		w.setReady(node, corev1.ConditionFalse)
		undo = func() { w.setReady(node, corev1.ConditionTrue) }
	case 3:
		// Its processes are gone by then: the agent goes first.
		w.count("nodes out of service")
		w.fleet.setDown(node, true, true)
		w.taint(node, corev1.Taint{Key: corev1.TaintNodeOutOfService, Value: "nodeshutdown", Effect: corev1.TaintEffectNoExecute})
		undo = func() {
			w.untaint(node)
			w.fleet.setDown(node, false, true)
		}
	case 4:
		w.count("nodes deleted")
		w.fleet.setDown(node, true, true)
		if err := w.client.CoreV1().Nodes().Delete(w.ctx, node, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			w.Errorf("delete node %s: %v", node, err)
		}
		undo = func() {
			w.makeNode(node)
			w.fleet.setDown(node, false, true)
		}
	}
	w.later(time.Duration(2+w.dice.IntN(8))*time.Second, func() { undo(); delete(w.disturbed, node) })
}

func (w *world) taint(node string, taint corev1.Taint) {
	w.patchNode(node, fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"value":%q,"effect":%q}]}}`, taint.Key, taint.Value, taint.Effect))
}

// untaint takes all taints away: those of a node that is not ready the controller manager puts back.
func (w *world) untaint(node string) { w.patchNode(node, `{"spec":{"taints":null}}`) }

func (w *world) patchNode(node, patch string, subresources ...string) {
	_, err := w.client.CoreV1().Nodes().Patch(w.ctx, node, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, subresources...)
	if err != nil && !apierrors.IsNotFound(err) && w.ctx.Err() == nil {
		w.Errorf("patch node %s: %v", node, err)
	}
}

func (w *world) setReady(node string, is corev1.ConditionStatus) {
	w.patchNode(node, fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q,"reason":"Churned"}]}}`, is), "status")
}
