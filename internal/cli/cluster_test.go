package cli_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/cli"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
	"github.com/flux-sandbox/flux-sandbox/internal/identity"
)

// cluster is a cluster with the server of the test.
type cluster struct {
	way     cli.Way
	err     error
	asked   []string // what Connect was called with
	closed  int
	context string
}

func (c *cluster) Namespace() string { return "of-the-context" }

func (c *cluster) Connect(_ context.Context, system, namespace, account string) (*cli.Way, error) {
	c.asked = append(c.asked, strings.Join([]string{system, namespace, account}, " "))
	way := c.way
	return &way, c.err
}

// secured serves what answers at a unix socket by TLS, with a certificate for a name.
func secured(t *testing.T, socket, name string) cli.Way {
	t.Helper()
	ca, err := identity.NewCA(time.Now())
	must(t, err)
	key, err := identity.NewKey()
	must(t, err)
	chain, err := ca.SignServer(time.Now(), []string{name}, key.Public())
	must(t, err)
	text, _, err := ca.PEM()
	must(t, err)
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{NextProtos: []string{"h2"}, Certificates: []tls.Certificate{{Certificate: chain, PrivateKey: key}}})
	must(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				to, err := net.Dial("unix", socket)
				if err != nil {
					return
				}
				defer to.Close()
				serving.Go(func() { _, _ = io.Copy(to, conn); _ = to.Close() })
				_, _ = io.Copy(conn, to)
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		serving.Wait()
	})
	return cli.Way{Address: listener.Addr().String(), ServerName: name, CA: text}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestTheServerOfACluster(t *testing.T) {
	var mu sync.Mutex // guards seen
	var seen []string
	e := grpcapitest.Start(t, grpcapitest.Tokens(func(authorization []string) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, authorization...)
	}))
	c := &cluster{way: secured(t, strings.TrimPrefix(e.Address, "unix://"), "the-server")}
	c.way.Token = func() (string, error) { return "t0ken", nil }
	c.way.Close = func() { c.closed++ }
	run := func(env string, args ...string) result {
		var out, errOut bytes.Buffer
		code := cli.Main(t.Context(), args, cli.Env{
			In: strings.NewReader(""), Out: &out, Err: &errOut,
			Getenv: func(name string) string { return map[string]string{cli.AddressEnv: env}[name] },
			Cluster: func(kubeconfig, context string) (cli.Cluster, bool, error) {
				if kubeconfig == "missing" {
					return nil, true, errors.New("there is no file missing")
				}
				c.context = context
				return c, true, nil
			},
		})
		return result{code, out.String(), errOut.String()}
	}
	// Named, it is the cluster's, also where the environment has an address.
	if r := run("unix:///nowhere.sock", "--context", "prod", "ps"); r.code != 0 || !strings.Contains(r.errOut, "no sandboxes in namespace of-the-context") || c.context != "prod" {
		t.Errorf("%+v, context %q", r, c.context)
	}
	if r := run("", "--kubeconfig", "k", "-n", "alice", "--service-account", "robot", "--system-namespace", "flux", "ps"); r.code != 0 || !strings.Contains(r.errOut, "namespace alice") {
		t.Errorf("%+v", r)
	}
	if want := []string{"flux-sandbox of-the-context default", "flux alice robot"}; !slices.Equal(c.asked, want) || c.closed != 2 {
		t.Errorf("asked for %q, want %q; closed %d times", c.asked, want, c.closed)
	}
	mu.Lock()
	if !slices.Equal(seen, []string{"Bearer t0ken", "Bearer t0ken"}) {
		t.Errorf("the server saw %q", seen)
	}
	mu.Unlock()
	// An address is an address.
	if r := run(e.Address, "ps"); r.code != 0 || len(c.asked) != 2 {
		t.Errorf("%+v, asked %q", r, c.asked)
	}
	for _, tt := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--address", e.Address, "--context", "prod", "ps"}, 2, "leave one out"},
		{[]string{"--kubeconfig", "missing", "ps"}, 2, "there is no file missing"},
		{[]string{"--kubeconfig", "missing", "version"}, 0, ""},
	} {
		if r := run("", tt.args...); r.code != tt.code || !strings.Contains(r.errOut, tt.says) {
			t.Errorf("%q: %+v", tt.args, r)
		}
	}
	// What answers there must be the server.
	c.way.ServerName = "another"
	if r := run("", "--context", "prod", "ps"); r.code != 1 || !strings.Contains(r.errOut, "not to be trusted") || strings.Count(r.errOut, "\n") != 1 {
		t.Errorf("%+v", r)
	}
	c.err = errors.New("nobody may")
	if r := run("", "--context", "prod", "ps"); r.code != 1 || r.errOut != "fluxctl: cannot list the sandboxes: nobody may\n" {
		t.Errorf("%+v", r)
	}
}
