package pods

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// facts is what is kept of a Pod.
type facts struct {
	// The name, the UID, the controller, the deletion and our annotation.
	metav1.ObjectMeta
	node       string
	phase      corev1.PodPhase
	reason     string // why it has no node, why it ended, or why it does not come up
	message    string
	containers []container
	// template is what it has of a template that can be changed, updating why it does not run with that yet.
	template                  string
	updated                   bool
	updating, updatingMessage string
	// disrupted: it ended, or is to end, for no reason of its own.
	disrupted bool
}

// container is what is kept of one of a Pod's containers.
type container struct {
	name, id        string
	running         bool
	startedAt       time.Time
	restarts        int32
	exitCode        *int32
	reason, message string // why it does not run
}

// strip reduces a Pod to its facts before it is kept.
func strip(o any) (any, error) {
	if pod, ok := o.(*corev1.Pod); ok {
		return factsOf(pod), nil
	}
	return o, nil
}

func factsOf(pod *corev1.Pod) *facts {
	f := &facts{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion, DeletionTimestamp: pod.DeletionTimestamp,
		},
		node:  pod.Spec.NodeName,
		phase: pod.Status.Phase,
	}
	if owner := metav1.GetControllerOf(pod); owner != nil {
		f.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	if name := pod.Annotations[v1alpha1.AnnotationContainer]; name != "" {
		f.Annotations = map[string]string{v1alpha1.AnnotationContainer: name}
	}
	for i := range pod.Spec.Containers {
		f.containers = append(f.containers, containerOf(pod, pod.Spec.Containers[i].Name))
	}
	f.template = pod.Annotations[v1alpha1.AnnotationTemplate]
	_, f.updated = pod.Annotations[v1alpha1.AnnotationReplaces]
	f.updating, f.updatingMessage = updating(pod)
	f.disrupted = slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue
	})
	f.reason, f.message = trouble(pod)
	return f
}

func containerOf(pod *corev1.Pod, name string) container {
	c := container{name: name}
	for _, s := range pod.Status.ContainerStatuses {
		if s.Name != name {
			continue
		}
		_, c.id, _ = strings.Cut(s.ContainerID, "://")
		c.restarts = s.RestartCount
		for _, ended := range []*corev1.ContainerStateTerminated{s.LastTerminationState.Terminated, s.State.Terminated} {
			if ended != nil {
				c.exitCode = &ended.ExitCode
			}
		}
		switch {
		case s.State.Running != nil:
			c.running, c.startedAt = true, s.State.Running.StartedAt.Time
		case s.State.Waiting != nil && !onItsWay(s.State.Waiting.Reason):
			c.reason, c.message = word(s.State.Waiting.Reason), s.State.Waiting.Message
		case s.State.Terminated != nil:
			c.reason = word(s.State.Terminated.Reason)
			c.message = fmt.Sprintf("container %s ended with exit code %d", name, s.State.Terminated.ExitCode)
			if s.State.Terminated.Message != "" {
				c.message += ": " + s.State.Terminated.Message
			}
		}
		c.message = short(c.message)
	}
	return c
}

// onItsWay says of the reason of a container that waits that nothing is wrong (pkg/kubelet: its default reasons).
func onItsWay(reason string) bool {
	return reason == "" || reason == "ContainerCreating" || reason == "PodInitializing"
}

// trouble is what is wrong with a Pod as a whole.
func trouble(pod *corev1.Pod) (reason, message string) {
	if pod.Status.Reason != "" || pod.Status.Message != "" {
		return word(pod.Status.Reason), short(pod.Status.Message)
	}
	if pod.Spec.NodeName == "" {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				return word(c.Reason), short(c.Message)
			}
		}
		return "", ""
	}
	if pod.Status.Phase == corev1.PodPending {
		for _, s := range pod.Status.InitContainerStatuses {
			if w := s.State.Waiting; w != nil && !onItsWay(w.Reason) {
				return word(w.Reason), short("init container " + s.Name + ": " + w.Message)
			}
		}
	}
	return "", ""
}

var reasonPattern = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$`)

// word is a reason as a condition takes it (metav1.Condition); none for what somebody wrote there that is no word.
func word(reason string) string {
	if len(reason) > 256 || !reasonPattern.MatchString(reason) {
		return ""
	}
	return reason
}

// maxMessage bounds what is kept of a message, in bytes: it goes into every write of a sandbox's status.
const maxMessage = 1024

func short(message string) string {
	if len(message) > maxMessage {
		return strings.ToValidUTF8(message[:maxMessage-3], "") + "..."
	}
	return message
}

// same says whether nothing that matters changed.
func (f *facts) same(other *facts) bool {
	a, b := *f, *other
	a.ResourceVersion, b.ResourceVersion = "", ""
	return reflect.DeepEqual(&a, &b)
}

// ownedBy says whether a sandbox is the Pod's controller.
func (f *facts) ownedBy(sb *v1alpha1.Sandbox) bool {
	return len(f.OwnerReferences) == 1 && f.OwnerReferences[0].UID == sb.UID
}

// view is the Pod of a sandbox.
func (f *facts) view(sb *v1alpha1.Sandbox) *scheduler.Pod {
	pod := &scheduler.Pod{
		Name: f.Name, UID: f.UID, Node: f.node, Phase: f.phase, Reason: f.reason, Message: f.message, Deleting: f.DeletionTimestamp != nil, Disrupted: f.disrupted,
	}
	if t := sb.Spec.Template; t != nil && f.template != "" {
		pod.Outdated = f.template != changeable(t)
		pod.Updated = f.updated && !pod.Outdated
		pod.Updating, pod.UpdatingMessage = f.updating, f.updatingMessage
	}
	name := f.Annotations[v1alpha1.AnnotationContainer]
	if ref := sb.Spec.PodRef; ref != nil && ref.Container != "" {
		name = ref.Container
	}
	for _, c := range f.containers {
		if name != "" && c.name != name {
			continue
		}
		pod.Container, pod.Running, pod.ContainerID = c.name, c.running, c.id
		pod.StartedAt, pod.Restarts, pod.ExitCode = c.startedAt, c.restarts, c.exitCode
		if pod.Reason == "" && pod.Message == "" {
			pod.Reason, pod.Message = c.reason, c.message
		}
		break
	}
	return pod
}
