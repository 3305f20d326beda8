package clusterdriver_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

func TestMain(m *testing.M) {
	if isChild() {
		runChild()
		return
	}
	apiserver.Main(m)
}

const (
	patience  = time.Minute
	account   = "system:serviceaccount:flux-sandbox:flux-sandbox-csi"
	domainKey = "unifiedbus.com/superpod"
	// selectedNode is what the scheduler writes, provisionedBy what the volume controller writes then.
	selectedNode  = "volume.kubernetes.io/selected-node"
	provisionedBy = "volume.kubernetes.io/storage-provisioner"
	// nodeOfToken is what the API server says of a token that is bound to a Pod.
	nodeOfToken = "authentication.kubernetes.io/node-name"
	finalizer   = "external-provisioner.volume.kubernetes.io/finalizer"
)

var groups = []string{"system:serviceaccounts", "system:serviceaccounts:flux-sandbox"}

// world is an API server with the rights and policies of our manifests, and pools. It has no controllers: the tests do
// what those would do.
type world struct {
	*testing.T
	server    *apiserver.Server
	admin     kubernetes.Interface
	namespace string
	dir       string
}

var setUp sync.Once

func newWorld(t *testing.T) *world {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedBinary(t, "mkfs.ext4", "mkfs.xfs")
	w := &world{T: t, server: apiserver.Shared(t), dir: t.TempDir()}
	w.admin = kubernetes.NewForConfigOrDie(w.server.Config())
	setUp.Do(func() {
		_, err := w.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "flux-sandbox"}}, metav1.CreateOptions{})
		w.must(err)
		manifests.Apply(t, w.server.Config(), manifests.Objects(t, "config/kubernetes/rbac.yaml", "config/admission/driver.yaml")...)
	})
	made, err := w.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}, metav1.CreateOptions{})
	w.must(err)
	w.namespace = made.Name
	t.Cleanup(func() {
		for device, file := range testenv.LoopDevices() {
			if strings.HasPrefix(file, w.dir) {
				t.Errorf("a loop device is left: %s: %s", device, file)
			}
		}
	})
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// name is a name of the test's own, for what is in no namespace.
func (w *world) name(s string) string { return w.namespace + "-" + s }

// node is a node whose driver is a process of its own.
type node struct {
	*world
	name string
	// between, if set, is between the node's driver and the API server.
	between func(w http.ResponseWriter, q *http.Request, forward http.Handler)
	calls   calls
	stop    func()
}

func (w *world) node(name string, labels map[string]string) *node {
	w.Helper()
	n := &node{world: w, name: w.name(name), stop: func() {}}
	all := map[string]string{csidriver.TopologyNode: n.name}
	maps.Copy(all, labels)
	_, err := w.admin.CoreV1().Nodes().Create(w.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: all}}, metav1.CreateOptions{})
	w.must(err)
	return n
}

func (n *node) path(suffix string) string { return filepath.Join(n.dir, n.name+suffix) }

// client has the rights of the node's driver.
func (n *node) client() kubernetes.Interface {
	config := n.server.Config()
	config.Impersonate = rest.ImpersonationConfig{UserName: account, Groups: groups, Extra: map[string][]string{nodeOfToken: {n.name}}}
	return kubernetes.NewForConfigOrDie(config)
}

// proxy is the way of the node's driver to the API server. It returns a kubeconfig that leads there.
func (n *node) proxy() string {
	n.Helper()
	to := n.server.Config()
	transport, err := rest.TransportFor(to)
	n.must(err)
	target, err := url.Parse(to.Host)
	n.must(err)
	forward := httputil.NewSingleHostReverseProxy(target)
	forward.Transport, forward.FlushInterval = transport, -1
	forward.ErrorLog = log.New(io.Discard, "", 0)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		n.calls.add(q)
		if n.between != nil {
			n.between(w, q, forward)
			return
		}
		forward.ServeHTTP(w, q)
	}))
	server.Config.ErrorLog = forward.ErrorLog
	server.StartTLS()
	n.Cleanup(server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	data, err := json.Marshal(map[string]any{ // JSON is YAML
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"contexts": []any{map[string]any{"name": "test", "context": map[string]any{"cluster": "test", "user": "driver"}}},
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{"server": server.URL, "certificate-authority-data": ca}}},
		"users": []any{map[string]any{"name": "driver", "user": map[string]any{
			"as": account, "as-groups": groups, "as-user-extra": map[string][]string{nodeOfToken: {n.name}}}}},
	})
	n.must(err)
	path := n.path(".kubeconfig")
	n.must(os.WriteFile(path, data, 0o600))
	return path
}

// command is the node's driver, which is this test binary.
func (n *node) command(env ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), append(env, strings.Join([]string{childEnv + "=" + n.proxy(), n.name, n.path("")}, " "))...)
	return cmd
}

// start runs the node's driver until the test ends or stop is called.
func (n *node) start() *node {
	n.Helper()
	cmd := n.command()
	var out bytes.Buffer
	cmd.Stderr = &out
	ready, err := cmd.StdoutPipe()
	n.must(err)
	n.must(cmd.Start())
	n.stop = sync.OnceFunc(func() {
		err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
		if err != nil || n.Failed() {
			n.Errorf("the driver of %s: %v\n%s", n.name, err, out.String())
		}
	})
	n.Cleanup(n.stop)
	if line, err := bufio.NewReader(ready).ReadString('\n'); err != nil {
		n.Fatalf("the driver of %s is not ready: %q %v", n.name, line, err)
	}
	return n
}

// dial connects to a socket of the node's driver.
func (n *node) dial(socket string) *grpc.ClientConn {
	n.Helper()
	conn, err := grpc.NewClient("unix:"+n.path(socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	n.must(err)
	n.Cleanup(func() { conn.Close() })
	return conn
}

func (n *node) csi() csi.NodeClient { return csi.NewNodeClient(n.dial(csiSocket)) }

// files are the files of the node's pool.
func (n *node) files() []string {
	n.Helper()
	entries, err := os.ReadDir(n.path(""))
	n.must(err)
	var names []string
	for _, e := range entries {
		if e.Name() != "lock" {
			names = append(names, e.Name())
		}
	}
	return names
}

// has checks that the pool has these volumes and nothing else.
func (n *node) has(volumes ...*corev1.PersistentVolume) {
	n.Helper()
	var want []string
	for _, v := range volumes {
		want = append(want, v.Name+".img", v.Name+".json")
	}
	slices.Sort(want)
	if got := n.files(); !slices.Equal(got, want) {
		n.Errorf("the pool of %s has %v, want %v", n.name, got, want)
	}
}

// class makes a StorageClass of the driver.
func (w *world) class(name string, change func(*storagev1.StorageClass)) string {
	w.Helper()
	c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: w.name(name)}, Provisioner: csidriver.Name,
		VolumeBindingMode: new(storagev1.VolumeBindingWaitForFirstConsumer)}
	if change != nil {
		change(c)
	}
	_, err := w.admin.StorageV1().StorageClasses().Create(w.Context(), c, metav1.CreateOptions{})
	w.must(err)
	return c.Name
}

// claim makes a claim for which the scheduler has selected the node.
func (n *node) claim(name, class string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	n.Helper()
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{selectedNode: n.name, provisionedBy: csidriver.Name, "example.com/kept": "yes"}},
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("32Mi")}}},
	}
	if change != nil {
		change(c)
	}
	c, err := n.admin.CoreV1().PersistentVolumeClaims(n.namespace).Create(n.Context(), c, metav1.CreateOptions{})
	n.must(err)
	return c
}

// volume waits for the claim's PersistentVolume.
func (w *world) volume(claim *corev1.PersistentVolumeClaim) *corev1.PersistentVolume {
	w.Helper()
	var pv *corev1.PersistentVolume
	w.until("claim "+claim.Name+" has a volume", func() (err error) {
		pv, err = w.admin.CoreV1().PersistentVolumes().Get(w.Context(), "pvc-"+string(claim.UID), metav1.GetOptions{})
		return err
	})
	return pv
}

// phase sets the phase of a PersistentVolume, as its controller does.
func (w *world) phase(pv *corev1.PersistentVolume, phase corev1.PersistentVolumePhase) {
	w.Helper()
	_, err := w.admin.CoreV1().PersistentVolumes().Patch(w.Context(), pv.Name, types.MergePatchType,
		fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase), metav1.PatchOptions{}, "status")
	w.must(err)
}

// gone waits until the provisioner has let the PersistentVolume go; what the protection controller keeps it for is gone, too.
func (w *world) gone(pv *corev1.PersistentVolume) {
	w.Helper()
	w.until("volume "+pv.Name+" is gone", func() error {
		pv, err := w.admin.CoreV1().PersistentVolumes().Get(w.Context(), pv.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err == nil && (pv.DeletionTimestamp == nil || slices.Contains(pv.Finalizers, finalizer)) {
			err = fmt.Errorf("deleted %v, finalizers %v", pv.DeletionTimestamp, pv.Finalizers)
		}
		return err
	})
}

// told waits for an Event of the object that contains a text, and returns its message.
func (w *world) told(uid types.UID, reason, text string) string {
	w.Helper()
	message := ""
	w.until(fmt.Sprintf("an Event %s with %q", reason, text), func() error {
		list, err := w.admin.CoreV1().Events("").List(w.Context(), metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(uid)})
		w.must(err)
		var all []string
		for _, e := range list.Items {
			if message = e.Message; e.Reason == reason && strings.Contains(message, text) {
				return nil
			}
			all = append(all, e.Reason+": "+e.Message)
		}
		return fmt.Errorf("there are %q", all)
	})
	return message
}

func (w *world) until(what string, is func() error) {
	w.Helper()
	var last error
	if !testenv.Poll(patience, func() bool {
		last = is()
		return last == nil
	}) {
		w.Fatalf("waited in vain until %s: %v", what, last)
	}
}
