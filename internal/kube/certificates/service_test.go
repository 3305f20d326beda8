package certificates

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	k8stesting "k8s.io/client-go/testing"
	testclock "k8s.io/utils/clock/testing"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	nodev1 "github.com/flux-sandbox/flux-sandbox/api/proto/node/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/identity"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
)

// unreachable is an API server at a port where nobody listens.
func unreachable() *rest.Config {
	return &rest.Config{Host: "http://127.0.0.1:1", Timeout: 10 * time.Second}
}

var agents = types.NamespacedName{Namespace: "flux", Name: "agent"}

// reviewed is what the API server says of an agent's token.
func reviewed(change func(*authenticationv1.TokenReviewStatus)) authenticationv1.TokenReviewStatus {
	said := authenticationv1.TokenReviewStatus{
		Authenticated: true,
		Audiences:     []string{DefaultAudience},
		User: authenticationv1.UserInfo{
			Username: "system:serviceaccount:flux:agent",
			Extra: map[string]authenticationv1.ExtraValue{
				nodeNameClaim: {"a"}, podNameClaim: {"agent-x"}, podUIDClaim: {"0b9f6d3e-4c1a-4f5e-9d7e-2f6a1c8b7e55"},
			},
		},
	}
	change(&said)
	return said
}

func same(*authenticationv1.TokenReviewStatus) {}

// fakeService is a service of namespace flux whose API server knows these tokens, and what it was asked.
func fakeService(t *testing.T, known map[string]authenticationv1.TokenReviewStatus) (*Service, *testclock.FakeClock) {
	t.Helper()
	client := fake.NewClientset()
	client.PrependReactor("create", "tokenreviews", func(action k8stesting.Action) (bool, runtime.Object, error) {
		review := action.(k8stesting.CreateAction).GetObject().(*authenticationv1.TokenReview)
		if review.Spec.Token == "down" {
			return true, nil, errors.New("connection refused to 10.0.0.1")
		}
		if !slices.Equal(review.Spec.Audiences, []string{DefaultAudience}) {
			t.Errorf("asked for the audiences %v", review.Spec.Audiences)
		}
		review.Status = known[review.Spec.Token]
		return true, review, nil
	})
	a, clock := authority(t, client, "flux", start)
	s, err := NewService(ServiceOptions{Reviews: client.AuthenticationV1().TokenReviews(), Authority: a, ServiceAccount: agents, Clock: clock, Logger: silent})
	if err != nil {
		t.Fatal(err)
	}
	return s, clock
}

// with is a call's context with metadata for authorization.
func with(ctx context.Context, values ...string) context.Context {
	md := metadata.MD{}
	md.Append("authorization", values...)
	return metadata.NewIncomingContext(ctx, md)
}

func csr(t *testing.T, node string) []byte {
	t.Helper()
	key, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	var id identity.ID
	if node != "" {
		if id, err = identity.Agent(node); err != nil {
			t.Fatal(err)
		}
	}
	der, err := identity.NewRequest(key, id)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestWhoGetsACertificate(t *testing.T) {
	key, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	controllers, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{identity.Controller().URI()}}, key)
	if err != nil {
		t.Fatal(err)
	}
	s, _ := fakeService(t, map[string]authenticationv1.TokenReviewStatus{
		"good":  reviewed(same),
		"wrong": {Authenticated: false, Error: "[invalid bearer token, token audiences [x] is invalid]"},
		"vague": reviewed(func(r *authenticationv1.TokenReviewStatus) { r.Audiences = nil }),
		"other audience": reviewed(func(r *authenticationv1.TokenReviewStatus) {
			r.Audiences = []string{"https://kubernetes.default.svc"}
		}),
		"not authenticated": reviewed(func(r *authenticationv1.TokenReviewStatus) { r.Authenticated = false }),
		"nobody":            reviewed(func(r *authenticationv1.TokenReviewStatus) { r.User.Username = "" }),
		"other account": reviewed(func(r *authenticationv1.TokenReviewStatus) {
			r.User.Username = "system:serviceaccount:flux:controller"
		}),
		"other namespace": reviewed(func(r *authenticationv1.TokenReviewStatus) {
			r.User.Username = "system:serviceaccount:evil:agent"
		}),
		"a user": reviewed(func(r *authenticationv1.TokenReviewStatus) { r.User.Username = "agent" }),
		"no node": reviewed(func(r *authenticationv1.TokenReviewStatus) {
			delete(r.User.Extra, nodeNameClaim)
		}),
		"two nodes": reviewed(func(r *authenticationv1.TokenReviewStatus) {
			r.User.Extra[nodeNameClaim] = authenticationv1.ExtraValue{"a", "b"}
		}),
		"no pod":     reviewed(func(r *authenticationv1.TokenReviewStatus) { delete(r.User.Extra, podNameClaim) }),
		"no pod UID": reviewed(func(r *authenticationv1.TokenReviewStatus) { delete(r.User.Extra, podUIDClaim) }),
		"odd node": reviewed(func(r *authenticationv1.TokenReviewStatus) {
			r.User.Extra[nodeNameClaim] = authenticationv1.ExtraValue{"../controller"}
		}),
	})
	for name, tc := range map[string]struct {
		authorization []string
		csr           []byte
		code          codes.Code
		reason        fault.Reason
		says          string
	}{
		"good":                  {[]string{"Bearer good"}, csr(t, "a"), codes.OK, "", ""},
		"good, names nobody":    {[]string{"bearer  good"}, csr(t, ""), codes.OK, "", ""},
		"no token":              {nil, csr(t, "a"), codes.Unauthenticated, fault.Unauthenticated, "no token"},
		"two tokens":            {[]string{"Bearer good", "Bearer good"}, csr(t, "a"), codes.Unauthenticated, fault.Unauthenticated, "several"},
		"another scheme":        {[]string{"Basic good"}, csr(t, "a"), codes.Unauthenticated, fault.Unauthenticated, "no bearer token"},
		"empty token":           {[]string{"Bearer "}, csr(t, "a"), codes.Unauthenticated, fault.Unauthenticated, "no bearer token"},
		"wrong token":           {[]string{"Bearer wrong"}, csr(t, "a"), codes.Unauthenticated, fault.Unauthenticated, "not valid for the audience " + DefaultAudience},
		"audience not said":     {[]string{"Bearer vague"}, csr(t, "a"), codes.Unauthenticated, fault.Unauthenticated, "audience"},
		"other audience":        {[]string{"Bearer other audience"}, csr(t, "a"), codes.Unauthenticated, fault.Unauthenticated, "audience"},
		"not authenticated":     {[]string{"Bearer not authenticated"}, csr(t, "a"), codes.Unauthenticated, fault.Unauthenticated, "not valid"},
		"nobody":                {[]string{"Bearer nobody"}, csr(t, "a"), codes.Unauthenticated, fault.Unauthenticated, "not valid"},
		"other ServiceAccount":  {[]string{"Bearer other account"}, csr(t, "a"), codes.PermissionDenied, fault.Forbidden, "system:serviceaccount:flux:controller gets no certificate"},
		"of another namespace":  {[]string{"Bearer other namespace"}, csr(t, "a"), codes.PermissionDenied, fault.Forbidden, "evil"},
		"a user of that name":   {[]string{"Bearer a user"}, csr(t, "a"), codes.PermissionDenied, fault.Forbidden, "not the agents'"},
		"no node claim":         {[]string{"Bearer no node"}, csr(t, "a"), codes.PermissionDenied, fault.Forbidden, "not bound to a Pod on a node"},
		"two nodes":             {[]string{"Bearer two nodes"}, csr(t, "a"), codes.PermissionDenied, fault.Forbidden, "not bound"},
		"no pod claim":          {[]string{"Bearer no pod"}, csr(t, "a"), codes.PermissionDenied, fault.Forbidden, "not bound"},
		"no pod UID claim":      {[]string{"Bearer no pod UID"}, csr(t, "a"), codes.PermissionDenied, fault.Forbidden, "not bound"},
		"a node that cannot be": {[]string{"Bearer odd node"}, csr(t, ""), codes.InvalidArgument, fault.InvalidName, "no name of a node"},
		"for another node":      {[]string{"Bearer good"}, csr(t, "b"), codes.InvalidArgument, fault.InvalidRequest, "the caller is the agent of node a"},
		"for the controller":    {[]string{"Bearer good"}, controllers, codes.InvalidArgument, fault.InvalidRequest, "the caller is the agent of node a"},
		"rubbish":               {[]string{"Bearer good"}, []byte("x"), codes.InvalidArgument, fault.InvalidRequest, "PKCS #10"},
		"API server down":       {[]string{"Bearer down"}, csr(t, "a"), codes.Unavailable, fault.AuthUnavailable, "did not answer"},
	} {
		resp, err := s.Issue(with(t.Context(), tc.authorization...), &nodev1.IssueRequest{Csr: tc.csr})
		err = fault.ToGRPC(err)
		if status.Code(err) != tc.code || err != nil && fault.ReasonOf(fault.FromGRPC(err)) != tc.reason || !strings.Contains(status.Convert(err).Message(), tc.says) {
			t.Errorf("%s: %v; want %s, %s, %q", name, err, tc.code, tc.reason, tc.says)
		}
		for _, leak := range []string{"10.0.0.1", "invalid bearer", "Bearer good"} {
			if strings.Contains(status.Convert(err).Message(), leak) {
				t.Errorf("%s: the caller is told %q: %v", name, leak, err)
			}
		}
		if err != nil {
			continue
		}
		leaf, err := x509.ParseCertificate(resp.Chain[0])
		if err != nil {
			t.Fatal(err)
		}
		id, err := identity.Of(leaf)
		if err != nil || id.Node() != "a" || !resp.NotAfter.AsTime().Equal(start.Add(identity.AgentValidity)) {
			t.Errorf("%s: it names %s until %s (%v)", name, id, resp.NotAfter.AsTime(), err)
		}
		bundle, err := identity.ParseBundleDER(resp.Bundle)
		if err != nil {
			t.Fatal(err)
		}
		if err := bundle.Verify([]*x509.Certificate{leaf}, x509.ExtKeyUsageServerAuth, start); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestLimitForEachNode(t *testing.T) {
	s, clock := fakeService(t, map[string]authenticationv1.TokenReviewStatus{
		"a": reviewed(same),
		"b": reviewed(func(r *authenticationv1.TokenReviewStatus) {
			r.User.Extra[nodeNameClaim] = authenticationv1.ExtraValue{"b"}
		}),
	})
	ask := func(token string) error {
		_, err := s.Issue(with(t.Context(), "Bearer "+token), &nodev1.IssueRequest{Csr: csr(t, token)})
		return err
	}
	for range nodeBurst {
		if err := ask("a"); err != nil {
			t.Fatal(err)
		}
	}
	if err := ask("a"); fault.ReasonOf(err) != fault.RateLimited {
		t.Errorf("over the limit: %v", err)
	}
	if err := ask("b"); err != nil {
		t.Errorf("another node: %v", err)
	}
	clock.Step(nodeEvery)
	if err := ask("a"); err != nil {
		t.Errorf("after a while: %v", err)
	}
	if err := ask("a"); fault.ReasonOf(err) != fault.RateLimited {
		t.Errorf("over the limit again: %v", err)
	}
}

func TestPanicBecomesAnError(t *testing.T) {
	s, _ := fakeService(t, nil)
	_, err := s.intercept(t.Context(), nil, nil, func(context.Context, any) (any, error) { panic("oh") })
	if status.Code(err) != codes.Internal {
		t.Errorf("a panic: %v", err)
	}
}

// cluster is a controller against a real API server.
type cluster struct {
	client    kubernetes.Interface
	config    *rest.Config
	namespace string
	authority *Authority
	address   string
	own       identity.Credentials
}

const serviceName = "controller.flux.svc"

// newCluster starts the controller's side: an Authority, its own certificates, and the service behind TLS.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{client: realClient(t), config: apiserver.Shared(t).Config()}
	c.namespace = inNamespace(t, c.client)
	var err error
	c.authority, err = NewAuthority(t.Context(), AuthorityOptions{Client: c.client, Namespace: c.namespace, Logger: silent})
	if err != nil {
		t.Fatal(err)
	}
	service, err := NewService(ServiceOptions{
		Reviews: c.client.AuthenticationV1().TokenReviews(), Authority: c.authority,
		ServiceAccount: types.NamespacedName{Namespace: c.namespace, Name: "agent"}, Logger: silent,
	})
	if err != nil {
		t.Fatal(err)
	}
	serving, commanding := c.authority.ServerRenewer(serviceName), c.authority.ClientRenewer()
	runRenewer(t, serving)
	runRenewer(t, commanding)
	c.own = identity.Credentials{Certificate: commanding.Certificate, Bundle: c.authority.Bundle}
	config := identity.Credentials{Certificate: serving.Certificate, Bundle: c.authority.Bundle}.ControllerServer()
	c.address = serve(t, NewServer(service, config, func(err error) { t.Errorf("refused: %v", err) }))
	for _, name := range []string{"agent", "other"} {
		sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := c.client.CoreV1().ServiceAccounts(c.namespace).Create(t.Context(), sa, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

func runRenewer(t *testing.T, r *identity.Renewer) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	select {
	case <-r.Ready():
	case <-time.After(time.Minute):
		_, err := r.Certificate()
		t.Fatal(err)
	}
}

func serve(t *testing.T, server *grpc.Server) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener)
	}()
	t.Cleanup(func() {
		server.Stop()
		<-done
	})
	return listener.Addr().String()
}

func dial(t *testing.T, address string, creds credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// node makes a Node object with the name.
func (c *cluster) node(t *testing.T, name string) *corev1.Node {
	t.Helper()
	node, err := c.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.client.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}) })
	return node
}

// pod makes a Pod on a node, on none if it is empty.
func (c *cluster) pod(t *testing.T, account, node string) *corev1.Pod {
	t.Helper()
	pod, err := c.client.CoreV1().Pods(c.namespace).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "agent-"},
		Spec: corev1.PodSpec{
			ServiceAccountName: account, NodeName: node, TerminationGracePeriodSeconds: new(int64),
			Containers: []corev1.Container{{Name: "agent", Image: "agent"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

// token is what kubelet, or somebody with the right to, requests for a ServiceAccount.
func (c *cluster) token(t *testing.T, account string, audiences []string, bound *authenticationv1.BoundObjectReference) string {
	t.Helper()
	seconds := int64(600)
	r, err := c.client.CoreV1().ServiceAccounts(c.namespace).CreateToken(t.Context(), account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: audiences, BoundObjectRef: bound, ExpirationSeconds: &seconds},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return r.Status.Token
}

func toPod(pod *corev1.Pod) *authenticationv1.BoundObjectReference {
	return &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}
}

// issue asks the service as an agent does.
func (c *cluster) issue(t *testing.T, token, node string) error {
	t.Helper()
	config := identity.Credentials{Bundle: c.authority.Bundle}.ServiceClient(serviceName)
	issuer := identity.NewRemoteIssuer(dial(t, c.address, credentials.NewTLS(config)), func() (string, error) { return token, nil })
	_, err := issuer.Issue(t.Context(), csr(t, node))
	return err
}

func TestTokensOfARealAPIServer(t *testing.T) {
	c := newCluster(t)
	nodeA := c.node(t, c.namespace+"-a")
	onA, free := c.pod(t, "agent", nodeA.Name), c.pod(t, "agent", "")
	others := c.pod(t, "other", nodeA.Name)
	ours := []string{DefaultAudience}
	toNode := &authenticationv1.BoundObjectReference{Kind: "Node", APIVersion: "v1", Name: nodeA.Name, UID: nodeA.UID}
	good := c.token(t, "agent", ours, toPod(onA))
	for name, tc := range map[string]struct {
		token  string
		reason fault.Reason
	}{
		"an agent's":               {good, ""},
		"two audiences":            {c.token(t, "agent", []string{"x", DefaultAudience}, toPod(onA)), ""},
		"without an audience":      {c.token(t, "agent", nil, toPod(onA)), fault.Unauthenticated},
		"another audience":         {c.token(t, "agent", []string{"x"}, toPod(onA)), fault.Unauthenticated},
		"bound to a Node":          {c.token(t, "agent", ours, toNode), fault.Forbidden},
		"bound to nothing":         {c.token(t, "agent", ours, nil), fault.Forbidden},
		"of a Pod without a node":  {c.token(t, "agent", ours, toPod(free)), fault.Forbidden},
		"of another account's Pod": {c.token(t, "other", ours, toPod(others)), fault.Forbidden},
		"spoiled":                  {good[:len(good)-4] + "AAAA", fault.Unauthenticated},
		"rubbish":                  {"rubbish", fault.Unauthenticated},
	} {
		err := c.issue(t, tc.token, nodeA.Name)
		if (err == nil) != (tc.reason == "") || err != nil && fault.ReasonOf(err) != tc.reason {
			t.Errorf("%s: %v; want %q", name, err, tc.reason)
		}
	}
	if err := c.issue(t, good, "somewhere-else"); fault.ReasonOf(err) != fault.InvalidRequest {
		t.Errorf("for another node than its own: %v", err)
	}

	// The token opens nothing else.
	config := rest.AnonymousClientConfig(c.config)
	config.BearerToken = good
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Pods(c.namespace).List(t.Context(), metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Errorf("an agent's token at the API server: %v", err)
	}

	if err := c.client.CoreV1().Pods(c.namespace).Delete(t.Context(), onA.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the token of a deleted Pod is refused", func() bool {
		reason := fault.ReasonOf(c.issue(t, good, nodeA.Name))
		return reason == fault.Unauthenticated
	})
}

// agentService answers.
type agentService struct {
	agentv1.UnimplementedAgentServiceServer
}

func (agentService) Probe(context.Context, *agentv1.ProbeRequest) (*agentv1.ProbeResponse, error) {
	return &agentv1.ProbeResponse{}, nil
}

// From the token to a command: the controller reaches the agent of the node, and no agent reaches another.
func TestFromTokenToCommand(t *testing.T) {
	c := newCluster(t)
	running := map[string]*identity.Renewer{}
	addresses := map[string]string{}
	mounted := identity.NewBundleFile(func() ([]byte, error) { return []byte(published(t, c.client, c.namespace)), nil })
	for _, short := range []string{"a", "b"} {
		node := c.node(t, c.namespace+"-"+short).Name
		token := c.token(t, "agent", []string{DefaultAudience}, toPod(c.pod(t, "agent", node)))
		id, err := identity.Agent(node)
		if err != nil {
			t.Fatal(err)
		}
		config := identity.Credentials{Bundle: mounted.Bundle}.ServiceClient(serviceName)
		r := identity.NewRenewer(identity.RenewerOptions{
			Issuer: identity.NewRemoteIssuer(dial(t, c.address, credentials.NewTLS(config)), func() (string, error) { return token, nil }),
			ID:     id, Usage: x509.ExtKeyUsageServerAuth, Trust: mounted.Bundle, Logger: silent,
		})
		runRenewer(t, r)
		server := grpc.NewServer(identity.ServerOptions(identity.Credentials{Certificate: r.Certificate, Bundle: mounted.Bundle}.AgentServer(), identity.ConnectionAge, nil)...)
		agentv1.RegisterAgentServiceServer(server, agentService{})
		running[short], addresses[short] = r, serve(t, server)
	}
	probe := func(from identity.Credentials, node, at string) error {
		config, err := from.ControllerClient(c.namespace + "-" + node)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = agentv1.NewAgentServiceClient(dial(t, addresses[at], credentials.NewTLS(config))).Probe(ctx, &agentv1.ProbeRequest{})
		return err
	}
	for _, node := range []string{"a", "b"} {
		if err := probe(c.own, node, node); err != nil {
			t.Errorf("the controller does not reach %s: %v", node, err)
		}
	}
	if err := probe(c.own, "a", "b"); err == nil || !strings.Contains(err.Error(), "it must be the agent of node "+c.namespace+"-a") {
		t.Errorf("the agent of b answers for a: %v", err)
	}
	asAgent := identity.Credentials{Certificate: running["b"].Certificate, Bundle: mounted.Bundle}
	if err := probe(asAgent, "a", "a"); status.Code(err) != codes.Unavailable {
		t.Errorf("an agent commands another: %v", err)
	}
}
