package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// component is a process of the cluster.
type component struct {
	name  string
	path  string // of the program
	args  []string
	env   []string
	ready func(context.Context) error // nil when it does its work
}

// startTimeout is how long a component may take to become ready: seconds as a rule, longer on a busy machine.
const startTimeout = 2 * time.Minute

// components are all, in the order in which they are started.
func (l layout) components(s state) []component {
	kube := func(name string) string { return filepath.Join(s.Kube, name) }
	self, _ := os.Executable()
	return []component{
		{
			name: "registry", path: self, args: []string{"registry"},
			ready: l.answers("http://" + registry + "/v2/"),
		},
		{
			name: "etcd", path: kube("etcd"),
			args: []string{
				"--data-dir=" + l.path("etcd"), "--log-level=warn",
				"--listen-client-urls=" + l.etcd(), "--advertise-client-urls=" + l.etcd(), "--listen-peer-urls=unix://" + l.run + "/etcd-peer.sock",
			},
			ready: listens(l.run + "/etcd.sock"),
		},
		{
			name: "kube-apiserver", path: kube("kube-apiserver"),
			args: []string{
				"--etcd-servers=" + l.etcd(),
				"--advertise-address=" + nodeIP, "--bind-address=" + nodeIP, "--secure-port=" + apiPort,
				"--cert-dir=" + l.pki(""), "--client-ca-file=" + l.pki("ca.crt"),
				"--tls-cert-file=" + l.pki("kube-apiserver.crt"), "--tls-private-key-file=" + l.pki("kube-apiserver.key"),
				"--kubelet-certificate-authority=" + l.pki("ca.crt"),
				"--kubelet-client-certificate=" + l.pki("kubelet-client-user.crt"), "--kubelet-client-key=" + l.pki("kubelet-client-user.key"),
				"--kubelet-preferred-address-types=InternalIP", // nobody resolves the node's name
				"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
				"--service-cluster-ip-range=" + services,
				"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
				"--service-account-signing-key-file=" + l.pki("service-accounts.key"), "--service-account-key-file=" + l.pki("service-accounts.key"),
				"--audit-policy-file=" + l.config("audit-policy.yaml"), "--audit-log-path=" + l.auditLog(),
			},
			ready: l.answers(apiURL + "/readyz"),
		},
		{
			name: "kube-controller-manager", path: kube("kube-controller-manager"),
			args: []string{
				"--kubeconfig=" + l.kubeconfig("kube-controller-manager"),
				"--authentication-kubeconfig=" + l.kubeconfig("kube-controller-manager"),
				"--authorization-kubeconfig=" + l.kubeconfig("kube-controller-manager"),
				"--bind-address=" + nodeIP, "--leader-elect=false",
				"--tls-cert-file=" + l.pki("kube-controller-manager.crt"), "--tls-private-key-file=" + l.pki("kube-controller-manager.key"),
				"--root-ca-file=" + l.pki("ca.crt"), "--service-account-private-key-file=" + l.pki("service-accounts.key"),
				"--cluster-signing-cert-file=" + l.pki("ca.crt"), "--cluster-signing-key-file=" + l.pki("ca.key"),
				"--use-service-account-credentials=true",
			},
			ready: l.answers("https://" + nodeIP + ":10257/healthz"),
		},
		{
			name: "kube-scheduler", path: kube("kube-scheduler"),
			args: []string{
				"--kubeconfig=" + l.kubeconfig("kube-scheduler"),
				"--authentication-kubeconfig=" + l.kubeconfig("kube-scheduler"),
				"--authorization-kubeconfig=" + l.kubeconfig("kube-scheduler"),
				"--bind-address=" + nodeIP, "--leader-elect=false",
				"--tls-cert-file=" + l.pki("kube-scheduler.crt"), "--tls-private-key-file=" + l.pki("kube-scheduler.key"),
			},
			ready: l.answers("https://" + nodeIP + ":10259/healthz"),
		},
		{
			name: "containerd", path: filepath.Join(s.Containerd, "containerd"),
			args:  []string{"--config=" + l.config("containerd.toml")},
			env:   []string{"PATH=" + s.Containerd + ":" + os.Getenv("PATH")}, // its shim
			ready: listens(l.containerd()),
		},
		{
			name: "kubelet", path: kube("kubelet"),
			args: []string{
				"--config=" + l.config("kubelet.yaml"), "--kubeconfig=" + l.kubeconfig("kubelet"),
				"--root-dir=" + l.kubelet(), "--cert-dir=" + l.pki(""), "--hostname-override=" + nodeName, "--node-ip=" + nodeIP,
			},
			ready: l.answers("http://" + nodeIP + ":10248/healthz"),
		},
		{
			name: "kube-proxy", path: kube("kube-proxy"),
			args:  []string{"--config=" + l.config("kube-proxy.yaml")},
			ready: l.answers("http://" + nodeIP + ":10256/healthz"),
		},
	}
}

// start starts a component unless it runs, and waits until it is ready.
func (l layout) start(ctx context.Context, c component) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	ended := func() bool { return len(running(c.name)) == 0 }
	if ended() {
		launched, err := launch(c.name, l.log(c.name), c.env, c.path, c.args...)
		if err != nil {
			return err
		}
		// Not by its mark: that is not to be seen yet in the moment in which the kernel loads the program.
		ended = func() bool {
			select {
			case <-launched:
				return true
			default:
				return false
			}
		}
	}
	ctx, dead := context.WithCancelCause(ctx)
	defer dead(nil)
	err := until(ctx, func() error {
		err := c.ready(ctx)
		if err != nil && ended() {
			err = fmt.Errorf("it ended; it said last:\n%s", tail(l.log(c.name)))
			dead(err)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%s does not become ready (log: %s): %w", c.name, l.log(c.name), err)
	}
	return nil
}

// stop ends a component, and not what it started.
func (c component) stop() error {
	if err := end(func() []process { return running(c.name) }); err != nil {
		return fmt.Errorf("stop %s: %w", c.name, err)
	}
	return nil
}

// listens probes a Unix socket.
func listens(path string) func(context.Context) error {
	return func(ctx context.Context) error {
		c, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err != nil {
			return err
		}
		return c.Close()
	}
}

// answers probes a URL: 200 is ready. It is one that needs no rights.
func (l layout) answers(url string) func(context.Context) error {
	return func(ctx context.Context) error {
		ca, err := os.ReadFile(l.pki("ca.crt"))
		if err != nil {
			return err
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(ca)
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
		defer transport.CloseIdleConnections()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := (&http.Client{Transport: transport}).Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("GET %s: %s", url, response.Status)
		}
		return nil
	}
}
