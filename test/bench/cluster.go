package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// Where the local cluster and what is deployed to it are (hack/localcluster).
const (
	clusterKubeconfig = "/var/lib/flux-localcluster/kubeconfig/admin"
	clusterAudit      = "/var/lib/flux-localcluster/log/audit.log"
	clusterVolumes    = "/var/lib/flux-localcluster/volumes/tenants"
	controllerAgent   = "flux-sandbox-controller/"
	podsRecreated     = 5
	createdOneByOne   = 10
	createdAtOnce     = 50
	clusterBudget     = 20 * time.Millisecond
)

var sandboxResource = v1alpha1.GroupVersion.WithResource("sandboxes")

// clusterBench uses the local cluster as kubectl does.
type clusterBench struct {
	*program
	client    kubernetes.Interface
	all       dynamic.Interface
	sandboxes dynamic.ResourceInterface
	namespace string
	// source is a directory of the node that is the Namespace's.
	source string
}

// openCluster makes a Namespace in the local cluster; nil, and a line that says so, when there is no cluster.
func openCluster(p *program, r *report) *clusterBench {
	if _, err := os.Stat(clusterKubeconfig); err != nil {
		r.value("cluster", "not measured: no local cluster runs (make cluster-up deploy)", "–")
		return nil
	}
	config, err := clientcmd.BuildConfigFromFlags("", clusterKubeconfig)
	p.must(err)
	config.QPS, config.Burst, config.UserAgent = 1000, 1000, "flux-bench"
	c := &clusterBench{program: p, namespace: fmt.Sprintf("bench-%d-%s", os.Getpid(), rand.String(5))}
	c.client, err = kubernetes.NewForConfig(config)
	p.must(err)
	c.all, err = dynamic.NewForConfig(config)
	p.must(err)
	c.sandboxes = c.all.Resource(sandboxResource).Namespace(c.namespace)
	_, err = c.client.CoreV1().Namespaces().Create(p.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.namespace,
		Labels: map[string]string{v1alpha1.LabelTenantID: c.namespace}}}, metav1.CreateOptions{})
	p.must(err)
	c.source = filepath.Join(clusterVolumes, c.namespace, "data")
	p.must(os.MkdirAll(c.source, 0o755))
	p.Cleanup(func() {
		p.must(c.client.CoreV1().Namespaces().Delete(context.Background(), c.namespace, metav1.DeleteOptions{}))
		p.must(os.RemoveAll(filepath.Dir(c.source)))
	})
	return c
}

// benchCluster measures an attach and a detach through a real API server: from the patch that kubectl sends to the event that
// says that the volume is mounted. The baseline is what one does without us: delete the Pod and create it again with the
// volume.
func benchCluster(p *program, r *report, s sizes) {
	c := openCluster(p, r)
	if c == nil {
		return
	}
	_, err := c.all.Resource(v1alpha1.GroupVersion.WithResource("sandboxgroups")).Namespace(c.namespace).Create(p.Context(), object("SandboxGroup", "default",
		map[string]any{"featureGates": map[string]any{"dynamicVolumeMount": true}}), metav1.CreateOptions{})
	p.must(err)

	var create, atOnce, attach, detach, patch, recreate samples
	c.created("s")
	events := c.watch("s")
	pairs := max(s.apiPairs/2, 10)
	from := c.audited()
	for range pairs {
		attach.add(func() {
			patch.add(func() { c.patch("s", v1alpha1.DynamicVolume{VolumeType: "local", Source: c.source, Target: "/bench"}) })
			c.await(events, "mounted", mounted)
		})
		detach.add(func() {
			c.patch("s")
			c.await(events, "detached", detached)
		})
	}
	calls := c.calls(from)
	var podCreate samples
	local := corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: c.source}}
	podCreate.add(func() { c.pod(local) })
	for range podsRecreated {
		recreate.add(func() {
			c.deletePod()
			c.pod(local)
		})
	}
	c.deletePod()
	c.claims(r, pairs)
	// Last, so that the volumes above are measured with few sandboxes.
	for i := range createdOneByOne {
		create.add(func() { c.created(fmt.Sprint("one-", i)) })
	}
	atOnce.add(func() {
		var names []string
		for i := range createdAtOnce {
			names = append(names, fmt.Sprint("all-", i))
		}
		c.created(names...)
	})
	r.times("cluster: create a sandbox until it runs, one by one", create, "create a Pod until it runs", podCreate)
	r.value(fmt.Sprintf("cluster: create %d sandboxes at once until all run", createdAtOnce), span(atOnce.median()),
		fmt.Sprintf("as many one by one: %s", span(createdAtOnce*create.median())))
	r.times("cluster: attach through the API server, until mounted", attach, "delete and re-create a Pod with the volume", recreate)
	r.times("cluster: detach through the API server, until gone", detach, "", nil)
	r.times("cluster: … of an attach, the caller's own write", patch, "", nil)
	r.value("cluster: API calls of the controller per attach and detach", calls(pairs), "–")
	r.budget("attach through a real API server", "p50 ≤ "+span(clusterBudget), span(attach.median()), attach.median() <= clusterBudget)
}

func object(kind, name string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{"apiVersion": v1alpha1.GroupVersion.String(), "kind": kind,
		"metadata": map[string]any{"name": name}, "spec": spec}}
}

// mounted says that the one volume of a sandbox is there, detached that none is.
func mounted(sb *v1alpha1.Sandbox) bool {
	return len(sb.Status.Volumes) == 1 && sb.Status.Volumes[0].Phase == v1alpha1.VolumeMounted
}

func detached(sb *v1alpha1.Sandbox) bool { return len(sb.Status.Volumes) == 0 }

// created creates sandboxes, all at once, and waits until each runs.
func (c *clusterBench) created(names ...string) {
	events := c.watch("")
	var group errgroup.Group
	for _, name := range names {
		group.Go(func() error {
			_, err := c.sandboxes.Create(c.Context(), object("Sandbox", name, map[string]any{"image": "ubuntu:latest", "command": []any{"sleep", "3600"}}), metav1.CreateOptions{})
			return err
		})
	}
	run := map[string]bool{}
	c.await(events, "all run", func(sb *v1alpha1.Sandbox) bool {
		if sb.Status.Phase == v1alpha1.SandboxRunning && slices.Contains(names, sb.Name) {
			run[sb.Name] = true
		}
		return len(run) == len(names)
	})
	c.must(group.Wait())
}

// watch follows a sandbox, or all when there is no name.
func (c *clusterBench) watch(name string) <-chan watch.Event {
	var options metav1.ListOptions
	if name != "" {
		options.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	}
	w, err := c.sandboxes.Watch(c.Context(), options)
	c.must(err)
	c.Cleanup(w.Stop)
	return w.ResultChan()
}

func (c *clusterBench) await(events <-chan watch.Event, what string, holds func(*v1alpha1.Sandbox) bool) {
	late := time.After(2 * time.Minute)
	for {
		select {
		case e, ok := <-events:
			if !ok {
				c.Fatalf("the watch ended before %s", what)
			}
			data, err := json.Marshal(e.Object)
			c.must(err)
			var sb v1alpha1.Sandbox
			c.must(json.Unmarshal(data, &sb))
			if holds(&sb) {
				return
			}
		case <-late:
			c.Fatalf("waited in vain until %s", what)
		}
	}
}

// patch makes these a sandbox's dynamic volumes.
func (c *clusterBench) patch(name string, volumes ...v1alpha1.DynamicVolume) {
	data, err := json.Marshal(map[string]any{"spec": map[string]any{"dynamicVolumes": slices.Concat([]v1alpha1.DynamicVolume{}, volumes)}})
	c.must(err)
	_, err = c.sandboxes.Patch(c.Context(), name, types.MergePatchType, data, metav1.PatchOptions{})
	c.must(err)
}

func (c *clusterBench) deletePod() {
	c.must(c.client.CoreV1().Pods(c.namespace).Delete(c.Context(), "p", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
}

// pod creates a Pod with the volume and waits until it runs.
func (c *clusterBench) pod(source corev1.VolumeSource) {
	pods := c.client.CoreV1().Pods(c.namespace)
	_, err := pods.Create(c.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: corev1.PodSpec{
		TerminationGracePeriodSeconds: ptr.To[int64](0),
		Containers: []corev1.Container{{Name: "main", Image: "ubuntu:latest", ImagePullPolicy: corev1.PullIfNotPresent, Command: []string{"sleep", "3600"},
			VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/bench"}}}},
		Volumes: []corev1.Volume{{Name: "data", VolumeSource: source}},
	}}, metav1.CreateOptions{})
	c.must(err)
	w, err := pods.Watch(c.Context(), metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, "p").String()})
	c.must(err)
	defer w.Stop()
	for e := range w.ResultChan() {
		if pod, ok := e.Object.(*corev1.Pod); ok && pod.Status.Phase == corev1.PodRunning {
			return
		}
	}
	c.Fatalf("the watch of the Pod ended")
}

// audited is how much of the audit log is written.
func (c *clusterBench) audited() int64 {
	info, err := os.Stat(clusterAudit)
	c.must(err)
	return info.Size()
}

// calls counts the controller's calls in the audit log from an offset, but for the renewal of its lease. The result says
// them per pair.
func (c *clusterBench) calls(from int64) func(pairs int) string {
	data, err := os.ReadFile(clusterAudit)
	c.must(err)
	counts := map[string]int{}
	lines := bufio.NewScanner(bytes.NewReader(data[from:]))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e struct {
			UserAgent string
			Verb      string
			ObjectRef struct{ Resource, Subresource string }
		}
		if json.Unmarshal(lines.Bytes(), &e) != nil || !strings.HasPrefix(e.UserAgent, controllerAgent) || e.ObjectRef.Resource == "leases" || e.Verb == "watch" {
			continue
		}
		what := e.Verb + " " + e.ObjectRef.Resource
		if e.ObjectRef.Subresource != "" {
			what += "/" + e.ObjectRef.Subresource
		}
		counts[what]++
	}
	c.must(lines.Err())
	return func(pairs int) string {
		var out []string
		for _, what := range slices.Sorted(maps.Keys(counts)) {
			out = append(out, fmt.Sprintf("%s %.2f", what, float64(counts[what])/float64(pairs)))
		}
		return strings.Join(out, ", ")
	}
}
