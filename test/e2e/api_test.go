package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/flux-sandbox/flux-sandbox/internal/identity"
)

// caller is a ServiceAccount of the test's namespace that calls the gRPC API over the controller's Service.
type caller struct {
	c         *cluster
	conn      *grpc.ClientConn
	address   string
	tokenFile string
	caFile    string
}

const serverName = "flux-sandbox-controller." + system + ".svc"

// caller makes a ServiceAccount with the rights of a role, and a connection that shows its token.
func (c *cluster) caller(name, clusterRole string) *caller {
	c.t.Helper()
	ctx := c.t.Context()
	_, err := c.client.CoreV1().ServiceAccounts(c.namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	must(c.t, err)
	if clusterRole != "" {
		_, err = c.client.RbacV1().RoleBindings(c.namespace).Create(ctx, &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: clusterRole},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: c.namespace, Name: name}}}, metav1.CreateOptions{})
		must(c.t, err)
	}
	return c.callerWith(c.token(name, "sandbox.flux.io/api"))
}

// token is a token of a ServiceAccount for an audience; the API server's own when empty.
func (c *cluster) token(account, audience string) string {
	c.t.Helper()
	request := &authenticationv1.TokenRequest{}
	if audience != "" {
		request.Spec.Audiences = []string{audience}
	}
	token, err := c.client.CoreV1().ServiceAccounts(c.namespace).CreateToken(c.t.Context(), account, request, metav1.CreateOptions{})
	must(c.t, err)
	return token.Status.Token
}

// callerWith calls with a token, or with none when it is empty.
func (c *cluster) callerWith(token string) *caller {
	c.t.Helper()
	service, err := c.client.CoreV1().Services(system).Get(c.t.Context(), "flux-sandbox-controller", metav1.GetOptions{})
	must(c.t, err)
	bundle, err := c.client.CoreV1().ConfigMaps(system).Get(c.t.Context(), "flux-sandbox-ca-bundle", metav1.GetOptions{})
	must(c.t, err)
	dir := c.t.TempDir()
	a := &caller{c: c, address: service.Spec.ClusterIP + ":9443", tokenFile: filepath.Join(dir, "token"), caFile: filepath.Join(dir, "ca.crt")}
	must(c.t, os.WriteFile(a.tokenFile, []byte(token), 0o600))
	must(c.t, os.WriteFile(a.caFile, []byte(bundle.Data["ca.crt"]), 0o600))
	trust := identity.Credentials{Bundle: identity.NewBundleFile(func() ([]byte, error) { return os.ReadFile(a.caFile) }).Bundle}
	options := []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(trust.ServiceClient(serverName)))}
	if token != "" {
		options = append(options, grpc.WithPerRPCCredentials(identity.Bearer(func() (string, error) { return token, nil })))
	}
	a.conn, err = grpc.NewClient("passthrough:///"+a.address, options...)
	must(c.t, err)
	c.t.Cleanup(func() { _ = a.conn.Close() })
	return a
}

// fluxctl runs fluxctl as the caller, and returns what it printed.
func (a *caller) fluxctl(args ...string) (string, error) {
	cmd := exec.CommandContext(a.c.t.Context(), os.Getenv(fluxctlEnv), append([]string{"--address", "tls://" + a.address, "--server-name", serverName,
		"--ca-file", a.caFile, "--token-file", a.tokenFile, "-n", a.c.namespace}, args...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// run is fluxctl that must succeed.
func (a *caller) run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := a.fluxctl(args...)
	if err != nil {
		t.Fatalf("fluxctl %q: %v\n%s", args, err, indent(out))
	}
	return out
}

// Somebody with a kubeconfig needs no address: fluxctl finds the controller, and calls as a ServiceAccount of the namespace.
func TestFluxctlWithAKubeconfig(t *testing.T) {
	c := open(t)
	must(t, os.WriteFile(filepath.Join(c.dir("a"), "hello"), []byte("from a\n"), 0o644))
	c.running("s", ticking, nil)
	fluxctl := func(stdin string, args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), os.Getenv(fluxctlEnv), append([]string{"--kubeconfig", os.Getenv(kubeconfigEnv), "-n", c.namespace}, args...)...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	// The ServiceAccount may do nothing yet.
	if out, err := fluxctl("", "ps"); err == nil || !strings.Contains(out, "system:serviceaccount:"+c.namespace+":default") || !strings.Contains(out, "FORBIDDEN") {
		t.Errorf("%v: %s", err, out)
	}
	_, err := c.client.RbacV1().RoleBindings(c.namespace).Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "default"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "flux-sandbox-user"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: c.namespace, Name: "default"}}}, metav1.CreateOptions{})
	must(t, err)
	var out string
	run := func(stdin string, args ...string) string {
		t.Helper()
		var err error
		if out, err = fluxctl(stdin, args...); err != nil {
			t.Fatalf("fluxctl %q: %v\n%s", args, err, indent(out))
		}
		return out
	}
	c.wait("the right is there", func() (bool, string) {
		out, err := fluxctl("", "ps")
		return err == nil && strings.Contains(out, "Running"), out
	})
	run("", "volume", "add", "s", "--source", c.data("a"), "--target", "/a")
	if run("", "exec", "s", "--", "cat", "/a/hello"); out != "from a\n" {
		t.Errorf("exec printed %q", out)
	}
	run("", "volume", "rm", "s", "/a")
	template, err := json.Marshal(corev1.PodTemplateSpec{Spec: podSpec(reader)})
	must(t, err)
	run(string(template), "run", "--name", "p", "--template", "-", "--volume", "source="+c.data("a")+",target=/data")
	if !strings.Contains(out, "is Running") {
		t.Errorf("a sandbox of a template: %s", out)
	}
	run("", "rm", "p")
	// Which cluster is not asked, but told.
	if out, err := fluxctl("", "--system-namespace", c.namespace, "ps"); err == nil || !strings.Contains(out, "is FluxSandbox installed in the cluster") {
		t.Errorf("%v: %s", err, out)
	}
}
