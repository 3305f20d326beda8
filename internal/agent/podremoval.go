package agent

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// podForceAfter is how long the deletion of a sandbox waits for processes of its Pod to let go of its volumes; then they
// are detached lazily. podBusyWait is the time between two looks.
const (
	podForceAfter = 30 * time.Second
	podBusyWait   = 250 * time.Millisecond
)

// removePod ends what the agent does for a container of a Pod: its volumes are detached and everything is forgotten. The
// Pod is not touched. Whoever gives up waiting leaves the rest to go on by itself.
func (a *Agent) removePod(ctx context.Context, sb *sandbox) error {
	keys := a.volumeKeys(sb.uid)
	defer a.changed(sb.uid)
	if err := a.recordGone(sb.uid); err != nil {
		return err
	}
	for {
		err := a.removePodOnce(ctx, sb)
		if err == nil {
			break
		}
		timer := a.config.Clock.NewTimer(podBusyWait)
		var ended bool
		select {
		case <-timer.C():
		case <-ctx.Done():
			ended = true
		}
		timer.Stop()
		switch {
		case ended:
			a.after(0, func() {
				a.bounded(a.stopping, sb, "deletion", a.removePodOnce)
			})
			return err
		case fault.ReasonOf(err) != fault.Busy:
			return err
		}
	}
	a.afterDeletion(ctx, keys)
	return nil
}

func (a *Agent) removePodOnce(ctx context.Context, sb *sandbox) error {
	release, err := sb.alone(ctx)
	if err != nil {
		return err
	}
	defer release()
	return a.finishDeletion(ctx, sb, 0)
}

// clearPod detaches the volumes of a sandbox whose deletion is recorded, and forgets them; Busy while a process holds one
// and it is not time to force it. The caller holds the life lock alone.
func (a *Agent) clearPod(ctx context.Context, sb *sandbox) error {
	if err := a.readPod(ctx, sb); err != nil {
		return err
	}
	now := a.config.Clock.Now()
	sb.mu.Lock()
	if sb.pod.forceAfter.IsZero() {
		sb.pod.forceAfter = now.Add(podForceAfter)
	}
	force := !now.Before(sb.pod.forceAfter)
	sb.mu.Unlock()
	var errs []error
	var busy error
	for _, v := range a.journal.Volumes(sb.uid) {
		if v.Phase == journal.Lazy {
			continue
		}
		out, err := a.updater.detach(context.WithoutCancel(ctx), sb, v, force, &passage{journal: a.journal})
		if err != nil {
			errs = append(errs, err)
		} else if out.Busy {
			busy = fault.New(errdefs.ErrFailedPrecondition, fault.Busy, "sandbox %s is being deleted, and processes of its Pod use %s", sb.uid, v.Target)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if busy != nil {
		return busy
	}
	if err := a.updater.forget(a.journal.Volumes(sb.uid)...); err != nil {
		return err
	}
	a.dropPod(sb)
	sb.setTrouble(nil)
	return nil
}
