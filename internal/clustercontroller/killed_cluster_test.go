//go:build failpoint

package clustercontroller_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/clustercontroller"
	"github.com/flux-sandbox/flux-sandbox/internal/identity"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/certificates"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

const (
	nodeName     = "n1"
	ownNamespace = "flux-sandbox"
	// directDriver is the CSI driver of the tests' PersistentVolumes, which the agent publishes itself.
	directDriver = "csi.example.com"
)

// The kinds that are looked at, those first whose objects own those of the others.
var (
	setsGVR      = agentsv1alpha1.GroupVersion.WithResource("sandboxsets")
	claimsGVR    = agentsv1alpha1.GroupVersion.WithResource("sandboxclaims")
	sandboxesGVR = v1alpha1.GroupVersion.WithResource("sandboxes")
	podsGVR      = corev1.SchemeGroupVersion.WithResource("pods")
	pvcsGVR      = corev1.SchemeGroupVersion.WithResource("persistentvolumeclaims")
	kinds        = []schema.GroupVersionResource{setsGVR, claimsGVR, sandboxesGVR, podsGVR, pvcsGVR}
)

// cluster is an API server with our definitions, rights and policies, and whatever the controller works with but does not
// bring: kube-scheduler, kubelet, the controller of PersistentVolumes, the garbage collector, and a node's agent.
type cluster struct {
	*testing.T
	server  *apiserver.Server
	admin   kubernetes.Interface
	objects dynamic.Interface
	agent   *nodeAgent
	// kubeconfig has the rights of the controller's ServiceAccount; logs is where controllers log.
	kubeconfig, logs string
	// started counts controllers.
	started *atomic.Int32
	held    *held
}

// held are Namespaces whose Pods get no node from now on.
type held struct {
	mu  sync.Mutex // guards all
	all map[string]bool
}

// of is the same cluster for a part of the test.
func (c *cluster) of(t *testing.T) *cluster {
	part := *c
	part.T = t
	part.logs = t.TempDir()
	part.logsOnFailure(t)
	return &part
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	server := apiserver.Start(t)
	c := &cluster{T: t, server: server, admin: kubernetes.NewForConfigOrDie(server.Config()), objects: dynamic.NewForConfigOrDie(server.Config()),
		agent: newNodeAgent(), started: &atomic.Int32{}, held: &held{all: map[string]bool{}},
		kubeconfig: as(t, server, "system:serviceaccount:"+ownNamespace+":flux-sandbox-controller")}
	must(c.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ownNamespace}}, metav1.CreateOptions{}))
	manifests.Apply(t, server.Config(), manifests.Objects(t, "config/crd/*.yaml", "config/kubernetes/rbac.yaml", "config/admission/*.yaml")...)
	has := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100"), corev1.ResourceMemory: resource.MustParse("100Gi"), corev1.ResourcePods: resource.MustParse("1000")}
	must(c.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{corev1.LabelHostname: nodeName}},
		Status: corev1.NodeStatus{Capacity: has, Allocatable: has}}, metav1.CreateOptions{}))
	c.serveAgent()
	ctx, cancel := context.WithCancel(t.Context())
	var playing sync.WaitGroup
	playing.Go(func() { c.play(ctx) })
	t.Cleanup(func() { cancel(); playing.Wait() })
	return c
}

// address is one of this machine that is no loopback, as EndpointSlices take no other.
func address(t *testing.T) string {
	t.Helper()
	for _, a := range must(net.InterfaceAddrs()) {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			return n.IP.String()
		}
	}
	testenv.Missing(t, "a network interface beside the loopback one")
	return ""
}

// serveAgent serves the node's agent, with a certificate of the installation's CA.
func (c *cluster) serveAgent() {
	c.Helper()
	authority := must(certificates.NewAuthority(c.Context(), certificates.AuthorityOptions{Client: c.admin, Namespace: ownNamespace}))
	key := must(identity.NewKey())
	issued := must(authority.Agent(nodeName, key.Public()))
	certificate := &tls.Certificate{Certificate: issued.Chain, PrivateKey: key, Leaf: must(x509.ParseCertificate(issued.Chain[0]))}
	own := identity.Credentials{Certificate: func() (*tls.Certificate, error) { return certificate, nil }, Bundle: authority.Bundle}
	server := grpc.NewServer(append(identity.ServerOptions(own.AgentServer(), identity.ConnectionAge, func(error) {}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: agentv1.KeepAlive / 2, PermitWithoutStream: true}))...)
	agentv1.RegisterAgentServiceServer(server, c.agent)
	at := address(c.T)
	l := must(net.Listen("tcp", net.JoinHostPort(at, "0")))
	go func() { _ = server.Serve(l) }()
	c.Cleanup(server.Stop)
	must(c.admin.DiscoveryV1().EndpointSlices(ownNamespace).Create(c.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "agents", Labels: map[string]string{discoveryv1.LabelServiceName: clustercontroller.DefaultAgentService}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{at}, NodeName: ptr.To(nodeName)}},
		Ports:       []discoveryv1.EndpointPort{{Port: ptr.To(int32(l.Addr().(*net.TCPAddr).Port))}},
	}, metav1.CreateOptions{}))
}

func (c *cluster) list(of schema.GroupVersionResource, namespace string) []unstructured.Unstructured {
	list, err := c.objects.Resource(of).Namespace(namespace).List(c.Context(), metav1.ListOptions{})
	if err != nil {
		return nil // the test is over
	}
	return list.Items
}

func (c *cluster) isHeld(namespace string) bool {
	c.held.mu.Lock()
	defer c.held.mu.Unlock()
	return c.held.all[namespace]
}

func (c *cluster) hold(namespace string) {
	c.held.mu.Lock()
	defer c.held.mu.Unlock()
	c.held.all[namespace] = true
}

// playEvery is how often everybody who is played looks at everything.
const playEvery = 20 * time.Millisecond

// play has everybody do what is theirs, until ctx ends. What fails is tried again with the next look.
func (c *cluster) play(ctx context.Context) {
	again := time.NewTicker(playEvery)
	defer again.Stop()
	for {
		// Dependents first: what is listed after them includes their owners, if these are there.
		claims, pods := c.list(pvcsGVR, ""), c.list(podsGVR, "")
		for i := range claims {
			c.bind(ctx, &claims[i], pods)
		}
		for i := range pods {
			c.kubelet(ctx, &pods[i])
		}
		c.collect(ctx, slices.Concat(claims, pods, c.list(sandboxesGVR, "")))
		select {
		case <-ctx.Done():
			return
		case <-again.C:
		}
	}
}

// bind plays the controller of PersistentVolumes, and the one that keeps a claim while a Pod uses it.
func (c *cluster) bind(ctx context.Context, o *unstructured.Unstructured, pods []unstructured.Unstructured) {
	api := c.admin.CoreV1().PersistentVolumeClaims(o.GetNamespace())
	if o.GetDeletionTimestamp() != nil {
		if !slices.Contains(o.GetFinalizers(), "kubernetes.io/pvc-protection") || slices.ContainsFunc(pods, func(p unstructured.Unstructured) bool { return uses(&p, o) }) {
			return
		}
		_, _ = api.Patch(ctx, o.GetName(), types.StrategicMergePatchType,
			[]byte(`{"metadata":{"uid":"`+string(o.GetUID())+`","$deleteFromPrimitiveList/finalizers":["kubernetes.io/pvc-protection"]}}`), metav1.PatchOptions{})
		return
	}
	if phase, _, _ := unstructured.NestedString(o.Object, "status", "phase"); phase != string(corev1.ClaimBound) {
		if volume, _, _ := unstructured.NestedString(o.Object, "spec", "volumeName"); volume != "" {
			pv, err := c.admin.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{})
			if err == nil && pv.Spec.ClaimRef == nil {
				pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUID()}
				pv, err = c.admin.CoreV1().PersistentVolumes().Update(ctx, pv, metav1.UpdateOptions{})
			}
			if err != nil || pv.Spec.ClaimRef.UID != o.GetUID() {
				return // another time, or another's
			}
		}
		_, _ = api.Patch(ctx, o.GetName(), types.MergePatchType, []byte(`{"status":{"phase":"Bound"}}`), metav1.PatchOptions{}, "status")
	}
}

func uses(pod, claim *unstructured.Unstructured) bool {
	volumes, _, _ := unstructured.NestedSlice(pod.Object, "spec", "volumes")
	return pod.GetNamespace() == claim.GetNamespace() && slices.ContainsFunc(volumes, func(v any) bool {
		name, _, _ := unstructured.NestedString(v.(map[string]any), "persistentVolumeClaim", "claimName")
		return name == claim.GetName()
	})
}

// kubelet plays kube-scheduler and kubelet: a Pod gets the node, runs what its spec says, and goes when it is to go.
func (c *cluster) kubelet(ctx context.Context, o *unstructured.Unstructured) {
	pod := &corev1.Pod{}
	if err := json.Unmarshal(must(o.MarshalJSON()), pod); err != nil {
		panic(err)
	}
	api := c.admin.CoreV1().Pods(pod.Namespace)
	switch {
	case pod.DeletionTimestamp != nil:
		c.agent.podGone(string(pod.UID))
		_ = api.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0)), Preconditions: &metav1.Preconditions{UID: &pod.UID}})
	case pod.Spec.NodeName == "" && !c.isHeld(pod.Namespace):
		_ = api.Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: pod.Name, UID: pod.UID}, Target: corev1.ObjectReference{Kind: "Node", Name: nodeName}}, metav1.CreateOptions{})
	case pod.Spec.NodeName != "" && pod.Status.ObservedGeneration != pod.Generation:
		c.agent.podRuns(string(pod.UID))
		st := corev1.PodStatus{ObservedGeneration: pod.Generation, Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
		for _, of := range pod.Spec.Containers {
			st.ContainerStatuses = append(st.ContainerStatuses, corev1.ContainerStatus{Name: of.Name, Image: of.Image, ImageID: of.Image, Resources: &of.Resources, Ready: true, Started: ptr.To(true),
				ContainerID: "containerd://" + string(pod.UID) + "-" + of.Image, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: pod.CreationTimestamp}}})
		}
		pod.Status = st
		_, _ = api.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	}
}

// collect plays the garbage collector: what has owners, none of which is there, is deleted.
func (c *cluster) collect(ctx context.Context, dependents []unstructured.Unstructured) {
	owners := map[types.UID]bool{}
	for _, of := range []schema.GroupVersionResource{setsGVR, claimsGVR, sandboxesGVR} {
		list, err := c.objects.Resource(of).List(ctx, metav1.ListOptions{})
		if err != nil {
			return
		}
		for _, o := range list.Items {
			owners[o.GetUID()] = true
			if of == claimsGVR && o.GetDeletionTimestamp() != nil && slices.Contains(o.GetFinalizers(), metav1.FinalizerOrphanDependents) {
				c.orphan(ctx, &o)
			}
		}
	}
	for _, o := range dependents {
		refs := o.GetOwnerReferences()
		if len(refs) == 0 || o.GetDeletionTimestamp() != nil || slices.ContainsFunc(refs, func(r metav1.OwnerReference) bool { return owners[r.UID] }) {
			continue
		}
		gvr := map[string]schema.GroupVersionResource{"Sandbox": sandboxesGVR, "Pod": podsGVR, "PersistentVolumeClaim": pvcsGVR}[o.GetKind()]
		_ = c.objects.Resource(gvr).Namespace(o.GetNamespace()).Delete(ctx, o.GetName(), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{
			UID: ptr.To(o.GetUID()), ResourceVersion: ptr.To(o.GetResourceVersion())}})
	}
}

// orphan takes a claim that is to leave its sandboxes from them, and lets it go.
func (c *cluster) orphan(ctx context.Context, claim *unstructured.Unstructured) {
	for _, sb := range c.list(sandboxesGVR, claim.GetNamespace()) {
		refs := sb.GetOwnerReferences()
		rest := slices.DeleteFunc(slices.Clone(refs), func(r metav1.OwnerReference) bool { return r.UID == claim.GetUID() })
		if len(rest) == len(refs) {
			continue
		}
		patch := must(json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": sb.GetResourceVersion(), "ownerReferences": rest}}))
		if _, err := c.objects.Resource(sandboxesGVR).Namespace(sb.GetNamespace()).Patch(ctx, sb.GetName(), types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			return
		}
	}
	_, _ = c.objects.Resource(claimsGVR).Namespace(claim.GetNamespace()).Patch(ctx, claim.GetName(), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
}

// pv makes a PersistentVolume of the direct driver.
func (c *cluster) pv(name string) string {
	c.Helper()
	must(c.admin.CoreV1().PersistentVolumes().Create(c.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		Capacity: corev1.ResourceList{corev1.ResourceStorage: oneGi}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: directDriver, VolumeHandle: name}},
	}}, metav1.CreateOptions{}))
	return name
}

// expireLease is the end of the time for which the Lease of a leader that is gone is waited for.
func (c *cluster) expireLease() {
	if err := c.admin.CoordinationV1().Leases(ownNamespace).Delete(c.Context(), clustercontroller.DefaultLease, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) && c.Context().Err() == nil {
		c.Error(err)
	}
}
