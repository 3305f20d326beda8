package connect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
)

// The names that config/kubernetes gives.
const (
	// DefaultNamespace is that of the controller.
	DefaultNamespace = "flux-sandbox"
	// Service is the controller's; its certificate has that name.
	Service = "flux-sandbox-controller"
	// Bundle is the ConfigMap with the CAs to trust.
	Bundle = "flux-sandbox-ca-bundle"
	// Role is the Role in the controller's namespace that allows what Connect does there.
	Role = "flux-sandbox-connect"
)

const (
	podLabel  = "app.kubernetes.io/name=" + Service
	portName  = "grpc"
	bundleKey = "ca.crt"
)

// Cluster is a cluster as a kubeconfig names it.
type Cluster struct {
	config    *rest.Config
	client    kubernetes.Interface
	namespace string
}

// Way is an open way to the gRPC API.
type Way struct {
	// Address is where to dial, ServerName the name that the certificate there must have, and CA the PEM of whom to trust.
	Address, ServerName string
	CA                  []byte
	// Token is the caller's token. It is asked for before every call.
	Token func() (string, error)
	// Close ends the way.
	Close func()
}

// Load reads the kubeconfig: of that file, or by kubectl's rules (KUBECONFIG, ~/.kube/config) when it is empty; of that context,
// or the current one. found is false where there is none and no file was named.
func Load(file, contextName string) (c *Cluster, found bool, err error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = file
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: contextName})
	raw, err := loader.RawConfig()
	if err != nil {
		return nil, true, fmt.Errorf("read the kubeconfig: %w", err)
	}
	if len(raw.Contexts) == 0 && file == "" && contextName == "" {
		return nil, false, nil
	}
	config, err := loader.ClientConfig()
	if err != nil {
		return nil, true, fmt.Errorf("read the kubeconfig: %w", err)
	}
	namespace, _, err := loader.Namespace()
	if err != nil {
		return nil, true, fmt.Errorf("read the kubeconfig: %w", err)
	}
	c, err = New(config, namespace)
	return c, true, err
}

// New is a cluster whose API server is reached by config. namespace is that of its user's sandboxes.
func New(config *rest.Config, namespace string) (*Cluster, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client of the API server %s: %w", config.Host, err)
	}
	return &Cluster{config: config, client: client, namespace: namespace}, nil
}

// Namespace is the namespace of the kubeconfig's context.
func (c *Cluster) Namespace() string { return c.namespace }

// Connect opens a way to a controller in the namespace system. It calls as the ServiceAccount account of namespace, or with the
// kubeconfig's own token when account is empty. Close the way when it is not needed any more.
func (c *Cluster) Connect(ctx context.Context, system, namespace, account string) (*Way, error) {
	bundle, err := c.client.CoreV1().ConfigMaps(system).Get(ctx, Bundle, metav1.GetOptions{})
	if err != nil {
		return nil, c.failed(err, "read ConfigMap "+system+"/"+Bundle, system)
	}
	pod, port, err := c.controller(ctx, system)
	if err != nil {
		return nil, err
	}
	token, err := c.token(namespace, account)
	if err != nil {
		return nil, err
	}
	if _, err := token(); err != nil { // what cannot be is better known before the way is open
		return nil, err
	}
	address, end, err := c.forward(ctx, pod, port)
	if err != nil {
		return nil, err
	}
	return &Way{Address: address, ServerName: Service + "." + system + ".svc", CA: []byte(bundle.Data[bundleKey]), Token: token, Close: end}, nil
}

// controller is a Pod that serves the API, and the port.
func (c *Cluster) controller(ctx context.Context, system string) (*corev1.Pod, int32, error) {
	pods, err := c.client.CoreV1().Pods(system).List(ctx, metav1.ListOptions{LabelSelector: podLabel})
	if err != nil {
		return nil, 0, c.failed(err, "list the Pods of "+Service, system)
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if port := portOf(pod); port != 0 && isReady(pod) {
			return pod, port, nil
		}
	}
	return nil, 0, fmt.Errorf("none of the %d Pods of %s in Namespace %s of the cluster %s is ready: is FluxSandbox installed there? (kubectl -n %s get pods)",
		len(pods.Items), Service, system, c.config.Host, system)
}

func portOf(pod *corev1.Pod) int32 {
	for i := range pod.Spec.Containers {
		for _, p := range pod.Spec.Containers[i].Ports {
			if p.Name == portName {
				return p.ContainerPort
			}
		}
	}
	return 0
}

func isReady(pod *corev1.Pod) bool {
	if pod.DeletionTimestamp != nil {
		return false
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}

// forward has the API server forward a port of a Pod, and returns where from.
func (c *Cluster) forward(ctx context.Context, pod *corev1.Pod, port int32) (address string, end func(), err error) {
	about := fmt.Sprintf("forward port %d of Pod %s/%s", port, pod.Namespace, pod.Name)
	url := c.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(c.config)
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w", about, err)
	}
	overWebSocket, err := portforward.NewSPDYOverWebsocketDialer(url, c.config)
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w", about, err)
	}
	dialer := portforward.NewFallbackDialer(overWebSocket, spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, url), func(error) bool { return true })
	stop, ready, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	forwarder, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{fmt.Sprintf("0:%d", port)}, stop, ready, io.Discard, io.Discard)
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w", about, err)
	}
	go func() { ended <- forwarder.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-ended:
		return "", nil, c.failed(err, about, pod.Namespace)
	case <-ctx.Done():
		close(stop)
		return "", nil, fmt.Errorf("%s: %w", about, context.Cause(ctx))
	}
	end = func() {
		close(stop)
		<-ended
	}
	ports, err := forwarder.GetPorts()
	if err != nil {
		end()
		return "", nil, fmt.Errorf("%s: %w", about, err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(int(ports[0].Local))), end, nil
}

// failed says of an error about something in the controller's namespace what to do.
func (c *Cluster) failed(err error, what, system string) error {
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: %w", what, err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%s: %w; the Role %s of Namespace %s allows it, ask the operator for a RoleBinding, or for an address (--address)", what, err, Role, system)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%s: it is not there: is FluxSandbox installed in the cluster %s, in that Namespace (--system-namespace)?", what, c.config.Host)
	}
	return fmt.Errorf("%s: %w", what, err)
}
