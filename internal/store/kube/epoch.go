package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/containerd/errdefs"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/patch"
)

// epochAnnotation of the Lease has the epoch that was given out last, for people.
const epochAnnotation = "sandbox.flux.io/epoch"

// NextEpoch implements store.Store. An epoch is a resourceVersion of the leaders' Lease, and each is spent by a write
// that makes another. resourceVersions of one resource only grow, also across objects of the same name, so the epoch
// grows also when somebody deleted the Lease, where a counter in it (spec.leaseTransitions) would begin again.
//
// The caller holds the Lease. A renewal that comes in between is no harm: the next one finds the annotation there.
// Errors: ErrUnavailable, also when there is no Lease.
func (s *Store) NextEpoch(ctx context.Context) (int64, error) { return s.NextEpochOf(ctx, "") }

// NextEpochOf is NextEpoch for the leader of that identity: it fails with ErrConflict when the Lease has another holder by
// now. The empty identity asks for nothing.
func (s *Store) NextEpochOf(ctx context.Context, holder string) (int64, error) {
	for range maxAttempts {
		if err := ctx.Err(); err != nil {
			return 0, fmt.Errorf("count up the epoch: %w", err)
		}
		lease, err := s.leases.Get(ctx, s.lease, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return 0, fault.New(errdefs.ErrUnavailable, store.Unavailable, "count up the epoch: there is no Lease %q: only an elected leader has an epoch", s.lease)
		}
		if err != nil {
			return 0, fault.New(errdefs.ErrUnavailable, store.Unavailable, "count up the epoch: %w", err)
		}
		if holder != "" && !holds(lease, holder) {
			return 0, fault.New(errdefs.ErrConflict, fault.Conflict, "count up the epoch: another replica leads by now")
		}
		epoch, err := strconv.ParseInt(lease.ResourceVersion, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("count up the epoch: the Lease's resourceVersion: %w", err)
		}
		p, err := json.Marshal(spend(lease.UID, lease.ResourceVersion, lease.Annotations))
		if err != nil {
			return 0, fmt.Errorf("count up the epoch: %w", err)
		}
		_, err = s.leases.Patch(ctx, s.lease, types.JSONPatchType, p, metav1.PatchOptions{})
		switch {
		case err == nil:
			return epoch, nil
		case lost(err), apierrors.IsNotFound(err):
		default:
			return 0, fault.New(errdefs.ErrUnavailable, store.Unavailable, "count up the epoch: %w", err)
		}
	}
	return 0, fault.New(errdefs.ErrConflict, fault.Conflict, "count up the epoch: the Lease changed during each of %d attempts", maxAttempts)
}

// Leads asks the API server whether the leader of that identity leads still. A process cannot know by itself: it may have
// been suspended, and with it every clock that it could look at. Errors: ErrConflict when it does not, ErrUnavailable.
func (s *Store) Leads(ctx context.Context, holder string) error {
	lease, err := s.leases.Get(ctx, s.lease, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err), err == nil && !holds(lease, holder):
		return fault.New(errdefs.ErrConflict, fault.Conflict, "%s leads no longer: the Lease %q is another's by now, or is gone", holder, s.lease)
	case err != nil:
		return fault.New(errdefs.ErrUnavailable, store.Unavailable, "ask whether %s leads still: %w", holder, err)
	}
	return nil
}

func holds(lease *coordinationv1.Lease, identity string) bool {
	present := lease.Spec.HolderIdentity
	return present != nil && *present == identity
}

// spend is the patch that gives the Lease another version and notes the one that it had.
func spend(uid types.UID, version string, annotations map[string]string) patch.Patch {
	p := patch.Patch{
		{Op: "test", Path: "/metadata/uid", Value: uid},
		{Op: "test", Path: "/metadata/resourceVersion", Value: version},
	}
	if len(annotations) == 0 {
		return append(p, patch.Operation{Op: "add", Path: "/metadata/annotations", Value: map[string]string{epochAnnotation: version}})
	}
	return append(p, patch.Operation{Op: "add", Path: "/metadata/annotations/sandbox.flux.io~1epoch", Value: version})
}
