package patch

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

type (
	sandbox = v1alpha1.Sandbox
	volume  = v1alpha1.DynamicVolume
)

func withVolumes(targets ...string) *sandbox {
	s := &sandbox{}
	for _, t := range targets {
		s.Spec.DynamicVolumes = append(s.Spec.DynamicVolumes, volume{Target: t})
	}
	return s
}

// The patches themselves: they travel to an API server, so their form matters.
func TestOperations(t *testing.T) {
	entry := func(target string) string {
		return `{"source":"","target":"` + target + `","volumeType":""}`
	}
	for name, c := range map[string]struct {
		old, new *sandbox
		options  []Option
		want     string
	}{
		"nothing": {old: withVolumes("/a"), new: withVolumes("/a"), options: []Option{WithGuard("u", "1")}, want: ``},
		"scalars": {
			old: &sandbox{Spec: v1alpha1.SandboxSpec{Image: "x", Group: "g"}},
			new: &sandbox{Spec: v1alpha1.SandboxSpec{Image: "y", Paused: true}},
			want: `{"op":"remove","path":"/spec/group"}
				{"op":"add","path":"/spec/image","value":"y"}
				{"op":"add","path":"/spec/paused","value":true}`,
		},
		"a guard": {
			old: &sandbox{}, new: &sandbox{Spec: v1alpha1.SandboxSpec{Paused: true}},
			options: []Option{WithGuard("u", "1"), WithRaw([]byte(`{"spec":{}}`))},
			want: `{"op":"test","path":"/metadata/uid","value":"u"}
				{"op":"test","path":"/metadata/resourceVersion","value":"1"}
				{"op":"add","path":"/spec/paused","value":true}`,
		},
		"names are escaped": {
			old:  &sandbox{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "1"}}},
			new:  &sandbox{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "1", "sandbox.flux.io/b~c": "2"}}},
			want: `{"op":"add","path":"/metadata/labels/sandbox.flux.io~1b~0c","value":"2"}`,
		},
		"an entry changes": {
			old: withVolumes("/a", "/b"),
			new: func() *sandbox { s := withVolumes("/a", "/b"); s.Spec.DynamicVolumes[1].ForceMount = true; return s }(),
			want: `{"op":"test","path":"/spec/dynamicVolumes/1/target","value":"/b"}
				{"op":"add","path":"/spec/dynamicVolumes/1/forceMount","value":true}`,
		},
		"entries come and go": {
			old: withVolumes("/a", "/b", "/c"), new: withVolumes("/n", "/b", "/m"),
			want: `{"op":"test","path":"/spec/dynamicVolumes/2/target","value":"/c"}
				{"op":"remove","path":"/spec/dynamicVolumes/2"}
				{"op":"test","path":"/spec/dynamicVolumes/0/target","value":"/a"}
				{"op":"remove","path":"/spec/dynamicVolumes/0"}
				{"op":"add","path":"/spec/dynamicVolumes/0","value":` + entry("/n") + `}
				{"op":"add","path":"/spec/dynamicVolumes/2","value":` + entry("/m") + `}`,
		},
		"entries move": {
			old: withVolumes("/a", "/b", "/c"), new: withVolumes("/c", "/a", "/b"),
			want: `{"op":"test","path":"/spec/dynamicVolumes/2/target","value":"/c"}
				{"op":"move","from":"/spec/dynamicVolumes/2","path":"/spec/dynamicVolumes/0"}`,
		},
		"a key comes twice": {
			old: withVolumes("/a", "/a"), new: withVolumes("/a"),
			want: `{"op":"add","path":"/spec/dynamicVolumes","value":[` + entry("/a") + `]}`,
		},
		"the last entry goes": {
			old: withVolumes("/a"), new: withVolumes(),
			want: `{"op":"remove","path":"/spec/dynamicVolumes"}`,
		},
		"other lists are replaced": {
			old:  &sandbox{Spec: v1alpha1.SandboxSpec{Args: []string{"a", "b"}}},
			new:  &sandbox{Spec: v1alpha1.SandboxSpec{Args: []string{"a"}}},
			want: `{"op":"add","path":"/spec/args","value":["a"]}`,
		},
		"an empty parent is written whole": {
			old:  &sandbox{},
			new:  &sandbox{Status: v1alpha1.SandboxStatus{Phase: "Running"}},
			want: `{"op":"add","path":"/status","value":{"phase":"Running"}}`,
		},
		"an empty parent that is stored is edited": {
			old:     &sandbox{},
			new:     &sandbox{Status: v1alpha1.SandboxStatus{Phase: "Running"}},
			options: []Option{WithRaw([]byte(`{"status":{"future":1}}`))},
			want:    `{"op":"add","path":"/status/phase","value":"Running"}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Diff(c.old, c.new, c.options...)
			if err != nil {
				t.Fatal(err)
			}
			var operations []json.RawMessage
			if got != nil {
				if err := json.Unmarshal(got, &operations); err != nil {
					t.Fatal(err)
				}
			}
			var lines []string
			for _, o := range operations {
				lines = append(lines, string(o))
			}
			if want := strings.ReplaceAll(c.want, "\t", ""); strings.Join(lines, "\n") != want {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(lines, "\n"), want)
			}
		})
	}
}

// A patch made from a list that has changed since hits no other entry.
func TestStaleListIsNotHit(t *testing.T) {
	change := withVolumes("/a", "/b")
	change.Spec.DynamicVolumes[1].ForceMount = true
	for name, to := range map[string]*sandbox{
		"change": change,
		"remove": withVolumes("/a"),
		"move":   withVolumes("/b", "/a"),
	} {
		p, err := Make(withVolumes("/a", "/b"), to)
		if err != nil {
			t.Fatal(err)
		}
		for _, stored := range []*sandbox{withVolumes("/b", "/a"), withVolumes("/a", "/x", "/b"), withVolumes("/b")} {
			if out, err := p.Apply(encode(t, stored)); err == nil {
				t.Errorf("%s was applied to another list: %s", name, out)
			}
		}
	}
}

func TestGuard(t *testing.T) {
	p, err := Make(&sandbox{}, withVolumes("/a"), WithGuard("u", "2"))
	if err != nil {
		t.Fatal(err)
	}
	for raw, ok := range map[string]bool{
		`{"metadata":{"uid":"u","resourceVersion":"2"},"spec":{}}`: true,
		`{"metadata":{"uid":"u","resourceVersion":"3"},"spec":{}}`: false,
		`{"metadata":{"uid":"v","resourceVersion":"2"},"spec":{}}`: false,
		`{"spec":{}}`: false,
	} {
		if _, err := p.Apply([]byte(raw)); (err == nil) != ok {
			t.Errorf("%s: %v", raw, err)
		}
	}
}

func TestTouches(t *testing.T) {
	p := Patch{{Op: "test", Path: "/metadata/uid"}, {Op: "add", Path: "/spec/image"}, {Op: "remove", Path: "/status"}}
	for pointer, want := range map[string]bool{"/spec": true, "/status": true, "/metadata": false, "/spe": false, "/spec/image": true, "/spec/image/x": false} {
		if p.Touches(pointer) != want {
			t.Errorf("Touches(%s) is %t", pointer, !want)
		}
	}
}

func TestBadArguments(t *testing.T) {
	if _, err := Make([]int{1}, &sandbox{}); err == nil {
		t.Error("a list was taken for an object")
	}
	if _, err := Make(&sandbox{}, make(chan int)); err == nil {
		t.Error("a channel was taken for an object")
	}
	for _, raw := range []string{``, `[]`, `{`, `null`} {
		if _, err := Make(&sandbox{}, &sandbox{}, WithRaw([]byte(raw))); err == nil {
			t.Errorf("%q was taken for a stored object", raw)
		}
	}
	for _, patch := range []string{``, `{}`, `[{"op":"add","path":"/a/b/c","value":1}]`, `[{"op":"remove","path":"/missing"}]`} {
		if out, err := Apply([]byte(`{}`), []byte(patch)); err == nil {
			t.Errorf("the patch %q was applied: %s", patch, out)
		}
	}
}

// Large numbers are not rounded, neither changed ones nor those beside.
func TestNumbers(t *testing.T) {
	old := &sandbox{ObjectMeta: metav1.ObjectMeta{Generation: 1<<62 + 1}}
	new := old.DeepCopy()
	new.Generation += 2
	raw := []byte(`{"metadata":{"generation":4611686018427387905},"future":9007199254740993}`)
	p, err := Make(old, new, WithRaw(raw))
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.Apply(raw)
	if err != nil {
		t.Fatal(err)
	}
	for _, number := range []string{"4611686018427387907", "9007199254740993"} {
		if !strings.Contains(string(out), number) {
			t.Errorf("%s is not in %s", number, out)
		}
	}
}

// An old build, from before dynamic volumes, changes an object that has them: none of them is lost.
func TestOldBuildKeepsNewFields(t *testing.T) {
	type oldEntry struct {
		Source string `json:"source"`
		Target string `json:"target"`
	}
	type oldSandbox struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata,omitempty"`
		Spec              struct {
			Image        string     `json:"image,omitempty"`
			VolumeMounts []oldEntry `json:"volumeMounts,omitempty"`
		} `json:"spec,omitempty"`
		Status struct {
			Phase string `json:"phase,omitempty"`
		} `json:"status,omitempty"`
	}
	full := &sandbox{
		ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "default"},
		Spec: v1alpha1.SandboxSpec{
			Image:          "x",
			VolumeMounts:   []v1alpha1.VolumeMount{{Source: "/1", Target: "/1", Mode: "ro"}, {Source: "/2", Target: "/2", Mode: "ro"}},
			DynamicVolumes: []volume{{VolumeType: "pvc", Source: "user-001-data", Target: "/w", SizeLimit: "50Gi", TenantID: "t-10086"}},
		},
		Status: v1alpha1.SandboxStatus{Volumes: []v1alpha1.VolumeStatus{{Target: "/w", Phase: v1alpha1.VolumeMounted}}},
	}
	raw := encode(t, full)
	var old oldSandbox
	if err := json.Unmarshal(raw, &old); err != nil {
		t.Fatal(err)
	}
	new := old
	new.Spec.Image = "y"
	new.Status.Phase = "Running"
	new.Spec.VolumeMounts = []oldEntry{{"/2", "/2"}, {"/3", "/3"}}
	want := full.DeepCopy()
	want.Spec.Image = "y"
	want.Status.Phase = "Running"
	want.Spec.VolumeMounts = []v1alpha1.VolumeMount{{Source: "/2", Target: "/2", Mode: "ro"}, {Source: "/3", Target: "/3"}}

	for _, withRaw := range []bool{true, false} {
		var options []Option
		if withRaw {
			options = []Option{WithRaw(raw)}
		} else {
			// To the old build the status looks empty, and it would write it whole. With something in it that
			// it knows, it does not.
			old.Status.Phase, full.Status.Phase = "Pending", "Pending"
			raw = encode(t, full)
		}
		p, err := Make(old, new, options...)
		if err != nil {
			t.Fatal(err)
		}
		out, err := p.Apply(raw)
		if err != nil {
			t.Fatal(err)
		}
		var got sandbox
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(&got, want) {
			t.Errorf("with the stored object %t: got\n%s\nwant\n%s", withRaw, encode(t, got), encode(t, want))
		}
	}
}

func encode(t testing.TB, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestEqual(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{`{"a":1,"b":[{"c":null,"d":2}]}`, `{ "b": [{"d":2}], "a": 1 }`, true},
		{`{"a":1}`, `{"a":1,"b":0}`, false},
		{`{"a":9007199254740993}`, `{"a":9007199254740992}`, false},
		{`{"a":[1,2]}`, `{"a":[2,1]}`, false},
		{`{`, `{`, false},
	} {
		if got := Equal([]byte(c.a), []byte(c.b)); got != c.want {
			t.Errorf("%s and %s: %v", c.a, c.b, got)
		}
	}
}
