//go:build failpoint

package clustercontroller_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// witness sees every version of every sandbox and claim of a Namespace, in their order, and holds against each what may
// never be.
type witness struct {
	c         *cluster
	namespace string
	running   sync.WaitGroup

	mu sync.Mutex // guards all below
	// most are the sandboxes that a set or claim may have, least those of a set that have to run, by name.
	most, least map[string]int
	// kept says of a claim of a volume that it stays whatever becomes of its sandbox.
	kept func(pvc string) bool
	// given has the SandboxClaim that a sandbox was given to; living are the sandboxes that are not being deleted.
	given  map[types.UID]types.UID
	living map[types.UID]*v1alpha1.Sandbox
	wrong  []string
	seen   int
}

func (c *cluster) witness(namespace string) *witness {
	w := &witness{c: c, namespace: namespace, most: map[string]int{}, least: map[string]int{}, kept: func(string) bool { return false },
		given: map[types.UID]types.UID{}, living: map[types.UID]*v1alpha1.Sandbox{}}
	ctx, cancel := context.WithCancel(c.Context())
	for gvr, see := range map[schema.GroupVersionResource]func(watch.EventType, *unstructured.Unstructured){sandboxesGVR: w.sandbox, pvcsGVR: w.pvc} {
		api := c.objects.Resource(gvr).Namespace(namespace)
		from := must(api.List(ctx, metav1.ListOptions{})).GetResourceVersion()
		events := must(api.Watch(ctx, metav1.ListOptions{ResourceVersion: from}))
		w.running.Go(func() {
			for e := range events.ResultChan() {
				o, ok := e.Object.(*unstructured.Unstructured)
				if !ok || e.Type == watch.Error {
					w.fail("the watch of %s failed: %v", gvr.Resource, e.Object)
					return
				}
				see(e.Type, o)
			}
			if ctx.Err() == nil {
				w.fail("the watch of %s ended", gvr.Resource)
			}
		})
	}
	c.Cleanup(func() { cancel(); w.running.Wait() })
	return w
}

func (w *witness) fail(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wrong = append(w.wrong, fmt.Sprintf(format, args...))
}

// allow says how many sandboxes a set or claim may have from now on.
func (w *witness) allow(name string, most int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.most[name] = most
}

// require says how many sandboxes of a set have to run from now on; 0 for none.
func (w *witness) require(set string, least int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.least[set] = least
}

func (w *witness) sandbox(kind watch.EventType, o *unstructured.Unstructured) {
	sb := &v1alpha1.Sandbox{}
	if err := json.Unmarshal(must(o.MarshalJSON()), sb); err != nil {
		panic(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen++
	wrong := func(format string, args ...any) {
		w.wrong = append(w.wrong, "sandbox "+sb.Name+" "+fmt.Sprintf(format, args...))
	}
	owner := metav1.GetControllerOf(sb)
	given, was := w.given[sb.UID]
	switch {
	case owner == nil && !was:
		wrong("is nobody's")
	case owner == nil: // the claim is gone, and has left it
	case owner.Kind == "SandboxClaim" && was && given != owner.UID:
		wrong("was given to a second claim, %s", owner.Name)
	case owner.Kind == "SandboxClaim":
		w.given[sb.UID] = owner.UID
	case was:
		wrong("went back to the pool of %s", owner.Name)
	}
	if kind == watch.Deleted || sb.DeletionTimestamp != nil {
		delete(w.living, sb.UID)
	} else {
		w.living[sb.UID] = sb
	}
	have, run := map[string]int{}, map[string]int{}
	for _, one := range w.living {
		if owner := metav1.GetControllerOf(one); owner != nil {
			have[owner.Name]++
			if one.Status.Phase == v1alpha1.SandboxRunning {
				run[owner.Name]++
			}
		}
	}
	for name, n := range have {
		if n > w.most[name] {
			wrong("is one too many: %s has %d, and may have %d", name, n, w.most[name])
		}
	}
	for name, least := range w.least {
		if run[name] < least {
			wrong("was needed: of %s %d run, and %d have to", name, run[name], least)
		}
	}
}

func (w *witness) pvc(kind watch.EventType, o *unstructured.Unstructured) {
	if kind != watch.Deleted && o.GetDeletionTimestamp() == nil {
		return
	}
	w.mu.Lock()
	kept := w.kept(o.GetName())
	w.mu.Unlock()
	if kept {
		w.fail("the claim %s was to be kept, and is deleted", o.GetName())
	}
	// Its sandbox went before it, or it is lost.
	name, uid := o.GetLabels()[v1alpha1.LabelSandbox], o.GetLabels()[v1alpha1.LabelSandboxUID]
	if name == "" { // one for a PersistentVolume
		if phase, _, _ := unstructured.NestedString(o.Object, "status", "phase"); phase == string(corev1.ClaimBound) {
			w.fail("the claim %s is deleted, and has a volume", o.GetName())
		}
		return
	}
	sb, err := w.c.objects.Resource(sandboxesGVR).Namespace(w.namespace).Get(w.c.Context(), name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err), w.c.Context().Err() != nil:
	case err != nil:
		w.fail("read the sandbox of the claim %s: %v", o.GetName(), err)
	case string(sb.GetUID()) == uid && sb.GetDeletionTimestamp() == nil:
		w.fail("the claim %s is lost, and its sandbox lives", o.GetName())
	}
}

// pods holds, at one moment, that no Pod has a claim of another sandbox than its own.
func (w *witness) pods() {
	pvcs := map[string]string{}
	for _, o := range w.c.list(pvcsGVR, w.namespace) {
		pvcs[o.GetName()] = o.GetLabels()[v1alpha1.LabelSandboxUID]
	}
	for _, o := range w.c.list(podsGVR, w.namespace) {
		pod := &corev1.Pod{}
		if err := json.Unmarshal(must(o.MarshalJSON()), pod); err != nil {
			panic(err)
		}
		for _, v := range pod.Spec.Volumes {
			if v.PersistentVolumeClaim == nil {
				continue
			}
			if of, there := pvcs[v.PersistentVolumeClaim.ClaimName]; !there || of != string(metav1.GetControllerOf(pod).UID) {
				w.fail("Pod %s has the claim %s, which is of the sandbox %q", pod.Name, v.PersistentVolumeClaim.ClaimName, of)
			}
		}
	}
}

// check tells what was wrong.
func (w *witness) check() {
	w.c.Helper()
	w.pods()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, wrong := range w.wrong {
		w.c.Error(wrong)
	}
	w.wrong = nil
	if w.seen == 0 {
		w.c.Error("the witness saw nothing")
	}
}
