package apiserver

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// startTimeout is how long a server may take to become ready: seconds as a rule, much more on a machine that
// compiles at the same time.
const startTimeout = 2 * time.Minute

// Server is a running API server. Its methods that start and stop it may not be called concurrently; all others
// may.
type Server struct {
	bin, dir  string
	port      int
	flags     []string
	token     string // of the administrator
	ca        []byte // what the server's certificate is checked with; PEM
	etcd, api *process
}

// Option changes how a server is started.
type Option func(*Server)

// Flags adds flags for kube-apiserver ("--feature-gates=X=true"). One that is given twice counts as written last,
// so the defaults of this package can be changed.
func Flags(flags ...string) Option {
	return func(s *Server) { s.flags = append(s.flags, flags...) }
}

// Start starts a server of the test's own. It ends with the test.
func Start(t testing.TB, options ...Option) *Server {
	t.Helper()
	bin := binaries(t)
	s, err := launch(bin, t.TempDir(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.end)
	return s
}

// shared is the test binary's common server.
var shared struct {
	// mu is held while the server is started; it guards the rest.
	mu      sync.Mutex
	managed bool // Main will stop it
	server  *Server
	err     error // why it did not start
}

// Shared returns the server of the test binary, started on first use and stopped by [Main]. It has the default
// flags. Tests use namespaces and names of their own, and do not stop it.
func Shared(t testing.TB) *Server {
	t.Helper()
	bin := binaries(t)
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if !shared.managed {
		t.Fatal("apiserver.Shared needs func TestMain(m *testing.M) { apiserver.Main(m) }, which stops the server at the end")
	}
	if shared.server == nil && shared.err == nil {
		var dir string
		if dir, shared.err = os.MkdirTemp("", "apiserver-"); shared.err == nil {
			shared.server, shared.err = launch(bin, dir, nil)
		}
		if shared.err != nil {
			_ = os.RemoveAll(dir)
		}
	}
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server
}

// Main is the TestMain of a package whose tests use [Shared]: it runs the tests, stops the server and exits.
func Main(m *testing.M) {
	shared.managed = true
	code := m.Run()
	if s := shared.server; s != nil {
		s.end()
		if err := os.RemoveAll(s.dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// Config returns the configuration of a client that may do everything (user admin, group system:masters). It has
// no limit of its own on requests per second; a test of such a limit sets QPS and Burst.
func (s *Server) Config() *rest.Config {
	return &rest.Config{Host: s.url(), BearerToken: s.token, TLSClientConfig: rest.TLSClientConfig{CAData: s.ca}, QPS: -1}
}

// As returns the configuration of a client that may do what RBAC lets a user in these groups do; the server adds
// system:authenticated. It is the administrator who impersonates them: the audit log has the name under
// impersonatedUser. A ServiceAccount's name is "system:serviceaccount:<namespace>:<name>", and its groups are
// "system:serviceaccounts" and "system:serviceaccounts:<namespace>".
func (s *Server) As(user string, groups ...string) *rest.Config {
	config := s.Config()
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	return config
}

// Kubeconfig returns the path of a kubeconfig with the rights of [Server.Config], for programs.
func (s *Server) Kubeconfig() string { return s.path("kubeconfig") }

// AuditLog returns the path of the audit log: one JSON object (audit.k8s.io/v1 Event, level Metadata) a line for
// each request, written when it was answered; for a watch, when it began and when it ended.
func (s *Server) AuditLog() string { return s.path("audit.log") }

// Stop takes the API server away, as a crash does. What it stored stays in etcd, which goes on.
func (s *Server) Stop() {
	s.api.kill()
	s.api = nil
}

// Restart stops the API server, if it runs, starts it again at the same address and waits until it is ready.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	s.Stop()
	if err := s.startAPI(); err != nil {
		t.Fatal(err)
	}
}

// end stops everything.
func (s *Server) end() {
	s.api.kill()
	s.etcd.kill()
}

func (s *Server) path(name string) string { return filepath.Join(s.dir, name) }

func (s *Server) url() string { return "https://" + net.JoinHostPort(host, strconv.Itoa(s.port)) }

const host = "127.0.0.1"

// launch starts both programs in a directory, which is left to the caller.
func launch(bin, dir string, options []Option) (_ *Server, err error) {
	s := &Server{bin: bin, dir: dir}
	for _, option := range options {
		option(s)
	}
	defer func() {
		if err != nil {
			s.end()
		}
	}()
	if s.port, err = freePort(); err != nil {
		return nil, err
	}
	if err := s.writeFiles(); err != nil {
		return nil, fmt.Errorf("prepare a Kubernetes API server in %s: %w", dir, err)
	}
	// Sockets with relative names: a test's directory is too long for one, and there is no port to collide.
	if s.etcd, err = start(dir, filepath.Join(bin, "etcd"), "etcd",
		"--data-dir=etcd", "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls="+etcdSocket, "--advertise-client-urls="+etcdSocket, "--listen-peer-urls=unix://etcd-peer.sock:0",
	); err != nil {
		return nil, err
	}
	if err := s.startAPI(); err != nil {
		return nil, err
	}
	return s, nil
}

const etcdSocket = "unix://etcd.sock:0"

// auditPolicy records who asked for what, at the end of each request.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
`

func (s *Server) writeFiles() error {
	s.token = rand.Text()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		"tokens.csv":        []byte(s.token + ",admin,admin,system:masters\n"),
		"accounts.key":      pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}),
		"audit-policy.yaml": []byte(auditPolicy),
	} {
		if err := os.WriteFile(s.path(name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// writeKubeconfig needs the server's certificate.
func (s *Server) writeKubeconfig() error {
	content, err := json.Marshal(map[string]any{ // JSON is YAML
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"contexts": []any{map[string]any{"name": "test", "context": map[string]any{"cluster": "test", "user": "admin"}}},
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{
			"server": s.url(), "certificate-authority-data": s.ca,
		}}},
		"users": []any{map[string]any{"name": "admin", "user": map[string]any{"token": s.token}}},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(s.Kubeconfig(), content, 0o600)
}

// startAPI starts kube-apiserver and waits until it is ready.
func (s *Server) startAPI() error {
	var err error
	s.api, err = start(s.dir, filepath.Join(s.bin, "kube-apiserver"), "kube-apiserver", slices.Concat([]string{
		"--etcd-servers=" + etcdSocket,
		"--bind-address=" + host, "--advertise-address=" + host, "--secure-port=" + strconv.Itoa(s.port), "--endpoint-reconciler-type=none",
		"--cert-dir=.", "--token-auth-file=tokens.csv",
		"--authorization-mode=Node,RBAC", "--disable-admission-plugins=ServiceAccount", "--allow-privileged=true",
		"--service-cluster-ip-range=10.0.0.0/24",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file=accounts.key", "--service-account-key-file=accounts.key",
		"--audit-policy-file=audit-policy.yaml", "--audit-log-path=audit.log",
	}, s.flags)...)
	if err != nil {
		return err
	}
	return s.waitReady()
}

// waitReady waits for the server's own word that it is ready, and for the namespace that it makes a moment later.
func (s *Server) waitReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for {
		err := s.ready(ctx)
		if err == nil {
			return nil
		}
		if ended := errors.Join(s.etcd.ended(), s.api.ended()); ended != nil {
			return ended
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return fmt.Errorf("kube-apiserver is not ready after %v; logs are in %s: %w", startTimeout, s.dir, err)
		}
	}
}

func (s *Server) ready(ctx context.Context) error {
	var err error
	if s.ca, err = os.ReadFile(s.path("apiserver.crt")); err != nil {
		return err // it makes itself one when it starts
	}
	client, err := rest.HTTPClientFor(s.Config())
	if err != nil {
		return err
	}
	for _, path := range []string{"/readyz", "/api/v1/namespaces/default"} {
		if err := get(ctx, client, s.url()+path); err != nil {
			return err
		}
	}
	return s.writeKubeconfig()
}

func get(ctx context.Context, client *http.Client, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", url, response.Status)
	}
	return nil
}

// freePort picks a port that nobody listens on, outside of the range that the kernel takes ports from by itself:
// one from there could be gone by the time the server listens, or starts again.
func freePort() (int, error) {
	const first, number, tries = 20000, 10000, 50
	var err error
	for range tries {
		port := first + mathrand.IntN(number)
		var l net.Listener
		if l, err = net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port))); err == nil {
			return port, l.Close()
		}
	}
	return 0, fmt.Errorf("find a free port for kube-apiserver: %w", err)
}
