//go:build failpoint

package clustercontroller_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/clustercontroller"
)

// slowWatch is a way to the API server on which nothing more is heard of sandboxes from hold on, but what is asked for.
type slowWatch struct {
	kubeconfig string

	mu   sync.Mutex // guards gate
	gate chan struct{}
}

// hold ends when free is called.
func (s *slowWatch) hold() (free func()) {
	gate := make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gate = gate
	return sync.OnceFunc(func() { close(gate) })
}

func (s *slowWatch) wait(r *http.Request) {
	s.mu.Lock()
	gate := s.gate
	s.mu.Unlock()
	if gate == nil {
		return
	}
	select {
	case <-gate:
	case <-r.Context().Done():
	}
}

// slowBody is the body of a watch.
type slowBody struct {
	io.ReadCloser
	wait func()
}

func (b slowBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.wait()
	return n, err
}

// newSlowWatch is such a way for who has a kubeconfig.
func newSlowWatch(t *testing.T, kubeconfig string) *slowWatch {
	t.Helper()
	s := &slowWatch{kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	file := must(clientcmd.LoadFromFile(kubeconfig))
	cluster := file.Clusters[file.Contexts[file.CurrentContext].Cluster]
	to := must(url.Parse(cluster.Server))
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) },
		Transport: must(rest.TransportFor(&rest.Config{Host: cluster.Server,
			TLSClientConfig: rest.TLSClientConfig{CAData: cluster.CertificateAuthorityData, CAFile: cluster.CertificateAuthority}})),
		FlushInterval: -1,
		ModifyResponse: func(r *http.Response) error {
			if strings.HasSuffix(r.Request.URL.Path, "/sandboxes") && r.Request.URL.Query().Get("watch") != "" {
				r.Body = slowBody{r.Body, func() { s.wait(r.Request) }}
			}
			return nil
		},
	}
	server := httptest.NewUnstartedServer(proxy)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	cluster.Server, cluster.CertificateAuthority, cluster.CertificateAuthorityData = server.URL, "", nil
	cluster.InsecureSkipTLSVerify = true
	if err := clientcmd.WriteToFile(*file, s.kubeconfig); err != nil {
		t.Fatal(err)
	}
	return s
}

// aLeaderWhoseWatchIsBehind takes office without having heard that a sandbox is gone, or that there is another: it makes no Pod for
// the first, and one for the second.
func aLeaderWhoseWatchIsBehind(t *testing.T, c *cluster) {
	c = c.of(t)
	d := c.drill("behind")
	leases := c.admin.CoordinationV1().Leases(ownNamespace)
	c.expireLease()
	must(leases.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: clustercontroller.DefaultLease}, Spec: coordinationv1.LeaseSpec{
		HolderIdentity: ptr.To("who is gone"), LeaseDurationSeconds: ptr.To(int32(3600)), AcquireTime: &metav1.MicroTime{Time: time.Now()}, RenewTime: &metav1.MicroTime{Time: time.Now()},
	}}, metav1.CreateOptions{}))
	sandbox := func(name string, finalizers ...string) {
		d.sandbox(&v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: finalizers}, Spec: v1alpha1.SandboxSpec{
			Template: &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "busybox"}}}}}})
	}
	sandbox("gone", v1alpha1.FinalizerVolumes)
	way := newSlowWatch(t, c.kubeconfig)
	c.kubeconfig = way.kubeconfig
	p := c.controller("behind", nil)
	t.Cleanup(p.kill)
	d.eventually("it waits for the lease", func() bool {
		return bytes.Contains(must(os.ReadFile(p.log)), []byte("Attempting to acquire leader lease"))
	})
	free := way.hold()
	t.Cleanup(free)
	sandboxes := c.objects.Resource(sandboxesGVR).Namespace(d.namespace)
	if err := sandboxes.Delete(t.Context(), "gone", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	must(sandboxes.Patch(t.Context(), "gone", "application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}))
	sandbox("new")
	c.expireLease()
	pods := c.admin.CoreV1().Pods(d.namespace)
	d.eventually("the new sandbox has a Pod", func() bool {
		_, err := pods.Get(t.Context(), "new", metav1.GetOptions{})
		return err == nil
	})
	free()
	if err := sandboxes.Delete(t.Context(), "new", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	d.eventually("it goes", func() bool {
		_, err := sandboxes.Get(t.Context(), "new", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	if _, err := pods.Get(t.Context(), "gone", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the sandbox that is gone has a Pod: %v", err)
	}
	if bytes.Contains(must(os.ReadFile(p.log)), []byte(d.namespace+"/gone")) {
		t.Errorf("the sandbox that is gone was dealt with")
	}
}

// sandbox makes a Sandbox.
func (d *drill) sandbox(sb *v1alpha1.Sandbox) {
	d.Helper()
	sb.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("Sandbox"))
	o := must(runtime.DefaultUnstructuredConverter.ToUnstructured(sb))
	must(d.objects.Resource(sandboxesGVR).Namespace(d.namespace).Create(d.Context(), &unstructured.Unstructured{Object: o}, metav1.CreateOptions{}))
}
