package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// Environment variables of the tests.
const (
	kubeconfigEnv = "FLUX_E2E_KUBECONFIG" // of an administrator
	kubectlEnv    = "FLUX_E2E_KUBECTL"
	clusterEnv    = "FLUX_E2E_LOCALCLUSTER" // the program, to take components away
	fluxctlEnv    = "FLUX_E2E_FLUXCTL"
)

// Where our deployment and the node's things are (hack/localcluster/deploy).
const (
	system     = "flux-sandbox"
	stateDir   = "/var/lib/flux-localcluster/flux-sandbox"
	volumesDir = "/var/lib/flux-localcluster/volumes"
	poolDir    = "/var/lib/flux-localcluster/csi"
	auditLog   = "/var/lib/flux-localcluster/log/audit.log"
	// publishedDir has what the agent had CSI drivers publish.
	publishedDir = "/run/flux-localcluster/flux-sandbox/csi/"
	cgroupDir    = "flux-localcluster/flux-sandbox"
	patience     = 90 * time.Second
)

var (
	sandboxes = v1alpha1.GroupVersion.WithResource("sandboxes")
	groups    = v1alpha1.GroupVersion.WithResource("sandboxgroups")
)

// cluster is the cluster with a namespace for one test.
type cluster struct {
	t         *testing.T
	config    *rest.Config
	client    kubernetes.Interface
	dynamic   dynamic.Interface
	namespace string
	tenant    string
	// before is the node's state at first; nil in a namespace beside another test's, which looks at it.
	before state
	// nodes are the nodes that the test added.
	nodes []*node
}

// open makes a namespace with a group whose gate is on. At the test's end everything is deleted, and the node must be as
// it was.
func open(t *testing.T, changes ...func(*cluster)) *cluster {
	t.Helper()
	testenv.NeedRoot(t)
	if os.Getenv(kubeconfigEnv) == "" {
		testenv.Missing(t, "the local cluster: %s is not set (make e2e)", kubeconfigEnv)
	}
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv(kubeconfigEnv))
	must(t, err)
	config.QPS, config.Burst, config.UserAgent = 200, 400, "flux-e2e"
	c := &cluster{t: t, config: config, namespace: "e2e-" + fmt.Sprint(time.Now().UnixNano()%1e9)}
	c.client, err = kubernetes.NewForConfig(config)
	must(t, err)
	c.dynamic, err = dynamic.NewForConfig(config)
	must(t, err)
	c.before, c.tenant = nodeState(t), c.namespace
	for _, change := range changes {
		change(c)
	}
	c.setUp()
	return c
}

// beside is another namespace, and so another tenant, in the same test.
func (c *cluster) beside() *cluster {
	c.t.Helper()
	other := *c
	other.namespace, other.tenant, other.before = c.namespace+"-2", c.namespace+"-2", nil
	other.setUp()
	return &other
}

func (c *cluster) setUp() {
	t := c.t
	t.Helper()
	_, err := c.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: c.namespace, Labels: map[string]string{v1alpha1.LabelTenantID: c.tenant}}}, metav1.CreateOptions{})
	must(t, err)
	must(t, os.MkdirAll(c.data(), 0o755))
	t.Cleanup(c.close)
	c.create(groups, &v1alpha1.SandboxGroup{ObjectMeta: metav1.ObjectMeta{Name: "default"},
		Spec: v1alpha1.SandboxGroupSpec{FeatureGates: v1alpha1.FeatureGates{DynamicVolumeMount: true}}})
}

func (c *cluster) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	if c.t.Failed() {
		c.dump(ctx)
	}
	c.deleteAll(ctx)
	if err := c.client.CoreV1().Namespaces().Delete(ctx, c.namespace, metav1.DeleteOptions{}); err != nil {
		c.t.Error(err)
	}
	for _, dir := range []string{c.data(), filepath.Join(volumesDir, "scratch", c.tenant)} {
		if err := os.RemoveAll(dir); err != nil {
			c.t.Error(err)
		}
	}
	if c.before == nil {
		return
	}
	if diff := awaitState(ctx, c.t, c.before); diff != "" {
		c.t.Errorf("left on the node:\n%s", diff)
	}
}

// deleteAll deletes the namespace's sandboxes and waits until they are gone.
func (c *cluster) deleteAll(ctx context.Context) {
	c.t.Helper()
	if err := c.dynamic.Resource(sandboxes).Namespace(c.namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		c.t.Error(err)
	}
	c.wait("the sandboxes are gone", func() (bool, string) {
		list := c.list()
		return len(list) == 0, fmt.Sprint(len(list), " are there")
	})
}

// dump logs what helps to see why a test failed.
func (c *cluster) dump(ctx context.Context) {
	for _, sb := range c.list() {
		out, _ := json.Marshal(sb.Status)
		c.t.Logf("sandbox %s: %s", sb.Name, out)
	}
	for _, app := range []string{"flux-sandbox-controller", "flux-sandbox-agent", "flux-sandbox-csi"} {
		pods, err := c.client.CoreV1().Pods(system).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=" + app})
		if err != nil {
			c.t.Log(err)
			continue
		}
		for _, p := range pods.Items {
			log, err := c.client.CoreV1().Pods(system).GetLogs(p.Name, &corev1.PodLogOptions{TailLines: new(int64(40))}).DoRaw(ctx)
			c.t.Logf("%s (%v):\n%s", p.Name, err, log)
		}
	}
}

// data is a folder of the tenant's below the node's allow-list.
func (c *cluster) data(elem ...string) string {
	return filepath.Join(append([]string{volumesDir, "tenants", c.tenant}, elem...)...)
}

// dir makes a folder of the tenant's, and returns it.
func (c *cluster) dir(name string) string {
	c.t.Helper()
	must(c.t, os.MkdirAll(c.data(name), 0o777))
	return c.data(name)
}

// kinds are the kinds of the resources.
var kinds = map[schema.GroupVersionResource]string{sandboxes: "Sandbox", groups: "SandboxGroup"}

func (c *cluster) create(resource schema.GroupVersionResource, object any) {
	c.t.Helper()
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	must(c.t, err)
	u := &unstructured.Unstructured{Object: content}
	u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kinds[resource]))
	delete(u.Object, "status")
	_, err = c.dynamic.Resource(resource).Namespace(c.namespace).Create(c.t.Context(), u, metav1.CreateOptions{})
	must(c.t, err)
}

// sandbox creates a sandbox that runs a shell script, changed by alter.
func (c *cluster) sandbox(name, script string, alter func(*v1alpha1.Sandbox)) {
	c.t.Helper()
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.SandboxSpec{Image: "ubuntu:latest", Command: []string{"sh", "-c", script}}}
	if alter != nil {
		alter(sb)
	}
	c.create(sandboxes, sb)
}

// running creates a sandbox and waits until it runs with all its volumes.
func (c *cluster) running(name, script string, alter func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	c.t.Helper()
	c.sandbox(name, script, alter)
	return c.phase(name, v1alpha1.SandboxRunning)
}

func (c *cluster) get(name string) *v1alpha1.Sandbox {
	c.t.Helper()
	u, err := c.dynamic.Resource(sandboxes).Namespace(c.namespace).Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	return decode(c.t, u)
}

func (c *cluster) list() []v1alpha1.Sandbox {
	list, err := c.dynamic.Resource(sandboxes).Namespace(c.namespace).List(context.Background(), metav1.ListOptions{})
	if err != nil {
		c.t.Log(err)
		return make([]v1alpha1.Sandbox, 1) // not known to be empty
	}
	var out []v1alpha1.Sandbox
	for i := range list.Items {
		out = append(out, *decode(c.t, &list.Items[i]))
	}
	return out
}

func decode(t *testing.T, u *unstructured.Unstructured) *v1alpha1.Sandbox {
	var sb v1alpha1.Sandbox
	must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &sb))
	return &sb
}

// patch is a merge patch of an object, as kubectl patch sends it.
func (c *cluster) patch(resource schema.GroupVersionResource, name, patch string) {
	c.t.Helper()
	_, err := c.dynamic.Resource(resource).Namespace(c.namespace).Patch(c.t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	must(c.t, err)
}

// volumes replaces the dynamic volumes of a sandbox.
func (c *cluster) volumes(name string, volumes ...v1alpha1.DynamicVolume) {
	c.t.Helper()
	if volumes == nil {
		volumes = []v1alpha1.DynamicVolume{}
	}
	data, err := json.Marshal(map[string]any{"spec": map[string]any{"dynamicVolumes": volumes}})
	must(c.t, err)
	c.patch(sandboxes, name, string(data))
}

func local(source, target string) v1alpha1.DynamicVolume {
	return v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypeLocal, Source: source, Target: target}
}

// wait waits until something holds; where says where it stands.
func (c *cluster) wait(what string, holds func() (ok bool, where string)) {
	c.t.Helper()
	c.waitFor(patience, what, holds)
}

// waitFor is wait for what takes longer.
func (c *cluster) waitFor(patience time.Duration, what string, holds func() (ok bool, where string)) {
	c.t.Helper()
	where := ""
	if !testenv.Poll(patience, func() (ok bool) {
		ok, where = holds()
		return ok
	}) {
		c.t.Fatalf("waited in vain until %s: %s", what, where)
	}
}

func (c *cluster) phase(name string, phase v1alpha1.SandboxPhase) *v1alpha1.Sandbox {
	c.t.Helper()
	var sb *v1alpha1.Sandbox
	c.wait(name+" is "+string(phase), func() (bool, string) {
		sb = c.get(name)
		if sb == nil {
			return false, "it does not exist"
		}
		return sb.Status.Phase == phase, fmt.Sprintf("%s %s %s", sb.Status.Phase, sb.Status.Reason, sb.Status.Message)
	})
	return sb
}

// row waits until a volume's row is in a phase.
func (c *cluster) row(name, target string, phase v1alpha1.VolumePhase) v1alpha1.VolumeStatus {
	c.t.Helper()
	var row v1alpha1.VolumeStatus
	c.wait(fmt.Sprintf("%s of %s is %s", target, name, phase), func() (bool, string) {
		sb := c.get(name)
		if sb == nil {
			return false, "the sandbox does not exist"
		}
		for _, v := range sb.Status.Volumes {
			if v.Target == target {
				row = v
				return v.Phase == phase, fmt.Sprintf("%s %s %s", v.Phase, v.Reason, v.Message)
			}
		}
		return false, "it has no row"
	})
	return row
}

// noRow waits until a target has no row.
func (c *cluster) noRow(name, target string) {
	c.t.Helper()
	c.wait(target+" of "+name+" is gone", func() (bool, string) {
		sb := c.get(name)
		for _, v := range sb.Status.Volumes {
			if v.Target == target {
				return false, fmt.Sprintf("%s %s %s", v.Phase, v.Reason, v.Message)
			}
		}
		return true, ""
	})
}

// kubectl runs kubectl in the test's namespace.
func (c *cluster) kubectl(args ...string) (string, error) {
	return c.kubectlIn(c.t.Context(), args...)
}

func (c *cluster) kubectlIn(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, os.Getenv(kubectlEnv), append([]string{"--kubeconfig", os.Getenv(kubeconfigEnv),
		"--cache-dir", filepath.Join(os.TempDir(), c.namespace), "-n", c.namespace}, args...)...)
	c.t.Cleanup(func() { _ = os.RemoveAll(filepath.Join(os.TempDir(), c.namespace)) })
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// component stops or starts a component of the local cluster.
func (c *cluster) component(what, name string) {
	c.t.Helper()
	out, err := exec.Command(os.Getenv(clusterEnv), what, name).CombinedOutput()
	if err != nil {
		c.t.Fatalf("%s %s: %v\n%s", what, name, err, out)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func indent(s string) string {
	var b bytes.Buffer
	for line := range strings.Lines(s) {
		b.WriteString("  " + line)
	}
	return b.String()
}
