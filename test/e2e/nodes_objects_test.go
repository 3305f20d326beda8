package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// caBundle is the certificates of the controller's CAs.
func (c *cluster) caBundle() []byte {
	c.t.Helper()
	bundle, err := c.client.CoreV1().ConfigMaps(system).Get(c.t.Context(), "flux-sandbox-ca-bundle", metav1.GetOptions{})
	must(c.t, err)
	return []byte(bundle.Data["ca.crt"])
}

// register makes the objects of a node but for its endpoint: Node and Lease as kubelet does, and a Pod that nobody runs.
func (n *node) register() {
	n.c.t.Helper()
	ctx, client := n.c.t.Context(), n.c.client
	n.object()
	_, err := client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Create(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: n.name},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &n.name, LeaseDurationSeconds: ptr.To[int32](40),
			RenewTime: &metav1.MicroTime{Time: time.Now()}},
	}, metav1.CreateOptions{})
	must(n.c.t, err)
	n.renew()
	n.pod = n.newPod(n.name)
}

// newPod makes a Pod of the agents' ServiceAccount on the node. In the test's namespace there is none.
func (n *node) newPod(name string) *corev1.Pod {
	n.c.t.Helper()
	pod, err := n.c.client.CoreV1().Pods(system).Create(n.c.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{NodeName: n.name, ServiceAccountName: "flux-sandbox-agent", AutomountServiceAccountToken: ptr.To(false),
			Containers: []corev1.Container{{Name: "agent", Image: "none"}}},
	}, metav1.CreateOptions{})
	must(n.c.t, err)
	return pod
}

// object makes the Node.
func (n *node) object() {
	n.c.t.Helper()
	ctx, client := n.c.t.Context(), n.c.client
	_, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: n.labels},
		// Kubernetes' scheduler places nothing here, and no DaemonSet for Linux has a Pod here: nobody would run them.
		Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: nodeLabel, Effect: corev1.TaintEffectNoSchedule}}},
	}, metav1.CreateOptions{})
	must(n.c.t, err)
	resources := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("4Gi")}
	status, err := json.Marshal(map[string]any{"status": corev1.NodeStatus{
		Addresses:   []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: n.address}},
		Allocatable: resources, Capacity: resources,
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Test",
			LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}},
	}})
	must(n.c.t, err)
	_, err = client.CoreV1().Nodes().PatchStatus(ctx, n.name, status)
	must(n.c.t, err)
}

// change is a merge patch of the Node's metadata, as kubectl label and kubectl annotate send it.
func (n *node) change(what, key string, value any) {
	n.c.t.Helper()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{what: map[string]any{key: value}}})
	must(n.c.t, err)
	_, err = n.c.client.CoreV1().Nodes().Patch(n.c.t.Context(), n.name, types.MergePatchType, patch, metav1.PatchOptions{})
	must(n.c.t, err)
}

// renew renews the node's Lease from now on, until beats ends it.
func (n *node) renew() {
	leases := n.c.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	beating, stop := context.WithCancel(context.Background())
	n.beats = stop
	n.beat.Go(func() {
		tick := time.NewTicker(5 * time.Second)
		defer tick.Stop()
		for {
			patch, _ := json.Marshal(map[string]any{"spec": map[string]any{"renewTime": metav1.NowMicro()}})
			_, _ = leases.Patch(beating, n.name, types.MergePatchType, patch, metav1.PatchOptions{})
			select {
			case <-beating.Done():
				return
			case <-tick.C:
			}
		}
	})
}

// endpoint says where the node's agent is.
func (n *node) endpoint(port int32) {
	n.c.t.Helper()
	ctx := context.Background() // also after the test
	slices, slice := n.c.client.DiscoveryV1().EndpointSlices(system), &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: map[string]string{
			discoveryv1.LabelServiceName: "flux-sandbox-agent", discoveryv1.LabelManagedBy: "e2e.flux.io"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{n.address}, NodeName: &n.name}},
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("grpc"), Port: &port, Protocol: ptr.To(corev1.ProtocolTCP)}},
	}
	_, err := slices.Update(ctx, slice, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = slices.Create(ctx, slice, metav1.CreateOptions{})
	}
	must(n.c.t, err)
}

// nodeAddress is the address of the real node.
func (c *cluster) nodeAddress() string {
	c.t.Helper()
	deployed, err := c.client.CoreV1().Pods(system).List(c.t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=flux-sandbox-agent"})
	must(c.t, err)
	for _, p := range deployed.Items {
		if p.Status.HostIP != "" {
			return p.Status.HostIP
		}
	}
	c.t.Fatal("the deployed agent has no address")
	return ""
}

// token is a token of the agents' ServiceAccount that is bound to a Pod, as kubelet projects it into that; the API server's
// own when the audience is empty.
func (n *node) token(pod *corev1.Pod, audience string) string {
	n.c.t.Helper()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}}}
	if audience != "" {
		request.Spec.Audiences = []string{audience}
	}
	token, err := n.c.client.CoreV1().ServiceAccounts(system).CreateToken(n.c.t.Context(), "flux-sandbox-agent", request, metav1.CreateOptions{})
	must(n.c.t, err)
	return token.Status.Token
}

// outOfService puts the taint on the Node that says that it does not run any more, or takes it off.
func (n *node) outOfService(is bool) {
	n.c.t.Helper()
	n.c.wait("the taints of "+n.name+" are written", func() (bool, string) {
		o, err := n.c.client.CoreV1().Nodes().Get(n.c.t.Context(), n.name, metav1.GetOptions{})
		must(n.c.t, err)
		o.Spec.Taints = slices.DeleteFunc(o.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
		if is {
			o.Spec.Taints = append(o.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeOutOfService, Value: "test", Effect: corev1.TaintEffectNoExecute})
		}
		_, err = n.c.client.CoreV1().Nodes().Update(n.c.t.Context(), o, metav1.UpdateOptions{})
		return err == nil, fmt.Sprint(err)
	})
}

// selected makes a group of the nodes with a label.
func (c *cluster) selected(name, label, value string, policy v1alpha1.SchedulingPolicy) {
	c.t.Helper()
	c.create(groups, &v1alpha1.SandboxGroup{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.SandboxGroupSpec{
		FeatureGates: v1alpha1.FeatureGates{DynamicVolumeMount: true}, SchedulingPolicy: policy,
		SubGroups: []v1alpha1.SubSandboxGroup{{Name: "default", NodeSelector: map[string]string{label: value}}}}})
}
