package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity/capacitytest"
)

var (
	sandboxSets   = agentsv1alpha1.GroupVersion.WithResource("sandboxsets")
	sandboxClaims = agentsv1alpha1.GroupVersion.WithResource("sandboxclaims")
)

// pools is a cluster whose sets and claims go before the test's end.
func pools(t *testing.T) *cluster {
	t.Helper()
	c := open(t)
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := c.kubectl("get", "sbs,sbc,sandbox,pod,pvc,events", "-o", "wide")
			t.Log(out)
			out, _ = c.kubectl("get", "sbs,sbc", "-o", "yaml")
			t.Log(out)
		}
		for _, kind := range []string{"sbs", "sbc"} {
			if out, err := c.clean("delete", kind, "--all"); err != nil {
				t.Error(out)
			}
		}
		c.wait("the sandboxes of sets and claims are gone", func() (bool, string) { n := len(c.list()); return n == 0, fmt.Sprint(n) })
	})
	return c
}

// clean is kubectl in a clean-up, when the test's own context has ended.
func (c *cluster) clean(args ...string) (string, error) {
	return c.kubectlIn(context.Background(), args...)
}

// apply applies a manifest of the documents, in the test's namespace instead of default.
func (c *cluster) apply(manifest string) {
	c.t.Helper()
	file := filepath.Join(c.t.TempDir(), "manifest.yaml")
	must(c.t, os.WriteFile(file, []byte(strings.ReplaceAll(manifest, "namespace: default", "namespace: "+c.namespace)), 0o600))
	if out, err := c.kubectl("apply", "-f", file); err != nil {
		c.t.Fatal(out)
	}
}

// shows waits until kubectl prints what a pattern describes, with any run of spaces for one.
func (c *cluster) shows(pattern string, args ...string) string {
	c.t.Helper()
	want := regexp.MustCompile("^" + strings.ReplaceAll(pattern, " ", " +") + "\n$")
	out := ""
	c.wait(fmt.Sprint("kubectl ", strings.Join(args, " "), " shows ", pattern), func() (bool, string) {
		var err error
		out, err = c.kubectl(args...)
		var lines []string
		for line := range strings.Lines(out) {
			lines = append(lines, strings.TrimRight(line, " \n")+"\n")
		}
		return err == nil && want.MatchString(strings.Join(lines, "")), out
	})
	return out
}

func (c *cluster) names(args ...string) []string {
	c.t.Helper()
	out, err := c.kubectl(append(args, "-o", "jsonpath={.items[*].metadata.name}")...)
	if err != nil {
		c.t.Fatal(out)
	}
	return strings.Fields(out)
}

func (c *cluster) claimed(name string) *agentsv1alpha1.SandboxClaim {
	c.t.Helper()
	return get[agentsv1alpha1.SandboxClaim](c, sandboxClaims, name)
}

func get[T any](c *cluster, of schema.GroupVersionResource, name string) *T {
	c.t.Helper()
	u, err := c.dynamic.Resource(of).Namespace(c.namespace).Get(context.Background(), name, metav1.GetOptions{})
	must(c.t, err)
	o := new(T)
	must(c.t, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, o))
	return o
}

// over waits until a claim is in a final phase.
func (c *cluster) over(name string, phase agentsv1alpha1.SandboxClaimPhase) *agentsv1alpha1.SandboxClaim {
	c.t.Helper()
	var claim *agentsv1alpha1.SandboxClaim
	c.wait("claim "+name+" is "+string(phase), func() (bool, string) {
		claim = c.claimed(name)
		status, _ := json.Marshal(claim.Status)
		return claim.Status.Phase == phase, string(status)
	})
	return claim
}

// The document about volume claim templates, walked through command by command.
func TestVolumeClaimTemplatesOfTheDocument(t *testing.T) {
	c := pools(t)
	c.apply(read(t, "../admission/testdata/claim-templates-set.yaml"))
	c.shows("NAME REPLICAS AVAILABLE UPDATEREVISION AGE\nstateful-sandboxset 3 3 [0-9a-f]{8} [0-9ms]+", "get", "sbs", "stateful-sandboxset")
	c.apply(read(t, "../admission/testdata/claim-templates-claim.yaml"))
	c.shows("NAME PHASE TEMPLATE DESIRED CLAIMED AGE\nmy-stateful-sandbox Completed stateful-sandboxset 1 1 [0-9ms]+", "get", "sbc", "my-stateful-sandbox")
	pod := c.claimed("my-stateful-sandbox").Status.SandboxNames[0]
	c.shows("agent-data-"+pod+" Bound .*", "get", "pvc", "agent-data-"+pod, "--no-headers")
	if out, err := c.kubectl("exec", pod, "--", "df", "-h", "/data"); err != nil || !strings.Contains(out, " /data\n") {
		t.Error(out)
	}
	if out, err := c.kubectl("exec", pod, "--", "sh", "-c", "echo 'This data will survive a pod crash!' > /data/evidence.txt"); err != nil {
		t.Error(out)
	}
	before, err := c.client.CoreV1().Pods(c.namespace).Get(t.Context(), pod, metav1.GetOptions{})
	must(t, err)
	if out, err := c.kubectl("delete", "pod", pod, "--grace-period=1"); err != nil {
		t.Fatal(out)
	}
	c.wait("the Pod is made again", func() (bool, string) {
		p, err := c.client.CoreV1().Pods(c.namespace).Get(t.Context(), pod, metav1.GetOptions{})
		return err == nil && p.UID != before.UID && p.Status.Phase == corev1.PodRunning, fmt.Sprint(err)
	})
	c.wait("the data is there", func() (bool, string) {
		out, err := c.kubectl("exec", pod, "--", "cat", "/data/evidence.txt")
		return err == nil && out == "This data will survive a pod crash!\n", out
	})
	// The claim's deletion takes sandbox and claim along, and nothing of the pool.
	if out, err := c.kubectl("delete", "sbc", "my-stateful-sandbox"); err != nil {
		t.Fatal(out)
	}
	c.wait("its PVC is gone", func() (bool, string) {
		left := c.names("get", "pvc")
		return len(left) == 3 && !strings.Contains(strings.Join(left, " "), pod), fmt.Sprint(left)
	})
	c.shows("stateful-sandboxset 3 3 .*", "get", "sbs", "--no-headers")
}

// shared makes the PersistentVolumes that the document about on-demand mounting names, with a filesystem of the node behind each.
func (c *cluster) shared(names ...string) {
	c.t.Helper()
	for _, name := range names {
		path := capacitytest.Mount(c.t, 64<<20) // a filesystem of its own, for df to show
		must(c.t, os.MkdirAll(filepath.Join(path, "sub", "dir"), 0o777))
		must(c.t, os.WriteFile(filepath.Join(path, "hello"), []byte("from "+name+"\n"), 0o644))
		must(c.t, os.WriteFile(filepath.Join(path, "sub", "dir", "hello"), []byte("from sub/dir of "+name+"\n"), 0o644))
		_, err := c.client.CoreV1().PersistentVolumes().Create(c.t.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.PersistentVolumeSpec{Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("50Gi")},
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
				PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: path}},
				NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpExists}}}}}}}}, metav1.CreateOptions{})
		must(c.t, err)
		c.t.Cleanup(func() {
			// Its claim is ours (flux-NAME), which keeps it from going.
			if out, err := c.clean("delete", "pvc", "--ignore-not-found", "flux-"+name); err != nil {
				c.t.Error(out)
			}
			if out, err := c.clean("delete", "pv", name); err != nil {
				c.t.Error(out)
			}
		})
	}
}

// The document about on-demand mounting, walked through command by command; and what it leaves out.
func TestOnDemandMountingOfTheDocument(t *testing.T) {
	c := pools(t)
	c.shared("shared-pv-1", "shared-pv-2")
	c.claimsGoFirst()
	c.apply(read(t, "../admission/testdata/on-demand-set.yaml"))
	c.shows("shared-storage-template 3 3 .*", "get", "sbs", "--no-headers")
	warm := c.names("get", "sandbox")

	// What cannot be mounted is said at once, and the pool is as it was, to the Pod.
	manifest := read(t, "../admission/testdata/on-demand-claim.yaml")
	uids := c.uids(warm...)
	c.boundElsewhere(c.namespace + "-theirs")
	refused := func(name, pv, reason, message string) {
		t.Helper()
		c.apply(strings.NewReplacer("shared-storage-claim", name, "shared-pv-2", pv).Replace(manifest))
		failed := c.over(name, agentsv1alpha1.ClaimFailed)
		if is := meta.FindStatusCondition(failed.Status.Conditions, agentsv1alpha1.ClaimClaimed); is.Reason != reason || is.Message != message || len(failed.Status.SandboxNames) != 0 {
			t.Errorf("%s: %+v", name, failed.Status)
		}
		c.eventSays("SandboxClaim", name, reason, "Failed: "+message)
	}
	refused("missing", "shared-pv-3", "VOLUME_NOT_FOUND", "there is no PersistentVolume shared-pv-3, which is to be mounted at /data2: create it first, or correct pvName")
	refused("theirs", c.namespace+"-theirs", "SOURCE_DENIED", "PersistentVolume "+c.namespace+"-theirs is bound to a claim of another namespace than the sandbox's "+
		c.namespace+": use a volume that is free, or a claim")
	if now := c.names("get", "sandbox"); !slices.Equal(now, warm) || !slices.Equal(c.uids(now...), uids) {
		t.Errorf("the pool was %v %v and is %v %v", warm, uids, now, c.uids(now...))
	}

	c.apply(manifest)
	c.shows("shared-storage-claim Completed shared-storage-template 1 1 .*", "get", "sbc", "shared-storage-claim", "--no-headers")
	out := c.shows("NAME STATUS AGE\nshared-storage-template-[a-z0-9]{5} Running [0-9ms]+",
		"get", "sandbox", "-l", "agents.kruise.io/claim-name=shared-storage-claim")
	pod := strings.Fields(out)[3]
	if !strings.Contains(strings.Join(warm, " "), pod) {
		t.Errorf("%s is none of the warm %v", pod, warm)
	}
	if n := c.restarts(pod); n != 0 {
		t.Errorf("the container was restarted %d times", n)
	}
	inPod := func(pod, script string) (string, error) { return c.kubectl("exec", pod, "--", "sh", "-c", script) }
	if out, err := c.kubectl("exec", pod, "--", "df", "-h", "/data1"); err != nil || !strings.Contains(out, " /data1\n") {
		t.Error(out)
	}
	if out, err := inPod(pod, "cat /data1/hello /data2/hello && echo written > /data1/new && ! touch /data2/new"); err != nil ||
		!strings.Contains(out, "from shared-pv-1\nfrom sub/dir of shared-pv-2\n") || !strings.Contains(out, "Read-only file system") {
		t.Errorf("%v: %s", err, out)
	}
	// A second sandbox has the same volume, and sees what the first wrote.
	c.apply(strings.Replace(manifest, "shared-storage-claim", "second", 1))
	second := c.over("second", agentsv1alpha1.ClaimCompleted).Status.SandboxNames[0]
	if out, err := inPod(second, "cat /data1/new"); err != nil || out != "written\n" || second == pod {
		t.Errorf("%s: %v: %s", second, err, out)
	}
	c.shows("shared-storage-template 3 3 .*", "get", "sbs", "--no-headers")

	// A target that is not empty: the reason is the agent's, and one sandbox is all that it costs.
	warm = c.names("get", "sandbox", "-l", "!agents.kruise.io/claim-name")
	for _, name := range warm {
		if out, err := inPod(name, "mkdir /full && touch /full/file"); err != nil {
			t.Fatal(out)
		}
	}
	c.apply(strings.NewReplacer("shared-storage-claim", "full", "/data1", "/full", "claimTimeout: 5m", "claimTimeout: 10s").Replace(manifest))
	words := ": PersistentVolume shared-pv-1 cannot be mounted at /full: "
	c.wait("the claim says what is wrong, before its time is over", func() (bool, string) {
		full := c.claimed("full")
		is := meta.FindStatusCondition(full.Status.Conditions, agentsv1alpha1.ClaimClaimed)
		return is != nil && is.Reason == "TARGET_NOT_EMPTY" && strings.HasPrefix(is.Message, "0 of 1 sandboxes are claimed; sandbox shared-storage-template-") &&
			strings.Contains(is.Message, words) && full.Status.Phase == agentsv1alpha1.ClaimClaiming, fmt.Sprintf("%+v", full.Status)
	})
	taken := c.claimed("full").Status.SandboxNames[0]
	full := c.over("full", agentsv1alpha1.ClaimFailed)
	is := meta.FindStatusCondition(full.Status.Conditions, agentsv1alpha1.ClaimClaimed)
	if is.Reason != "TARGET_NOT_EMPTY" || !strings.HasPrefix(is.Message, "the time is over (claimTimeout): sandbox "+taken+words) || !strings.HasSuffix(is.Message, notEmpty) {
		t.Errorf("%+v", is)
	}
	c.eventSays("SandboxClaim", "full", "TARGET_NOT_EMPTY", notEmpty)
	c.wait("five sandboxes are left", func() (bool, string) { n := c.names("get", "sandbox"); return len(n) == 5, fmt.Sprint(n) })
	warm = slices.DeleteFunc(warm, func(name string) bool { return name == taken })
	if now := c.names("get", "sandbox", "-l", "!agents.kruise.io/claim-name"); len(now) != 3 || !slices.Contains(now, warm[0]) || !slices.Contains(now, warm[1]) {
		t.Errorf("of the pool %v is left %v", warm, now)
	}

	// From an empty pool.
	c.patch(sandboxSets, "shared-storage-template", `{"spec":{"replicas":0}}`)
	c.shows("shared-storage-template 0 0 .*", "get", "sbs", "--no-headers")
	c.apply(strings.NewReplacer("shared-storage-claim", "made").Replace(manifest))
	made := c.over("made", agentsv1alpha1.ClaimCompleted).Status.SandboxNames[0]
	if out, err := inPod(made, "cat /data1/hello"); err != nil || out != "from shared-pv-1\n" {
		t.Errorf("%v: %s", err, out)
	}
	// The container of a claimed sandbox comes back with its volumes.
	if out, err := c.kubectl("delete", "pod", made, "--grace-period=1"); err != nil {
		t.Fatal(out)
	}
	c.wait("the volumes are there in the next Pod", func() (bool, string) {
		out, err := inPod(made, "cat /data1/hello /data2/hello")
		return err == nil && out == "from shared-pv-1\nfrom sub/dir of shared-pv-2\n", out
	})
}

// notEmpty is what an agent says of a target that has something in it.
const notEmpty = "the directory is not empty; the volume would hide what is there; " +
	"undone: its record was deleted, its source is released, unless another volume uses it"

// boundElsewhere makes a PersistentVolume that is a claim's of another Namespace.
func (c *cluster) boundElsewhere(name string) {
	c.t.Helper()
	_, err := c.client.CoreV1().PersistentVolumes().Create(c.t.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			ClaimRef:    &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: "default", Name: name},
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: c.data()}}}}, metav1.CreateOptions{})
	must(c.t, err)
	c.t.Cleanup(func() {
		if err := c.client.CoreV1().PersistentVolumes().Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			c.t.Error(err)
		}
	})
}

// Ten claims at once for five warm sandboxes: each has one of its own, and none of the five is left over.
func TestTenClaimsForFiveSandboxes(t *testing.T) {
	c := pools(t)
	const spec = "  replicas: 5\n  updateStrategy: {maxUnavailable: 2}\n"
	set := strings.NewReplacer("  replicas: 3\n", spec, "shared-storage-template", "pool", "    spec:\n", "    spec:\n      terminationGracePeriodSeconds: 1\n").
		Replace(read(t, "../admission/testdata/on-demand-set.yaml"))
	c.apply(set)
	c.whole("pool", 5)
	warm := c.poolOf("pool")
	claims := func(prefix string, n int) (names []string) {
		t.Helper()
		var all []string
		for i := range n {
			names = append(names, fmt.Sprint(prefix, i))
			all = append(all, "apiVersion: agents.kruise.io/v1alpha1\nkind: SandboxClaim\nmetadata: {name: "+names[i]+"}\nspec: {templateName: pool, claimTimeout: 2m}\n")
		}
		c.apply(strings.Join(all, "---\n"))
		return names
	}
	var given []string
	allOver := func(claims []string) {
		t.Helper()
		for _, claim := range claims {
			names := c.over(claim, agentsv1alpha1.ClaimCompleted).Status.SandboxNames
			if len(names) != 1 || slices.Contains(given, names[0]) {
				t.Errorf("%s has %v", claim, names)
			}
			given = append(given, names...)
		}
	}
	allOver(claims("c", 10))
	for _, name := range warm {
		if !slices.Contains(given, name) {
			t.Errorf("%s was warm and nobody has it", name)
		}
	}
	c.whole("pool", 5)
	if n := len(c.list()); n != 15 {
		t.Errorf("there are %d sandboxes", n)
	}

	// The template changes while claims run: what is claimed is not touched, the rest is replaced, at most two at a time.
	uids, old := c.uids(given...), c.set("pool").Status.UpdateRevision
	most := c.mostTerminating("pool")
	c.apply(strings.Replace(set, "image: ubuntu:latest", "image: nginx:latest", 1))
	more := claims("m", 3)
	before := len(given)
	allOver(more)
	late := c.uids(given[before:]...)
	c.wait("the set is of another revision", func() (bool, string) {
		st := c.set("pool").Status
		return st.UpdateRevision != old && st.UpdatedReplicas == 5 && st.UpdatedAvailableReplicas == 5 && st.Replicas == 5, fmt.Sprintf("%+v", st)
	})
	if n := most(); n == 0 || n > 2 {
		t.Errorf("%d of the pool were being deleted at once", n)
	}
	if now := c.uids(given...); !slices.Equal(now, slices.Concat(uids, late)) {
		t.Errorf("what was claimed was %v and is %v", slices.Concat(uids, late), now)
	}
	for _, name := range given {
		if n := c.restarts(name); n != 0 {
			t.Errorf("%s has %d restarts", name, n)
		}
	}
}

// mostTerminating watches how many of a set's own sandboxes are being deleted at once. What it returns ends that, and says it.
func (c *cluster) mostTerminating(set string) func() int {
	c.t.Helper()
	owner := c.set(set).UID
	ctx, stop := context.WithCancel(c.t.Context())
	w, err := c.dynamic.Resource(sandboxes).Namespace(c.namespace).Watch(ctx, metav1.ListOptions{})
	must(c.t, err)
	most, ended := 0, make(chan struct{})
	go func() {
		defer close(ended)
		terminating := map[string]bool{}
		for event := range w.ResultChan() {
			o, ok := event.Object.(*unstructured.Unstructured)
			if !ok {
				continue
			}
			if ref := metav1.GetControllerOf(o); event.Type != watch.Deleted && o.GetDeletionTimestamp() != nil && ref != nil && ref.UID == owner {
				terminating[o.GetName()] = true
			} else {
				delete(terminating, o.GetName())
			}
			most = max(most, len(terminating))
		}
	}()
	return func() int {
		stop()
		w.Stop()
		<-ended
		return most
	}
}
