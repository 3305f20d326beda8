package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	testclock "k8s.io/utils/clock/testing"

	nodev1 "github.com/flux-sandbox/flux-sandbox/api/proto/node/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

var silent = slog.New(slog.NewTextHandler(io.Discard, nil))

// issuing is an Issuer by a CA that can be exchanged and can fail.
type issuing struct {
	t     *testing.T
	clock *testclock.FakeClock

	mu      sync.Mutex // guards what follows
	ca      *CA
	failure error
}

func (i *issuing) set(ca *CA, failure error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.ca, i.failure = ca, failure
}

func (i *issuing) Issue(_ context.Context, csr []byte) (*Issued, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.failure != nil {
		return nil, i.failure
	}
	id, err := Agent("a")
	if err != nil {
		return nil, err
	}
	key, err := CheckRequest(csr, id)
	if err != nil {
		return nil, err
	}
	chain, err := i.ca.SignAgent(i.clock.Now(), "a", key)
	return &Issued{Chain: chain, Bundle: bundleOf(i.t, i.ca)}, err
}

// running is a Renewer that runs; every attempt is seen on attempts.
type running struct {
	*Renewer
	*issuing
	attempts chan error
}

func startRenewer(t *testing.T, ca *CA, failure error, trust func() (*Bundle, error)) *running {
	t.Helper()
	clock := testclock.NewFakeClock(start)
	r := &running{issuing: &issuing{t: t, clock: clock, ca: ca, failure: failure}, attempts: make(chan error)}
	id, err := Agent("a")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.Renewer = NewRenewer(RenewerOptions{Issuer: r.issuing, ID: id, Usage: x509.ExtKeyUsageServerAuth, Trust: trust, Clock: clock, Logger: silent,
		Renewed: func(err error) {
			select {
			case r.attempts <- err:
			case <-ctx.Done():
			}
		}})
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return r
}

func (r *running) attempt(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.attempts:
		return err
	case <-time.After(time.Minute):
		t.Fatal("no attempt is made")
		return nil
	}
}

// waits blocks until the Renewer waits for the clock.
func (r *running) waits(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !r.clock.HasWaiters(); {
		select {
		case err := <-r.attempts:
			t.Fatalf("an attempt that is not due: %v", err)
		case <-time.After(time.Millisecond):
		}
		if time.Now().After(end) {
			t.Fatal("the Renewer does not wait")
		}
	}
}

// until moves the clock in steps that the Renewer looks up at, and returns when the next attempt is made.
func (r *running) until(t *testing.T) (time.Time, error) {
	t.Helper()
	for range 1000 {
		if r.clock.HasWaiters() {
			r.clock.Step(recheck / 2)
		}
		select {
		case err := <-r.attempts:
			return r.clock.Now(), err
		case <-time.After(time.Millisecond):
		}
	}
	t.Fatalf("no attempt is made until %s", r.clock.Now())
	return time.Time{}, nil
}

func TestRenewalAtTwoThirds(t *testing.T) {
	r := startRenewer(t, newCA(t, start), nil, nil)
	if err := r.attempt(t); err != nil {
		t.Fatal(err)
	}
	<-r.Ready()
	first, err := r.Certificate()
	if err != nil {
		t.Fatal(err)
	}
	if !r.NotAfter().Equal(start.Add(AgentValidity)) {
		t.Errorf("valid until %s", r.NotAfter())
	}
	at, err := r.until(t)
	if err != nil {
		t.Fatal(err)
	}
	if after := at.Sub(start); after < AgentValidity*17/30 || after > AgentValidity*2/3+recheck {
		t.Errorf("renewed %s after the first", after)
	}
	r.waits(t)
	second, err := r.Certificate()
	if err != nil {
		t.Fatal(err)
	}
	if second.PrivateKey.(*ecdsa.PrivateKey).Equal(first.PrivateKey) {
		t.Error("the key is the same")
	}
	if !second.Leaf.NotAfter.After(first.Leaf.NotAfter) {
		t.Error("the second is not valid for longer")
	}
}

func TestRenewalIsSpreadByChance(t *testing.T) {
	end := start.Add(30 * time.Hour)
	if early, late := renewAt(start, end, 1), renewAt(start, end, 0); !early.Equal(start.Add(17*time.Hour)) || !late.Equal(start.Add(20*time.Hour)) {
		t.Errorf("between %s and %s", early, late)
	}
	last := time.Duration(0)
	for failures, most := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 32 * time.Second, time.Minute, time.Minute} {
		for range 100 {
			if d := Backoff(failures); d < most/2 || d >= most {
				t.Fatalf("after %d failures: %s", failures, d)
			}
		}
		last = most
	}
	if Backoff(1<<20) > last {
		t.Error("the backoff grows without end")
	}
}

func TestFailuresAreRetriedAndSaid(t *testing.T) {
	r := startRenewer(t, newCA(t, start), errors.New("the controller is away"), nil)
	for range 4 {
		if _, err := r.until(t); err == nil {
			t.Fatal("no error")
		}
	}
	r.waits(t)
	select {
	case <-r.Ready():
		t.Error("ready without a certificate")
	default:
	}
	if _, err := r.Certificate(); err == nil || !strings.Contains(err.Error(), "the controller is away") {
		t.Errorf("Certificate: %v", err)
	}
	if !r.NotAfter().IsZero() {
		t.Error("it has an end")
	}
	r.set(r.ca, nil)
	if _, err := r.until(t); err != nil {
		t.Fatal(err)
	}
	<-r.Ready()
	cert, err := r.Certificate()
	if err != nil {
		t.Fatal(err)
	}
	// Away for longer than the certificate lives: it is still shown, so that the peer can say that it expired.
	r.set(r.ca, errors.New("away again"))
	for r.clock.Now().Before(cert.Leaf.NotAfter) {
		if _, err := r.until(t); err == nil {
			t.Fatal("no error")
		}
	}
	r.waits(t)
	if last, err := r.Certificate(); err != nil || last != cert {
		t.Errorf("after the end: %v", err)
	}
	r.set(r.ca, nil)
	if _, err := r.until(t); err != nil {
		t.Fatal(err)
	}
	r.waits(t)
	if last, err := r.Certificate(); err != nil || last == cert {
		t.Errorf("when the issuer is back: %v", err)
	}
}

// A CA that is replaced by force: the bundle that peers read changes, and the certificate follows within minutes.
// While the issuer lags behind the bundle it is asked once a minute and no more.
func TestCertificateFollowsTheBundle(t *testing.T) {
	first, second := newCA(t, start), newCA(t, start)
	var mu sync.Mutex
	trusted := bundleOf(t, first)
	r := startRenewer(t, first, nil, func() (*Bundle, error) {
		mu.Lock()
		defer mu.Unlock()
		return trusted, nil
	})
	if err := r.attempt(t); err != nil {
		t.Fatal(err)
	}
	r.waits(t)
	mu.Lock()
	trusted = bundleOf(t, second)
	mu.Unlock()
	last := start
	for range 3 {
		at, err := r.until(t)
		if err != nil {
			t.Fatal(err)
		}
		if after := at.Sub(last); after < recheck || after > 2*recheck {
			t.Errorf("asked after %s", after)
		}
		last = at
	}
	r.waits(t)
	r.set(second, nil)
	if _, err := r.until(t); err != nil {
		t.Fatal(err)
	}
	r.waits(t)
	cert, err := r.Certificate()
	if err != nil {
		t.Fatal(err)
	}
	if err := bundleOf(t, second).Verify([]*x509.Certificate{cert.Leaf}, x509.ExtKeyUsageServerAuth, r.clock.Now()); err != nil {
		t.Error(err)
	}
	if at, err := r.until(t); err != nil || at.Sub(last) < AgentValidity/2 {
		t.Errorf("asked again at %s although the bundle vouches for it (%v)", at, err)
	}
}

func TestCertificatesOfNoUse(t *testing.T) {
	ca, foreign := newCA(t, start), newCA(t, start)
	other := newKey(t)
	id, err := Agent("a")
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		issue func(key any) (*Issued, error)
		says  string
	}{
		"another node's": {func(key any) (*Issued, error) {
			chain, err := ca.SignAgent(start, "b", key)
			return &Issued{Chain: chain, Bundle: bundleOf(t, ca)}, err
		}, "it names the agent of node b"},
		"another key's": {func(any) (*Issued, error) {
			chain, err := ca.SignAgent(start, "a", &other.PublicKey)
			return &Issued{Chain: chain, Bundle: bundleOf(t, ca)}, err
		}, "another key"},
		"a client's": {func(key any) (*Issued, error) {
			chain, err := ca.SignController(start, key)
			return &Issued{Chain: chain, Bundle: bundleOf(t, ca)}, err
		}, "key usage"},
		"not of its bundle": {func(key any) (*Issued, error) {
			chain, err := foreign.SignAgent(start, "a", key)
			return &Issued{Chain: chain, Bundle: bundleOf(t, ca)}, err
		}, "unknown authority"},
		"nothing":      {func(any) (*Issued, error) { return &Issued{Bundle: bundleOf(t, ca)}, nil }, "no certificate"},
		"unreadable":   {func(any) (*Issued, error) { return &Issued{Chain: [][]byte{{1}}, Bundle: bundleOf(t, ca)}, nil }, "cannot be read"},
		"without more": {func(any) (*Issued, error) { return &Issued{}, nil }, "no trust bundle"},
	} {
		issuer := IssuerFunc(func(_ context.Context, csr []byte) (*Issued, error) {
			key, err := CheckRequest(csr, id)
			if err != nil {
				return nil, err
			}
			return tc.issue(key)
		})
		r := NewRenewer(RenewerOptions{Issuer: issuer, ID: id, Usage: x509.ExtKeyUsageServerAuth, Clock: testclock.NewFakeClock(start), Logger: silent})
		if err := r.renew(t.Context()); err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := r.Certificate(); err == nil {
			t.Errorf("%s: used", name)
		}
	}
}

// certificateService notes the token and signs.
type certificateService struct {
	nodev1.UnimplementedNodeCertificateServiceServer
	issuer Issuer
	token  chan string
}

func (s *certificateService) Issue(ctx context.Context, r *nodev1.IssueRequest) (*nodev1.IssueResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	s.token <- strings.Join(md.Get("authorization"), "|")
	issued, err := s.issuer.Issue(ctx, r.GetCsr())
	if err != nil {
		return nil, fault.ToGRPC(err)
	}
	return &nodev1.IssueResponse{Chain: issued.Chain, Bundle: issued.Bundle.DER()}, nil
}

func TestRemoteIssuer(t *testing.T) {
	ca := newCA(t, start)
	clock := testclock.NewFakeClock(start)
	service := &certificateService{issuer: &issuing{t: t, clock: clock, ca: ca}, token: make(chan string, 1)}
	credentialsOf := Credentials{
		Certificate: func() (*tls.Certificate, error) { return serverCert(t, ca, start, "svc"), nil },
		Bundle:      func() (*Bundle, error) { return bundleOf(t, ca), nil },
		Clock:       clock,
	}
	dial := func(creds credentials.TransportCredentials, options ...grpc.ServerOption) *grpc.ClientConn {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer(options...)
		nodev1.RegisterNodeCertificateServiceServer(server, service)
		go func() { _ = server.Serve(listener) }()
		t.Cleanup(server.Stop)
		conn, err := grpc.NewClient("passthrough:///"+listener.Addr().String(), grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	id, err := Agent("a")
	if err != nil {
		t.Fatal(err)
	}
	renew := func(conn *grpc.ClientConn, token func() (string, error), id ID) (*Renewer, error) {
		r := NewRenewer(RenewerOptions{Issuer: NewRemoteIssuer(conn, token), ID: id, Usage: x509.ExtKeyUsageServerAuth, Clock: clock, Logger: silent})
		return r, r.renew(t.Context())
	}
	token := func() (string, error) { return "secret", nil }
	secure := dial(credentials.NewTLS(credentialsOf.ServiceClient("svc")), ServerOptions(credentialsOf.ControllerServer(), ConnectionAge, nil)...)
	r, err := renew(secure, token, id)
	if err != nil {
		t.Fatal(err)
	}
	if got := <-service.token; got != "Bearer secret" {
		t.Errorf("the token came as %q", got)
	}
	if cert, err := r.Certificate(); err != nil || cert.Leaf.URIs[0].String() != id.URI().String() {
		t.Errorf("the certificate: %v", err)
	}
	if b, err := r.Bundle(); err != nil || string(b.PEM()) != string(bundleOf(t, ca).PEM()) {
		t.Errorf("the bundle: %v", err)
	}
	if _, err := renew(secure, func() (string, error) { return "", errors.New("no such file") }, id); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("without a token: %v", err)
	}
	if _, err := renew(secure, token, Controller()); fault.ReasonOf(err) != fault.InvalidRequest {
		t.Errorf("for somebody else: %v", err)
	}
	<-service.token
	if _, err := renew(dial(insecure.NewCredentials()), token, id); err == nil || !strings.Contains(err.Error(), "transport") {
		t.Errorf("in clear: %v", err)
	}
	select {
	case <-service.token:
		t.Error("the token travelled in clear")
	default:
	}
}
