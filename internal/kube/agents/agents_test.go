package agents_test

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/agents"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

func node(name string, labels map[string]string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid-" + "of-" + "node", Labels: labels, Annotations: map[string]string{agents.AnnotationMaxSandboxes: "7"}},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("1500m"), corev1.ResourceMemory: resource.MustParse("1Gi")}},
	}
}

func endpoints(name, node, address string, port int32) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "flux", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "agents"}},
		Endpoints:  []discoveryv1.Endpoint{{Addresses: []string{address}, NodeName: &node}},
		Ports:      []discoveryv1.EndpointPort{{Port: &port}},
	}
}

// cluster is a fake API server with Agents that follow it.
type cluster struct {
	t      *testing.T
	client *fake.Clientset
	agents *agents.Agents
	events chan scheduler.AgentEvent
}

func start(t *testing.T, objects ...any) *cluster {
	t.Helper()
	c := &cluster{t: t, client: fake.NewClientset(), events: make(chan scheduler.AgentEvent)}
	for _, o := range objects {
		c.put(o)
	}
	var err error
	c.agents, err = agents.New(agents.Config{Client: c.client, Namespace: "flux", Service: "agents",
		Credentials: func(string) (credentials.TransportCredentials, error) { return insecure.NewCredentials(), nil }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.agents.Run(ctx) }()
	followed := make(chan struct{})
	go func() {
		defer close(followed)
		for e := range c.agents.Follow(ctx) {
			select {
			case c.events <- e:
			case <-ctx.Done():
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		<-followed
	})
	return c
}

func (c *cluster) put(o any) {
	c.t.Helper()
	var err error
	switch o := o.(type) {
	case *corev1.Node:
		if _, err = c.client.CoreV1().Nodes().Update(c.t.Context(), o, metav1.UpdateOptions{}); err != nil {
			_, err = c.client.CoreV1().Nodes().Create(c.t.Context(), o, metav1.CreateOptions{})
		}
	case *discoveryv1.EndpointSlice:
		slices := c.client.DiscoveryV1().EndpointSlices(o.Namespace)
		if _, err = slices.Update(c.t.Context(), o, metav1.UpdateOptions{}); err != nil {
			_, err = slices.Create(c.t.Context(), o, metav1.CreateOptions{})
		}
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// next is the next event, which must be of a type and about a node.
func (c *cluster) next(want scheduler.AgentEventType, node string) scheduler.Agent {
	c.t.Helper()
	select {
	case e := <-c.events:
		if e.Type != want || e.Agent.Node != node {
			c.t.Fatalf("event %d about %q, want %d about %q", e.Type, e.Agent.Node, want, node)
		}
		return e.Agent
	case <-time.After(10 * time.Second):
		c.t.Fatalf("no event; want %d about %q", want, node)
	}
	panic("unreachable")
}

func TestAnAgentIsANodeWithAnEndpoint(t *testing.T) {
	c := start(t, node("n1", map[string]string{"zone": "a"}), endpoints("s1", "n1", "127.0.0.1", 1))
	first := c.next(scheduler.AgentAdded, "n1")
	if first.Labels["zone"] != "a" || first.Client == nil ||
		first.Capacity != (scheduler.Capacity{Sandboxes: 7, CPUMilli: 1500, MemoryBytes: 1 << 30}) {
		t.Errorf("%+v", first)
	}
	c.next(scheduler.AgentsSynced, "")
	// A label, and an address.
	c.put(node("n1", map[string]string{"zone": "b"}))
	if a := c.next(scheduler.AgentAdded, "n1"); a.Labels["zone"] != "b" || a.Client != first.Client {
		t.Errorf("%+v", a)
	}
	c.put(endpoints("s1", "n1", "127.0.0.1", 2))
	if a := c.next(scheduler.AgentAdded, "n1"); a.Client == first.Client {
		t.Error("the agent moved, and is asked where it was")
	}
	// What is no change is no event: the next one is about the other node. An endpoint without a Node is not an agent, nor
	// is it a node that died.
	busy := node("n1", map[string]string{"zone": "b"})
	busy.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, LastHeartbeatTime: metav1.Now()}}
	c.put(busy)
	c.put(endpoints("s2", "n2", "127.0.0.1", 3))
	c.put(node("n2", nil))
	c.next(scheduler.AgentAdded, "n2")
	if c.agents.Dead("n2") {
		t.Error("a node that is there is dead")
	}
}

func TestAbsenceIsNotDeath(t *testing.T) {
	c := start(t, node("n1", nil), node("n2", nil), endpoints("s1", "n1", "127.0.0.1", 1))
	c.next(scheduler.AgentAdded, "n1")
	c.next(scheduler.AgentsSynced, "")
	if err := c.client.DiscoveryV1().EndpointSlices("flux").Delete(t.Context(), "s1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	// The taint is the next that is told: the endpoint's end was not.
	out := node("n2", nil)
	out.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Value: "nodeshutdown", Effect: corev1.TaintEffectNoExecute}}
	c.put(out)
	c.next(scheduler.NodeDied, "n2")
	if c.agents.Dead("n1") || !c.agents.Dead("n2") {
		t.Errorf("dead: n1 %v, n2 %v", c.agents.Dead("n1"), c.agents.Dead("n2"))
	}
	if err := c.client.CoreV1().Nodes().Delete(t.Context(), "n1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.next(scheduler.AgentRemoved, "n1")
	c.next(scheduler.NodeDied, "n1")
	if !c.agents.Dead("n1") || !c.agents.Dead("never heard of") {
		t.Error("a deleted node is not dead")
	}
	if _, err := c.agents.Client("n1"); fault.ReasonOf(err) != fault.NoAgent {
		t.Errorf("client of a deleted node: %v", err)
	}
}

// A Node that is deleted and made anew, as by an administrator, has its agent again although no endpoint changed.
func TestANodeIsMadeAnew(t *testing.T) {
	served := make(chan struct{}, 1)
	slice := endpoints("s1", "n1", "127.0.0.1", serveProbe(t, served))
	c := start(t, node("n1", nil), slice)
	first := c.next(scheduler.AgentAdded, "n1")
	c.next(scheduler.AgentsSynced, "")
	if err := c.client.CoreV1().Nodes().Delete(t.Context(), "n1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.next(scheduler.AgentRemoved, "n1")
	c.next(scheduler.NodeDied, "n1")
	// The slice changes for another node's sake, and still has the endpoint: what has no Node is not asked.
	other := slice.DeepCopy()
	other.Endpoints = append(other.Endpoints, endpoints("", "n2", "127.0.0.1", 0).Endpoints...)
	c.put(other)
	c.put(node("n2", nil))
	c.next(scheduler.AgentAdded, "n2")
	if _, err := c.agents.Client("n1"); fault.ReasonOf(err) != fault.NoAgent {
		t.Errorf("client of a deleted node: %v", err)
	}
	c.put(node("n1", nil))
	again := c.next(scheduler.AgentAdded, "n1")
	if again.Client == nil || again.Client == first.Client {
		t.Fatalf("%+v", again)
	}
	if _, err := again.Client.Probe(t.Context(), &agentv1.ProbeRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	<-served
	if c.agents.Dead("n1") {
		t.Error("the node is dead")
	}
}

// A terminating endpoint, as while the agent's Pod is replaced, does not take the place of the new one.
func TestTheOldPodOfTwoIsNotAsked(t *testing.T) {
	served := make(chan struct{}, 1)
	port := serveProbe(t, served)
	slice := endpoints("s1", "n1", "127.0.0.1", port)
	old := slice.Endpoints[0]
	old.Addresses = []string{"127.0.0.2"}
	old.Conditions.Terminating = ptr.To(true)
	slice.Endpoints = append(slice.Endpoints, old)
	c := start(t, node("n1", nil), slice)
	a := c.next(scheduler.AgentAdded, "n1")
	if _, err := a.Client.Probe(t.Context(), &agentv1.ProbeRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	<-served
}

type prober struct {
	agentv1.UnimplementedAgentServiceServer
	served chan struct{}
}

func (p prober) Probe(context.Context, *agentv1.ProbeRequest) (*agentv1.ProbeResponse, error) {
	p.served <- struct{}{}
	return &agentv1.ProbeResponse{}, nil
}

func serveProbe(t *testing.T, served chan struct{}) int32 {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	agentv1.RegisterAgentServiceServer(server, prober{served: served})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return int32(listener.Addr().(*net.TCPAddr).Port)
}

// Nothing is asked of the API server again once the watches stand.
func TestNoPolling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(node("n1", nil))
		a, err := agents.New(agents.Config{Client: client, Namespace: "flux", Service: "agents",
			Credentials: func(string) (credentials.TransportCredentials, error) { return insecure.NewCredentials(), nil }})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		<-a.Synced()
		before := len(client.Actions())
		select {
		case err := <-done:
			t.Fatal("it ended:", err)
		case <-time.After(24 * time.Hour): // of the bubble's clock
		}
		if after := len(client.Actions()); after != before {
			t.Errorf("%d calls in a day of quiet: %v", after-before, client.Actions()[before:])
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
