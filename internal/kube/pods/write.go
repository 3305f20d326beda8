package pods

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Every write to the API server has a step before and after it.
var steps = failpoint.Steps("pod", []string{"create", "delete", stepResize, stepUpdate})

// The steps of an update in place.
const (
	stepResize = "resize"
	stepUpdate = "update"
)

// Read implements scheduler.Pods.
func (p *Pods) Read(ctx context.Context, sb *v1alpha1.Sandbox) (*scheduler.Pod, error) {
	f, err := p.read(ctx, sb)
	if err != nil {
		return nil, err
	}
	return viewOf(f, sb), nil
}

// read asks the API server for the Pod that has the name, whoever's it is; nil when there is none.
func (p *Pods) read(ctx context.Context, sb *v1alpha1.Sandbox) (*facts, error) {
	name := sb.Name
	if sb.Spec.PodRef != nil {
		name = sb.Spec.PodRef.Name
	}
	pod, err := p.client.CoreV1().Pods(sb.Namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, failed("read", sb.Namespace, name, err)
	}
	return factsOf(pod), nil
}

// Create implements scheduler.Pods.
func (p *Pods) Create(ctx context.Context, sb *v1alpha1.Sandbox) error {
	if sb.Spec.Template == nil {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "sandbox %s/%s has no template to make a Pod from", sb.Namespace, sb.Name)
	}
	err := failpoint.Step(steps, "create", func() error {
		_, err := p.client.CoreV1().Pods(sb.Namespace).Create(ctx, podOf(sb), metav1.CreateOptions{})
		return err
	})
	if err == nil {
		p.log.Info("made a Pod", "sandbox", store.KeyOf(sb).String(), "tenant", sb.Spec.TenantID)
		return nil
	}
	if !apierrors.IsAlreadyExists(err) {
		return failed("create", sb.Namespace, sb.Name, err)
	}
	there, err := p.read(ctx, sb)
	switch {
	case err != nil:
		return err
	case there == nil, there.ownedBy(sb) && there.DeletionTimestamp != nil:
		return fault.New(errdefs.ErrUnavailable, store.Unavailable, "Pod %s/%s is just being deleted: it is made again when it is gone", sb.Namespace, sb.Name)
	case there.ownedBy(sb):
		return nil
	}
	return fault.New(errdefs.ErrAlreadyExists, fault.PodNameTaken,
		"there is a Pod %s in Namespace %s that this sandbox does not own (%s), and it is left alone: delete it, or give the sandbox another name, or podRef to use it",
		sb.Name, sb.Namespace, ownerOf(there))
}

func ownerOf(f *facts) string {
	if len(f.OwnerReferences) == 0 {
		return "nobody does"
	}
	return f.OwnerReferences[0].Kind + " " + f.OwnerReferences[0].Name + " does"
}

// podOf is the Pod that a sandbox's template describes, with the claims of its volumeClaimTemplates.
func podOf(sb *v1alpha1.Sandbox) *corev1.Pod {
	t := sb.Spec.Template.DeepCopy()
	labels := maps.Clone(t.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[v1alpha1.LabelSandbox] = sb.Name
	annotations := maps.Clone(t.Annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[v1alpha1.AnnotationTemplate] = changeable(sb.Spec.Template)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: sb.Namespace, Name: sb.Name, Labels: labels, Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(sb, v1alpha1.GroupVersion.WithKind("Sandbox"))},
		},
		Spec: withClaims(t.Spec, sb),
	}
}

// withClaims gives a Pod a volume for each of its sandbox's claims, in place of one of that name in the template. It is placed by
// the scheduler then, also where the template names its node: nobody else has a claim bound that waits for its first consumer.
func withClaims(spec corev1.PodSpec, sb *v1alpha1.Sandbox) corev1.PodSpec {
	if spec.NodeName != "" && len(sb.Spec.VolumeClaimTemplates) > 0 {
		requireNode(&spec, spec.NodeName)
		spec.NodeName = ""
	}
	for i := range sb.Spec.VolumeClaimTemplates {
		t := &sb.Spec.VolumeClaimTemplates[i]
		spec.Volumes = append(slices.DeleteFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == t.Name }), corev1.Volume{
			Name: t.Name, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: v1alpha1.ClaimName(t, sb.Name)}},
		})
	}
	return spec
}

// requireNode has a Pod placed on a node, beside what else it requires of it.
func requireNode(spec *corev1.PodSpec, node string) {
	if spec.Affinity == nil {
		spec.Affinity = &corev1.Affinity{}
	}
	if spec.Affinity.NodeAffinity == nil {
		spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	required := &spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if *required == nil {
		*required = &corev1.NodeSelector{NodeSelectorTerms: make([]corev1.NodeSelectorTerm, 1)}
	}
	for i := range (*required).NodeSelectorTerms {
		t := &(*required).NodeSelectorTerms[i]
		t.MatchFields = append(t.MatchFields, corev1.NodeSelectorRequirement{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}})
	}
}

// Delete implements scheduler.Pods.
func (p *Pods) Delete(ctx context.Context, sb *v1alpha1.Sandbox, uid types.UID) error {
	return p.delete(ctx, sb, uid, nil)
}

// Kill implements scheduler.Pods.
func (p *Pods) Kill(ctx context.Context, sb *v1alpha1.Sandbox, uid types.UID) error {
	there, err := p.read(ctx, sb)
	if err != nil || there == nil || there.UID != uid {
		return err
	}
	node, err := p.client.CoreV1().Nodes().Get(ctx, there.node, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return fault.New(errdefs.ErrUnavailable, store.Unavailable, "read node %s, before Pod %s/%s is taken away: %w", there.node, sb.Namespace, sb.Name, err)
	case !slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService }):
		return fault.New(errdefs.ErrUnavailable, store.Unavailable, "node %s is there, and not out of service: Pod %s/%s is left to it", there.node, sb.Namespace, sb.Name)
	}
	return p.delete(ctx, sb, uid, ptr.To(int64(0)))
}

func (p *Pods) delete(ctx context.Context, sb *v1alpha1.Sandbox, uid types.UID, grace *int64) error {
	there, err := p.read(ctx, sb)
	switch {
	case err != nil:
		return err
	case there == nil || there.UID != uid:
		return nil
	case sb.Spec.Template == nil || !there.ownedBy(sb):
		return fault.New(errdefs.ErrPermissionDenied, fault.Forbidden, "Pod %s/%s is not sandbox %s's and is not deleted", there.Namespace, there.Name, sb.Name)
	}
	err = failpoint.Step(steps, "delete", func() error {
		return p.client.CoreV1().Pods(sb.Namespace).Delete(ctx, sb.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}, GracePeriodSeconds: grace})
	})
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // conflict: another has its name by now
		return nil
	}
	return failed("delete", sb.Namespace, sb.Name, err)
}

// failed gives an error of the API server its kind and reason.
func failed(verb, namespace, name string, err error) error {
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s Pod %s/%s: %w", verb, namespace, name, err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsForbidden(err), apierrors.IsNotFound(err):
		// By its validation, an admission policy, a quota, our own rights, or as the Namespace is gone.
		return fault.New(errdefs.ErrFailedPrecondition, fault.PodRefused, "%s Pod %s/%s: the API server refuses it: %w", verb, namespace, name, err)
	}
	return fault.New(errdefs.ErrUnavailable, store.Unavailable, "%s Pod %s/%s: %w", verb, namespace, name, err)
}
