package patch

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

func TestRandomObjects(t *testing.T) {
	for seed := range uint64(150) {
		checkPair(t, seed, seed*7+1, seed%5 == 0)
	}
}

func FuzzDiff(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(seed, seed+1, seed%2 == 0)
	}
	f.Fuzz(func(t *testing.T, a, b uint64, twice bool) { checkPair(t, a, b, twice) })
}

// checkPair makes two random objects and checks the patch between them, for each way to make it.
func checkPair(t *testing.T, seedA, seedB uint64, twice bool) {
	t.Helper()
	checkObjects(t, randomSandbox(seedA, twice), randomSandbox(seedB, twice))
	checkObjects(t, randomGroup(seedA), randomGroup(seedB))
	if t.Failed() {
		t.Fatalf("with the seeds %d and %d", seedA, seedB)
	}
}

func checkObjects(t *testing.T, a, b any) {
	t.Helper()
	plain, want := treeOf(t, a), treeOf(t, b)

	// What a typed writer stored.
	check(t, "plain", a, b, plain, want, false)
	// What a person stored: without the members that Go writes as {}.
	pruned := treeOf(t, a)
	prune(pruned)
	read := reflect.New(reflect.TypeOf(a).Elem()).Interface()
	if err := json.Unmarshal(encode(t, pruned), read); err != nil {
		t.Fatal(err)
	}
	check(t, "pruned", read, b, pruned, want, false)
	check(t, "pruned, raw", read, b, pruned, want, true)
	// What a newer build stored: with members that we do not know, at every level.
	future := treeOf(t, a)
	addUnknown(future, "")
	check(t, "unknown fields", a, b, future, merged("", future, plain, want), true)

	if p, err := Make(b, b, WithRaw(encode(t, want))); err != nil || len(p) != 0 {
		t.Errorf("an object differs from itself: %v %v", p, err)
	}
}

// check applies the patch from a to b to the stored tree, and compares the result.
func check(t *testing.T, what string, a, b any, stored, want any, withRaw bool) {
	t.Helper()
	raw := encode(t, stored)
	var options []Option
	if withRaw {
		options = append(options, WithRaw(raw))
	}
	p, err := Make(a, b, options...)
	if err != nil {
		t.Fatal(err)
	}
	out := raw
	if len(p) > 0 {
		if out, err = p.Apply(raw); err != nil {
			t.Errorf("%s: %v\npatch %s\nstored %s", what, err, encode(t, p), raw)
			return
		}
	}
	got, err := parse(out)
	if err != nil {
		t.Fatal(err)
	}
	// Members that are {} and missing ones mean the same.
	wantTree, _ := parse(encode(t, want))
	prune(got)
	prune(wantTree)
	if !reflect.DeepEqual(got, wantTree) {
		t.Errorf("%s:\ngot    %s\nwant   %s\nstored %s\npatch  %s", what, encode(t, got), encode(t, wantTree), raw, encode(t, p))
	}
}

func treeOf(t *testing.T, v any) map[string]any {
	t.Helper()
	object, err := tree(v)
	if err != nil {
		t.Fatal(err)
	}
	return object
}

// prune removes members that are empty objects.
func prune(v any) {
	switch v := v.(type) {
	case map[string]any:
		for name, member := range v {
			prune(member)
			if m, ok := member.(map[string]any); ok && len(m) == 0 {
				delete(v, name)
			}
		}
	case []any:
		for _, entry := range v {
			prune(entry)
		}
	}
}

// isMap says whether the objects of that name are Go maps, whose members are all known.
var isMap = map[string]bool{"labels": true, "annotations": true, "limits": true, "requests": true, "nodeSelector": true}

func addUnknown(v any, name string) {
	switch v := v.(type) {
	case map[string]any:
		if isMap[name] {
			return
		}
		for name, member := range v {
			addUnknown(member, name)
		}
		v["future"] = map[string]any{"kept": []any{"x"}}
	case []any:
		for _, entry := range v {
			addUnknown(entry, name)
		}
	}
}

// merged is what must be stored after a change from a to b: b, with the unknown members of what is in both.
func merged(pattern string, stored, a, b any) any {
	switch b := b.(type) {
	case map[string]any:
		a, ok := a.(map[string]any)
		if !ok {
			return b
		}
		stored := stored.(map[string]any)
		out := map[string]any{}
		if u, ok := stored["future"]; ok {
			out["future"] = u
		}
		for name, member := range b {
			out[name] = merged(pattern+"/"+name, stored[name], a[name], member)
		}
		return out
	case []any:
		a, ok := a.([]any)
		if !ok {
			return b
		}
		stored := stored.([]any)
		aKeys, aOK := keysOf(a, listKeys[pattern])
		_, bOK := keysOf(b, listKeys[pattern])
		if !aOK || !bOK {
			if reflect.DeepEqual(a, b) {
				return stored
			}
			return b
		}
		out := make([]any, len(b))
		for i, entry := range b {
			out[i] = entry
			for j, k := range aKeys {
				if entry.(map[string]any)[listKeys[pattern]] == k {
					out[i] = merged(pattern+"/*", stored[j], a[j], entry)
				}
			}
		}
		return out
	}
	return b
}

// generator makes random values from a small set, so that two objects have much in common.
type generator struct {
	*rand.Rand
	twice bool // keys of lists may come twice
}

func (g generator) word() string { return []string{"", "a", "b", "c/~d", "é<&>\""}[g.IntN(5)] }
func (g generator) flip() bool   { return g.IntN(2) == 0 }

// names are keys for a list: in any order, each at most once unless twice.
func (g generator) names() []string {
	var out []string
	for _, i := range g.Perm(5)[:g.IntN(6)] {
		out = append(out, fmt.Sprint("/k", i))
		if g.twice && g.IntN(8) == 0 {
			out = append(out, fmt.Sprint("/k", i))
		}
	}
	return out
}

func (g generator) time() *metav1.Time {
	if g.flip() {
		return nil
	}
	return &metav1.Time{Time: time.Unix(int64(1700000000+g.IntN(3)), 0).UTC()}
}

func (g generator) stringMap() map[string]string {
	var m map[string]string
	for range g.IntN(3) {
		if m == nil {
			m = map[string]string{}
		}
		m["k"+g.word()] = g.word()
	}
	return m
}

func (g generator) resources() (r corev1.ResourceRequirements) {
	if g.flip() {
		r.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse([]string{"1", "1500m", "2000m"}[g.IntN(3)])}
	}
	if g.flip() {
		r.Requests = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")}
	}
	return r
}

func (g generator) env() (env []v1alpha1.EnvVar) {
	for _, n := range g.names() {
		env = append(env, v1alpha1.EnvVar{Name: n, Value: g.word()})
	}
	return env
}

func (g generator) conditions() (out []metav1.Condition) {
	for _, n := range g.names() {
		out = append(out, metav1.Condition{Type: n, Status: metav1.ConditionStatus(g.word()), Message: g.word()})
	}
	return out
}

func (g generator) meta() metav1.ObjectMeta {
	m := metav1.ObjectMeta{Name: "x", UID: "u", Labels: g.stringMap(), Annotations: g.stringMap(), DeletionTimestamp: g.time()}
	for range g.IntN(3) {
		m.Finalizers = append(m.Finalizers, g.word())
	}
	return m
}

func randomSandbox(seed uint64, twice bool) *v1alpha1.Sandbox {
	g := generator{rand.New(rand.NewPCG(seed, 1)), twice}
	s := &v1alpha1.Sandbox{ObjectMeta: g.meta()}
	if g.IntN(10) == 0 {
		return s
	}
	s.Spec.Group, s.Spec.Image, s.Spec.Paused = g.word(), g.word(), g.flip()
	s.Spec.Resources, s.Spec.Env, s.Spec.ShutdownTime = g.resources(), g.env(), g.time()
	for range g.IntN(3) {
		s.Spec.Command = append(s.Spec.Command, g.word())
	}
	for _, target := range g.names() {
		s.Spec.VolumeMounts = append(s.Spec.VolumeMounts, v1alpha1.VolumeMount{Target: target, Source: g.word()})
	}
	for _, target := range g.names() {
		v := v1alpha1.DynamicVolume{Target: target, Source: g.word(), ForceMount: g.flip(), SizeLimit: g.word()}
		if g.flip() {
			v.Detach = &v1alpha1.DetachRequest{Force: g.flip(), RequestID: g.word()}
		}
		s.Spec.DynamicVolumes = append(s.Spec.DynamicVolumes, v)
	}
	if g.IntN(5) == 0 {
		return s
	}
	s.Status.Phase, s.Status.Restarts, s.Status.StartTime = v1alpha1.SandboxPhase(g.word()), int32(g.IntN(3)), g.time()
	s.Status.Conditions = g.conditions()
	if g.flip() {
		code := int32(g.IntN(2))
		s.Status.ExitCode = &code
	}
	for _, target := range g.names() {
		row := v1alpha1.VolumeStatus{Target: target, Phase: v1alpha1.VolumePhase(g.word()), NextRetryTime: g.time()}
		if since := g.time(); since != nil {
			row.Since = *since
		}
		s.Status.Volumes = append(s.Status.Volumes, row)
	}
	return s
}

func randomGroup(seed uint64) *v1alpha1.SandboxGroup {
	g := generator{Rand: rand.New(rand.NewPCG(seed, 2))}
	o := &v1alpha1.SandboxGroup{ObjectMeta: g.meta()}
	o.Spec.FeatureGates.DynamicVolumeMount = g.flip()
	o.Spec.SchedulingPolicy.Strategy = g.word()
	o.Spec.SchedulingPolicy.TopologyAffinity.Enabled = g.flip()
	if g.flip() {
		o.Spec.SchedulingPolicy.Weights = &v1alpha1.SchedulingWeights{Load: int32(g.IntN(2))}
	}
	for range g.IntN(3) {
		o.Spec.VolumePolicy.DeniedTargets = append(o.Spec.VolumePolicy.DeniedTargets, g.word())
	}
	for _, n := range g.names() {
		part := v1alpha1.SubSandboxGroup{Name: n, Capacity: int32(g.IntN(2)), NodeSelector: g.stringMap()}
		part.Template.Image, part.Template.Env, part.Template.Resources = g.word(), g.env(), g.resources()
		o.Spec.SubGroups = append(o.Spec.SubGroups, part)
	}
	o.Status.Sandboxes, o.Status.Conditions = int32(g.IntN(3)), g.conditions()
	return o
}
