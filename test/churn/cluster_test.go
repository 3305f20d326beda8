package churn

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/certificates"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

// kwokEnv names the environment variable with the path of kwok. Unset: what hack/kwok/build.sh builds.
const kwokEnv = "FLUX_TEST_KWOK"

// controllerEnv names the environment variable with the path of the controller. Unset: it is built.
const controllerEnv = "FLUX_TEST_CONTROLLER"

const (
	// system is the controller's namespace.
	system = "flux-sandbox"
	// provisioner is who makes the volumes of claims, driver that of the volumes that sandboxes are given.
	provisioner, driver = "churn.example.com", "csi.example.com"
	// keptFromAgents is a driver that agents do not call, as provisioner is: kubelet mounts its volumes, for anchors.
	keptFromAgents = "kubelet.example.com"
	class          = "churn"
)

// cluster is a control plane with simulated nodes: nothing but containers and mounts is played.
type cluster struct {
	*testing.T
	server  *apiserver.Server
	config  *rest.Config
	client  kubernetes.Interface
	objects dynamic.Interface
	way     *way
	// programs must not end by themselves.
	programs []*apiserver.Program
	binary   string
	replicas []*replica
}

// replica is one of the controller's processes.
type replica struct {
	name    string
	started int
	program *apiserver.Program
}

func newCluster(t *testing.T, way *way) *cluster {
	t.Helper()
	server := apiserver.Start(t, apiserver.Flags("--audit-log-maxsize=50", "--audit-log-maxbackup=2"))
	own := server.Config()
	own.Wrap(func(next http.RoundTripper) http.RoundTripper { return patient{next} })
	c := &cluster{T: t, server: server, config: server.Config(), client: kubernetes.NewForConfigOrDie(own), objects: dynamic.NewForConfigOrDie(own), way: way}
	c.binary = c.build()
	for _, h := range append([]home{{namespace: system}}, homes...) {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: h.namespace}}
		if h.tenant != "" {
			namespace.Labels = map[string]string{v1alpha1.LabelTenantID: h.tenant}
		}
		must(c.client.CoreV1().Namespaces().Create(t.Context(), namespace, metav1.CreateOptions{}))
	}
	manifests.Apply(t, c.config, manifests.Objects(t, "config/crd/*.yaml", "config/kubernetes/rbac.yaml", "config/admission/*.yaml")...)
	must(c.client.StorageV1().StorageClasses().Create(t.Context(), &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: class}, Provisioner: provisioner,
		ReclaimPolicy: ptr.To(corev1.PersistentVolumeReclaimDelete), VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)}, metav1.CreateOptions{}))
	way.start(t, c.config)
	c.run("kube-controller-manager", server.Bin("kube-controller-manager"), "--kubeconfig="+server.Kubeconfig(), "--leader-elect=false", "--secure-port=0",
		"--controllers="+strings.Join([]string{"garbage-collector-controller", "persistentvolume-binder-controller", "persistentvolumeclaim-protection-controller",
			"persistentvolume-protection-controller", "pod-garbage-collector-controller", "taint-eviction-controller", "node-lifecycle-controller"}, ","),
		// Nodes are ready when a test says so.
		"--node-monitor-grace-period=24h", "--kube-api-qps=500", "--kube-api-burst=1000", "--pvclaimbinder-sync-period=5s")
	c.run("kube-scheduler", server.Bin("kube-scheduler"), "--kubeconfig="+server.Kubeconfig(), "--leader-elect=false", "--secure-port=0",
		"--kube-api-qps=500", "--kube-api-burst=1000")
	stages, err := filepath.Abs("testdata/stages.yaml")
	must("", err)
	c.run("kwok", c.kwok(), "--kubeconfig="+server.Kubeconfig(), "--manage-all-nodes=true", "--node-lease-duration-seconds=0", "--config="+stages)
	return c
}

func (c *cluster) run(name, path string, args ...string) {
	c.Helper()
	if _, err := exec.LookPath(path); err != nil {
		testenv.Missing(c, "%s (%v)", name, err)
	}
	c.programs = append(c.programs, c.server.Run(c, name, path, args...))
}

// kwok is where kwok is.
func (c *cluster) kwok() string {
	c.Helper()
	if path := os.Getenv(kwokEnv); path != "" {
		return path
	}
	out, err := exec.Command("../../hack/kwok/build.sh").Output()
	if err != nil {
		testenv.Missing(c, "kwok: run hack/kwok/build.sh (%v)", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "kwok")
}

// build builds the controller as it is shipped, unless it is named.
func (c *cluster) build() string {
	c.Helper()
	if path := os.Getenv(controllerEnv); path != "" {
		return path
	}
	path := filepath.Join(c.TempDir(), "flux-sandbox-controller")
	command := exec.Command("go", "build", "-o", path, "../../cmd/flux-sandbox-controller")
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := command.CombinedOutput(); err != nil {
		c.Fatalf("build the controller: %v\n%s", err, out)
	}
	return path
}

// authority is the CA that the controller will find: that it is made before the first replica starts lets agents have
// certificates at once.
func (c *cluster) authority() *certificates.Authority {
	c.Helper()
	return must(certificates.NewAuthority(c.Context(), certificates.AuthorityOptions{Client: c.client, Namespace: system}))
}

// start starts a replica, anew if it was killed.
func (c *cluster) start(r *replica) {
	c.Helper()
	r.started++
	// A Pod that is made again has another name, and so has its replica.
	identity := fmt.Sprintf("%s-%d", r.name, r.started)
	r.program = c.server.Run(c, identity, c.binary, "--kubeconfig="+c.way.kubeconfig, "--namespace="+system, "--identity="+identity,
		"--listen=127.0.0.1:0", "--certificate-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", "--anchor-image=pause", "--anchor-grace=5s",
		"--direct-drivers="+driver, "--lease-duration=6s", "--renew-deadline=4s", "--retry-period=1s", "--log-format=text", "--log-level=info")
}

// ended are the programs that ended without having been told to.
func (c *cluster) ended() error {
	for _, p := range c.programs {
		if err := p.Ended(); err != nil {
			return err
		}
	}
	return nil
}

// address is one that endpoints may have: no loopback address, which the API server refuses.
func address(t testing.TB) string {
	t.Helper()
	all, err := net.InterfaceAddrs()
	must("", err)
	for _, a := range all {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() && ip.IP.To4() != nil {
			return ip.IP.String()
		}
	}
	testenv.Missing(t, "an IPv4 address that is not of the loopback interface")
	return ""
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// kubeconfig writes a kubeconfig for a server whose callers need no credentials.
func kubeconfig(t testing.TB, url string, certificate []byte) string {
	t.Helper()
	content := must(json.Marshal(map[string]any{ // JSON is YAML
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"contexts": []any{map[string]any{"name": "test", "context": map[string]any{"cluster": "test", "user": "any"}}},
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{
			"server": url, "certificate-authority-data": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}),
		}}},
		"users": []any{map[string]any{"name": "any", "user": map[string]any{}}},
	}))
	path := filepath.Join(t.TempDir(), "kubeconfig")
	must("", os.WriteFile(path, content, 0o600))
	return path
}

// settled is how long something may take that nothing hinders any more. Pods that were lost several times wait longest, for
// their back-off.
const settled = 3 * time.Minute
