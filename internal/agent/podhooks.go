package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/pods"
)

// podHandler is what internal/pods tells of the node's Pods.
type podHandler struct{ a *Agent }

// Wants says whether a container has volumes of ours. It is asked for every container that starts on the node.
func (h podHandler) Wants(ref pods.Ref) bool {
	sb, ok := h.a.podAt(ref)
	return ok && len(h.a.journal.Volumes(sb.uid)) > 0
}

// Starting attaches what waits for a container before its process begins. What is not there by the context's end is
// attached while the container runs already.
func (h podHandler) Starting(ctx context.Context, c pods.Container) {
	sb, ok := h.a.podAt(c.Ref)
	if !ok || h.a.stopping.Err() != nil {
		return
	}
	done := make(chan struct{})
	var late atomic.Bool
	h.a.work(func() {
		defer close(done)
		h.a.podStarting(ctx, sb, c, &late)
	})
	select {
	case <-done:
	case <-ctx.Done():
		late.Store(true)
		h.a.log.Warn("a container starts before all of its volumes are attached", "sandbox", sb.uid, "container", c.ID)
	}
}

// Changed has the agent look at a Pod, or at all.
func (h podHandler) Changed(podUID string) {
	if h.a.stopping.Err() != nil {
		return
	}
	h.a.mu.Lock()
	var changed []*sandbox
	for ref, sb := range h.a.podIndex {
		if podUID == "" || ref.PodUID == podUID {
			changed = append(changed, sb)
		}
	}
	h.a.mu.Unlock()
	for _, sb := range changed {
		h.a.lookAtPod(sb)
	}
}

// podStarting attaches what waits for a container that was created. ctx is the time until it starts; what was begun goes
// on after that.
func (a *Agent) podStarting(ctx context.Context, sb *sandbox, c pods.Container, late *atomic.Bool) {
	began := a.config.Clock.Now()
	release, err := sb.alone(ctx)
	if err != nil {
		a.log.Warn("a container starts while another operation on it is under way; its volumes are attached after it", "sandbox", sb.uid, "error", err)
		return
	}
	p, _ := sb.podIdentity()
	if sb.ctx.Err() != nil || p.UID != c.PodUID || p.Container != c.Container {
		release() // being deleted, or another Pod's by now
		return
	}
	err = a.adopt(sb, &c, true)
	release()
	if err != nil {
		a.log.Error("a container that starts could not be recorded; its volumes are attached later", "sandbox", sb.uid, "error", err)
		return
	}
	_ = a.attachToPod(a.stopping, sb, c.ID, late) // noted and tried again
	a.log.Info("a container starts", "sandbox", sb.uid, "container", c.ID, "late", late.Load(), "duration", a.config.Clock.Since(began))
}

// lookAtPod reads the state of a Pod's container, and attaches what waits for it, on a goroutine of its own. Looks that are
// asked for while one is under way are one more.
func (a *Agent) lookAtPod(sb *sandbox) {
	sb.mu.Lock()
	p := sb.pod
	busy := p.looking
	p.looking, p.again = true, busy
	sb.mu.Unlock()
	if busy {
		return
	}
	a.work(func() {
		for {
			if err := a.lookAtPodOnce(sb); err != nil && a.stopping.Err() == nil {
				a.log.Error("a Pod's container could not be looked at; it is tried again", "sandbox", sb.uid, "error", err)
				sb.setTrouble(err)
				a.changed(sb.uid)
			}
			sb.mu.Lock()
			again := p.again && a.stopping.Err() == nil
			p.looking, p.again = again, false
			sb.mu.Unlock()
			if !again {
				return
			}
		}
	})
}

func (a *Agent) lookAtPodOnce(sb *sandbox) error {
	if p, _ := sb.podIdentity(); p.Gone || sb.ctx.Err() != nil || a.config.Pods == nil {
		return nil // its deletion looks itself
	}
	ctx, cancel := context.WithTimeout(a.stopping, restartReady)
	defer cancel()
	// Without the life lock, for which a volume that hangs could make everybody wait.
	unchanged, err := a.unchangedPod(ctx, sb)
	if err != nil {
		return err
	}
	if !unchanged {
		release, err := sb.alone(ctx)
		if err != nil {
			return err
		}
		if sb.ctx.Err() == nil {
			err = a.readPod(ctx, sb)
		}
		release()
		if err != nil {
			return err
		}
	}
	sb.mu.Lock()
	c := sb.pod.container
	sb.mu.Unlock()
	// One that was only created belongs to the hook. Its start is another event.
	if c.Started {
		_ = a.attachToPod(ctx, sb, c.ID, nil) // noted and tried again
	}
	return nil
}

// attachToPod attaches every volume that waits for a container: each on its own, so that one whose source hangs keeps no
// other from being there in time. late says whether the container was started meanwhile; nil for one that was started
// before.
func (a *Agent) attachToPod(ctx context.Context, sb *sandbox, containerID string, late *atomic.Bool) error {
	ctx, cancel := context.WithTimeout(ctx, restartReady)
	defer cancel()
	missing := slices.DeleteFunc(a.journal.Volumes(sb.uid), func(v journal.Volume) bool { return !waits(v) })
	errs := make([]error, len(missing))
	var all sync.WaitGroup
	for i, v := range missing {
		all.Go(func() { errs[i] = a.updater.attachLate(ctx, sb, v, containerID, late) })
	}
	all.Wait()
	err := errors.Join(errs...)
	if sb.setTrouble(err) && err != nil {
		a.log.Warn("volumes could not be attached to a Pod's container; it is tried again", "sandbox", sb.uid, "container", containerID, "error", err)
	}
	if len(missing) > 0 {
		a.changed(sb.uid)
	}
	return err
}

// attachLate attaches a volume that waits to a Pod's container.
func (u *ContainerMountUpdater) attachLate(ctx context.Context, sb *sandbox, wanted journal.Volume, containerID string, late *atomic.Bool) error {
	ctx, cancel := joined(ctx, sb.ctx)
	defer cancel()
	unlock, err := sb.lockTarget(ctx, wanted.Target)
	if err != nil {
		return err
	}
	defer unlock()
	record, ok := u.journal.VolumeAt(sb.uid, wanted.Target)
	if !ok || record.ID != wanted.ID || !waits(record) {
		return nil // detached, or attached, meanwhile
	}
	r := &readyVolume{timing: newStages(u.clock, attachFailpoints), attached: v1alpha1.AttachedAfterStart}
	defer r.close()
	if err := u.ready(ctx, record.Request, r, true); err != nil {
		return fmt.Errorf("attach %s: %w", record.Target, err)
	}
	release, err := sb.share(ctx)
	if err != nil {
		return err
	}
	defer release()
	if record, ok = u.journal.VolumeAt(sb.uid, wanted.Target); !ok || record.ID != wanted.ID || !waits(record) {
		return nil
	}
	c, ok := sb.seen()
	if !ok || c.ID != containerID || c.State != containers.Running {
		return nil // it ended; the next one begins anew
	}
	if err := sb.takesVolume(record.Target); err != nil {
		return err
	}
	if record.Phase != journal.Waiting { // of unknown outcome
		if err := u.clear(ctx, sb, record); err != nil {
			return err
		}
		record = waiting(record)
	} else if !record.Left.IsZero() && sb.isCreating(containerID) {
		// An agent that was killed while runc waited for it had attached it already.
		left := record
		left.Mount = record.Left
		if err := u.clear(ctx, sb, left); err != nil {
			return err
		}
	}
	if late != nil && !late.Load() {
		r.attached = v1alpha1.AttachedBeforeStart
	}
	placed, err := u.place(ctx, sb, record, r, u.journal.Write)
	if err != nil {
		if !mayBeMounted(err) {
			if putErr := u.put(record); putErr != nil {
				err = incomplete(err, putErr)
			}
		}
		return err
	}
	if placed.Attached == v1alpha1.AttachedBeforeStart && late.Load() {
		placed.Attached = v1alpha1.AttachedAfterStart
		return u.put(placed)
	}
	return nil
}
