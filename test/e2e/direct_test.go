package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// published are the volumes that the node's agent had drivers publish.
func published(t *testing.T) []string {
	t.Helper()
	var all []string
	for line := range strings.Lines(read(t, "/proc/self/mountinfo")) {
		if at := strings.Fields(line)[4]; strings.HasPrefix(at, publishedDir) {
			all = append(all, at)
		}
	}
	return all
}

// bound makes claims of flux-local and has a Pod bind them.
func (c *cluster) bound(names ...string) {
	c.t.Helper()
	for _, name := range names {
		c.claimOf(name, "flux-local", "64Mi")
	}
	c.podWith("binder", nil, names...)
	c.deletePod("binder")
}

// callsSince counts our programs' calls in the audit log from an offset, but for leases and the watches themselves.
func callsSince(t *testing.T, from int64) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for line := range strings.Lines(read(t, auditLog)[from:]) {
		var e struct {
			UserAgent, Verb string
			ObjectRef       struct{ Resource, Subresource, Name string }
		}
		if json.Unmarshal([]byte(line), &e) != nil || !strings.HasPrefix(e.UserAgent, "flux-") || e.ObjectRef.Resource == "leases" || e.Verb == "watch" {
			continue
		}
		program, _, _ := strings.Cut(e.UserAgent, " ")
		counts[program+" "+e.Verb+" "+e.ObjectRef.Resource+" "+e.ObjectRef.Subresource+" "+e.ObjectRef.Name]++
	}
	return counts
}

func claim(name, target string) v1alpha1.DynamicVolume {
	return v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: name, Target: target}
}

// A claim of the built-in driver is attached to a sandbox that runs, written, and seen by a second one of the node, with one
// publication for both. When the sandboxes are gone it is unpublished, and what was written is there for the next, a Pod too.
func TestAClaimIsAttachedWhileTheSandboxRuns(t *testing.T) {
	c := open(t)
	c.bound("data")
	c.running("one", ticking, nil)
	c.running("two", ticking, nil)
	one := c.process(c.get("one"))
	limited := claim("data", "/data")
	limited.SizeLimit = "64Mi"
	c.volumes("one", limited)
	row := c.row("one", "/data", v1alpha1.VolumeMounted)
	if row.Path != v1alpha1.VolumePathDirect || row.LimitEnforcement != v1alpha1.LimitCapacity {
		t.Errorf("row %+v", row)
	}
	must(t, os.WriteFile(one.path("data", "f"), []byte("kept"), 0o644))
	readOnly := claim("data", "/in")
	readOnly.Mode = v1alpha1.VolumeModeReadOnly
	c.volumes("two", readOnly)
	c.row("two", "/in", v1alpha1.VolumeMounted)
	two := c.process(c.get("two"))
	if got := read(t, two.path("in", "f")); got != "kept" {
		t.Errorf("the second sandbox sees %q", got)
	}
	if err := os.WriteFile(two.path("in", "g"), nil, 0o644); err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("it writes what it has read-only: %v", err)
	}
	if p := published(t); len(p) != 1 {
		t.Errorf("published are %v", p)
	}
	smaller := claim("data", "/small")
	smaller.SizeLimit = "32Mi"
	c.volumes("two", readOnly, smaller)
	if row := c.row("two", "/small", v1alpha1.VolumeFailed); row.Reason != string(fault.LimitNotEnforced) || !strings.Contains(row.Message, "33554432") || !strings.Contains(row.Message, "67108864") {
		t.Errorf("row %+v", row)
	}
	uninterrupted(t, one)
	uninterrupted(t, two)
	c.deleteAll(t.Context())
	c.wait("it is unpublished", func() (bool, string) {
		p := published(t)
		return len(p) == 0, fmt.Sprint(p)
	})
	c.podWith("next", nil, "data")
	if got := c.sh("next", "cat /data/f"); got != "kept" {
		t.Errorf("the Pod sees %q", got)
	}
	c.deletePod("next")
	c.deleteClaim("data")
}

// A PersistentVolume by its name, with a subPath, read-only; and a subPath that is not there.
func TestAPersistentVolumeByName(t *testing.T) {
	c := open(t)
	c.bound("data")
	pv := c.volumeOf("data")
	c.running("one", ticking, func(sb *v1alpha1.Sandbox) { sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{claim("data", "/data")} })
	one := c.process(c.get("one"))
	must(t, os.Mkdir(one.path("data", "sub"), 0o755))
	must(t, os.WriteFile(one.path("data", "sub", "f"), []byte("below"), 0o644))
	byName := v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePV, Source: pv, Target: "/pv", SubPath: "sub", Mode: v1alpha1.VolumeModeReadOnly}
	missing := byName
	missing.Target, missing.SubPath = "/missing", "none"
	c.running("two", ticking, nil)
	c.volumes("two", byName, missing)
	c.row("two", "/pv", v1alpha1.VolumeMounted)
	if row := c.row("two", "/missing", v1alpha1.VolumeFailed); !strings.Contains(row.Reason, "SUBPATH_NOT_FOUND") {
		t.Errorf("row %+v", row)
	}
	two := c.process(c.get("two"))
	if entries, err := os.ReadDir(two.path("pv")); err != nil || len(entries) != 1 || entries[0].Name() != "f" {
		t.Errorf("the sandbox sees %v, %v", entries, err)
	}
	// It is deleted while it is in use, and goes with the last user.
	claims := c.client.CoreV1().PersistentVolumeClaims(c.namespace)
	must(t, claims.Delete(t.Context(), "data", metav1.DeleteOptions{}))
	c.volumes("two")
	c.noRow("two", "/pv")
	got, err := claims.Get(t.Context(), "data", metav1.GetOptions{})
	must(t, err)
	if got.DeletionTimestamp == nil || !slices.Contains(got.Finalizers, v1alpha1.FinalizerInUse) {
		t.Errorf("the claim is not kept: deleted %v, finalizers %v", got.DeletionTimestamp, got.Finalizers)
	}
	if got := read(t, one.path("data", "sub", "f")); got != "below" {
		t.Errorf("the first sandbox sees %q", got)
	}
	c.volumes("one")
	c.noRow("one", "/data")
	c.wait("claim, volume and data are gone", func() (bool, string) {
		left, _ := filepath.Glob(filepath.Join(poolDir, pv+"*"))
		_, err := claims.Get(t.Context(), "data", metav1.GetOptions{})
		return err != nil && len(left) == 0, fmt.Sprint(left, err)
	})
	uninterrupted(t, one)
}

// The agent, the driver's Pod and the node's containerd go and come while volumes of the driver are in use and attached.
func TestClaimsWhileTheNodesProgramsAreReplaced(t *testing.T) {
	c := open(t)
	c.bound("a", "b")
	c.running("one", ticking, nil)
	c.create(sandboxes, &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "pod"}, Spec: v1alpha1.SandboxSpec{
		Template: &corev1.PodTemplateSpec{Spec: podSpec("while :; do sleep 1; done")}}})
	c.phase("pod", v1alpha1.SandboxRunning)
	c.volumes("one", claim("a", "/a"))
	c.row("one", "/a", v1alpha1.VolumeMounted)
	one := c.process(c.get("one"))
	must(t, os.WriteFile(one.path("a", "f"), []byte("kept"), 0o644))
	c.kill("flux-sandbox-csi")
	c.volumes("one", claim("a", "/a"), claim("b", "/b"))
	c.volumes("pod", claim("a", "/a"))
	c.kill("flux-sandbox-agent")
	c.row("one", "/b", v1alpha1.VolumeMounted)
	c.row("pod", "/a", v1alpha1.VolumeMounted)
	c.systemReady()
	c.component("stop", "kubelet")
	c.component("start", "kubelet")
	c.reads("pod", "/a", "/a/f", "kept")
	must(t, os.WriteFile(one.path("b", "f"), []byte("b"), 0o644))
	uninterrupted(t, one)
	c.volumes("one")
	c.noRow("one", "/a")
	c.noRow("one", "/b")
	c.deleteAll(t.Context())
	c.deleteClaim("a")
	c.deleteClaim("b")
	c.systemReady()
}

// Fifty claims of one node are provisioned and attached at once. For two minutes then, nobody of ours asks the API server for
// anything.
func TestFiftyClaimsAtOnce(t *testing.T) {
	c := open(t)
	var names []string
	for i := range 50 {
		names = append(names, fmt.Sprintf("c%d", i))
	}
	c.bound(names...)
	for i := range 5 {
		name, mine := fmt.Sprintf("s%d", i), names[10*i:10*i+10]
		c.sandbox(name, ticking, func(sb *v1alpha1.Sandbox) {
			for _, n := range mine {
				sb.Spec.DynamicVolumes = append(sb.Spec.DynamicVolumes, claim(n, "/"+n))
			}
		})
	}
	for i := range 5 {
		p := c.process(c.phase(fmt.Sprintf("s%d", i), v1alpha1.SandboxRunning))
		for _, n := range names[10*i : 10*i+10] {
			must(t, os.WriteFile(p.path(n, "name"), []byte(n), 0o644))
		}
	}
	if p := published(t); len(p) != len(names) {
		t.Errorf("%d are published", len(p))
	}
	// What is told of the attachments, Events among it, comes a moment after them.
	var from int64
	c.wait("nobody of ours asks the API server for anything for some seconds", func() (bool, string) {
		from = int64(len(read(t, auditLog)))
		<-time.After(5 * time.Second)
		calls := callsSince(t, from)
		return len(calls) == 0, fmt.Sprint(calls)
	})
	<-time.After(2 * time.Minute)
	for call, n := range callsSince(t, from) {
		t.Errorf("%d calls in steady state: %s", n, call)
	}
	c.deleteAll(t.Context())
	for _, n := range names {
		c.deleteClaim(n)
	}
}
