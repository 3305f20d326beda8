package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// Back-off of restarts: the first is immediate, then the delay doubles from restartBase to restartMax, and begins
// anew after a process has run for restartReset. The figures are kubelet's, but for a shorter base.
const (
	restartBase  = time.Second
	restartMax   = 5 * time.Minute
	restartReset = 10 * time.Minute
)

// restarts is the back-off of one sandbox.
type restarts struct {
	failures int
	pending  bool // a restart is waiting for its time
}

// next is the delay before the next restart of a process that ran for a time.
func (r *restarts) next(ran time.Duration) time.Duration {
	if ran > restartReset {
		r.failures = 0
	}
	r.failures++
	if r.failures == 1 {
		return 0
	}
	return min(restartBase<<min(r.failures-2, 20), restartMax)
}

// watch follows containerd. Its events are hints: every one makes the agent read the sandbox's state, and a resync
// reads all.
func (a *Agent) watch(events <-chan containers.Event) {
	for {
		select {
		case <-a.stopping.Done():
			return
		case e, ok := <-events:
			if !ok {
				return
			}
			if e.UID != "" {
				a.look(e.UID)
				continue
			}
			for _, sb := range a.all() {
				a.look(sb.uid)
			}
		}
	}
}

// look deals with a sandbox whose task may have ended, on a goroutine of its own.
func (a *Agent) look(uid string) {
	a.mu.Lock()
	sb, ok := a.sandboxes[uid]
	a.mu.Unlock()
	if ok && !sb.isPod() {
		a.work(func() { a.lookOnce(sb) })
	}
}

func (a *Agent) lookOnce(sb *sandbox) {
	err := a.ended(a.stopping, sb)
	if err == nil || a.stopping.Err() != nil {
		return
	}
	a.log.Error("a sandbox whose process may have ended could not be dealt with; it is tried again", "sandbox", sb.uid, "error", err)
	sb.setTrouble(err)
	a.changed(sb.uid)
	if sb.looking.CompareAndSwap(false, true) {
		a.after(restartBase, func() {
			sb.looking.Store(false)
			a.lookOnce(sb)
		})
	}
}

// ended deals with a task that has ended: restart, or clean up. It does nothing while the task runs.
func (a *Agent) ended(ctx context.Context, sb *sandbox) error {
	release, err := sb.alone(ctx)
	if err != nil {
		return err
	}
	defer release()
	if sb.ctx.Err() != nil {
		return nil // its deletion cleans up
	}
	if _, ok := sb.seen(); !ok {
		return nil
	}
	if err := a.refresh(ctx, sb); err != nil {
		return err
	}
	c, ok := sb.seen()
	record, known := a.journal.Sandbox(sb.uid)
	if !ok || hasTask(c) || !known {
		return nil
	}
	defer a.changed(sb.uid)
	switch record.Desired {
	case journal.DesiredCreated:
		// It died before it was started: whoever creates it makes a new task.
		return a.endTask(ctx, sb, 0)
	case journal.DesiredStopped:
		if c.State == containers.NoTask && len(a.journal.Volumes(sb.uid)) == 0 {
			return nil
		}
		return a.endTask(ctx, sb, 0) // an end that was not finished
	}
	if err := a.recordExit(sb, c); err != nil {
		return err
	}
	record, _ = a.journal.Sandbox(sb.uid)
	if !wantsRestart(c.RestartPolicy, record.ExitCode) {
		if err := a.updateSandbox(sb.uid, journal.Change{}, func(s *journal.Sandbox) { s.Desired = journal.DesiredStopped }); err != nil {
			return err
		}
		return a.endTask(ctx, sb, 0)
	}
	sb.mu.Lock()
	waiting := sb.restarts.pending
	sb.restarts.pending = true
	var delay time.Duration
	if !waiting {
		delay = sb.restarts.next(record.ExitedAt.Sub(record.StartedAt))
	}
	sb.mu.Unlock()
	if !waiting {
		a.after(delay, func() { a.restart(sb) })
	}
	return nil
}

// recordExit writes down how the task ended, once, and that its volumes wait for the next one: also those of a task that
// was made since and died before it was started. The caller holds the life lock alone and has seen that the task is
// over.
func (a *Agent) recordExit(sb *sandbox, c containers.Container) error {
	change, err := a.waitAgain(sb.uid)
	if err != nil {
		return err
	}
	if record, _ := a.journal.Sandbox(sb.uid); record.ExitCode != nil {
		if len(change.PutVolumes) == 0 {
			return nil
		}
		return a.journal.Write(change)
	}
	return a.updateSandbox(sb.uid, change, func(s *journal.Sandbox) {
		code, reason, at := int32(-1), "Unknown", a.config.Clock.Now()
		if c.Exit != nil {
			code, reason, at = int32(c.Exit.Code), c.Exit.Reason, c.Exit.At
		}
		s.ExitCode, s.ExitReason, s.ExitedAt = &code, reason, at
	})
}

// waitAgain is the change by which the volumes of a task that ended wait for the next one. Those that were detached
// lazily are forgotten.
func (a *Agent) waitAgain(uid string) (journal.Change, error) {
	var lazy []journal.Volume
	change := journal.Change{}
	for _, v := range a.journal.Volumes(uid) {
		switch v.Phase {
		case journal.Waiting:
		case journal.Lazy:
			lazy = append(lazy, v)
		default:
			left := v.Mount
			v = waiting(v)
			v.Left = left
			change.PutVolumes = append(change.PutVolumes, v)
		}
	}
	if len(lazy) == 0 {
		return change, nil
	}
	return change, a.updater.forget(lazy...)
}

// waiting is a volume's record as it is while the volume waits for a task.
func waiting(v journal.Volume) journal.Volume {
	v.Phase, v.Mount, v.Attached = journal.Waiting, mount.Identity{}, ""
	return v
}

func wantsRestart(policy string, exitCode *int32) bool {
	switch v1alpha1.RestartPolicy(policy) {
	case v1alpha1.RestartNever:
		return false
	case v1alpha1.RestartOnFailure:
		return exitCode == nil || *exitCode != 0
	}
	return true
}

// restart makes a new task on the same root filesystem, attaches every volume of the last one, and starts it.
func (a *Agent) restart(sb *sandbox) {
	sb.mu.Lock()
	sb.restarts.pending = false
	sb.mu.Unlock()
	if err := a.restartOnce(a.stopping, sb); err != nil && a.stopping.Err() == nil {
		a.log.Error("a sandbox could not be restarted; it is tried again", "sandbox", sb.uid, "error", err)
		sb.setTrouble(fmt.Errorf("restart: %w", err))
		a.changed(sb.uid)
		a.again(sb)
	}
}

// again tries a restart later.
func (a *Agent) again(sb *sandbox) {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	if sb.restarts.pending {
		return
	}
	sb.restarts.pending = true
	a.after(max(sb.restarts.next(0), restartBase), func() { a.restart(sb) })
}

// restartReady bounds how long a restart waits for its sources; then it is tried again, with the volumes as they are
// wished by then.
const restartReady = 30 * time.Second

func (a *Agent) restartOnce(ctx context.Context, sb *sandbox) error {
	if record, ok := a.journal.Sandbox(sb.uid); sb.ctx.Err() != nil || !ok || record.Desired != journal.DesiredRunning {
		return nil
	}
	wait, cancel := context.WithTimeout(ctx, restartReady)
	defer cancel()
	ready, err := a.readyWaiting(wait, sb)
	if err != nil {
		return err
	}
	defer ready.close()
	release, err := sb.alone(ctx)
	if err != nil {
		return err
	}
	defer release()
	if record, ok := a.journal.Sandbox(sb.uid); sb.ctx.Err() != nil || !ok || record.Desired != journal.DesiredRunning {
		return nil
	}
	defer a.changed(sb.uid)
	if err := a.refresh(ctx, sb); err != nil {
		return err
	}
	c, ok := sb.seen()
	if !ok || c.State == containers.Running {
		return nil
	}
	if c.State != containers.Created {
		// Whatever told of the end may have been cut off before it wrote it down.
		if err := a.recordExit(sb, c); err != nil {
			return err
		}
		sb.see(&c) // leave the namespace of the task that ended
		c, err = a.config.Containers.CreateTask(ctx, sb.uid)
		if err != nil {
			return errors.Join(err, a.refresh(ctx, sb))
		}
		sb.see(&c)
	}
	if err := a.attachWaiting(ctx, sb, ready); err != nil {
		return err
	}
	return a.startTask(ctx, sb, c, func(s *journal.Sandbox) {
		s.Restarts++
		s.StartedAt = a.config.Clock.Now()
	})
}

// after runs f after a delay, unless the agent is closed before.
func (a *Agent) after(delay time.Duration, f func()) {
	a.work(func() {
		timer := a.config.Clock.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C():
			f()
		case <-a.stopping.Done():
		}
	})
}
