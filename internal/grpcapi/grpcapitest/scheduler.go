package grpcapitest

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// Node is the name of the node that every sandbox gets.
const Node = "node-1"

// Epoch is the time of everything in the test.
var Epoch = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

// Fate is what becomes of a sandbox or of a volume. The zero value is success.
type Fate struct {
	// Hold leaves it as it is on the way: a sandbox Pending, a volume Attaching or Detaching.
	Hold bool
	// Reason and Message make it fail; a sandbox stays Pending with them.
	Reason  fault.Reason
	Message string
	// Phase is the phase of a sandbox instead of Running.
	Phase v1alpha1.SandboxPhase
	// Holders keep a volume busy.
	Holders []v1alpha1.VolumeHolder
	// Row changes the row of a mounted volume.
	Row func(*v1alpha1.VolumeStatus)
}

// Scheduler plays the scheduler runtime.
type Scheduler struct {
	sandboxes store.Sandboxes
	errors    chan<- error
	kick      chan struct{}

	mu    sync.Mutex // guards fates and operations
	fates map[string]Fate
	// operations counts the operations for their ids.
	operations int
}

// Set decides the fate of what has this image (of a sandbox), source (of a volume) or name (of a sandbox that
// is deleted), and has everything looked at again.
func (s *Scheduler) Set(what string, fate Fate) {
	s.mu.Lock()
	s.fates[what] = fate
	s.mu.Unlock()
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

func (s *Scheduler) fate(what string) Fate {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fates[what]
}

func (s *Scheduler) operation() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.operations++
	return "op-" + strconv.Itoa(s.operations)
}

// run looks at every sandbox that changes, and at all of them after Set.
func (s *Scheduler) run(ctx context.Context) {
	changed := make(chan *v1alpha1.Sandbox)
	go func() {
		defer close(changed)
		for event := range s.sandboxes.Follow(ctx) {
			if event.Type != store.Changed {
				continue
			}
			select {
			case changed <- event.Object:
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		select {
		case sb, ok := <-changed:
			if !ok {
				return
			}
			s.report(ctx, s.reconcile(ctx, sb))
		case <-s.kick:
			page, err := s.sandboxes.List(ctx, store.ListOptions{})
			s.report(ctx, err)
			for _, sb := range page.Items {
				s.report(ctx, s.reconcile(ctx, sb))
			}
		}
	}
}

func (s *Scheduler) report(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil || errdefs.IsNotFound(err) {
		return
	}
	select {
	case s.errors <- fmt.Errorf("scheduler: %w", err):
	default:
	}
}

// reconcile writes the status of a sandbox, then what becomes of its entries.
func (s *Scheduler) reconcile(ctx context.Context, sb *v1alpha1.Sandbox) error {
	key, pre := store.KeyOf(sb), store.Preconditions{UID: sb.UID}
	if sb.DeletionTimestamp != nil {
		if s.fate(sb.Name).Hold {
			return nil
		}
		_, err := s.sandboxes.UpdateSpec(ctx, key, pre, func(fresh *v1alpha1.Sandbox) error {
			fresh.Finalizers = nil
			return nil
		})
		return err
	}
	var drop, refuse []string
	written, err := s.sandboxes.UpdateStatus(ctx, key, pre, func(fresh *v1alpha1.Sandbox) error {
		drop, refuse = nil, nil
		s.setPhase(fresh)
		var rows []v1alpha1.VolumeStatus
		for i := range fresh.Spec.VolumeMounts {
			e := volume.FromStatic(&fresh.Spec.VolumeMounts[i])
			rows = append(rows, s.row(fresh, v1alpha1.VolumeKindStatic, e, &drop, &refuse))
		}
		for _, e := range fresh.Spec.DynamicVolumes {
			rows = append(rows, s.row(fresh, v1alpha1.VolumeKindDynamic, e, &drop, &refuse))
		}
		for _, old := range fresh.Status.Volumes {
			left := old.Phase == v1alpha1.VolumeFailed && old.OnFailure == v1alpha1.OnFailureRemove || old.DetachState == v1alpha1.DetachLazy
			if left && !slices.ContainsFunc(rows, func(r v1alpha1.VolumeStatus) bool { return r.Target == old.Target }) {
				rows = append(rows, old)
			}
		}
		// A volume that is detached and not held any more leaves nothing behind.
		rows = slices.DeleteFunc(rows, func(r v1alpha1.VolumeStatus) bool {
			return slices.Contains(drop, r.EntryHash) && r.Phase == v1alpha1.VolumeDetaching && r.DetachState == ""
		})
		fresh.Status.Volumes = rows
		mounted := 0
		for _, r := range rows {
			if r.Phase == v1alpha1.VolumeMounted {
				mounted++
			}
		}
		fresh.Status.VolumesReady = fmt.Sprintf("%d/%d", mounted, len(rows))
		return nil
	})
	if err != nil || len(drop)+len(refuse) == 0 {
		return err
	}
	_, err = s.sandboxes.UpdateSpec(ctx, store.KeyOf(written), pre, func(fresh *v1alpha1.Sandbox) error {
		fresh.Spec.DynamicVolumes = slices.DeleteFunc(fresh.Spec.DynamicVolumes, func(e v1alpha1.DynamicVolume) bool {
			return slices.Contains(drop, volume.EntryHash(&e))
		})
		for i, e := range fresh.Spec.DynamicVolumes {
			if e.Detach != nil && slices.Contains(refuse, e.Detach.RequestID) {
				fresh.Spec.DynamicVolumes[i].Detach = nil
			}
		}
		return nil
	})
	return err
}

func (s *Scheduler) setPhase(sb *v1alpha1.Sandbox) {
	fate := s.fate(sb.Spec.Image)
	st := &sb.Status
	st.Reason, st.Message, st.ObservedGeneration = "", "", sb.Generation
	switch {
	case fate.Hold:
		st.Phase = v1alpha1.SandboxPending
		return
	case fate.Reason != "":
		st.Phase, st.Reason, st.Message = v1alpha1.SandboxPending, string(fate.Reason), fate.Message
		return
	case sb.Spec.Paused:
		st.Phase = v1alpha1.SandboxPaused
	case fate.Phase != "":
		st.Phase = fate.Phase
	default:
		st.Phase = v1alpha1.SandboxRunning
	}
	st.Node, st.ContainerID = Node, "container-of-"+sb.Name
}

// row is the row of an entry, and what is to become of the entry itself.
func (s *Scheduler) row(sb *v1alpha1.Sandbox, kind v1alpha1.VolumeKind, e v1alpha1.DynamicVolume, drop, refuse *[]string) v1alpha1.VolumeStatus {
	volume.Default(&e, sb.Spec.TenantID)
	hash, fate := volume.EntryHash(&e), s.fate(e.Source)
	row := v1alpha1.VolumeStatus{
		Kind: kind, VolumeType: e.VolumeType, Source: e.Source, Target: e.Target, Mode: e.Mode, SizeLimit: e.SizeLimit,
		TenantID: e.TenantID, SubPath: e.SubPath, ForceMount: e.ForceMount, OnFailure: e.OnFailure, RequestID: e.RequestID,
		EntryHash: hash, ObservedGeneration: sb.Generation, Since: metav1.NewTime(Epoch), Phase: v1alpha1.VolumePending,
	}
	if i := slices.IndexFunc(sb.Status.Volumes, func(r v1alpha1.VolumeStatus) bool { return r.EntryHash == hash }); i >= 0 {
		row = sb.Status.Volumes[i]
	}
	if e.Detach != nil {
		row.RequestID, row.DetachState, row.Holders = e.Detach.RequestID, "", nil
		switch {
		case fate.Hold:
			row.Phase = v1alpha1.VolumeDetaching
			return row
		case len(fate.Holders) > 0 && !e.Detach.Force:
			row.Reason, row.DetachState, row.Holders = string(fault.Busy), v1alpha1.DetachBusy, fate.Holders
			*refuse = append(*refuse, e.Detach.RequestID)
			return row
		case len(fate.Holders) > 0:
			row.DetachState = v1alpha1.DetachLazy
		}
		row.Phase, row.Reason = v1alpha1.VolumeDetaching, ""
		*drop = append(*drop, hash)
		return row
	}
	if sb.Status.Phase != v1alpha1.SandboxRunning {
		row.Phase = v1alpha1.VolumePending
		return row
	}
	if row.Phase == v1alpha1.VolumeMounted || row.Phase == v1alpha1.VolumeFailed {
		return row
	}
	if row.OperationID == "" {
		row.OperationID = s.operation()
	}
	switch {
	case fate.Hold:
		row.Phase = v1alpha1.VolumeAttaching
	case fate.Reason != "":
		row.Phase, row.Reason, row.Message, row.Attempts = v1alpha1.VolumeFailed, string(fate.Reason), fate.Message, 1
		if e.OnFailure == v1alpha1.OnFailureRemove {
			*drop = append(*drop, hash)
		}
	default:
		row.Phase, row.Path, row.LimitEnforcement, row.Attached = v1alpha1.VolumeMounted, v1alpha1.VolumePathLocal, v1alpha1.LimitNone, v1alpha1.AttachedLive
		if e.SizeLimit != "" {
			row.LimitEnforcement = v1alpha1.LimitImage
		}
		if fate.Row != nil {
			fate.Row(&row)
		}
	}
	return row
}
