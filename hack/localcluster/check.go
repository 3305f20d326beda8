package main

import (
	"context"
	"fmt"
	"net"
	"strings"
)

// check proves that the cluster does what a cluster does: a Pod of a registry's image runs and has an address,
// "kubectl exec" and "kubectl logs" reach it, and it reaches a Deployment through its Service and the API server; and
// that NRI can be used.
func (l layout) check(ctx context.Context, s state) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	const namespace = "localcluster-check"
	manifest, err := configs.ReadFile("config/check.yaml")
	if err != nil {
		return err
	}
	kubectl := l.kubectl(s)
	defer func() {
		if _, gone := kubectl("delete", "namespace", namespace, "--timeout=60s", "--ignore-not-found"); err == nil {
			err = gone
		}
	}()
	file := l.config("check.yaml")
	if err := writeFile(file, manifest); err != nil {
		return err
	}
	if _, err := kubectl("apply", "-f", file); err != nil {
		return err
	}
	in := func(args ...string) (string, error) { return kubectl(append([]string{"-n", namespace}, args...)...) }
	if _, err := in("wait", "pod/one", "--for=condition=Ready", "--timeout=60s"); err != nil {
		return err
	}
	if _, err := in("rollout", "status", "deployment/web", "--timeout=60s"); err != nil {
		return err
	}

	for _, step := range []struct {
		what, want string
		args       []string
	}{
		{"the Pod has an address of the Pods'", "10.213.", []string{"get", "pod", "one", "-o", "jsonpath={.status.podIP}"}},
		{"kubectl logs", "started", []string{"logs", "one"}},
		{"kubectl exec", "1", []string{"exec", "one", "--", "sh", "-c", "echo $$ | wc -l"}},
		{"a Service is reached from a Pod", "It works", []string{"exec", "one", "--", "sh", "-c", "wget -qO- http://$WEB_SERVICE_HOST"}},
		// busybox does not speak the server's TLS: without it, the answer is the server's complaint.
		{"the API server is reached from a Pod", "HTTPS server", []string{"exec", "one", "--", "sh", "-c",
			`printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 5 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT`}},
	} {
		err := until(ctx, func() error { // endpoints and logs come a moment later
			out, err := in(step.args...)
			if err == nil && !strings.Contains(out, step.want) {
				err = fmt.Errorf("the answer was %q", out)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
		fmt.Println("ok   ", step.what)
	}
	c, err := net.Dial("unix", "/var/run/nri/nri.sock")
	if err != nil {
		return fmt.Errorf("NRI: %w", err)
	}
	fmt.Println("ok    NRI")
	return c.Close()
}
