package convert_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
)

// notInProto are the fields of the objects that the messages leave out on purpose.
var notInProto = map[string]string{
	"ResourceRequirements.Claims":           "dynamic resource allocation is none of ours",
	"ObjectMeta.GenerateName":               "the server makes names",
	"ObjectMeta.SelfLink":                   "deprecated by Kubernetes",
	"ObjectMeta.Finalizers":                 "the server's own",
	"ObjectMeta.OwnerReferences":            "the server's own",
	"ObjectMeta.ManagedFields":              "Kubernetes' own",
	"ObjectMeta.DeletionGracePeriodSeconds": "Kubernetes' own",
}

// filler gives every field a value of its own, so that two fields that are swapped are noticed.
type filler struct{ n int }

func (f *filler) text() string    { f.n++; return fmt.Sprintf("v%d", f.n) }
func (f *filler) number() int64   { f.n++; return int64(f.n) }
func (f *filler) time() time.Time { f.n++; return time.Unix(int64(1_700_000_000+f.n), 5).UTC() }

// template is a template of which the JSON is what it is encoded to.
func (f *filler) template() corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{f.text(): f.text()}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: f.text(), Image: f.text()}}}}
}

// claim is likewise.
func (f *filler) claim() corev1.PersistentVolumeClaim {
	return corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: f.text()},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.PersistentVolumeAccessMode(f.text())}}}
}

func (f *filler) object(v reflect.Value) {
	switch x := v.Addr().Interface().(type) {
	case *metav1.Time:
		*x = metav1.NewTime(f.time())
		return
	case *corev1.ResourceList:
		*x = corev1.ResourceList{"cpu": *resource.NewQuantity(f.number(), resource.DecimalSI)}
		return
	case *corev1.PodTemplateSpec:
		*x = f.template()
		return
	case *corev1.PersistentVolumeClaim:
		*x = f.claim()
		return
	case *intstr.IntOrString:
		*x = intstr.FromInt32(int32(f.number()))
		return
	case *map[string]string:
		*x = map[string]string{f.text(): f.text()}
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			field := v.Type().Field(i)
			if _, skip := notInProto[v.Type().Name()+"."+field.Name]; skip || field.Name == "TypeMeta" {
				continue
			}
			f.object(v.Field(i))
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.object(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		f.object(v.Index(0))
		f.object(v.Index(1))
	case reflect.String:
		v.SetString(f.text())
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int32, reflect.Int64:
		v.SetInt(f.number())
	default:
		panic("filler knows nothing of " + v.Type().String())
	}
}

func (f *filler) message(m protoreflect.Message) {
	if ts, ok := m.Interface().(*timestamppb.Timestamp); ok {
		proto.Merge(ts, timestamppb.New(f.time()))
		return
	}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		switch {
		case fd.IsMap():
			quantity := strings.HasSuffix(string(fd.ContainingMessage().Name()), "Resources")
			value := f.text()
			if quantity {
				value = fmt.Sprint(f.number())
			}
			m.Mutable(fd).Map().Set(protoreflect.ValueOfString(f.text()).MapKey(), protoreflect.ValueOfString(value))
		case fd.IsList():
			list := m.Mutable(fd).List()
			for range 2 {
				if fd.Kind() == protoreflect.MessageKind {
					f.message(list.AppendMutable().Message())
				} else {
					list.Append(f.scalar(fd))
				}
			}
		case fd.Kind() == protoreflect.MessageKind:
			f.message(m.Mutable(fd).Message())
		default:
			m.Set(fd, f.scalar(fd))
		}
	}
}

func (f *filler) scalar(fd protoreflect.FieldDescriptor) protoreflect.Value {
	switch fd.Kind() {
	case protoreflect.StringKind:
		switch fd.Name() {
		case "template":
			text, _ := json.Marshal(f.template())
			return protoreflect.ValueOfString(string(text))
		case "volume_claim_templates":
			text, _ := json.Marshal(f.claim())
			return protoreflect.ValueOfString(string(text))
		}
		return protoreflect.ValueOfString(f.text())
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(f.number()))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(f.number())
	}
	panic("filler knows nothing of " + fd.Kind().String())
}

func TestNoFieldOfTheObjectsIsForgotten(t *testing.T) {
	objectAndBack(t, v1alpha1.GroupVersion.WithKind("Sandbox"), convert.SandboxProto, convert.Sandbox)
	objectAndBack(t, agentsv1alpha1.GroupVersion.WithKind("SandboxClaim"), convert.ClaimProto, convert.Claim)
	objectAndBack(t, agentsv1alpha1.GroupVersion.WithKind("SandboxSet"), convert.SetProto, convert.Set)
}

func objectAndBack[O any, M any](t *testing.T, kind schema.GroupVersionKind, to func(*O) M, from func(M) (*O, error)) {
	t.Helper()
	want := new(O)
	(&filler{}).object(reflect.ValueOf(want).Elem())
	any(want).(runtime.Object).GetObjectKind().SetGroupVersionKind(kind)

	got, err := from(to(want))
	if err != nil {
		t.Fatal(err)
	}
	if !equality.Semantic.DeepEqual(want, got) {
		t.Errorf("there and back:\n got %+v\nwant %+v", got, want)
	}
}

func TestNoFieldOfTheMessagesIsForgotten(t *testing.T) {
	messageAndBack(t, &sandboxv1.Sandbox{}, convert.Sandbox, convert.SandboxProto)
	messageAndBack(t, &sandboxv1.SandboxClaim{}, convert.Claim, convert.ClaimProto)
	messageAndBack(t, &sandboxv1.SandboxSet{}, convert.Set, convert.SetProto)
}

func messageAndBack[O any, M proto.Message](t *testing.T, want M, to func(M) (*O, error), from func(*O) M) {
	t.Helper()
	(&filler{}).message(want.ProtoReflect())

	object, err := to(want)
	if err != nil {
		t.Fatal(err)
	}
	if got := from(object); !proto.Equal(want, got) {
		t.Errorf("there and back:\n got %v\nwant %v", got, want)
	}
}

func TestEmptyClaimAndSet(t *testing.T) {
	claim, err := convert.Claim(nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := convert.ClaimProto(claim), (&sandboxv1.SandboxClaim{Spec: &sandboxv1.SandboxClaimSpec{}, Status: &sandboxv1.SandboxClaimStatus{}}); !proto.Equal(want, got) {
		t.Errorf("got %v, want %v", got, want)
	}
	if _, err := convert.Set(nil); err != nil {
		t.Error(err)
	}
}

func TestEmptySandbox(t *testing.T) {
	object, err := convert.Sandbox(nil)
	if err != nil {
		t.Fatal(err)
	}
	want := &sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{}, Status: &sandboxv1.SandboxStatus{}}
	if got := convert.SandboxProto(object); !proto.Equal(want, got) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A message with a string that is no UTF-8 cannot be sent at all.
func TestWordsOfASandboxCanBeSent(t *testing.T) {
	raw := "/data/\xff"
	m := convert.SandboxProto(&v1alpha1.Sandbox{Status: v1alpha1.SandboxStatus{Message: raw, Conditions: []metav1.Condition{{Message: raw}},
		Volumes: []v1alpha1.VolumeStatus{{Message: raw, Holders: []v1alpha1.VolumeHolder{{Command: raw}}}}}})
	if _, err := proto.Marshal(m); err != nil {
		t.Error(err)
	}
}

func TestBadQuantityNamesItsField(t *testing.T) {
	_, err := convert.Sandbox(&sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{
		Resources: &sandboxv1.Resources{Limits: map[string]string{"memory": "lots"}},
	}})
	if err == nil || !strings.Contains(err.Error(), `spec.resources.limits["memory"]: "lots"`) {
		t.Errorf("got %v", err)
	}
	_, err = convert.Claim(&sandboxv1.SandboxClaim{Spec: &sandboxv1.SandboxClaimSpec{InplaceUpdate: &sandboxv1.InplaceUpdate{
		Resources: &sandboxv1.Resources{Requests: map[string]string{"cpu": "lots"}},
	}}})
	if err == nil || !strings.Contains(err.Error(), `spec.inplaceUpdate.resources.requests["cpu"]: "lots"`) {
		t.Errorf("got %v", err)
	}
}

func TestBadTemplateIsRefused(t *testing.T) {
	for _, text := range []string{"{", `{"spec":{"container":[]}}`, "[]"} {
		if _, err := convert.Sandbox(&sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{Template: text}}); err == nil || !strings.Contains(err.Error(), "spec.template") {
			t.Errorf("%s: %v", text, err)
		}
	}
}
