package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
)

const (
	warmSandboxes = 4
	claimsAtOnce  = 50
	claimedMost   = 3
	claimRounds   = 10
	// volumesBudget is what three volumes may cost a claim (issue of the pools).
	volumesBudget = 50 * time.Millisecond
)

// poolsBench measures claims of a SandboxSet's warm sandboxes.
type poolsBench struct {
	*clusterBench
	sets, claims dynamic.ResourceInterface
	volumes      []string
}

// benchPools measures from the creation of a SandboxClaim to the event that says that it is Completed. The baseline is what one
// does without us: a Pod with the claim of such a volume.
func benchPools(of *program, r *report, _ sizes) {
	c := openCluster(of, r)
	if c == nil {
		return
	}
	p := &poolsBench{clusterBench: c,
		sets:   c.all.Resource(agentsv1alpha1.GroupVersion.WithResource("sandboxsets")).Namespace(c.namespace),
		claims: c.all.Resource(agentsv1alpha1.GroupVersion.WithResource("sandboxclaims")).Namespace(c.namespace),
	}
	for i := range claimedMost {
		p.volume(fmt.Sprint(c.namespace, "-", i))
	}
	p.set(warmSandboxes)
	p.claimed("first", claimedMost) // each volume becomes the namespace's with its first use
	p.release("first")
	p.warm(warmSandboxes)

	by := map[int]*samples{0: {}, 1: {}, claimedMost: {}}
	from := c.audited()
	for round := range claimRounds {
		for n, s := range by {
			name := fmt.Sprint("claim-", n, "-", round)
			s.add(func() { p.claimed(name, n) })
			p.release(name)
			p.warm(warmSandboxes)
		}
	}
	calls := c.calls(from)
	var pod samples
	source := corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "flux-" + p.volumes[0]}}
	for range podsRecreated {
		pod.add(func() { c.pod(source) })
		c.deletePod()
	}
	var fill, atOnce samples
	fill.add(func() { p.scale(claimsAtOnce) })
	var names []string
	for i := range claimsAtOnce {
		names = append(names, fmt.Sprint("all-", i))
	}
	atOnce.add(func() { p.allClaimed(1, names...) })
	p.scale(0)
	p.release(names...)
	c.must(p.sets.Delete(c.Context(), "pool", metav1.DeleteOptions{}))

	const baseline = "create a Pod with such a volume until it runs"
	r.times("pools: claim a warm sandbox, until Completed", *by[0], baseline, pod)
	r.times("pools: … with one volume", *by[1], baseline, pod)
	r.times(fmt.Sprintf("pools: … with %d volumes", claimedMost), *by[claimedMost], baseline, pod)
	r.value(fmt.Sprintf("pools: %d claims at once, a volume each, of as many warm sandboxes, until all are Completed", claimsAtOnce), span(atOnce.median()), "–")
	r.value("pools: sandboxes made warm per second", fmt.Sprintf("%.2f", float64(claimsAtOnce-warmSandboxes)/fill.median().Seconds()),
		fmt.Sprintf("Pods one by one: %.2f", 1/pod.median().Seconds()))
	r.value("pools: API calls of the controller per claim, the end of it and the sandbox that is made in its place", calls(claimRounds*len(by)), "–")
	more := by[claimedMost].median() - by[0].median()
	r.budget(fmt.Sprintf("%d volumes of a claim", claimedMost), "p50 ≤ "+span(volumesBudget)+" more than none", span(more), more <= volumesBudget)
}

// volume makes a PersistentVolume, a directory of the node, which goes with its claim's namespace.
func (p *poolsBench) volume(name string) {
	dir := filepath.Join(clusterVolumes, p.namespace, name)
	p.must(os.MkdirAll(dir, 0o755))
	pvs := p.client.CoreV1().PersistentVolumes()
	_, err := pvs.Create(p.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		Capacity:    corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: dir}},
	}}, metav1.CreateOptions{})
	p.must(err)
	p.Cleanup(func() { p.must(pvs.Delete(context.Background(), name, metav1.DeleteOptions{})) })
	p.volumes = append(p.volumes, name)
}

// set makes the set and waits until it is warm.
func (p *poolsBench) set(replicas int) {
	set := map[string]any{"replicas": replicas, "runtimes": []any{map[string]any{"name": "csi"}}, "template": map[string]any{"spec": map[string]any{
		"terminationGracePeriodSeconds": 0,
		"containers":                    []any{map[string]any{"name": "sandbox", "image": "ubuntu:latest", "imagePullPolicy": "IfNotPresent", "command": []any{"sleep", "3600"}}}}}}
	_, err := p.sets.Create(p.Context(), ofPools("SandboxSet", "pool", set), metav1.CreateOptions{})
	p.must(err)
	p.warm(replicas)
}

func ofPools(kind, name string, spec map[string]any) *unstructured.Unstructured {
	o := object(kind, name, spec)
	o.SetAPIVersion(agentsv1alpha1.GroupVersion.String())
	return o
}

func (p *poolsBench) scale(replicas int) {
	_, err := p.sets.Patch(p.Context(), "pool", types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas), metav1.PatchOptions{})
	p.must(err)
	p.warm(replicas)
}

// warm waits until the set has as many sandboxes as that, and all are available.
func (p *poolsBench) warm(replicas int) {
	follow(p, p.sets, fmt.Sprint(replicas, " sandboxes are warm"), func(s *agentsv1alpha1.SandboxSet) bool {
		return s.Status.ObservedGeneration == s.Generation && int(s.Status.Replicas) == replicas && int(s.Status.AvailableReplicas) == replicas
	})
}

// claimed makes a claim with the first volumes and waits until it is Completed.
func (p *poolsBench) claimed(name string, volumes int) { p.allClaimed(volumes, name) }

func (p *poolsBench) allClaimed(volumes int, names ...string) {
	spec := map[string]any{"templateName": "pool", "claimTimeout": "5m"}
	var mounts []any
	for i, v := range p.volumes[:volumes] {
		mounts = append(mounts, map[string]any{"pvName": v, "mountPath": fmt.Sprint("/data", i)})
	}
	if len(mounts) > 0 {
		spec["dynamicVolumesMount"] = mounts
	}
	var group errgroup.Group
	group.SetLimit(claimsAtOnce)
	for _, name := range names {
		group.Go(func() error {
			_, err := p.claims.Create(p.Context(), ofPools("SandboxClaim", name, spec), metav1.CreateOptions{})
			return err
		})
	}
	completed := map[string]bool{}
	follow(p, p.claims, "all are claimed", func(o *agentsv1alpha1.SandboxClaim) bool {
		if o.Status.Phase == agentsv1alpha1.ClaimFailed {
			p.Fatalf("claim %s failed: %+v", o.Name, o.Status.Conditions)
		}
		for _, name := range names {
			if name == o.Name && o.Status.Phase == agentsv1alpha1.ClaimCompleted {
				completed[name] = true
			}
		}
		return len(completed) == len(names)
	})
	p.must(group.Wait())
}

// release deletes claims and waits until their sandboxes are gone.
func (p *poolsBench) release(names ...string) {
	for _, name := range names {
		p.must(p.claims.Delete(p.Context(), name, metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationForeground)}))
	}
	w, err := p.claims.Watch(p.Context(), metav1.ListOptions{})
	p.must(err)
	defer w.Stop()
	late := time.After(5 * time.Minute)
	for {
		left := 0
		for _, name := range names {
			if _, err := p.claims.Get(p.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				p.must(err)
				left++
			}
		}
		if left == 0 {
			return
		}
		select {
		case <-w.ResultChan():
		case <-late:
			p.Fatalf("%d claims are still there", left)
		}
	}
}

// follow waits until an object of a kind is as it should be, whatever it was before.
func follow[T any](p *poolsBench, of dynamic.ResourceInterface, what string, holds func(*T) bool) {
	again := func() watch.Interface {
		w, err := of.Watch(p.Context(), metav1.ListOptions{}) // begins with what there is
		p.must(err)
		return w
	}
	w := again()
	defer func() { w.Stop() }()
	late := time.After(10 * time.Minute)
	for {
		select {
		case e, ok := <-w.ResultChan():
			if !ok { // as the API server does with who is slow
				w.Stop()
				w = again()
				continue
			}
			if e.Type != watch.Added && e.Type != watch.Modified {
				continue
			}
			data, err := json.Marshal(e.Object)
			p.must(err)
			o := new(T)
			p.must(json.Unmarshal(data, o))
			if holds(o) {
				return
			}
		case <-late:
			p.Fatalf("waited in vain until %s", what)
		}
	}
}
