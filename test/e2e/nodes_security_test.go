package e2e

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	nodev1 "github.com/flux-sandbox/flux-sandbox/api/proto/node/v1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/identity"
)

// signer is a CA with its key, that signs whatever is asked of it.
type signer struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// signer is the CA of the cluster, with the key from its Secret.
func (c *cluster) signer() signer {
	c.t.Helper()
	secret, err := c.client.CoreV1().Secrets(system).Get(c.t.Context(), "flux-sandbox-ca", metav1.GetOptions{})
	must(c.t, err)
	for name, cert := range secret.Data {
		if of, found := strings.CutSuffix(name, ".crt"); found {
			return signerOf(c.t, cert, secret.Data[of+".key"])
		}
	}
	c.t.Fatal("the CA's Secret has no certificate")
	return signer{}
}

// foreignSigner is another CA.
func foreignSigner(t *testing.T) signer {
	t.Helper()
	ca, err := identity.NewCA(time.Now())
	must(t, err)
	cert, key, err := ca.PEM()
	must(t, err)
	return signerOf(t, cert, key)
}

func signerOf(t *testing.T, certPEM, keyPEM []byte) signer {
	t.Helper()
	certBlock, _ := pem.Decode(certPEM)
	keyBlock, _ := pem.Decode(keyPEM)
	if certBlock == nil || keyBlock == nil {
		t.Fatal("the CA is not in PEM")
	}
	cert, err := x509.ParseCertificate(certBlock.Bytes)
	must(t, err)
	key, err := x509.ParsePKCS8PrivateKey(keyBlock.Bytes)
	must(t, err)
	return signer{cert, key.(crypto.Signer)}
}

// sign signs a certificate that names a holder and is valid until then.
func (s signer) sign(t *testing.T, id identity.ID, usage x509.ExtKeyUsage, until time.Time) *tls.Certificate {
	t.Helper()
	key, err := identity.NewKey()
	must(t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		NotBefore: until.Add(-2 * time.Hour), NotAfter: until, URIs: []*url.URL{id.URI()}, ExtKeyUsage: []x509.ExtKeyUsage{usage},
		KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
	}, s.cert, key.Public(), s.key)
	must(t, err)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// id is who the agent of a node is.
func (n *node) id() identity.ID {
	n.c.t.Helper()
	id, err := identity.Agent(n.name)
	must(n.c.t, err)
	return id
}

// trust are credentials with a certificate, or with none when it is nil, that trust the cluster's CA.
func (c *cluster) trust(own *tls.Certificate) identity.Credentials {
	bundle := c.caBundle()
	return identity.Credentials{
		Certificate: func() (*tls.Certificate, error) { return own, nil },
		Bundle:      identity.NewBundleFile(func() ([]byte, error) { return bundle, nil }).Bundle,
	}
}

// showing calls the node's agent as the controller does, with this certificate.
func (n *node) showing(own *tls.Certificate) agentv1.AgentServiceClient {
	n.c.t.Helper()
	config, err := n.c.trust(own).ControllerClient(n.name)
	must(n.c.t, err)
	if own == nil {
		config.GetClientCertificate = nil
	}
	return n.dialled(credentials.NewTLS(config))
}

// asController calls the node's agent with a certificate as the controller has it.
func (n *node) asController() agentv1.AgentServiceClient {
	n.c.t.Helper()
	return n.showing(n.c.signer().sign(n.c.t, identity.Controller(), x509.ExtKeyUsageClientAuth, time.Now().Add(time.Hour)))
}

func (n *node) dialled(creds credentials.TransportCredentials) agentv1.AgentServiceClient {
	n.c.t.Helper()
	conn, err := grpc.NewClient(fmt.Sprintf("passthrough:///%s:%d", n.address, n.port), grpc.WithTransportCredentials(creds))
	must(n.c.t, err)
	n.c.t.Cleanup(func() { _ = conn.Close() })
	return agentv1.NewAgentServiceClient(conn)
}

// An agent answers nobody but who shows the controller's certificate, signed by the cluster's CA and valid now.
func (c *cluster) strangersAtAnAgent() {
	t := c.t
	n, other, ca := c.nodes[0], c.nodes[1], c.signer()
	later := time.Now().Add(time.Hour)
	sb := c.running("s", ticking, on(n.only()))
	p := c.process(sb)
	for who, try := range map[string]struct {
		client agentv1.AgentServiceClient
		told   string // the stranger
		logged string // by the agent
	}{
		"in clear":                         {n.dialled(insecure.NewCredentials()), "", "does not speak TLS"},
		"without a certificate":            {n.showing(nil), "certificate required", "didn't provide a certificate"},
		"with one of another CA":           {n.showing(foreignSigner(t).sign(t, identity.Controller(), x509.ExtKeyUsageClientAuth, later)), "unknown certificate authority", "unknown authority"},
		"with one that is over":            {n.showing(ca.sign(t, identity.Controller(), x509.ExtKeyUsageClientAuth, time.Now().Add(-time.Minute))), "expired certificate", "has expired"},
		"with another agent's":             {n.showing(ca.sign(t, other.id(), x509.ExtKeyUsageServerAuth, later)), "bad certificate", "the agent of node " + other.name},
		"with another agent's for clients": {n.showing(ca.sign(t, other.id(), x509.ExtKeyUsageClientAuth, later)), "bad certificate", "the agent of node " + other.name},
		"with its own":                     {n.showing(ca.sign(t, n.id(), x509.ExtKeyUsageClientAuth, later)), "bad certificate", "the agent of node " + n.name},
	} {
		before := len(read(t, n.file("log")))
		_, err := try.client.Probe(t.Context(), &agentv1.ProbeRequest{})
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), try.told) {
			t.Errorf("%s, it is told: %v; want %q", who, err, try.told)
		}
		c.wait("the agent logs who came "+who, func() (bool, string) {
			log := read(t, n.file("log"))[before:]
			return strings.Contains(log, "a connection was refused") && strings.Contains(log, try.logged), log
		})
		_, err = try.client.DeleteSandbox(t.Context(), &agentv1.DeleteSandboxRequest{Command: &agentv1.Command{
			Epoch: 1 << 62, LeaseUid: "stranger", SandboxUid: string(sb.UID), Generation: 1 << 30, OperationId: "stranger"}})
		if status.Code(err) != codes.Unavailable {
			t.Errorf("%s, a sandbox is deleted: %v", who, err)
		}
	}
	uninterrupted(t, p)
	if _, err := n.asController().Probe(t.Context(), &agentv1.ProbeRequest{}); err != nil {
		t.Errorf("the controller itself: %v", err)
	}
}

// The controller commands nobody who is not the agent of exactly that node, at whatever address it is told that agent is.
func (c *cluster) impostors() {
	t := c.t
	n, other, ca := c.nodes[2], c.nodes[1], c.signer()
	later := time.Now().Add(time.Hour)
	user := c.caller("impostors", "flux-sandbox-user")
	sb := c.running("s", ticking, on(n.only()))
	p := c.process(sb)
	add := func() error {
		_, err := sandboxv1.NewSandboxVolumeServiceClient(user.conn).AddSandVolume(t.Context(), &sandboxv1.AddSandVolumeRequest{
			Sandbox: &sandboxv1.SandboxRef{Namespace: c.namespace, Name: "s"},
			Volume:  &sandboxv1.DynamicVolume{VolumeType: "local", Source: c.data("a"), Target: "/a"}})
		return err
	}
	n.kill()
	var asked atomic.Int32
	// serving is a server that shows a certificate and takes everybody, and tells of connections that came to nothing.
	serving := func(own *tls.Certificate) (port int32, refused func() (bool, string)) {
		listener, err := net.Listen("tcp", n.address+":0")
		must(t, err)
		connections := make(chan error, 1)
		options := identity.ServerOptions(c.trust(own).ControllerServer(), identity.ConnectionAge, func(err error) {
			select {
			case connections <- err:
			default:
			}
		})
		server := grpc.NewServer(append(options, grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
			asked.Add(1)
			return status.Error(codes.Internal, "asked")
		}))...)
		go func() { _ = server.Serve(listener) }()
		t.Cleanup(server.Stop)
		return int32(listener.Addr().(*net.TCPAddr).Port), func() (bool, string) {
			select {
			case err := <-connections:
				return strings.Contains(err.Error(), "bad certificate"), err.Error()
			default:
				return false, "nobody came"
			}
		}
	}
	// The agent of another node, at the address of this one's.
	since, before := metav1.Now(), len(read(t, other.file("log")))
	n.endpoint(other.port)
	c.wait("the leader says who answers", func() (bool, string) {
		log := c.controllerLogs(since)
		return strings.Contains(log, "the peer is the agent of node "+other.name+", and it must be the agent of node "+n.name), ""
	})
	if log := read(t, other.file("log"))[before:]; !strings.Contains(log, "a connection was refused") {
		t.Errorf("the log of %s: %s", other.name, log)
	}
	if err := add(); status.Code(err) != codes.Unavailable || fault.ReasonOf(fault.FromGRPC(err)) != fault.AgentUnavailable {
		t.Errorf("with the agent of another node: %v", err)
	}
	for who, own := range map[string]*tls.Certificate{
		"one of another CA":             foreignSigner(t).sign(t, n.id(), x509.ExtKeyUsageServerAuth, later),
		"one whose certificate is over": ca.sign(t, n.id(), x509.ExtKeyUsageServerAuth, time.Now().Add(-time.Minute)),
		"one with another node's":       ca.sign(t, other.id(), x509.ExtKeyUsageServerAuth, later),
		"one with the controller's":     ca.sign(t, identity.Controller(), x509.ExtKeyUsageServerAuth, later),
		"one whose is for clients":      ca.sign(t, n.id(), x509.ExtKeyUsageClientAuth, later),
	} {
		port, refused := serving(own)
		n.endpoint(port)
		c.wait(who+" is refused", refused)
		if err := add(); status.Code(err) != codes.Unavailable || fault.ReasonOf(fault.FromGRPC(err)) != fault.AgentUnavailable {
			t.Errorf("with %s: %v", who, err)
		}
	}
	if n := asked.Load(); n > 0 {
		t.Errorf("impostors were asked %d times", n)
	}
	if has := other.has(); len(has) > 0 {
		t.Errorf("%s has %v", other.name, has)
	}
	n.start()
	n.ready()
	n.endpoint(n.port)
	c.wait("its own agent is asked again", func() (bool, string) { err := add(); return err == nil, fmt.Sprint(err) })
	c.row("s", "/a", v1alpha1.VolumeMounted)
	if p.mountAt(t, "/a") == "" {
		t.Error("the volume is not mounted")
	}
	uninterrupted(t, p)
}

// controllerLogs is what the controllers logged since then.
func (c *cluster) controllerLogs(since metav1.Time) string {
	c.t.Helper()
	pods, err := c.client.CoreV1().Pods(system).List(c.t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=flux-sandbox-controller"})
	must(c.t, err)
	var all strings.Builder
	for _, p := range pods.Items {
		log, _ := c.client.CoreV1().Pods(system).GetLogs(p.Name, &corev1.PodLogOptions{SinceTime: &since}).DoRaw(c.t.Context())
		all.Write(log)
	}
	return all.String()
}

// The controller signs for nobody but an agent's Pod, and for no other node than that Pod's; and what an agent shows it opens
// nothing else.
func (c *cluster) tokensForCertificates() {
	t := c.t
	n, other := c.nodes[0], c.nodes[1]
	service, err := c.client.CoreV1().Services(system).Get(t.Context(), "flux-sandbox-controller", metav1.GetOptions{})
	must(t, err)
	conn, err := grpc.NewClient("passthrough:///"+service.Spec.ClusterIP+":9444", grpc.WithTransportCredentials(credentials.NewTLS(c.trust(nil).ServiceClient(serverName))))
	must(t, err)
	defer conn.Close()
	issue := func(token string, id identity.ID) error {
		key, err := identity.NewKey()
		must(t, err)
		csr, err := identity.NewRequest(key, id)
		must(t, err)
		var options []grpc.CallOption
		if token != "" {
			options = append(options, grpc.PerRPCCredentials(identity.Bearer(func() (string, error) { return token, nil })))
		}
		_, err = nodev1.NewNodeCertificateServiceClient(conn).Issue(t.Context(), &nodev1.IssueRequest{Csr: csr}, options...)
		return err
	}
	good := n.token(n.pod, agentAudience)
	_, err = c.client.CoreV1().ServiceAccounts(c.namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "agent"}}, metav1.CreateOptions{})
	must(t, err)
	unbound, err := c.client.CoreV1().ServiceAccounts(system).CreateToken(t.Context(), "flux-sandbox-agent", &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: []string{agentAudience}}}, metav1.CreateOptions{})
	must(t, err)
	gone := n.newPod(n.name + "-gone")
	ofGone := n.token(gone, agentAudience)
	must(t, c.client.CoreV1().Pods(system).Delete(t.Context(), gone.Name, deleteNow))
	forAPI := n.token(n.pod, "")
	for who, try := range map[string]struct {
		token  string
		id     identity.ID
		reason fault.Reason
	}{
		"without a token":                       {"", n.id(), fault.Unauthenticated},
		"with the API server's audience":        {forAPI, n.id(), fault.Unauthenticated},
		"with the audience of users":            {n.token(n.pod, "sandbox.flux.io/api"), n.id(), fault.Unauthenticated},
		"with one that is over":                 {retimed(t, good, -time.Minute), n.id(), fault.Unauthenticated},
		"with one that was changed":             {good[:len(good)-8] + "AAAAAAAA", n.id(), fault.Unauthenticated},
		"as another ServiceAccount":             {c.token("agent", agentAudience), n.id(), fault.Forbidden},
		"with one that is bound to nothing":     {unbound.Status.Token, n.id(), fault.Forbidden},
		"for another node":                      {good, other.id(), fault.InvalidRequest},
		"for the controller":                    {good, identity.Controller(), fault.InvalidRequest},
		"with the agent's own":                  {good, n.id(), ""},
		"with the agent's own, over in an hour": {retimed(t, good, time.Hour), n.id(), ""},
	} {
		if err := issue(try.token, try.id); (err == nil) != (try.reason == "") || err != nil && fault.ReasonOf(fault.FromGRPC(err)) != try.reason {
			t.Errorf("a certificate, %s: %v; want %q", who, err, try.reason)
		}
	}
	c.wait("the token of a Pod that is gone is refused", func() (bool, string) {
		err := issue(ofGone, n.id())
		return fault.ReasonOf(fault.FromGRPC(err)) == fault.Unauthenticated, fmt.Sprint(err)
	})

	// What the agent shows is no token of the API server; and one of its ServiceAccount that is may nothing.
	for token, refused := range map[string]func(error) bool{good: apierrors.IsUnauthorized, forAPI: apierrors.IsForbidden} {
		config := rest.AnonymousClientConfig(c.config)
		config.BearerToken = token
		client, err := kubernetes.NewForConfig(config)
		must(t, err)
		for what, try := range map[string]func() error{
			"read its Node": func() error {
				_, err := client.CoreV1().Nodes().Get(t.Context(), n.name, metav1.GetOptions{})
				return err
			},
			"list Pods": func() error {
				_, err := client.CoreV1().Pods(system).List(t.Context(), metav1.ListOptions{})
				return err
			},
			"read the CA": func() error {
				_, err := client.CoreV1().Secrets(system).Get(t.Context(), "flux-sandbox-ca", metav1.GetOptions{})
				return err
			},
			"delete a Pod": func() error { return client.CoreV1().Pods(system).Delete(t.Context(), n.name, metav1.DeleteOptions{}) },
			"make a token": func() error {
				_, err := client.CoreV1().ServiceAccounts(system).CreateToken(t.Context(), "flux-sandbox-controller", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
				return err
			},
			"list sandboxes": func() error {
				return client.Discovery().RESTClient().Get().AbsPath("/apis/" + v1alpha1.GroupVersion.String() + "/sandboxes").Do(t.Context()).Error()
			},
			"change its slice": func() error {
				return client.DiscoveryV1().EndpointSlices(system).Delete(t.Context(), n.name, metav1.DeleteOptions{})
			},
		} {
			if err := try(); !refused(err) {
				t.Errorf("an agent's token, to %s: %v", what, err)
			}
		}
	}
}

// retimed is a token with another end, signed with the key of the cluster.
func retimed(t *testing.T, token string, end time.Duration) string {
	t.Helper()
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("the token has %d parts", len(parts))
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	must(t, err)
	var claims map[string]any
	must(t, json.Unmarshal(text, &claims))
	claims["exp"] = time.Now().Add(end).Unix()
	claims["iat"], claims["nbf"] = time.Now().Add(-time.Hour).Unix(), time.Now().Add(-time.Hour).Unix()
	text, err = json.Marshal(claims)
	must(t, err)
	block, _ := pem.Decode([]byte(read(t, filepath.Join(filepath.Dir(filepath.Dir(os.Getenv(kubeconfigEnv))), "pki", "service-accounts.key"))))
	key, err := x509.ParseECPrivateKey(block.Bytes)
	must(t, err)
	signed := parts[0] + "." + base64.RawURLEncoding.EncodeToString(text)
	sum := sha256.Sum256([]byte(signed))
	r, s, err := ecdsa.Sign(rand.Reader, key, sum[:])
	must(t, err)
	var signature [64]byte
	r.FillBytes(signature[:32])
	s.FillBytes(signature[32:])
	return signed + "." + base64.RawURLEncoding.EncodeToString(signature[:])
}

// A leader that is followed by another sends what it still had to send: the agents refuse it by its epoch, and nothing
// happens. With the new leader's epoch the same command would be carried out, and what nobody wishes is taken away again.
func (c *cluster) lateLeader() {
	t := c.t
	n := c.nodes[0]
	sb := c.running("s", ticking, on(n.only(), local(c.data("a"), "/a")))
	p := c.process(sb)
	of, err := c.client.CoreV1().Namespaces().Get(t.Context(), system, metav1.GetOptions{})
	must(t, err)
	leaseUID, agent := string(of.UID)+"/flux-sandbox-controller", n.asController()
	epoch := func() int64 {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := agent.Inventory(ctx, &agentv1.InventoryRequest{LeaseUid: leaseUID})
		must(t, err)
		update, err := stream.Recv()
		must(t, err)
		return update.GetEpochSeen()
	}
	old := epoch()
	if old == 0 {
		t.Fatal("the agent has seen no epoch of this Lease")
	}

	leases := c.client.CoordinationV1().Leases(system)
	lease, err := leases.Get(t.Context(), "flux-sandbox-controller", metav1.GetOptions{})
	must(t, err)
	holder := *lease.Spec.HolderIdentity
	pod, _, _ := strings.Cut(holder, "_")
	must(t, c.client.CoreV1().Pods(system).Delete(t.Context(), pod, metav1.DeleteOptions{}))
	current := int64(0)
	c.wait("the agent has heard of the next leader", func() (bool, string) {
		current = epoch()
		return current > old, fmt.Sprint("it knows epoch ", current)
	})

	command := func(epoch int64, operation string) *agentv1.Command {
		return &agentv1.Command{Epoch: epoch, LeaseUid: leaseUID, SandboxUid: string(sb.UID), Generation: sb.Generation, OperationId: operation}
	}
	workload := &agentv1.Workload{Kind: &agentv1.Workload_Container{Container: &agentv1.ContainerWorkload{}}}
	attach := func(epoch int64) error {
		_, err := agent.Attach(t.Context(), &agentv1.AttachRequest{Command: command(epoch, "late-attach"), Workload: workload, When: agentv1.When_NOW,
			TenantId: c.tenant, Target: "/late", Mode: "rw", EntryHash: "late", Kind: "Dynamic",
			Source: &agentv1.AttachRequest_Local{Local: &agentv1.LocalSource{Path: c.data("b")}}})
		return err
	}
	_, detached := agent.Detach(t.Context(), &agentv1.DetachRequest{Command: command(old, "late-detach"), Workload: workload, Target: "/a"})
	_, stopped := agent.StopSandbox(t.Context(), &agentv1.StopSandboxRequest{Command: command(old, "late-stop")})
	_, deleted := agent.DeleteSandbox(t.Context(), &agentv1.DeleteSandboxRequest{Command: command(old, "late-delete")})
	for what, err := range map[string]error{"attach": attach(old), "detach": detached, "stop": stopped, "delete": deleted} {
		if status.Code(err) != codes.FailedPrecondition || fault.ReasonOf(fault.FromGRPC(err)) != fault.StaleCommand {
			t.Errorf("%s of the old leader's: %v", what, err)
		}
	}
	if line := p.mountAt(t, "/late"); line != "" {
		t.Errorf("the old leader's volume is mounted: %s", line)
	}
	if p.mountAt(t, "/a") == "" {
		t.Error("the old leader's detach was carried out")
	}
	uninterrupted(t, p)

	must(t, attach(current))
	c.wait("what nobody wishes is detached", func() (bool, string) {
		line := p.mountAt(t, "/late")
		return line == "", line
	})
	c.row("s", "/a", v1alpha1.VolumeMounted)
	uninterrupted(t, p)
	c.systemReady()
}
