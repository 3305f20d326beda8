package identity

import (
	"context"
	"crypto/tls"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	testclock "k8s.io/utils/clock/testing"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
)

// agentService is an agent that can be asked and followed.
type agentService struct {
	agentv1.UnimplementedAgentServiceServer
}

func (agentService) Probe(context.Context, *agentv1.ProbeRequest) (*agentv1.ProbeResponse, error) {
	return &agentv1.ProbeResponse{}, nil
}

// Inventory sends an update for each the client asks for by reading; it ends with the client.
func (agentService) Inventory(_ *agentv1.InventoryRequest, stream grpc.ServerStreamingServer[agentv1.InventoryUpdate]) error {
	if err := stream.Send(&agentv1.InventoryUpdate{Full: true}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

// refusals are what a server reported.
type refusals chan error

// serve runs an agent behind a TLS configuration and returns its address.
func serve(t testing.TB, config *tls.Config, age time.Duration) (string, refusals) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := make(refusals, 64)
	s := grpc.NewServer(ServerOptions(config, age, func(err error) {
		select {
		case refused <- err:
		default:
		}
	})...)
	agentv1.RegisterAgentServiceServer(s, agentService{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(listener)
	}()
	t.Cleanup(func() {
		s.Stop()
		<-done
	})
	return listener.Addr().String(), refused
}

func dial(t testing.TB, address string, creds credentials.TransportCredentials) agentv1.AgentServiceClient {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return agentv1.NewAgentServiceClient(conn)
}

func probe(t testing.TB, client agentv1.AgentServiceClient) error {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := client.Probe(ctx, &agentv1.ProbeRequest{})
	return err
}

// fixed are credentials that do not change.
func fixed(cert *tls.Certificate, bundle *Bundle, clock *testclock.FakePassiveClock) Credentials {
	return Credentials{
		Certificate: func() (*tls.Certificate, error) { return cert, nil },
		Bundle:      func() (*Bundle, error) { return bundle, nil },
		Clock:       clock,
	}
}

func controllerOf(t testing.TB, c Credentials, node string) *tls.Config {
	t.Helper()
	config, err := c.ControllerClient(node)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func TestAgentAcceptsTheController(t *testing.T) {
	ca := newCA(t, start)
	clock := testclock.NewFakePassiveClock(start)
	address, _ := serve(t, fixed(agentCert(t, ca, start, "a"), bundleOf(t, ca), clock).AgentServer(), ConnectionAge)
	config := controllerOf(t, fixed(controllerCert(t, ca, start), bundleOf(t, ca), clock), "a")
	if err := probe(t, dial(t, address, credentials.NewTLS(config))); err != nil {
		t.Fatal(err)
	}
}

// What a stranger meets at an agent: no answer, and a sentence in the agent's log. What it is told itself depends on
// TLS, whose alerts are few words.
func TestAgentRefuses(t *testing.T) {
	ca, foreign := newCA(t, start.Add(-24*time.Hour)), newCA(t, start)
	clock := testclock.NewFakePassiveClock(start)
	trust := bundleOf(t, ca)
	agent := fixed(agentCert(t, ca, start, "a"), trust, clock)
	later := start.Add(Skew + time.Minute)
	old := start.Add(-ControllerValidity - time.Minute)
	// The client's own checks are left out: the server's are tested.
	showing := func(cert *tls.Certificate) *tls.Config {
		config := controllerOf(t, fixed(cert, trust, clock), "a")
		config.VerifyConnection = nil
		return config
	}
	none := showing(nil)
	none.GetClientCertificate = nil
	tls12 := showing(controllerCert(t, ca, start))
	tls12.MinVersion, tls12.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	selfSigned := controllerCert(t, foreign, start)
	selfSigned.Certificate = append(selfSigned.Certificate, ca.cert.Raw) // the right CA beside it proves nothing
	for name, tc := range map[string]struct {
		creds credentials.TransportCredentials
		told  string // to the client
		log   string // to the server
	}{
		"plaintext":                   {insecure.NewCredentials(), "", "does not speak TLS"},
		"no certificate":              {credentials.NewTLS(none), "certificate required", "didn't provide a certificate"},
		"of another CA":               {credentials.NewTLS(showing(controllerCert(t, foreign, start))), "unknown certificate authority", "claims to be the controller: tls: failed to verify certificate: x509: certificate signed by unknown authority"},
		"of another CA, ours with it": {credentials.NewTLS(showing(selfSigned)), "unknown certificate authority", "unknown authority"},
		"expired":                     {credentials.NewTLS(showing(controllerCert(t, ca, old))), "expired certificate", "claims to be the controller: tls: failed to verify certificate: x509: certificate has expired"},
		"not valid yet":               {credentials.NewTLS(showing(controllerCert(t, ca, later))), "expired certificate", "is not yet valid"},
		"an agent's":                  {credentials.NewTLS(showing(agentCert(t, ca, start, "b"))), "bad certificate", "claims to be the agent of node b:"},
		"this very agent's":           {credentials.NewTLS(showing(agentCert(t, ca, start, "a"))), "bad certificate", "claims to be the agent of node a:"},
		"a server's of the gRPC API":  {credentials.NewTLS(showing(serverCert(t, ca, start, "svc.ns"))), "bad certificate", "names nobody:"},
		"TLS 1.2":                     {credentials.NewTLS(tls12), "protocol version", "unsupported versions"},
	} {
		t.Run(name, func(t *testing.T) {
			address, refused := serve(t, agent.AgentServer(), ConnectionAge)
			err := probe(t, dial(t, address, tc.creds))
			if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), tc.told) {
				t.Errorf("the client is told: %v; want %q", err, tc.told)
			}
			if report := <-refused; !strings.Contains(report.Error(), tc.log) {
				t.Errorf("the agent logs: %v; want %q", report, tc.log)
			}
		})
	}
}

// The identity is looked at even where the usage of a certificate would let it pass.
func TestIdentityDecidesBesideUsage(t *testing.T) {
	ca := newCA(t, start)
	clock := testclock.NewFakePassiveClock(start)
	trust := bundleOf(t, ca)
	state := func(c *tls.Certificate) tls.ConnectionState {
		return tls.ConnectionState{PeerCertificates: append(trust.certs[:0:0], c.Leaf)}
	}
	server, err := fixed(agentCert(t, ca, start, "a"), trust, clock).AgentServer().GetConfigForClient(nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		verify func(tls.ConnectionState) error
		cert   *tls.Certificate
		says   string
	}{
		"agent as controller":  {server.VerifyConnection, agentCert(t, ca, start, "b"), "the peer is the agent of node b, and it must be the controller"},
		"server as controller": {server.VerifyConnection, serverCert(t, ca, start, "svc"), "the peer is not the controller"},
		"controller":           {server.VerifyConnection, controllerCert(t, ca, start), ""},
	} {
		err := tc.verify(state(tc.cert))
		if (err == nil) != (tc.says == "") || err != nil && !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := server.VerifyConnection(tls.ConnectionState{}); err == nil {
		t.Error("nobody is the controller")
	}
}

func TestControllerRefuses(t *testing.T) {
	ca, foreign := newCA(t, start.Add(-24*time.Hour)), newCA(t, start)
	clock := testclock.NewFakePassiveClock(start)
	trust := bundleOf(t, ca)
	old := start.Add(-AgentValidity - time.Minute)
	for name, tc := range map[string]struct {
		cert *tls.Certificate
		says string
	}{
		"another node's":   {agentCert(t, ca, start, "b"), "the peer is the agent of node b, and it must be the agent of node a"},
		"a longer name":    {agentCert(t, ca, start, "a.b"), "agent of node a.b"},
		"of another CA":    {agentCert(t, foreign, start, "a"), "unknown authority"},
		"expired":          {agentCert(t, ca, old, "a"), "certificate has expired"},
		"not valid yet":    {agentCert(t, ca, start.Add(Skew+time.Minute), "a"), "not yet valid"},
		"the controller's": {controllerCert(t, ca, start), "incompatible key usage"},
		"a server's":       {serverCert(t, ca, start, "a"), "the peer is not the agent of node a"},
	} {
		t.Run(name, func(t *testing.T) {
			// A server that shows the certificate and accepts everybody.
			address, _ := serve(t, fixed(tc.cert, trust, clock).ControllerServer(), ConnectionAge)
			config := controllerOf(t, fixed(controllerCert(t, ca, start), trust, clock), "a")
			err := probe(t, dial(t, address, credentials.NewTLS(config)))
			if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%v; want %q", err, tc.says)
			}
		})
	}
	if _, err := fixed(nil, trust, clock).ControllerClient("A/b"); err == nil {
		t.Error("a node with an impossible name can be dialled")
	}
}

func TestServiceIsKnownByItsName(t *testing.T) {
	ca, foreign := newCA(t, start), newCA(t, start)
	clock := testclock.NewFakePassiveClock(start)
	trust := bundleOf(t, ca)
	for name, tc := range map[string]struct {
		cert   *tls.Certificate
		bundle func() (*Bundle, error)
		says   string
	}{
		"its own":                    {serverCert(t, ca, start, "x", "controller.flux.svc"), func() (*Bundle, error) { return trust, nil }, ""},
		"another name's":             {serverCert(t, ca, start, "other.flux.svc"), func() (*Bundle, error) { return trust, nil }, "other.flux.svc"},
		"an agent's":                 {agentCert(t, ca, start, "controller.flux.svc"), func() (*Bundle, error) { return trust, nil }, "controller.flux.svc"},
		"of another CA":              {serverCert(t, foreign, start, "controller.flux.svc"), func() (*Bundle, error) { return trust, nil }, "unknown authority"},
		"ours, to the machine's CAs": {serverCert(t, ca, start, "controller.flux.svc"), nil, "unknown authority"},
		"without a bundle":           {serverCert(t, ca, start, "controller.flux.svc"), NewBundleFile(func() ([]byte, error) { return nil, nil }).Bundle, "no certificate"},
	} {
		t.Run(name, func(t *testing.T) {
			address, _ := serve(t, fixed(tc.cert, trust, clock).ControllerServer(), ConnectionAge)
			client := Credentials{Bundle: tc.bundle, Clock: clock}
			err := probe(t, dial(t, address, credentials.NewTLS(client.ServiceClient("controller.flux.svc"))))
			if (err == nil) != (tc.says == "") || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%v; want %q", err, tc.says)
			}
		})
	}
}

// A side that has nothing to show, or does not know whom to trust, answers nobody.
func TestFailsClosed(t *testing.T) {
	ca := newCA(t, start)
	clock := testclock.NewFakePassiveClock(start)
	missing := NewRenewer(RenewerOptions{})
	noBundle := fixed(agentCert(t, ca, start, "a"), nil, clock)
	noBundle.Bundle = missing.Bundle
	noCert := fixed(nil, bundleOf(t, ca), clock)
	noCert.Certificate = missing.Certificate
	for name, tc := range map[string]struct {
		server Credentials
		says   string
	}{"no bundle": {noBundle, "no trust bundle yet"}, "no certificate": {noCert, "no certificate yet"}} {
		t.Run(name, func(t *testing.T) {
			address, refused := serve(t, tc.server.AgentServer(), ConnectionAge)
			config := controllerOf(t, fixed(controllerCert(t, ca, start), bundleOf(t, ca), clock), "a")
			if err := probe(t, dial(t, address, credentials.NewTLS(config))); status.Code(err) != codes.Unavailable {
				t.Errorf("answered: %v", err)
			}
			if report := <-refused; !strings.Contains(report.Error(), tc.says) {
				t.Errorf("logged: %v", report)
			}
		})
	}
}

// current are credentials that can be exchanged.
type current struct {
	mu     sync.Mutex // guards what follows
	cert   *tls.Certificate
	bundle *Bundle
}

func (c *current) set(cert *tls.Certificate, bundle *Bundle) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cert, c.bundle = cert, bundle
}

func (c *current) credentials(clock *testclock.FakePassiveClock) Credentials {
	return Credentials{
		Certificate: func() (*tls.Certificate, error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.cert, nil
		},
		Bundle: func() (*Bundle, error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.bundle, nil
		},
		Clock: clock,
	}
}

// Certificates, keys and at last the CA change under a stream of calls, with connections ended by their age all the
// while: no call fails, the stream that began under the first certificate goes on, and at the end the first CA is
// trusted by nobody.
func TestRotationFailsNoCall(t *testing.T) {
	clock := testclock.NewFakePassiveClock(start)
	first, second := newCA(t, start), newCA(t, start)
	var agent, controller current
	handshakes := make(chan struct{}, 1024)
	set := func(signer *CA, trusted ...*CA) {
		agent.set(agentCert(t, signer, start, "a"), bundleOf(t, trusted...))
		controller.set(controllerCert(t, signer, start), bundleOf(t, trusted...))
	}
	set(first, first)
	address, refused := serve(t, agent.credentials(clock).AgentServer(), 20*time.Millisecond)
	config := controllerOf(t, controller.credentials(clock), "a")
	verify := config.VerifyConnection
	config.VerifyConnection = func(state tls.ConnectionState) error {
		select {
		case handshakes <- struct{}{}:
		default:
		}
		return verify(state)
	}
	client := dial(t, address, credentials.NewTLS(config))
	following, err := client.Inventory(t.Context(), &agentv1.InventoryRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := following.Recv(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := following.Recv()
		ended <- err
	}()

	stop := make(chan struct{})
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := probe(t, client); err != nil {
					t.Errorf("a call failed: %v", err)
					return
				}
			}
		})
	}
	await := func(n int) {
		for range n {
			select {
			case <-handshakes:
			case err := <-refused:
				t.Fatal(err)
			case <-time.After(time.Minute):
				t.Fatal("no new connection is made")
			}
		}
	}
	step := func(signer *CA, trusted ...*CA) {
		for len(handshakes) > 0 {
			<-handshakes
		}
		set(signer, trusted...)
		await(3)
	}
	await(2)
	step(first, first)          // new certificates and keys
	step(first, first, second)  // a successor is trusted
	step(second, first, second) // and signs
	step(second, second)        // the first one has ended
	select {
	case err := <-ended:
		t.Errorf("the stream that ran before ended: %v", err)
	default:
	}
	close(stop)
	callers.Wait()
	clock.SetTime(start.Add(ControllerValidity + time.Minute))
	fresh := dial(t, address, credentials.NewTLS(config))
	if err := probe(t, fresh); status.Code(err) != codes.Unavailable {
		t.Errorf("a new connection with an expired certificate: %v", err)
	}
	select {
	case err := <-ended:
		t.Errorf("what was established ended with its certificate: %v", err)
	default:
	}
}
