package claimtemplates

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Every write to the API server has a step before and after it.
var steps = failpoint.Steps("claim-template", []string{"create", "settle"})

// Ensure implements scheduler.Claims.
func (c *Claims) Ensure(ctx context.Context, sb *v1alpha1.Sandbox) (made []string, err error) {
	for i := range sb.Spec.VolumeClaimTemplates {
		template := &sb.Spec.VolumeClaimTemplates[i]
		name := v1alpha1.ClaimName(template, sb.Name)
		there, err := c.ensure(ctx, sb, template)
		if err != nil {
			return made, err
		}
		if !there {
			made = append(made, name)
			c.log.Info("made a claim", "claim", name, "sandbox", store.KeyOf(sb).String(), "tenant", sb.Spec.TenantID)
		}
	}
	return made, nil
}

// ensure has one claim be there, and says whether it was.
func (c *Claims) ensure(ctx context.Context, sb *v1alpha1.Sandbox, template *corev1.PersistentVolumeClaim) (there bool, err error) {
	name := v1alpha1.ClaimName(template, sb.Name)
	claim, err := c.read(ctx, sb, name, c.isKnown(sb, name))
	if err != nil {
		return false, err
	}
	if claim == nil {
		err := failpoint.Step(steps, "create", func() error {
			_, err := c.client.CoreV1().PersistentVolumeClaims(sb.Namespace).Create(ctx, claimOf(sb, template), metav1.CreateOptions{})
			return err
		})
		switch {
		case err == nil:
			return false, nil
		case !apierrors.IsAlreadyExists(err):
			return false, failed("create", sb.Namespace, name, err)
		}
		if claim, err = c.read(ctx, sb, name, true); err != nil {
			return false, err
		}
		if claim == nil {
			return false, fault.New(errdefs.ErrUnavailable, store.Unavailable, "claim %s/%s was there a moment ago and is gone: it is made again", sb.Namespace, name)
		}
	}
	switch mine := isOf(claim, sb); {
	case !mine && !mayAdopt(claim, sb):
		return false, fault.New(errdefs.ErrAlreadyExists, fault.ClaimNameTaken,
			"there is a claim %s in Namespace %s that is not this sandbox's (%s), and it is left alone: delete it, give the sandbox another name, or label it %s=%s to let the sandbox use it",
			name, sb.Namespace, whose(claim), v1alpha1.LabelAdopt, sb.Name)
	case claim.DeletionTimestamp != nil:
		return false, fault.New(errdefs.ErrUnavailable, fault.ClaimTerminating,
			"claim %s/%s is being deleted, which its finalizers hold up (%s): a new, empty one is made when it is gone; if it stays, look who else uses it",
			sb.Namespace, name, strings.Join(claim.Finalizers, ", "))
	}
	return true, c.settle(ctx, sb, claim)
}

// isKnown says whether the watch has told of a claim of that name that is the sandbox's.
func (c *Claims) isKnown(sb *v1alpha1.Sandbox, name string) bool {
	_, known, err := c.informer.GetStore().GetByKey(store.Key{Namespace: sb.Namespace, Name: name}.String())
	return known && err == nil
}

// read asks the API server for a claim that is likely to be there; nil when it is not, or need not be asked for.
func (c *Claims) read(ctx context.Context, sb *v1alpha1.Sandbox, name string, likely bool) (*corev1.PersistentVolumeClaim, error) {
	if !likely {
		return nil, nil
	}
	claim, err := c.client.CoreV1().PersistentVolumeClaims(sb.Namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, failed("read", sb.Namespace, name, err)
	}
	return claim, nil
}

// Settle implements scheduler.Claims.
func (c *Claims) Settle(ctx context.Context, sb *v1alpha1.Sandbox) error {
	for i := range sb.Spec.VolumeClaimTemplates {
		claim, err := c.read(ctx, sb, v1alpha1.ClaimName(&sb.Spec.VolumeClaimTemplates[i], sb.Name), true)
		if err != nil {
			return err
		}
		if claim == nil || !isOf(claim, sb) {
			continue
		}
		if err := c.settle(ctx, sb, claim); err != nil {
			return err
		}
	}
	return nil
}

// settle has a claim bear our labels, and outlive the sandbox or not, with one patch if anything is not as it has to be.
func (c *Claims) settle(ctx context.Context, sb *v1alpha1.Sandbox, claim *corev1.PersistentVolumeClaim) error {
	goes := sb.Spec.PersistentVolumeClaimRetentionPolicy.Deleted() == v1alpha1.RetentionDelete && claim.Labels[v1alpha1.LabelAdopt] != sb.Name
	if claim.Labels[v1alpha1.LabelSandboxUID] == string(sb.UID) && claim.Labels[v1alpha1.LabelSandbox] == sb.Name && hasOwner(claim, sb.UID) == goes {
		return nil
	}
	owners := slices.DeleteFunc(slices.Clone(claim.OwnerReferences), func(o metav1.OwnerReference) bool { return o.UID == sb.UID })
	if goes {
		owners = append(owners, owner(sb))
	}
	if owners == nil {
		owners = []metav1.OwnerReference{}
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": claim.UID, "resourceVersion": claim.ResourceVersion, "labels": labels(sb), "ownerReferences": owners}})
	if err != nil {
		return fmt.Errorf("write a patch of claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	err = failpoint.Step(steps, "settle", func() error {
		_, err := c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Patch(ctx, claim.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return failed("change", claim.Namespace, claim.Name, err)
	}
	return nil
}

// claimOf is the claim that a template describes.
func claimOf(sb *v1alpha1.Sandbox, template *corev1.PersistentVolumeClaim) *corev1.PersistentVolumeClaim {
	t := template.DeepCopy()
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: sb.Namespace, Name: v1alpha1.ClaimName(template, sb.Name), Labels: t.Labels, Annotations: t.Annotations},
		Spec:       t.Spec,
	}
	if claim.Labels == nil {
		claim.Labels = map[string]string{}
	}
	maps.Copy(claim.Labels, labels(sb))
	if sb.Spec.PersistentVolumeClaimRetentionPolicy.Deleted() == v1alpha1.RetentionDelete {
		claim.OwnerReferences = []metav1.OwnerReference{owner(sb)}
	}
	return claim
}

func labels(sb *v1alpha1.Sandbox) map[string]string {
	return map[string]string{v1alpha1.LabelSandbox: sb.Name, v1alpha1.LabelSandboxUID: string(sb.UID)}
}

func owner(sb *v1alpha1.Sandbox) metav1.OwnerReference {
	return *metav1.NewControllerRef(sb, v1alpha1.GroupVersion.WithKind("Sandbox"))
}

func hasOwner(claim *corev1.PersistentVolumeClaim, uid types.UID) bool {
	return slices.ContainsFunc(claim.OwnerReferences, func(o metav1.OwnerReference) bool { return o.UID == uid })
}

// isOf says whether a claim is a sandbox's.
func isOf(claim *corev1.PersistentVolumeClaim, sb *v1alpha1.Sandbox) bool {
	controller := metav1.GetControllerOf(claim)
	if controller != nil {
		return controller.UID == sb.UID
	}
	return claim.Labels[v1alpha1.LabelSandboxUID] == string(sb.UID)
}

// mayAdopt says whether whoever made the claim lets the sandbox use it.
func mayAdopt(claim *corev1.PersistentVolumeClaim, sb *v1alpha1.Sandbox) bool {
	return metav1.GetControllerOf(claim) == nil && claim.Labels[v1alpha1.LabelAdopt] == sb.Name
}

// whose says whose a claim is that is not the sandbox's.
func whose(claim *corev1.PersistentVolumeClaim) string {
	if controller := metav1.GetControllerOf(claim); controller != nil {
		return fmt.Sprintf("%s %s owns it", controller.Kind, controller.Name)
	}
	if uid := claim.Labels[v1alpha1.LabelSandboxUID]; uid != "" {
		return fmt.Sprintf("it was kept of a sandbox %s with UID %s", claim.Labels[v1alpha1.LabelSandbox], uid)
	}
	return "somebody else made it"
}

// failed gives an error of the API server its kind and reason.
func failed(verb, namespace, name string, err error) error {
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s claim %s/%s: %w", verb, namespace, name, err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsForbidden(err), apierrors.IsNotFound(err):
		// By its validation, an admission policy, a quota, our own rights, or as the Namespace is gone.
		return fault.New(errdefs.ErrFailedPrecondition, fault.ClaimRefused, "%s claim %s/%s: the API server refuses it: %w", verb, namespace, name, err)
	}
	return fault.New(errdefs.ErrUnavailable, store.Unavailable, "%s claim %s/%s: %w", verb, namespace, name, err)
}
