package grpcapi

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// ClaimTimeout is the reason of a claim that had nothing when its time was over, and is Failed: unlike OPERATION_PENDING it is
// final.
const ClaimTimeout fault.Reason = "SANDBOX_CLAIM_TIMEOUT"

// claimService serves SandboxClaimService.
type claimService struct {
	sandboxv1.UnimplementedSandboxClaimServiceServer
	*Server
}

// CreateSandboxClaim stores a claim and, if asked, waits until it is over.
func (s *claimService) CreateSandboxClaim(ctx context.Context, req *sandboxv1.CreateSandboxClaimRequest) (*sandboxv1.SandboxClaim, error) {
	claim, err := newClaim(ctx, req.GetClaim())
	if err != nil {
		return nil, err
	}
	if err := s.permitPrograms(ctx, claim); err != nil {
		return nil, err
	}
	pools, err := s.pools(ctx, Access{Verb: "create", Resource: ResourceClaims, Namespace: claim.Namespace})
	if err != nil {
		return nil, err
	}
	waitCtx, cancel := s.waiting(ctx)
	defer cancel()
	if claim.Name != "" {
		claim, err = pools.Claims.Create(ctx, claim)
	} else {
		claim, err = createClaimNamed(ctx, pools.Claims, claim)
	}
	if err != nil {
		return nil, err
	}
	annotate(ctx, slog.String("uid", string(claim.UID)))
	if req.GetWait() {
		if claim, err = s.untilOver(ctx, waitCtx, pools.Claims, claim); err != nil {
			return nil, err
		}
	}
	return convert.ClaimProto(claim), nil
}

// permitPrograms asks for the right to create sandboxes, where a claim decides what runs in them. The admission policy of that
// (config/admission/sets.yaml) sees us and not the caller.
func (s *Server) permitPrograms(ctx context.Context, claim *agentsv1alpha1.SandboxClaim) error {
	u := claim.Spec.InplaceUpdate
	if len(claim.Spec.EnvVars) == 0 && (u == nil || u.Image == "") {
		return nil
	}
	if _, err := s.permit(ctx, Access{Verb: "create", Namespace: claim.Namespace}); err != nil {
		return fmt.Errorf("inplace_update.image and env_vars decide what runs in a sandbox, with its ServiceAccount and Secrets: %w", err)
	}
	return nil
}

// newClaim makes the object of a request and checks what a better answer can be given to than the API server's, whose
// schema and policies have the say in all else.
func newClaim(ctx context.Context, m *sandboxv1.SandboxClaim) (*agentsv1alpha1.SandboxClaim, error) {
	if m.GetSpec().GetTemplateName() == "" {
		return nil, invalid("the request names no SandboxSet: set claim.spec.template_name")
	}
	if err := checkTimes(m.GetSpec()); err != nil {
		return nil, err
	}
	read, err := convert.Claim(m)
	if err != nil {
		return nil, invalid("%v", err)
	}
	claim := &agentsv1alpha1.SandboxClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: cmp.Or(m.GetNamespace(), DefaultNamespace), Name: m.GetName(), Labels: m.GetLabels(), Annotations: m.GetAnnotations()},
		Spec:       read.Spec,
	}
	annotate(ctx, slog.String("kind", store.ClaimKind.String()), slog.String("object", store.KeyOf(claim).String()), slog.String("set", claim.Spec.TemplateName))
	if err := checkNamespace(claim.Namespace); err != nil {
		return nil, err
	}
	if claim.Name != "" {
		if err := store.ClaimKind.CheckKey(store.KeyOf(claim)); err != nil {
			return nil, err
		}
	}
	if err := store.SetKind.CheckKey(store.Key{Namespace: claim.Namespace, Name: claim.Spec.TemplateName}); err != nil {
		return nil, err
	}
	if n := claim.Spec.Replicas; n != nil && *n < 1 {
		return nil, invalid("claim.spec.replicas is %d: ask for 1 sandbox or more", *n)
	}
	return claim, checkVolumesOfClaim(claim.Spec.DynamicVolumesMount)
}

// checkTimes refuses times that no time is, as a message can have them.
func checkTimes(m *sandboxv1.SandboxClaimSpec) error {
	if d := m.GetClaimTimeout(); d != nil && (d.CheckValid() != nil || d.AsDuration() < 0) {
		return invalid("claim.spec.claim_timeout is no time, or a negative one")
	}
	// A negative one is that of a claim that is kept.
	if d := m.GetTtlAfterCompleted(); d != nil && d.CheckValid() != nil {
		return invalid("claim.spec.ttl_after_completed is no time")
	}
	if t := m.GetShutdownTime(); t != nil && t.CheckValid() != nil {
		return invalid("claim.spec.shutdown_time is no time")
	}
	return nil
}

// checkVolumesOfClaim checks volumes as they are checked when they are added to a sandbox.
func checkVolumesOfClaim(mounts []agentsv1alpha1.DynamicVolumeMount) error {
	if len(mounts) > maxVolumesOfClaim {
		return fault.New(errdefs.ErrInvalidArgument, fault.TooManyVolumes, "the claim asks for %d volumes: %d is the most", len(mounts), maxVolumesOfClaim)
	}
	var entries []v1alpha1.DynamicVolume
	for _, m := range mounts {
		e := v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePV, Source: m.PVName, Target: m.MountPath, SubPath: m.SubPath,
			Mode: v1alpha1.VolumeModeReadWrite, OnFailure: v1alpha1.OnFailureKeep}
		if err := volume.ValidateEntry(&e, volume.SandboxContext{}); err != nil {
			return err
		}
		entries = append(entries, e)
	}
	return volume.ValidateTargets(nil, entries)
}

// maxVolumesOfClaim is the most volumes of a claim, as its schema has it.
const maxVolumesOfClaim = 32

// createClaimNamed makes names of the set's until one is free; a second attempt is hardly ever needed.
func createClaimNamed(ctx context.Context, claims store.Writer[*agentsv1alpha1.SandboxClaim], claim *agentsv1alpha1.SandboxClaim) (*agentsv1alpha1.SandboxClaim, error) {
	const attempts = 5
	var err error
	for range attempts {
		named := claim.DeepCopy()
		// A set's name leaves room for this many characters in that of a sandbox; in that of a claim as well.
		named.Name = claim.Spec.TemplateName + "-" + rand.String(agentsv1alpha1.RandomSuffix)
		var created *agentsv1alpha1.SandboxClaim
		if created, err = claims.Create(ctx, named); !errdefs.IsAlreadyExists(err) {
			return created, err
		}
	}
	return nil, err
}

// untilOver waits until a claim is Completed, which is returned, or Failed, which is an error.
func (s *Server) untilOver(ctx, waitCtx context.Context, claims store.Follower[*agentsv1alpha1.SandboxClaim], claim *agentsv1alpha1.SandboxClaim) (*agentsv1alpha1.SandboxClaim, error) {
	key, last, seen := store.KeyOf(claim), claim, false
	waitCtx, cancel := s.untilStop(waitCtx)
	defer cancel()
	for event := range claims.Follow(waitCtx, key) {
		if event.Type == store.Synced && seen {
			continue
		}
		if event.Type != store.Changed || event.Object.UID != claim.UID {
			return nil, fault.New(errdefs.ErrNotFound, store.ClaimNotFound, "sandbox claim %s was deleted before it was over", key)
		}
		last, seen = event.Object, true
		switch last.Status.Phase {
		case agentsv1alpha1.ClaimCompleted:
			return last, nil
		case agentsv1alpha1.ClaimFailed:
			return nil, claimFailed(last)
		}
	}
	err := errStopping
	if ctx.Err() != nil || waitCtx.Err() == context.DeadlineExceeded {
		err = context.DeadlineExceeded
	}
	phase := string(cmp.Or(last.Status.Phase, agentsv1alpha1.ClaimPending))
	if c := claimed(last); c.Message != "" {
		phase += ": " + c.Message
	}
	return nil, stillPending(ctx, err, "sandbox claim %s is not over yet (%s); that goes on: wait for it with: fluxctl claim get %s --wait", key, phase, key.Name)
}

// claimed is a claim's condition Claimed; the zero value when there is none yet.
func claimed(claim *agentsv1alpha1.SandboxClaim) metav1.Condition {
	if c := meta.FindStatusCondition(claim.Status.Conditions, agentsv1alpha1.ClaimClaimed); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// claimFailed is why a claim is Failed, in the words of its condition. A reason that is none of ours (that of a Pod, say) is
// where the claim was when its time was over.
func claimFailed(claim *agentsv1alpha1.SandboxClaim) error {
	c := claimed(claim)
	reason := fault.Reason(c.Reason)
	kind := fault.KindOf(reason)
	switch {
	case reason == store.SetNotFound:
		kind = errdefs.ErrNotFound
	case errdefs.IsUnknown(kind):
		kind, reason = context.DeadlineExceeded, ClaimTimeout
	}
	return fault.New(kind, reason, "sandbox claim %s has failed: %s; it is kept: look with: fluxctl claim get %s", store.KeyOf(claim), c.Message, claim.Name)
}

// GetSandboxClaim reads a claim and, if asked, waits until it is over.
func (s *claimService) GetSandboxClaim(ctx context.Context, req *sandboxv1.GetSandboxClaimRequest) (*sandboxv1.SandboxClaim, error) {
	key, err := poolKey(ctx, store.ClaimKind, req.GetNamespace(), req.GetName())
	if err != nil {
		return nil, err
	}
	pools, err := s.pools(ctx, Access{Verb: "get", Resource: ResourceClaims, Namespace: key.Namespace, Name: key.Name})
	if err != nil {
		return nil, err
	}
	waitCtx, cancel := s.waiting(ctx)
	defer cancel()
	claim, err := pools.Claims.Get(ctx, key)
	if err == nil && req.GetWait() {
		claim, err = s.untilOver(ctx, waitCtx, pools.Claims, claim)
	}
	if err != nil {
		return nil, err
	}
	return convert.ClaimProto(claim), nil
}

// ListSandboxClaims lists claims by namespace and name.
func (s *claimService) ListSandboxClaims(ctx context.Context, req *sandboxv1.ListSandboxClaimsRequest) (*sandboxv1.ListSandboxClaimsResponse, error) {
	if err := checkNamespace(req.GetNamespace()); err != nil {
		return nil, err
	}
	pools, err := s.pools(ctx, Access{Verb: "list", Resource: ResourceClaims, Namespace: req.GetNamespace()})
	if err != nil {
		return nil, err
	}
	claims, next, err := listPage(ctx, req, pools.Claims, convert.ClaimProto)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.ListSandboxClaimsResponse{Claims: claims, NextPageToken: next}, nil
}

// DeleteSandboxClaim deletes a claim, with the sandboxes that it was given, and if asked waits until these are gone.
func (s *claimService) DeleteSandboxClaim(ctx context.Context, req *sandboxv1.DeleteSandboxClaimRequest) (*sandboxv1.DeleteSandboxClaimResponse, error) {
	key, err := poolKey(ctx, store.ClaimKind, req.GetNamespace(), req.GetName())
	if err != nil {
		return nil, err
	}
	pools, err := s.pools(ctx, Access{Verb: "delete", Resource: ResourceClaims, Namespace: key.Namespace, Name: key.Name})
	if err != nil {
		return nil, err
	}
	if err := deleteOwner(ctx, s.Server, pools.Claims, key, req.GetWait()); err != nil {
		return nil, err
	}
	return &sandboxv1.DeleteSandboxClaimResponse{}, nil
}
