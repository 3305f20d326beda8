package grpcapi_test

import (
	"testing"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
)

func TestSandboxesThatArePods(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	for name, spec := range map[string]v1alpha1.SandboxSpec{
		"own":     {Template: &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "busybox"}}}}},
		"adopted": {PodRef: &v1alpha1.PodReference{Name: "web-0", UID: "some-uid"}},
	} {
		_, err := e.Store.Sandboxes().Create(t.Context(), &v1alpha1.Sandbox{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Finalizers: []string{v1alpha1.FinalizerVolumes}}, Spec: spec,
		})
		noError(t, err)
		e.Await(keyOf(name), func(sb *v1alpha1.Sandbox) bool { return sb.Status.Phase == v1alpha1.SandboxRunning })
	}
	for name, pod := range map[string]string{"own": "own", "adopted": "web-0"} {
		_, _, err := talk(t.Context(), e, start(name, "echo"))
		wantError(t, err, codes.Unimplemented, fault.InvalidRequest, "kubectl exec -n default "+pod)
		_, err = logs(t.Context(), e, &sandboxv1.LogsRequest{Sandbox: named(name)})
		wantError(t, err, codes.Unimplemented, fault.InvalidRequest, "kubectl logs -n default "+pod)
		// Volumes are the same for all.
		_, err = e.Volumes.AddSandVolume(t.Context(), &sandboxv1.AddSandVolumeRequest{Sandbox: named(name),
			Volume: &sandboxv1.DynamicVolume{VolumeType: "local", Source: "/data/a", Target: "/data"}})
		noError(t, err)
	}
	_, err := e.Sandboxes.PauseSandbox(t.Context(), &sandboxv1.PauseSandboxRequest{Sandbox: named("adopted"), Paused: true})
	wantError(t, err, codes.FailedPrecondition, fault.InvalidRequest, "web-0")
	_, err = e.Sandboxes.PauseSandbox(t.Context(), &sandboxv1.PauseSandboxRequest{Sandbox: named("own"), Paused: true, Wait: true})
	noError(t, err)
}
