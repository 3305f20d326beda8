package pods

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// wanted is what of a container can be changed while it runs.
type wanted struct {
	Name  string `json:"name"`
	Image string `json:"image"`
	// Limits and Requests have cpu and memory alone.
	Limits   map[string]string `json:"limits,omitempty"`
	Requests map[string]string `json:"requests,omitempty"`
}

// changeableResources are those that kubelet can change of a container that runs.
var changeableResources = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory}

// wantedOf is what of a template can be changed. A request that is left out is the limit, as it is in a new Pod.
func wantedOf(t *corev1.PodTemplateSpec) []wanted {
	var out []wanted
	for _, c := range t.Spec.Containers {
		w := wanted{Name: c.Name, Image: c.Image, Limits: map[string]string{}, Requests: map[string]string{}}
		for _, r := range changeableResources {
			limit, limited := c.Resources.Limits[r]
			request, requested := c.Resources.Requests[r]
			if limited {
				w.Limits[string(r)] = limit.String()
			}
			if requested {
				w.Requests[string(r)] = request.String()
			} else if limited {
				w.Requests[string(r)] = limit.String()
			}
		}
		out = append(out, w)
	}
	return out
}

// changeable tells what of a template can be changed from what it was. What the Pod has cannot be compared with the
// template instead: admission may have made something else of it.
func changeable(t *corev1.PodTemplateSpec) string {
	data, err := json.Marshal(wantedOf(t))
	if err != nil {
		panic(err) // strings alone
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:8])
}

// Update implements scheduler.Pods. The resources come first, and what tells that the Pod is up to date last, so that
// whatever is interrupted is done again.
func (p *Pods) Update(ctx context.Context, sb *v1alpha1.Sandbox, uid types.UID) error {
	pod, err := p.client.CoreV1().Pods(sb.Namespace).Get(ctx, sb.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return failed("read", sb.Namespace, sb.Name, err)
	case pod.UID != uid:
		return nil
	case sb.Spec.Template == nil || !factsOf(pod).ownedBy(sb):
		return fault.New(errdefs.ErrPermissionDenied, fault.Forbidden, "Pod %s/%s is not sandbox %s's and is not changed", pod.Namespace, pod.Name, sb.Name)
	}
	images, resources, replaces := changes(pod, wantedOf(sb.Spec.Template))
	patch := func(what string, metadata map[string]any, containers []any, subresources ...string) error {
		metadata["uid"] = uid
		data, err := json.Marshal(map[string]any{"metadata": metadata, "spec": map[string]any{"containers": containers}})
		if err != nil {
			return fmt.Errorf("write a patch of Pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
		err = failpoint.Step(steps, what, func() error {
			_, err := p.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, data, metav1.PatchOptions{}, subresources...)
			return err
		})
		if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // conflict: another has its name by now
			return nil
		}
		return failed(what, pod.Namespace, pod.Name, err)
	}
	if len(resources) > 0 {
		if err := patch(stepResize, map[string]any{}, resources, "resize"); err != nil {
			return err
		}
	}
	return patch(stepUpdate, map[string]any{"annotations": map[string]string{
		v1alpha1.AnnotationTemplate: changeable(sb.Spec.Template), v1alpha1.AnnotationReplaces: strings.Join(replaces, ",")}}, images)
}

// changes are the containers of a patch of a Pod's images, and of one of its resources, and the ids of the containers that the
// former replaces.
func changes(pod *corev1.Pod, want []wanted) (images, resources []any, replaces []string) {
	images = []any{}
	for _, id := range strings.Split(pod.Annotations[v1alpha1.AnnotationReplaces], ",") {
		if id != "" && slices.ContainsFunc(pod.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.ContainerID == id }) {
			replaces = append(replaces, id) // those of a change before, if they are there still
		}
	}
	for _, w := range want {
		i := slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == w.Name })
		if i < 0 {
			continue
		}
		has := &pod.Spec.Containers[i]
		if has.Image != w.Image {
			images = append(images, map[string]any{"name": w.Name, "image": w.Image})
			for _, s := range pod.Status.ContainerStatuses {
				if s.Name == w.Name && s.ContainerID != "" && !slices.Contains(replaces, s.ContainerID) {
					replaces = append(replaces, s.ContainerID)
				}
			}
		}
		if differ(has.Resources.Limits, w.Limits) || differ(has.Resources.Requests, w.Requests) {
			resources = append(resources, map[string]any{"name": w.Name, "resources": map[string]any{"limits": w.Limits, "requests": w.Requests}})
		}
	}
	return images, resources, replaces
}

func differ(has corev1.ResourceList, want map[string]string) bool {
	for r, quantity := range want {
		q, ok := has[corev1.ResourceName(r)]
		if wished, err := resource.ParseQuantity(quantity); !ok || err != nil || q.Cmp(wished) != 0 {
			return true
		}
	}
	return false
}

// updating is why a Pod does not run with what it got by Update yet; empty when it does.
func updating(pod *corev1.Pod) (reason, message string) {
	replaces, updated := pod.Annotations[v1alpha1.AnnotationReplaces]
	if !updated {
		return "", ""
	}
	for _, c := range pod.Status.Conditions {
		if c.Status == corev1.ConditionTrue && (c.Type == corev1.PodResizePending || c.Type == corev1.PodResizeInProgress) {
			return cmp.Or(word(c.Reason), "Resizing"), short(c.Message)
		}
	}
	if seen := pod.Status.ObservedGeneration; seen != 0 && seen < pod.Generation {
		return "NotSeen", "kubelet has not seen the change yet"
	}
	for _, s := range pod.Status.ContainerStatuses {
		if s.ContainerID != "" && slices.Contains(strings.Split(replaces, ","), s.ContainerID) {
			return "Restarting", "container " + s.Name + " is restarted with its new image"
		}
		if replaces != "" && s.State.Running == nil {
			if w := s.State.Waiting; w != nil && !onItsWay(w.Reason) {
				return cmp.Or(word(w.Reason), "Restarting"), short(w.Message)
			}
			return "Restarting", "container " + s.Name + " does not run yet"
		}
	}
	return "", ""
}
