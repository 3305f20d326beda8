package v1alpha1_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// The example of the specification (0006, "CR YAML"), with a name.
const specified = `
apiVersion: sandbox.flux.io/v1alpha1
kind: Sandbox
metadata:
  name: example
spec:
  volumeMounts:
  - source: /agent/public/models
    target: /sandbox/public
    mode: ro
  dynamicVolumes:
  - volumeType: pvc
    source: user-001-data
    target: /sandbox/workspace
    mode: rw
    sizeLimit: 50Gi
    tenantId: t-10086
`

// The feature gate as the specification writes it.
const specifiedGroup = `
apiVersion: sandbox.flux.io/v1alpha1
kind: SandboxGroup
metadata:
  name: default
spec:
  featureGates:
    dynamicVolumeMount: true
  schedulingPolicy:
    topologyAffinity:
      enabled: true
`

func TestSpecifiedSandboxDecodes(t *testing.T) {
	var got v1alpha1.Sandbox
	if err := yaml.UnmarshalStrict([]byte(specified), &got); err != nil {
		t.Fatal(err)
	}
	want := v1alpha1.Sandbox{
		TypeMeta:   metav1.TypeMeta{APIVersion: "sandbox.flux.io/v1alpha1", Kind: "Sandbox"},
		ObjectMeta: metav1.ObjectMeta{Name: "example"},
		Spec: v1alpha1.SandboxSpec{
			VolumeMounts: []v1alpha1.VolumeMount{{
				Source: "/agent/public/models", Target: "/sandbox/public", Mode: v1alpha1.VolumeModeReadOnly,
			}},
			DynamicVolumes: []v1alpha1.DynamicVolume{{
				VolumeType: v1alpha1.VolumeTypePVC, Source: "user-001-data", Target: "/sandbox/workspace",
				Mode: v1alpha1.VolumeModeReadWrite, SizeLimit: "50Gi", TenantID: "t-10086",
			}},
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

func TestSpecifiedGroupDecodes(t *testing.T) {
	var got v1alpha1.SandboxGroup
	if err := yaml.UnmarshalStrict([]byte(specifiedGroup), &got); err != nil {
		t.Fatal(err)
	}
	if !got.Spec.FeatureGates.DynamicVolumeMount || !got.Spec.SchedulingPolicy.TopologyAffinity.Enabled {
		t.Errorf("got %+v", got.Spec)
	}
	var empty v1alpha1.SandboxGroup
	if err := yaml.UnmarshalStrict([]byte("spec: {}"), &empty); err != nil || empty.Spec.FeatureGates.DynamicVolumeMount {
		t.Errorf("the gate is on by default (%v)", err)
	}
}

func TestUnknownFieldsAreRefused(t *testing.T) {
	for _, change := range [][2]string{
		{"sizeLimit:", "size:"},
		{"tenantId:", "tenant:"},
		{"dynamicVolumes:", "volumes:"},
		{"    mode: ro", "    mode: ro\n    mode: rw"},
	} {
		var s v1alpha1.Sandbox
		if err := yaml.UnmarshalStrict([]byte(strings.Replace(specified, change[0], change[1], 1)), &s); err == nil {
			t.Errorf("with %q for %q it decodes", change[1], change[0])
		}
	}
}

// The scheme decodes the kinds strictly, as the API machinery does.
func TestScheme(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	for text, want := range map[string]runtime.Object{specified: &v1alpha1.Sandbox{}, specifiedGroup: &v1alpha1.SandboxGroup{}} {
		got, _, err := decoder.Decode([]byte(text), nil, nil)
		if err != nil || reflect.TypeOf(got) != reflect.TypeOf(want) {
			t.Errorf("got a %T (%v); want a %T", got, err, want)
		}
	}
	for _, wrong := range []string{"tenantID:", "tenant:"} { // names are compared with their case
		if _, _, err := decoder.Decode([]byte(strings.Replace(specified, "tenantId:", wrong, 1)), nil, nil); !runtime.IsStrictDecodingError(err) {
			t.Errorf("with %s for tenantId: %v", wrong, err)
		}
	}
	for _, list := range []runtime.Object{&v1alpha1.SandboxList{}, &v1alpha1.SandboxGroupList{}} {
		if _, _, err := scheme.ObjectKinds(list); err != nil {
			t.Error(err)
		}
	}
}

// Enumerations are open: a value of a newer build is kept as it is.
func TestUnknownValuesAreKept(t *testing.T) {
	const text = `{"spec":{"dynamicVolumes":[{"volumeType":"tape","source":"s","target":"/t"}]},` +
		`"status":{"phase":"Hibernating","volumes":[{"target":"/t","phase":"Rewinding","path":"Tape"}]}}`
	var s v1alpha1.Sandbox
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	for _, value := range []string{"tape", "Hibernating", "Rewinding", "Tape"} {
		if !strings.Contains(string(out), `"`+value+`"`) {
			t.Errorf("%s is not in %s", value, out)
		}
	}
}

// Every field of every kind is copied by DeepCopy, shares no memory with the copy, and survives JSON.
func TestEveryFieldIsCopiedAndEncoded(t *testing.T) {
	for _, object := range []runtime.Object{
		&v1alpha1.Sandbox{}, &v1alpha1.SandboxList{}, &v1alpha1.SandboxGroup{}, &v1alpha1.SandboxGroupList{},
	} {
		t.Run(fmt.Sprintf("%T", object), func(t *testing.T) {
			n := 0
			fill(reflect.ValueOf(object).Elem(), &n)
			copied := object.DeepCopyObject()
			if !reflect.DeepEqual(copied, object) {
				t.Errorf("the copy differs:\n%+v\n%+v", copied, object)
			}
			apart(t, "object", reflect.ValueOf(object), reflect.ValueOf(copied))

			data, err := json.Marshal(object)
			if err != nil {
				t.Fatal(err)
			}
			back := reflect.New(reflect.TypeOf(object).Elem()).Interface()
			if err := yaml.UnmarshalStrict(data, back); err != nil {
				t.Fatal(err)
			}
			again, err := json.Marshal(back)
			if err != nil {
				t.Fatal(err)
			}
			if string(again) != string(data) {
				t.Errorf("decoded and encoded again:\n%s\nwant\n%s", again, data)
			}
		})
	}
}

// fill gives every field, however deep, a value other than its zero.
func fill(v reflect.Value, n *int) {
	*n++
	switch v.Interface().(type) {
	case metav1.Time:
		v.Set(reflect.ValueOf(metav1.NewTime(time.Unix(1700000000+int64(*n), 0))))
		return
	case resource.Quantity:
		v.Set(reflect.ValueOf(*resource.NewQuantity(int64(*n), resource.DecimalSI)))
		return
	case intstr.IntOrString:
		v.Set(reflect.ValueOf(intstr.FromInt32(int32(*n))))
		return
	case metav1.FieldsV1:
		v.Set(reflect.ValueOf(*metav1.NewFieldsV1(`{"a":1}`)))
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(v.Index(i), n)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, n)
		fill(value, n)
		v.SetMapIndex(key, value)
	case reflect.String:
		v.SetString(fmt.Sprint("v", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(int64(*n))
	default:
		panic(fmt.Sprintf("fill: %s", v.Type()))
	}
}

// apart fails when two equal values share memory that can be written to.
func apart(t *testing.T, path string, a, b reflect.Value) {
	switch a.Interface().(type) {
	case metav1.Time, resource.Quantity: // values, shared safely
		return
	}
	switch a.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map:
		if !a.IsNil() && a.Pointer() == b.Pointer() {
			t.Errorf("%s is shared with the copy", path)
		}
	}
	switch a.Kind() {
	case reflect.Pointer:
		if !a.IsNil() {
			apart(t, path, a.Elem(), b.Elem())
		}
	case reflect.Struct:
		for i := range a.NumField() {
			apart(t, path+"."+a.Type().Field(i).Name, a.Field(i), b.Field(i))
		}
	case reflect.Slice:
		for i := range a.Len() {
			apart(t, fmt.Sprintf("%s[%d]", path, i), a.Index(i), b.Index(i))
		}
	case reflect.Map:
		for _, k := range a.MapKeys() {
			apart(t, path+"."+k.String(), a.MapIndex(k), b.MapIndex(k))
		}
	}
}
