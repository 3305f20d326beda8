package churn

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

const (
	// seedEnv repeats the actions of an earlier run; what comes of them depends on the machine, too.
	seedEnv = "FLUX_CHURN_SEED"
	// timeEnv is how long to churn ("10m"); without it two minutes, an hour in a soak run.
	timeEnv = "FLUX_CHURN_TIME"
	// reportEnv names a file that gets what a run tells, also of one that passes.
	reportEnv = "FLUX_CHURN_REPORT"
	// logsEnv names a directory that gets the controllers' logs when a run fails.
	logsEnv = "FLUX_CHURN_LOGS"

	nodes = 20
	// pace is the time between two actions.
	pace = 120 * time.Millisecond
	// idle is how long nothing may be written when all is as wished.
	idle = time.Minute
)

// world is a cluster in which all kinds of things happen.
type world struct {
	*cluster
	fleet  *fleet
	ledger *ledger
	audit  *audit
	ctx    context.Context

	// What is below is the actors' goroutine's.
	dice      *rand.Rand
	step      int
	due       []delayed
	disturbed map[string]bool
	counts    map[string]int
	// sets are the sets that there are.
	sets []types.NamespacedName
}

type delayed struct {
	at time.Time
	do func()
}

// later has something done after a while, or at the end of the churn.
func (w *world) later(after time.Duration, do func()) {
	w.due = append(w.due, delayed{time.Now().Add(after), do})
}

// runDue does what is due.
func (w *world) runDue(all bool) {
	var left []delayed
	due := w.due
	w.due = nil
	for _, d := range due {
		if all || !time.Now().Before(d.at) {
			d.do()
		} else {
			left = append(left, d)
		}
	}
	w.due = append(left, w.due...)
}

func (w *world) count(what string) { w.counts[what]++ }

// tell says something that is worth knowing of a run that passes.
func tell(t testing.TB, format string, args ...any) {
	t.Helper()
	t.Logf(format, args...)
	if path := os.Getenv(reportEnv); path != "" {
		file := must(os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644))
		defer file.Close()
		fmt.Fprintf(file, format+"\n", args...)
	}
}

// TestConvergence churns, and then looks whether all comes to be as wished.
func TestConvergence(t *testing.T) {
	seed, length := rand.Uint64(), time.Duration(testenv.Long(2, 60))*time.Minute
	if s := os.Getenv(seedEnv); s != "" {
		seed = must(strconv.ParseUint(s, 10, 64))
	}
	if s := os.Getenv(timeEnv); s != "" {
		length = must(time.ParseDuration(s))
	}
	tell(t, "%s=%d, %v", seedEnv, seed, length)
	began := time.Now()
	w := newWorld(t, seed)
	w.settle("the sets are whole at first")
	tell(t, "set up in %v", time.Since(began).Round(time.Second))

	before := w.tally()
	w.churn(length)
	ended := time.Now()
	w.calm()
	w.settle("all is as wished after the churn")
	tell(t, "converged in %v", time.Since(ended).Round(time.Second))
	w.report(before)
	w.idle()
	w.end()
	w.ledger.flush()
	w.hold()
}

func newWorld(t *testing.T, seed uint64) *world {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	way := &way{dice: rand.New(rand.NewPCG(seed, 1))}
	c := newCluster(t, way)
	w := &world{cluster: c, ctx: ctx, fleet: newFleet(t, rand.New(rand.NewPCG(seed, 2))), ledger: newLedger(), audit: newAudit(c.server.AuditLog()),
		dice: rand.New(rand.NewPCG(seed, 3)), disturbed: map[string]bool{}, counts: map[string]int{}}
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	w.ledger.follow(ctx, t, c.objects, &running, w.fleet.see)
	running.Go(func() { w.audit.follow(ctx) })
	running.Go(func() { w.provision(ctx) })
	authority := c.authority()
	for i := range nodes {
		w.addNode(nodeName(i), authority)
	}
	for _, d := range drives {
		d.make(w)
	}
	for _, name := range []string{"a", "b"} {
		r := &replica{name: "replica-" + name}
		c.replicas = append(c.replicas, r)
		c.start(r)
	}
	for _, h := range homes {
		for i := range workClaims {
			claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: workClaim(i)}, Spec: claimSpec()}
			claim.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
			must(c.client.CoreV1().PersistentVolumeClaims(h.namespace).Create(ctx, claim, metav1.CreateOptions{}))
		}
	}
	w.set("churn-a", "plain", 30, nil)
	w.set("churn-b", "plain", 30, nil)
	w.set("churn-a2", "bounded", 35, func(s *agentsv1alpha1.SandboxSetSpec) { s.ScaleStrategy.MaxUnavailable = ptr.To(intOr(10)) })
	w.set("churn-a", "stateful", 15, func(s *agentsv1alpha1.SandboxSetSpec) { s.VolumeClaimTemplates = claimTemplates() })
	w.set("churn-a2", "stateful", 15, func(s *agentsv1alpha1.SandboxSetSpec) {
		s.VolumeClaimTemplates, s.PersistentVolumeClaimRetentionPolicy = claimTemplates(), retention(v1alpha1.RetentionDelete, v1alpha1.RetentionRetain)
	})
	w.set("churn-b", "stateful", 15, func(s *agentsv1alpha1.SandboxSetSpec) {
		s.VolumeClaimTemplates, s.PersistentVolumeClaimRetentionPolicy = claimTemplates(), retention(v1alpha1.RetentionRetain, v1alpha1.RetentionDelete)
	})
	return w
}

// churn has something happen at every step, and holds the rules meanwhile.
func (w *world) churn(length time.Duration) {
	w.Helper()
	w.way.faulty.Store(true)
	w.fleet.faulty.Store(true)
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for until := time.Now().Add(length); time.Now().Before(until); w.step++ {
		<-tick.C
		w.runDue(false)
		w.act()
		w.hold()
	}
}

// hold ends the test when a rule was broken.
func (w *world) hold() {
	w.Helper()
	if err := w.ended(); err != nil {
		w.Errorf("a program ended: %v", err)
	}
	w.restart()
	for _, wrong := range append(w.ledger.broken(), w.fleet.broken()...) {
		w.Error(wrong)
	}
	if w.Failed() {
		w.tail()
		w.Fatalf("at step %d", w.step)
	}
}

// restart has a replica that ended by itself come again, as kubelet does. It may end, as when the API server fails it at its
// start, but not in a panic.
func (w *world) restart() {
	w.Helper()
	for _, r := range w.replicas {
		if r.program == nil || r.program.Ended() == nil {
			continue
		}
		if why := r.program.Ended().Error(); strings.Contains(why, "panic: ") || strings.Contains(why, "fatal error: ") {
			w.Errorf("%s-%d: %s", r.name, r.started, why)
			continue
		}
		w.count("controllers ended by themselves")
		w.start(r)
	}
}

// tail shows the last that the controllers said.
func (w *world) tail() {
	for _, r := range w.replicas {
		if r.program == nil {
			continue
		}
		said, _ := os.ReadFile(r.program.Log())
		if dir := os.Getenv(logsEnv); dir != "" {
			must("", os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s-%d.log", r.name, r.started)), said, 0o600))
		}
		lines := strings.Split(string(said), "\n")
		w.Logf("%s-%d said last:\n%s", r.name, r.started, strings.Join(lines[max(0, len(lines)-40):], "\n"))
	}
}

// calm ends the churn: what was disturbed is put right, and nothing fails any more.
func (w *world) calm() {
	w.Helper()
	w.way.faulty.Store(false)
	w.fleet.faulty.Store(false)
	for len(w.due) > 0 {
		w.runDue(true)
	}
	w.dropForeign()
	w.unblock()
	tell(w, "churned: %s", sums(w.counts))
}

func sums(counts map[string]int) string {
	var all []string
	for _, what := range sorted(maps.Keys(counts)) {
		all = append(all, fmt.Sprint(counts[what], " ", what))
	}
	return strings.Join(all, ", ")
}

func template() corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		// A node that is not ready is left at once.
		Tolerations: []corev1.Toleration{
			{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To(int64(1))},
			{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To(int64(1))},
		},
		TerminationGracePeriodSeconds: ptr.To(int64(5)),
		Containers: []corev1.Container{{Name: "main", Image: "busybox:1", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("16Mi")}}}},
	}}
}

func retention(whenDeleted, whenScaled v1alpha1.RetentionPolicy) *v1alpha1.PersistentVolumeClaimRetentionPolicy {
	return &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: whenDeleted, WhenScaled: whenScaled}
}

func claimTemplates() []corev1.PersistentVolumeClaim {
	return []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "own"}, Spec: claimSpec()}}
}

func claimSpec() corev1.PersistentVolumeClaimSpec {
	return corev1.PersistentVolumeClaimSpec{StorageClassName: ptr.To(class), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}}
}

func (w *world) set(namespace, name string, replicas int32, alter func(*agentsv1alpha1.SandboxSetSpec)) {
	w.Helper()
	set := &agentsv1alpha1.SandboxSet{Spec: agentsv1alpha1.SandboxSetSpec{Replicas: replicas, Runtimes: []agentsv1alpha1.Runtime{{Name: agentsv1alpha1.RuntimeCSI}}, Template: template()}}
	set.Namespace, set.Name = namespace, name
	w.sets = append(w.sets, types.NamespacedName{Namespace: namespace, Name: name})
	if alter != nil {
		alter(&set.Spec)
	}
	if len(set.Spec.VolumeClaimTemplates) > 0 {
		mountOwn(&set.Spec.Template)
	}
	must("", w.create("set", "SandboxSet", agentsv1alpha1.GroupVersion.String(), set))
}

func mountOwn(t *corev1.PodTemplateSpec) {
	t.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "own", MountPath: "/own"}}
}

// create creates an object of a watched kind.
func (w *world) create(kind, named, version string, o any) error {
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return err
	}
	u := &unstructured.Unstructured{Object: content}
	u.SetKind(named)
	u.SetAPIVersion(version)
	delete(content, "status")
	_, err = w.objects.Resource(watched[kind].resource).Namespace(u.GetNamespace()).Create(w.ctx, u, metav1.CreateOptions{})
	return err
}
