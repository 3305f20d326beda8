package churn

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/sets"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// ledger holds the rules against every state that there was, in the order in which they were: each kind comes by a watch of
// its own, but the versions of all objects are revisions of one store. An event is looked at when every watch is past it.
type ledger struct {
	mu      sync.Mutex // guards all below
	pending []event
	// past is the newest version that each kind's watch has told of.
	past map[string]uint64
	seen int
	// What there is, at the version that was looked at last.
	sandboxes map[types.UID]*v1alpha1.Sandbox
	sets      map[types.UID]*pool
	claims    map[types.UID]*agentsv1alpha1.SandboxClaim
	pods      map[types.UID]*corev1.Pod
	pvcs      map[types.NamespacedName]*corev1.PersistentVolumeClaim
	// given has the claim that a sandbox was given to, made whom a PersistentVolumeClaim was made for.
	given map[types.UID]types.UID
	made  map[types.UID]types.UID
	// policies has what becomes of a sandbox's own claims, also when it is gone. byHand are those that somebody deletes, over
	// those of which the deletion was looked at.
	policies     map[types.UID]v1alpha1.RetentionPolicy
	byHand, over map[types.UID]bool
	// bound has the claim that a PersistentVolume is bound to, first the Namespace that had one first which is no tenant's.
	bound map[types.UID]types.UID
	first map[string]string
	// forms are what a sandbox's Pods ran as.
	forms map[types.UID][]string
	// created counts sandboxes, asked claims, podsMade the Pods, anchors those that are anchors, images and resizes the changes
	// of Pods in place.
	created, asked, podsMade, anchors, images, resizes int
	wrong                                              []string
}

// pool is a set with what it asked for since the generation that its controller has acted on.
type pool struct {
	set    *agentsv1alpha1.SandboxSet
	wished map[int64]int32
}

type event struct {
	version uint64
	kind    string
	gone    bool
	object  metav1.Object
}

func newLedger() *ledger {
	return &ledger{past: map[string]uint64{}, sandboxes: map[types.UID]*v1alpha1.Sandbox{}, sets: map[types.UID]*pool{}, claims: map[types.UID]*agentsv1alpha1.SandboxClaim{},
		pods: map[types.UID]*corev1.Pod{}, pvcs: map[types.NamespacedName]*corev1.PersistentVolumeClaim{}, given: map[types.UID]types.UID{}, made: map[types.UID]types.UID{},
		policies: map[types.UID]v1alpha1.RetentionPolicy{}, byHand: map[types.UID]bool{}, over: map[types.UID]bool{}, bound: map[types.UID]types.UID{},
		first: map[string]string{}, forms: map[types.UID][]string{}}
}

// watched are the kinds, with what makes an object of each.
var watched = map[string]struct {
	resource schema.GroupVersionResource
	empty    func() metav1.Object
}{
	"sandbox": {v1alpha1.GroupVersion.WithResource("sandboxes"), func() metav1.Object { return &v1alpha1.Sandbox{} }},
	"set":     {agentsv1alpha1.GroupVersion.WithResource("sandboxsets"), func() metav1.Object { return &agentsv1alpha1.SandboxSet{} }},
	"claim":   {agentsv1alpha1.GroupVersion.WithResource("sandboxclaims"), func() metav1.Object { return &agentsv1alpha1.SandboxClaim{} }},
	"pod":     {corev1.SchemeGroupVersion.WithResource("pods"), func() metav1.Object { return &corev1.Pod{} }},
	"pvc":     {corev1.SchemeGroupVersion.WithResource("persistentvolumeclaims"), func() metav1.Object { return &corev1.PersistentVolumeClaim{} }},
	"pv":      {corev1.SchemeGroupVersion.WithResource("persistentvolumes"), func() metav1.Object { return &corev1.PersistentVolume{} }},
}

// follow watches all kinds until ctx ends. There are no objects of them yet. pods is told of every Pod at once.
func (l *ledger) follow(ctx context.Context, t *testing.T, client dynamic.Interface, running *sync.WaitGroup, pods func(pod *corev1.Pod, gone bool)) {
	t.Helper()
	for kind := range watched {
		l.past[kind] = 0
	}
	for kind, k := range watched {
		list := must(client.Resource(k.resource).List(ctx, metav1.ListOptions{}))
		if len(list.Items) > 0 {
			t.Fatalf("there is a %s already", kind)
		}
		running.Go(func() {
			at := list.GetResourceVersion()
			for ctx.Err() == nil {
				events, err := client.Resource(k.resource).Watch(ctx, metav1.ListOptions{ResourceVersion: at, AllowWatchBookmarks: true})
				if err != nil {
					testenv.Poll(time.Second, func() bool { return ctx.Err() != nil }) // it is tried again
					continue
				}
				for e := range events.ResultChan() {
					o, ok := e.Object.(*unstructured.Unstructured)
					if !ok || e.Type == watch.Error {
						l.mu.Lock()
						l.fail("the watch on each %s ended: %v", kind, e.Object)
						l.mu.Unlock()
						return
					}
					at = o.GetResourceVersion()
					version := must(strconv.ParseUint(at, 10, 64))
					if e.Type == watch.Bookmark {
						l.comeTo(kind, version)
						continue
					}
					object := k.empty()
					must("", runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, object))
					gone := e.Type == watch.Deleted
					if pod, is := object.(*corev1.Pod); is {
						pods(pod, gone)
					}
					l.add(event{version: version, kind: kind, gone: gone, object: object})
				}
			}
		})
	}
}

func (l *ledger) add(e event) {
	l.mu.Lock()
	l.pending = append(l.pending, e)
	l.mu.Unlock()
	l.comeTo(e.kind, e.version)
}

// comeTo notes that all of a kind is told until a version, and looks at what is told of every kind. A kind of which nothing happens
// comes further by bookmarks, each minute.
func (l *ledger) comeTo(kind string, version uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.past[kind] = version
	safe := version
	for _, v := range l.past {
		safe = min(safe, v)
	}
	l.look(safe)
}

// flush has all looked at that came. Nothing may be on its way.
func (l *ledger) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.look(1<<64 - 1)
}

// look looks at the events until a version, in order.
func (l *ledger) look(until uint64) {
	slices.SortStableFunc(l.pending, func(a, b event) int { return cmp.Compare(a.version, b.version) })
	for len(l.pending) > 0 && l.pending[0].version <= until {
		e := l.pending[0]
		l.pending = l.pending[1:]
		l.seen++
		switch o := e.object.(type) {
		case *v1alpha1.Sandbox:
			l.sandbox(o, e.gone)
		case *agentsv1alpha1.SandboxSet:
			l.set(o, e.gone)
		case *agentsv1alpha1.SandboxClaim:
			l.claim(o, e.gone)
		case *corev1.Pod:
			l.pod(o, e.gone)
		case *corev1.PersistentVolumeClaim:
			l.pvc(o, e.gone)
		case *corev1.PersistentVolume:
			l.pv(o, e.gone)
		}
	}
}

// fail notes that a rule was broken. The lock is held.
func (l *ledger) fail(format string, args ...any) {
	l.wrong = append(l.wrong, fmt.Sprintf(format, args...))
}

// sandbox: it has one claim in its life and never goes back, and neither its set nor its claim has more than was asked for.
func (l *ledger) sandbox(sb *v1alpha1.Sandbox, gone bool) {
	before := l.sandboxes[sb.UID]
	l.policy(before, sb)
	l.tenant(sb)
	if gone || sb.DeletionTimestamp != nil {
		l.ends(sb)
	}
	if gone {
		delete(l.sandboxes, sb.UID)
		return
	}
	if before == nil {
		l.created++
	}
	l.sandboxes[sb.UID] = sb
	owner, was := metav1.GetControllerOf(sb), (*metav1.OwnerReference)(nil)
	if before != nil {
		was = metav1.GetControllerOf(before)
	}
	given, isGiven := l.given[sb.UID]
	switch {
	case owner == nil:
		// A claim that ttlAfterCompleted deletes leaves its sandboxes to whoever has them.
		if was != nil && !l.expiring(was.UID) {
			l.fail("sandbox %s (version %s) was %s %s's and is nobody's", sb.Name, sb.ResourceVersion, was.Kind, was.Name)
		}
		return
	case isGiven && given != owner.UID:
		l.fail("sandbox %s (version %s) was given to claim %s, and is %s %s's (%s) now", sb.Name, sb.ResourceVersion, given, owner.Kind, owner.Name, owner.UID)
	case owner.Kind == "SandboxClaim":
		l.given[sb.UID] = owner.UID
	}
	if was != nil && was.UID == owner.UID {
		return
	}
	if c := l.claims[owner.UID]; c != nil {
		l.gets(before, sb, c)
	}
	n, who := 0, []string{}
	for _, o := range l.owned(owner.UID) {
		if o.DeletionTimestamp == nil && !sets.Over(o) {
			n++
			who = append(who, fmt.Sprintf("%s (version %s) %s %s", o.Name, o.ResourceVersion, o.Status.Phase, o.Status.Reason))
		}
	}
	if p := l.sets[owner.UID]; p != nil {
		if most := p.most(); n > most {
			l.fail("set %s has %d unclaimed sandboxes with %s (version %s): it asked for %d (%v): %s", owner.Name, n, sb.Name, sb.ResourceVersion, most, p.wished, strings.Join(who, ", "))
		}
	}
	if c := l.claims[owner.UID]; c != nil && n > replicasOf(c) {
		l.fail("claim %s has %d sandboxes with %s (version %s): it asked for %d", owner.Name, n, sb.Name, sb.ResourceVersion, replicasOf(c))
	}
}

// expiring says whether a claim is gone, or on its way out.
func (l *ledger) expiring(claim types.UID) bool {
	c := l.claims[claim]
	return l.sets[claim] == nil && (c == nil || c.DeletionTimestamp != nil || c.Spec.TTLAfterCompleted != nil && c.Status.CompletionTime != nil)
}

func replicasOf(c *agentsv1alpha1.SandboxClaim) int {
	if c.Spec.Replicas == nil {
		return 1
	}
	return int(*c.Spec.Replicas)
}

// most is what a set may have that its controller acts on: a spec that it has seen, or a newer one.
func (p *pool) most() int {
	most := int32(0)
	for _, n := range p.wished {
		most = max(most, n)
	}
	return int(most)
}

func (l *ledger) set(set *agentsv1alpha1.SandboxSet, gone bool) {
	if gone {
		delete(l.sets, set.UID)
		return
	}
	p := l.sets[set.UID]
	if p == nil {
		p = &pool{wished: map[int64]int32{}}
		l.sets[set.UID] = p
	}
	if p.set != nil && set.Status.ObservedGeneration < p.set.Status.ObservedGeneration {
		l.fail("the status of set %s (version %s) went back from generation %d to %d", set.Name, set.ResourceVersion, p.set.Status.ObservedGeneration, set.Status.ObservedGeneration)
	}
	p.set = set
	p.wished[set.Generation] = set.Spec.Replicas
	for generation := range p.wished {
		if generation < set.Status.ObservedGeneration {
			delete(p.wished, generation)
		}
	}
}

func final(c *agentsv1alpha1.SandboxClaim) bool {
	return c.Status.Phase == agentsv1alpha1.ClaimCompleted || c.Status.Phase == agentsv1alpha1.ClaimFailed
}

// claim: what is final stays.
func (l *ledger) claim(c *agentsv1alpha1.SandboxClaim, gone bool) {
	before := l.claims[c.UID]
	if gone {
		delete(l.claims, c.UID)
		return
	}
	if before == nil {
		l.asked++
	}
	l.claims[c.UID] = c
	switch {
	case before != nil && final(before):
		if c.Status.Phase != before.Status.Phase || !slices.Equal(c.Status.SandboxNames, before.Status.SandboxNames) {
			l.fail("claim %s (version %s) was %s with %v, and is %s with %v", c.Name, c.ResourceVersion, before.Status.Phase, before.Status.SandboxNames, c.Status.Phase, c.Status.SandboxNames)
		}
	case final(c):
		if c.Status.Phase == agentsv1alpha1.ClaimCompleted {
			l.completed(c)
		}
		for _, name := range c.Status.SandboxNames {
			if !slices.ContainsFunc(l.owned(c.UID), func(sb *v1alpha1.Sandbox) bool { return sb.Name == name }) {
				// It may have been deleted between the decision and the write.
				l.forgiven(c, name)
			}
		}
	}
}

// forgiven fails unless a sandbox that a claim names was the claim's once.
func (l *ledger) forgiven(c *agentsv1alpha1.SandboxClaim, name string) {
	for _, claim := range l.given {
		if claim == c.UID {
			return
		}
	}
	l.fail("claim %s (version %s) names sandbox %s, and never had one", c.Name, c.ResourceVersion, name)
}

func (l *ledger) owned(uid types.UID) (all []*v1alpha1.Sandbox) {
	for _, sb := range l.sandboxes {
		if owner := metav1.GetControllerOf(sb); owner != nil && owner.UID == uid {
			all = append(all, sb)
		}
	}
	return all
}

func ownedBy(o metav1.Object, uid types.UID) bool {
	owner := metav1.GetControllerOf(o)
	return owner != nil && owner.UID == uid
}

// pod: a sandbox has one at most, and it mounts no claim but the sandbox's.
func (l *ledger) pod(pod *corev1.Pod, gone bool) {
	before := l.pods[pod.UID]
	if gone {
		delete(l.pods, pod.UID)
		return
	}
	l.pods[pod.UID] = pod
	owner := metav1.GetControllerOf(pod)
	if owner == nil || owner.Kind != "Sandbox" {
		if before == nil {
			l.anchors++
		}
		return
	}
	l.ran(before, pod, owner.UID)
	if before == nil {
		l.podsMade++
		for _, other := range l.pods {
			if other.UID != pod.UID && ownedBy(other, owner.UID) {
				l.fail("sandbox %s has Pod %s and Pod %s (version %s) at once", owner.Name, other.UID, pod.UID, pod.ResourceVersion)
			}
		}
		if sb := l.sandboxes[owner.UID]; sb == nil {
			l.fail("Pod %s (version %s) was made for a sandbox that is gone", pod.Name, pod.ResourceVersion)
		}
	}
	if before != nil && before.Spec.NodeName == pod.Spec.NodeName {
		return
	}
	for _, v := range pod.Spec.Volumes {
		if v.PersistentVolumeClaim == nil {
			continue
		}
		if pvc := l.pvcs[types.NamespacedName{Namespace: pod.Namespace, Name: v.PersistentVolumeClaim.ClaimName}]; pvc != nil && l.madeFor(pvc) != owner.UID {
			l.fail("Pod %s (version %s) of sandbox %s mounts claim %s (%s), which was made for %q", pod.Name, pod.ResourceVersion, owner.UID, pvc.Name, pvc.UID, l.madeFor(pvc))
		}
	}
}

// broken are the rules that were broken since the last time.
func (l *ledger) broken() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer func() { l.wrong = nil }()
	return l.wrong
}
