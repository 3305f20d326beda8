package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// create makes the sandbox's container with a task that is created and not started, and attaches what waits for it. A
// sandbox that is there is left as it is, whatever the specification says by now: one whose task has ended gets a new one
// on its own root filesystem.
func (a *Agent) create(ctx context.Context, spec containers.Spec, fence func() error) error {
	if err := a.notAPod(spec.UID); err != nil {
		return err
	}
	sb := a.sandbox(spec.UID)
	ready, err := a.readyWaiting(ctx, sb)
	if err != nil {
		return err
	}
	defer ready.close()
	release, err := sb.alone(ctx)
	if err != nil {
		return err
	}
	defer release()
	if sb.ctx.Err() != nil {
		return context.Cause(sb.ctx)
	}
	if err := fence(); err != nil {
		return err
	}
	for _, v := range a.journal.Volumes(spec.UID) {
		if v.Request.TenantID != spec.TenantID {
			return fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch,
				"sandbox %s is to be made for tenant %q, and volumes of tenant %q wait for it", spec.UID, spec.TenantID, v.Request.TenantID)
		}
	}
	defer a.changed(spec.UID)
	c, ok := sb.seen()
	if !ok || !hasTask(c) {
		if err := failpoint.Step(sandboxFailpoints, stepJournalCreated, func() error {
			return a.updateSandbox(spec.UID, journal.Change{}, func(s *journal.Sandbox) {
				s.Desired, s.ExitCode, s.ExitReason, s.ExitedAt = journal.DesiredCreated, nil, "", time.Time{}
			})
		}); err != nil {
			return err
		}
		if !ok {
			c, err = a.config.Containers.Create(ctx, spec)
		}
		if err == nil && !hasTask(c) {
			sb.see(&c) // leave the namespace of the task that ended
			c, err = a.config.Containers.CreateTask(ctx, spec.UID)
		}
		if err != nil {
			return errors.Join(err, a.refresh(ctx, sb))
		}
		sb.see(&c)
	}
	return a.attachWaiting(ctx, sb, ready)
}

// readyVolumes are the volumes that wait for a task, by record id.
type readyVolumes map[string]*readyVolume

func (r readyVolumes) close() {
	for _, v := range r {
		v.close()
	}
}

// waits says whether a volume has to be attached to the sandbox's next task.
func waits(v journal.Volume) bool { return v.Phase != journal.Lazy && v.Phase != journal.Mounted }

// readyWaiting makes ready whatever waits for the sandbox's next task. It may wait for sources, so it is called before
// the life lock is taken: a source that hangs keeps no sandbox from being stopped.
func (a *Agent) readyWaiting(ctx context.Context, sb *sandbox) (readyVolumes, error) {
	ctx, cancel := joined(ctx, sb.ctx)
	defer cancel()
	ready := readyVolumes{}
	for _, v := range a.journal.Volumes(sb.uid) {
		if !waits(v) {
			continue
		}
		r := &readyVolume{timing: newStages(a.config.Clock, attachFailpoints)}
		ready[v.ID] = r
		if err := a.updater.ready(ctx, v.Request, r, true); err != nil {
			ready.close()
			return nil, fmt.Errorf("attach %s: %w", v.Target, err)
		}
	}
	return ready, nil
}

// attachWaiting attaches every volume that waits for the sandbox's task. The caller holds the life lock alone.
func (a *Agent) attachWaiting(ctx context.Context, sb *sandbox, ready readyVolumes) error {
	for _, record := range a.journal.Volumes(sb.uid) {
		if !waits(record) {
			continue
		}
		r, ok := ready[record.ID]
		if !ok {
			return fault.New(errdefs.ErrUnavailable, fault.OperationPending, "attach %s: it was asked for a moment ago and is not ready yet; try again", record.Target)
		}
		if record.Phase != journal.Waiting { // of unknown outcome
			if err := a.updater.clear(ctx, sb, record); err != nil {
				return err
			}
			record.Phase, record.Mount = journal.Waiting, mount.Identity{}
		}
		if _, err := a.updater.place(ctx, sb, record, r, a.journal.Write); err != nil {
			if !mayBeMounted(err) {
				if putErr := a.updater.put(record); putErr != nil {
					err = incomplete(err, putErr)
				}
			}
			return err
		}
	}
	return nil
}

// start lets the sandbox's process begin.
func (a *Agent) start(ctx context.Context, sb *sandbox, fence func() error) error {
	release, err := sb.alone(ctx)
	if err != nil {
		return err
	}
	defer release()
	if sb.ctx.Err() != nil {
		return context.Cause(sb.ctx)
	}
	if err := fence(); err != nil {
		return err
	}
	defer a.changed(sb.uid)
	c, ok := sb.seen()
	if !ok {
		return sb.notRunning()
	}
	for _, v := range a.journal.Volumes(sb.uid) {
		if c.State == containers.Created && waits(v) {
			return fault.New(errdefs.ErrFailedPrecondition, fault.OperationPending, "sandbox %s is not started before %s is attached: create it again", sb.uid, v.Target)
		}
	}
	return a.startTask(ctx, sb, c, func(s *journal.Sandbox) {
		if s.Desired != journal.DesiredRunning || s.StartedAt.IsZero() {
			s.StartedAt = a.config.Clock.Now()
		}
	})
}

// startTask lets a task's process begin and records that it runs, with what update says besides. The caller holds the life
// lock alone.
func (a *Agent) startTask(ctx context.Context, sb *sandbox, c containers.Container, update func(*journal.Sandbox)) error {
	if err := a.config.Containers.Start(ctx, sb.uid); err != nil {
		return err
	}
	c.State = containers.Running
	sb.see(&c)
	sb.setTrouble(nil)
	return failpoint.Step(sandboxFailpoints, stepJournalStarted, func() error {
		return a.updateSandbox(sb.uid, journal.Change{}, func(s *journal.Sandbox) {
			update(s)
			s.Desired, s.ExitCode, s.ExitReason, s.ExitedAt = journal.DesiredRunning, nil, "", time.Time{}
		})
	})
}

// stopTask ends the sandbox's task and detaches its volumes: they go with the task's mount namespace. The root
// filesystem is kept.
func (a *Agent) stopTask(ctx context.Context, sb *sandbox, grace time.Duration, fence func() error) error {
	release, err := sb.alone(ctx)
	if err != nil {
		return err
	}
	defer release()
	if err := fence(); err != nil {
		return err
	}
	defer a.changed(sb.uid)
	if err := failpoint.Step(sandboxFailpoints, stepJournalStopped, func() error {
		return a.updateSandbox(sb.uid, journal.Change{}, func(s *journal.Sandbox) { s.Desired = journal.DesiredStopped })
	}); err != nil {
		return err
	}
	if _, ok := sb.seen(); !ok {
		return nil
	}
	return a.endTask(ctx, sb, grace)
}

// endTask ends the task and forgets what was mounted in it. The caller holds the life lock alone, and has recorded
// that the task is not wanted.
func (a *Agent) endTask(ctx context.Context, sb *sandbox, grace time.Duration) error {
	if _, err := a.config.Containers.Stop(ctx, sb.uid, grace); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	sb.mu.Lock()
	sb.leave()
	sb.mu.Unlock()
	if _, err := a.config.Containers.DeleteTask(ctx, sb.uid); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if err := a.refresh(ctx, sb); err != nil {
		return err
	}
	return a.updater.forget(a.journal.Volumes(sb.uid)...)
}

// refresh reads the container's state anew.
func (a *Agent) refresh(ctx context.Context, sb *sandbox) error {
	if sb.isPod() {
		return a.readPod(ctx, sb)
	}
	c, err := a.config.Containers.Get(ctx, sb.uid)
	switch {
	case errdefs.IsNotFound(err):
		sb.see(nil)
	case err != nil:
		return err
	default:
		sb.see(&c)
	}
	return nil
}

// releaseWait is how long a delete waits for its volumes to be released before it leaves that to the reaper: the
// kernel takes filesystems apart a moment after their last user.
const releaseWait = 5 * time.Second

// remove ends a sandbox and removes everything of it but the data of its volumes.
func (a *Agent) remove(ctx context.Context, uid string, grace time.Duration) error {
	sb := a.sandbox(uid)
	sb.cancel(sb.terminating()) // whatever waits on its behalf gives up
	if sb.isPod() {
		return a.removePod(ctx, sb)
	}
	release, err := sb.alone(ctx)
	if err != nil {
		return err
	}
	defer release()
	defer a.changed(uid)
	if err := a.recordGone(uid); err != nil {
		return err
	}
	keys := a.volumeKeys(uid)
	if err := a.finishDeletion(ctx, sb, grace); err != nil {
		return err
	}
	a.afterDeletion(ctx, keys)
	return nil
}

// recordGone records that a sandbox is not wanted any more.
func (a *Agent) recordGone(uid string) error {
	return failpoint.Step(sandboxFailpoints, stepJournalGone, func() error {
		return a.updateSandbox(uid, journal.Change{}, func(s *journal.Sandbox) { s.Desired = journal.DesiredGone })
	})
}

// volumeKeys are the keys of a sandbox's volumes.
func (a *Agent) volumeKeys(uid string) map[string]bool {
	keys := map[string]bool{}
	for _, v := range a.journal.Volumes(uid) {
		keys[v.Request.Key] = true
	}
	return keys
}

// afterDeletion waits a while until volumes that a deleted sandbox had are released, if nobody else has them.
func (a *Agent) afterDeletion(ctx context.Context, keys map[string]bool) {
	a.forgetTombstones()
	wait, cancel := context.WithTimeout(ctx, releaseWait)
	defer cancel()
	a.reaper.await(wait, keys)
}

// finishDeletion removes what is left of a sandbox whose deletion is recorded. The caller holds the life lock alone.
func (a *Agent) finishDeletion(ctx context.Context, sb *sandbox, grace time.Duration) error {
	if s, ok := a.journal.Sandbox(sb.uid); !ok || !s.DeletedAt.IsZero() {
		return nil
	}
	clearUp := func() error { return a.clearContainer(ctx, sb, grace) }
	if sb.isPod() {
		clearUp = func() error { return a.clearPod(ctx, sb) }
	}
	if err := clearUp(); err != nil {
		return err
	}
	sb.see(nil)
	return failpoint.Step(sandboxFailpoints, stepJournalDeleted, func() error {
		return a.updateSandbox(sb.uid, journal.Change{}, func(s *journal.Sandbox) { s.DeletedAt = a.config.Clock.Now() })
	})
}

// clearContainer ends a sandbox's task and removes its container. The caller holds the life lock alone.
func (a *Agent) clearContainer(ctx context.Context, sb *sandbox, grace time.Duration) error {
	if _, ok := sb.seen(); ok {
		if err := a.endTask(ctx, sb, grace); err != nil {
			return err
		}
	} else if err := a.updater.forget(a.journal.Volumes(sb.uid)...); err != nil {
		return err
	}
	// Also without a container: a creation that was cut off leaves parts.
	return a.config.Containers.Delete(ctx, sb.uid)
}

// tombstoneAge is how long a deleted sandbox is remembered, to refuse commands that arrive late.
const tombstoneAge = time.Hour

// forgetTombstones drops what is left of sandboxes that were deleted long ago.
func (a *Agent) forgetTombstones() {
	a.fenceMu.Lock()
	defer a.fenceMu.Unlock()
	var old []string
	for _, s := range a.journal.Sandboxes() {
		if !s.DeletedAt.IsZero() && a.config.Clock.Since(s.DeletedAt) > tombstoneAge {
			old = append(old, s.UID)
		}
	}
	if len(old) == 0 {
		return
	}
	if err := a.journal.Write(journal.Change{DeleteSandboxes: old}); err != nil {
		a.log.Error("old sandbox records stay in the journal", "error", err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, uid := range old {
		delete(a.sandboxes, uid)
	}
}

// RemoveAll deletes every sandbox of the node, and waits until their volumes are released.
func (a *Agent) RemoveAll(ctx context.Context) error {
	var errs []error
	for _, sb := range a.all() {
		if _, ok := sb.seen(); ok || sb.isPod() {
			errs = append(errs, a.remove(ctx, sb.uid, 0))
		}
	}
	// What recovery could not remove: there is no later time.
	_, err := a.config.Containers.Sweep(ctx)
	return errors.Join(append(errs, err)...)
}
