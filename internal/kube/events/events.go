// Package events tells what happens to sandboxes as Events of the API server.
//
// They are off the path of every operation: an Event is queued, sent in the background a moment after what it tells of, and
// dropped when the API server cannot take it (patient.go). Equal ones within ten minutes are counted in one object, and one
// sandbox cannot flood the others (client-go's correlator).
package events

import (
	"errors"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// Recorder is a scheduler.EventRecorder.
type Recorder struct {
	broadcaster record.EventBroadcaster
	recorder    record.EventRecorder
	ended       chan struct{}
}

// NewRecorder begins to send Events in the name of a component. Close ends it.
func NewRecorder(client kubernetes.Interface, component string) (*Recorder, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(v1alpha1.AddToScheme(scheme), agentsv1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	b := record.NewBroadcaster()
	ended := make(chan struct{})
	b.StartRecordingToSink(&patient{sink: &typedv1.EventSinkImpl{Interface: client.CoreV1().Events("")}, clock: clock.RealClock{}, ended: ended})
	return &Recorder{broadcaster: b, recorder: b.NewRecorder(scheme, corev1.EventSource{Component: component}), ended: ended}, nil
}

// maxMessage is the most bytes of an Event's message that the API server takes (validation of core/v1 Events).
const maxMessage = 1024

// Event implements scheduler.EventRecorder.
func (r *Recorder) Event(sandbox *v1alpha1.Sandbox, eventType, reason, message string) {
	r.About(sandbox, eventType, reason, message)
}

// About is Event for any object of ours.
func (r *Recorder) About(object runtime.Object, eventType, reason, message string) {
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage-3], "") + "..."
	}
	r.recorder.Event(object, eventType, reason, message)
}

// Close ends the sending, once. What is still queued is lost.
func (r *Recorder) Close() {
	close(r.ended)
	r.broadcaster.Shutdown()
}
