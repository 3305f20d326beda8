package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// persistent makes a PersistentVolume with a directory of the tenant's, changed by alter, and returns its name.
func (c *cluster) persistent(name string, alter func(*corev1.PersistentVolume)) string {
	c.t.Helper()
	must(c.t, os.WriteFile(filepath.Join(c.dir(name), "hello"), []byte("from "+name), 0o644))
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: c.namespace + "-" + name}, Spec: corev1.PersistentVolumeSpec{
		Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource:        corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: c.data(name)}}}}
	alter(pv)
	pv, err := c.client.CoreV1().PersistentVolumes().Create(c.t.Context(), pv, metav1.CreateOptions{})
	must(c.t, err)
	c.t.Cleanup(func() {
		if err := c.client.CoreV1().PersistentVolumes().Delete(context.Background(), pv.Name, metav1.DeleteOptions{}); err != nil {
			c.t.Error(err)
		}
	})
	return pv.Name
}

// inDomain says by a label where a volume is.
func inDomain(domain string) func(*corev1.PersistentVolume) {
	return func(pv *corev1.PersistentVolume) { pv.Labels = map[string]string{v1alpha1.DefaultTopologyKey: domain} }
}

// onlyIn has a local volume be used in one domain only.
func onlyIn(domain string) func(*corev1.PersistentVolume) {
	return func(pv *corev1.PersistentVolume) {
		pv.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: pv.Spec.HostPath.Path}}
		pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: v1alpha1.DefaultTopologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{domain}}}}}}}
	}
}

// claim makes a claim for a PersistentVolume.
func (c *cluster) claim(name, volume string) {
	c.t.Helper()
	none := ""
	_, err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Create(c.t.Context(), &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}, StorageClassName: &none, VolumeName: volume,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}}}, metav1.CreateOptions{})
	must(c.t, err)
	c.t.Cleanup(func() {
		if err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			c.t.Error(err)
		}
	})
}

func pv(name, target string) v1alpha1.DynamicVolume {
	return v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePV, Source: name, Target: target}
}

// crossings is how often a volume was attached across domains, by the metric of whoever leads.
func (c *cluster) crossings() (n int) {
	c.t.Helper()
	for _, address := range c.controllers() {
		text, err := httpGet(address)
		must(c.t, err)
		if _, value, found := strings.Cut(text, "\nsandbox_pvc_cross_topology_mount "); found {
			var one int
			_, err := fmt.Sscan(value, &one)
			must(c.t, err)
			n += one
		}
	}
	return n
}

// The topology domain of a volume against that of a node: it decides where a sandbox is placed, and whether a volume is
// attached to one that runs, by what the node's label says at that moment.
func (c *cluster) topology() {
	t := c.t
	user := c.caller("topology", "flux-sandbox-user")
	volumes := map[string]string{}
	for _, domain := range []string{"d1", "d2"} {
		volumes[domain] = c.persistent(domain, inDomain(domain))
	}
	volumes["d3"] = c.persistent("d3", onlyIn("d3"))

	// A new sandbox is placed in the domain of its volume, by whichever name that has.
	c.claim("of-d1", volumes["d1"])
	for domain, entry := range map[string]v1alpha1.DynamicVolume{"d1": {VolumeType: v1alpha1.VolumeTypePVC, Source: "of-d1", Target: "/data"},
		"d2": pv(volumes["d2"], "/data"), "d3": pv(volumes["d3"], "/data")} {
		c.sandbox("near-"+domain, ticking, on("spread", entry))
	}
	for i, n := range c.nodes {
		domain := fmt.Sprint("d", i+1)
		n.onNode(c.phase("near-"+domain, v1alpha1.SandboxRunning))
		row := c.row("near-"+domain, "/data", v1alpha1.VolumeMounted)
		if row.Topology != v1alpha1.TopologyMatch || row.VolumeDomain != domain || row.SandboxDomain != domain {
			t.Errorf("near-%s: row %+v", domain, row)
		}
		if got := read(t, c.process(c.get("near-"+domain)).path("data", "hello")); got != "from "+domain {
			t.Errorf("near-%s has %q", domain, got)
		}
	}

	// A running sandbox in d1.
	n := c.nodes[0]
	p := c.process(c.running("s", ticking, on(n.only())))
	ref := &sandboxv1.SandboxRef{Namespace: c.namespace, Name: "s"}
	add := func(domain, target string) (*sandboxv1.VolumeStatus, error) {
		added, err := sandboxv1.NewSandboxVolumeServiceClient(user.conn).AddSandVolume(t.Context(), &sandboxv1.AddSandVolumeRequest{
			Sandbox: ref, Volume: &sandboxv1.DynamicVolume{VolumeType: "pv", Source: volumes[domain], Target: target}})
		return added.GetVolume(), err
	}
	refused := func(domain, target, sandbox string) {
		t.Helper()
		_, err := add(domain, target)
		if status.Code(err) != codes.FailedPrecondition || fault.ReasonOf(fault.FromGRPC(err)) != fault.CrossTopology ||
			!strings.Contains(err.Error(), "domain "+domain+" and the sandbox in "+sandbox) {
			t.Errorf("a volume of %s for a sandbox in %s: %v", domain, sandbox, err)
		}
		if line := p.mountAt(t, target); line != "" {
			t.Errorf("it was mounted: %s", line)
		}
	}
	attached := func(domain, target string, verdict v1alpha1.Topology, sandbox string) {
		t.Helper()
		row, err := add(domain, target)
		if err != nil || row.GetTopology() != string(verdict) || row.GetVolumeDomain() != domain || row.GetSandboxDomain() != sandbox {
			t.Errorf("a volume of %s for a sandbox in %q: %v, %v", domain, sandbox, row, err)
		}
		if err == nil && read(t, p.path(target, "hello")) != "from "+domain {
			t.Errorf("%s is not the volume of %s", target, domain)
		}
	}
	attached("d1", "/near", v1alpha1.TopologyMatch, "d1")
	refused("d2", "/far", "d1")

	// forceMount overrules the topology, and is heard of; what the node cannot use at all is refused all the same.
	crossings := c.crossings()
	near := pv(volumes["d1"], "/near")
	c.volumes("s", near, pv(volumes["d2"], "/forced"))
	if row := c.row("s", "/forced", v1alpha1.VolumeFailed); row.Reason != string(fault.CrossTopology) || row.Topology != v1alpha1.TopologyMismatch ||
		row.VolumeDomain != "d2" || row.SandboxDomain != "d1" || row.NextRetryTime != nil {
		t.Errorf("row %+v", row)
	}
	forced, never := pv(volumes["d2"], "/forced"), pv(volumes["d3"], "/never")
	forced.ForceMount, never.ForceMount = true, true
	c.volumes("s", near, forced, never)
	if row := c.row("s", "/forced", v1alpha1.VolumeMounted); row.Topology != v1alpha1.TopologyForced || row.VolumeDomain != "d2" || row.SandboxDomain != "d1" {
		t.Errorf("row %+v", row)
	}
	if read(t, p.path("forced", "hello")) != "from d2" {
		t.Error("the forced volume is not there")
	}
	c.event("s", "ForcedAcrossTopology")
	if got := c.crossings(); got != crossings+1 {
		t.Errorf("%d volumes were attached across domains, want %d", got, crossings+1)
	}
	if row := c.row("s", "/never", v1alpha1.VolumeFailed); row.Reason != string(fault.UnreachableVolume) || p.mountAt(t, "/never") != "" {
		t.Errorf("row %+v", row)
	}
	// What was refused is judged anew when the volume's label is corrected, or the node's.
	waits, wrong := pv(volumes["d2"], "/waits"), pv(c.persistent("wrong", inDomain("d9")), "/wrong")
	c.volumes("s", near, forced, waits, wrong)
	c.noRow("s", "/never")
	for _, target := range []string{"/waits", "/wrong"} {
		if row := c.row("s", target, v1alpha1.VolumeFailed); row.Topology != v1alpha1.TopologyMismatch {
			t.Errorf("row %+v", row)
		}
	}
	_, err := c.client.CoreV1().PersistentVolumes().Patch(t.Context(), wrong.Source, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"`+v1alpha1.DefaultTopologyKey+`":"d1"}}}`), metav1.PatchOptions{})
	must(t, err)
	if row := c.row("s", "/wrong", v1alpha1.VolumeMounted); row.Topology != v1alpha1.TopologyMatch || row.VolumeDomain != "d1" {
		t.Errorf("row %+v", row)
	}

	// The node moves to the other domain: what is attached stays.
	n.change("labels", v1alpha1.DefaultTopologyKey, "d2")
	defer n.change("labels", v1alpha1.DefaultTopologyKey, "d1")
	if row := c.row("s", "/waits", v1alpha1.VolumeMounted); row.Topology != v1alpha1.TopologyMatch || row.SandboxDomain != "d2" {
		t.Errorf("row %+v", row)
	}
	attached("d2", "/now-near", v1alpha1.TopologyMatch, "d2")
	refused("d1", "/now-far", "d2")
	// Without its label nothing is known, and nobody is stopped.
	n.change("labels", v1alpha1.DefaultTopologyKey, nil)
	c.seen(n, "nowhere")
	attached("d1", "/unknown", v1alpha1.TopologyUnknown, "")
	for target, domain := range map[string]string{"near": "d1", "forced": "d2", "waits": "d2", "now-near": "d2", "unknown": "d1"} {
		if p.mountAt(t, "/"+target) == "" || read(t, p.path(target, "hello")) != "from "+domain {
			t.Errorf("/%s is gone", target)
		}
	}
	uninterrupted(t, p)
	c.deleteAll(t.Context()) // before the volumes
}

// seen waits until the controller has seen what was changed of a Node before: a sandbox is placed by a label that is newer.
func (c *cluster) seen(n *node, mark string) {
	c.t.Helper()
	const label = "e2e.flux.io/seen"
	n.change("labels", label, c.namespace+mark)
	c.selected("seen-"+mark, label, c.namespace+mark, v1alpha1.SchedulingPolicy{})
	n.onNode(c.running("seen-"+mark, "exec sleep 1000", on("seen-"+mark)))
}
