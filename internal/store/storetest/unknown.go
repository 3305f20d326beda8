package storetest

import (
	"context"
	"encoding/json"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// testUnknownFields puts fields that this build does not know at every level of an object, makes every
// kind of write, and finds them again.
func testUnknownFields(t *testing.T, b Backend) {
	ctx := context.Background()
	all := b.Store.Sandboxes()
	s := sandboxes.empty()
	s.Namespace, s.Name = "default", "a"
	s.Labels = map[string]string{"l": "1"}
	s.Finalizers = []string{"example.com/hold"}
	s.Spec.VolumeMounts = []v1alpha1.VolumeMount{{Source: "/models", Target: "/m"}}
	s.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{
		{VolumeType: "local", Source: "/a", Target: "/a"},
		{VolumeType: "local", Source: "/b", Target: "/b", Detach: &v1alpha1.DetachRequest{Force: true}},
		{VolumeType: "local", Source: "/c", Target: "/c"},
	}
	if _, err := all.Create(ctx, s); err != nil {
		t.Fatal(err)
	}
	if _, err := all.UpdateStatus(ctx, key("a"), store.Preconditions{}, func(s *v1alpha1.Sandbox) error {
		s.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Test", LastTransitionTime: metav1.Now()}}
		s.Status.Volumes = []v1alpha1.VolumeStatus{{Target: "/m"}, {Target: "/a"}, {Target: "/b"}, {Target: "/c"}}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	b.EditRaw(key("a"), func(o map[string]any) { mark(o) })

	updated, err := all.UpdateSpec(ctx, key("a"), store.Preconditions{}, func(s *v1alpha1.Sandbox) error {
		s.Labels["l"] = "2"
		s.Spec.WorkingDir = "/srv"
		s.Spec.VolumeMounts[0].Mode = "ro"
		d := s.Spec.DynamicVolumes
		d[1].Detach.RequestID = "r"
		d[2].ForceMount = true
		// /a goes, /c and /b change places, /d comes between them.
		s.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{d[2], {VolumeType: "local", Source: "/d", Target: "/d"}, d[1]}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := all.UpdateStatus(ctx, key("a"), store.Preconditions{}, func(s *v1alpha1.Sandbox) error {
		v := s.Status.Volumes
		v[0].Phase, v[2].Phase, v[3].Phase = "Mounted", "Detaching", "Attaching"
		s.Status.Volumes = []v1alpha1.VolumeStatus{v[0], v[3], {Target: "/d"}, v[2]}
		s.Status.Conditions[0].Status = "False"
		s.Status.Phase = "Running"
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := all.Delete(ctx, key("a"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}

	raw := b.Raw(key("a"))
	spec := raw["spec"].(map[string]any)
	status := raw["status"].(map[string]any)
	for _, c := range []struct {
		what string
		got  any
		want []any // per entry of a list, whether it has the unknown field
	}{
		{"the object", raw, nil},
		{"metadata", raw["metadata"], nil},
		{"spec", spec, nil},
		{"spec.resources", spec["resources"], nil},
		{"spec.volumeMounts", spec["volumeMounts"], []any{"kept"}},
		{"spec.dynamicVolumes", spec["dynamicVolumes"], []any{"kept", nil, "kept"}},
		{"spec.dynamicVolumes[2].detach", spec["dynamicVolumes"].([]any)[2].(map[string]any)["detach"], nil},
		{"status", status, nil},
		{"status.conditions", status["conditions"], []any{"kept"}},
		{"status.volumes", status["volumes"], []any{"kept", "kept", nil, "kept"}},
	} {
		if c.what == "metadata" && b.KnownMetadata {
			continue
		}
		if c.want == nil {
			if c.got.(map[string]any)["future"] != "kept" {
				t.Errorf("%s has lost its unknown field: %v", c.what, c.got)
			}
			continue
		}
		var got []any
		for _, entry := range c.got.([]any) {
			got = append(got, entry.(map[string]any)["future"])
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s has unknown fields %v; want %v", c.what, got, c.want)
		}
	}

	// And the known fields are what was asked for.
	now, err := all.Get(ctx, key("a"))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := encode(t, now.Spec), encode(t, updated.Spec); got != want {
		t.Errorf("the spec is\n%s\nwant\n%s", got, want)
	}
	if d := now.Spec.DynamicVolumes; len(d) != 3 || d[0].Target != "/c" || !d[0].ForceMount || d[1].Target != "/d" || d[2].Detach.RequestID != "r" {
		t.Errorf("the dynamic volumes are %+v", d)
	}
	if v := now.Status.Volumes; len(v) != 4 || v[1].Target != "/c" || v[1].Phase != "Attaching" || v[2].Target != "/d" || v[3].Phase != "Detaching" {
		t.Errorf("the volumes of the status are %+v", v)
	}
}

// mark puts an unknown field into every object of a JSON value, but for maps of labels.
func mark(v any) {
	switch v := v.(type) {
	case map[string]any:
		for name, member := range v {
			if name != "labels" {
				mark(member)
			}
		}
		v["future"] = "kept"
	case []any:
		for _, entry := range v {
			mark(entry)
		}
	}
}

func encode(t *testing.T, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// testMissingMembers writes into parents that the stored object does not have, though Go would write them
// as {}; and into ones that are null.
func testMissingMembers(t *testing.T, b Backend) {
	ctx := context.Background()
	all := b.Store.Sandboxes()
	s := sandboxes.empty()
	s.Namespace, s.Name = "default", "a"
	s.Spec.Env = []v1alpha1.EnvVar{{Name: "A"}}
	if _, err := all.Create(ctx, s); err != nil {
		t.Fatal(err)
	}
	for _, edit := range []func(map[string]any){
		func(o map[string]any) {
			delete(o, "status")
			delete(o["spec"].(map[string]any), "resources")
		},
		func(o map[string]any) { o["status"], o["spec"].(map[string]any)["resources"] = nil, nil },
		func(o map[string]any) { delete(o, "spec"); delete(o, "status") },
	} {
		b.EditRaw(key("a"), edit)
		cpu := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1500m")}
		if _, err := all.UpdateSpec(ctx, key("a"), store.Preconditions{}, func(s *v1alpha1.Sandbox) error {
			s.Spec.Resources.Limits = cpu
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		got, err := all.UpdateStatus(ctx, key("a"), store.Preconditions{}, func(s *v1alpha1.Sandbox) error {
			s.Status.Phase = "Running"
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if got.Spec.Resources.Limits.Cpu().MilliValue() != 1500 || got.Status.Phase != "Running" {
			t.Errorf("got %+v", got)
		}
	}
}
