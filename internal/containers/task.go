package containers

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// CreateTask makes a new task in state Created on the sandbox's root filesystem as it is, after deleting an ended one.
// A task that is Created already is left as it is; a running one is ErrFailedPrecondition.
func (r *Runtime) CreateTask(ctx context.Context, uid string) (Container, error) {
	unlock, err := r.lock(ctx, uid)
	if err != nil {
		return Container{}, err
	}
	defer unlock()
	record, err := r.record(ctx, uid)
	if err != nil {
		return Container{}, err
	}
	process, err := r.process(ctx, uid)
	if err != nil {
		return Container{}, err
	}
	switch stateOf(process) {
	case Running:
		return Container{}, fault.New(errdefs.ErrFailedPrecondition, fault.Conflict, "sandbox %s is running: stop it first", uid)
	case Stopped:
		if _, err := r.recordAndDelete(ctx, uid); err != nil {
			return Container{}, err
		}
		fallthrough
	case NoTask:
		if err := r.createTask(ctx, record, nil); err != nil {
			return Container{}, errorf(err, "make a new task for sandbox %s", uid)
		}
		if process, err = r.process(ctx, uid); err != nil {
			return Container{}, err
		}
	}
	return r.container(record, process), nil
}

// Start lets a created sandbox's process begin. A running one is left as it is; without a created task it is
// ErrFailedPrecondition.
func (r *Runtime) Start(ctx context.Context, uid string) error {
	unlock, err := r.lock(ctx, uid)
	if err != nil {
		return err
	}
	defer unlock()
	process, err := r.process(ctx, uid)
	if err != nil {
		return err
	}
	switch state := stateOf(process); state {
	case Running:
		return nil
	case Created:
	default:
		if _, err := r.record(ctx, uid); err != nil {
			return err
		}
		return fault.New(errdefs.ErrFailedPrecondition, fault.SandboxNotRunning,
			"start sandbox %s: its task is %s: make a new one first", uid, state)
	}
	return r.step(StepStart, func() error {
		_, err := r.tasks().Start(r.context(ctx), &tasksapi.StartRequest{ContainerID: uid})
		return errorf(errgrpc.ToNative(err), "start sandbox %s", uid)
	})
}

// Stop ends a sandbox's task: SIGTERM to its process, after grace SIGKILL to all. The task is left in state Stopped, its
// end recorded. A created task is killed at once, an ended one is only read; without any task Stop answers the recorded
// end, or the zero Exit.
func (r *Runtime) Stop(ctx context.Context, uid string, grace time.Duration) (Exit, error) {
	unlock, err := r.lock(ctx, uid)
	if err != nil {
		return Exit{}, err
	}
	defer unlock()
	process, err := r.process(ctx, uid)
	if err != nil {
		return Exit{}, err
	}
	switch stateOf(process) {
	case NoTask:
		if _, err := r.record(ctx, uid); err != nil {
			return Exit{}, err
		}
		if exit := r.recordedExit(uid); exit != nil {
			return *exit, nil
		}
		return Exit{}, nil
	case Created:
		grace = 0
		fallthrough
	case Running:
		if err := r.end(ctx, uid, int(process.Pid), grace); err != nil {
			return Exit{}, errorf(err, "stop sandbox %s", uid)
		}
	}
	return r.recordEnd(ctx, uid, StepStopRecord)
}

// end ends the task, whose first process is pid, and returns when it has ended.
func (r *Runtime) end(ctx context.Context, uid string, pid int, grace time.Duration) error {
	waitCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := r.waitEnd(waitCtx, uid)
	if grace > 0 {
		awaitCatching(ctx, pid, unix.SIGTERM)
		if err := r.step(StepStopTerm, func() error { return r.kill(ctx, uid, unix.SIGTERM) }); err != nil {
			return err
		}
		select {
		case err := <-ended:
			return err
		case <-time.After(grace):
		}
	}
	if err := r.step(StepStopKill, func() error { return r.kill(ctx, uid, unix.SIGKILL) }); err != nil {
		return err
	}
	return <-ended
}

// catchPatience bounds the wait for the sandbox's PID 1 to be ready for signals, which takes it milliseconds.
const (
	catchPatience = time.Second
	catchInterval = 2 * time.Millisecond
)

// awaitCatching waits until a sandbox's PID 1 catches a signal. To one that has just been started and does not yet, the
// kernel sends none (pid_namespaces(7)): it would be lost, and the whole grace be waited for.
func awaitCatching(ctx context.Context, pid int, signal unix.Signal) {
	ctx, cancel := context.WithTimeout(ctx, catchPatience)
	defer cancel()
	for {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil || catches(string(status), signal) {
			return // it does, or is gone
		}
		select {
		case <-time.After(catchInterval):
		case <-ctx.Done():
			return
		}
	}
}

// catches reads the signals that a process catches off its /proc/PID/status (proc(5)). runc's own process, which becomes
// PID 1, does not count.
func catches(status string, signal unix.Signal) bool {
	_, mask, _ := strings.Cut(status, "\nSigCgt:\t")
	mask, _, _ = strings.Cut(mask, "\n")
	caught, err := strconv.ParseUint(mask, 16, 64)
	return err == nil && caught&(1<<(signal-1)) != 0 && !strings.HasPrefix(status, "Name:\trunc")
}

// kill sends a signal to the sandbox's PID 1, SIGKILL to all its processes. Nobody to receive it is no error.
func (r *Runtime) kill(ctx context.Context, uid string, signal unix.Signal) error {
	_, err := r.tasks().Kill(r.context(ctx), &tasksapi.KillRequest{
		ContainerID: uid,
		Signal:      uint32(signal),
		All:         signal == unix.SIGKILL,
	})
	if err = errgrpc.ToNative(err); errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) {
		return nil
	}
	return errorf(err, "send %s", unix.SignalName(signal))
}

// waitEnd tells when the task has ended or is gone. It outlasts a restart of containerd. The goroutine ends with ctx at
// the latest.
func (r *Runtime) waitEnd(ctx context.Context, uid string) <-chan error {
	ended := make(chan error, 1)
	go func() {
		for {
			_, err := r.tasks().Wait(r.context(ctx), &tasksapi.WaitRequest{ContainerID: uid})
			err = errgrpc.ToNative(err)
			if errdefs.IsNotFound(err) {
				err = nil
			}
			if !errdefs.IsUnavailable(err) || ctx.Err() != nil {
				ended <- err
				return
			}
			if err := r.awaitContainerd(ctx); err != nil {
				ended <- err
				return
			}
		}
	}()
	return ended
}

// recordEnd records how the ended task ended.
func (r *Runtime) recordEnd(ctx context.Context, uid, step string) (Exit, error) {
	process, err := r.process(ctx, uid)
	if err != nil {
		return Exit{}, err
	}
	if process == nil {
		if exit := r.recordedExit(uid); exit != nil {
			return *exit, nil
		}
		return Exit{}, nil
	}
	exit := r.exitOf(uid, process)
	return exit, r.step(step, func() error {
		return errorf(r.recordExit(uid, exit), "record the end of sandbox %s", uid)
	})
}

// DeleteTask deletes an ended task and answers how it ended, also when it is deleted already. One that is created or
// running is ErrFailedPrecondition.
func (r *Runtime) DeleteTask(ctx context.Context, uid string) (Exit, error) {
	unlock, err := r.lock(ctx, uid)
	if err != nil {
		return Exit{}, err
	}
	defer unlock()
	process, err := r.process(ctx, uid)
	if err != nil {
		return Exit{}, err
	}
	switch state := stateOf(process); state {
	case Created, Running:
		return Exit{}, fault.New(errdefs.ErrFailedPrecondition, fault.Conflict, "sandbox %s is %s: stop it first", uid, state)
	case NoTask:
		if _, err := r.record(ctx, uid); err != nil {
			return Exit{}, err
		}
		// It may be hidden (see removeTask).
		if err := r.deleteTask(ctx, uid); err != nil {
			return Exit{}, err
		}
		if exit := r.recordedExit(uid); exit != nil {
			return *exit, nil
		}
		return Exit{}, nil
	}
	return r.recordAndDelete(ctx, uid)
}

// recordAndDelete deletes an ended task once its end is recorded.
func (r *Runtime) recordAndDelete(ctx context.Context, uid string) (Exit, error) {
	exit, err := r.recordEnd(ctx, uid, StepTaskRecord)
	if err != nil {
		return Exit{}, err
	}
	return exit, r.step(StepTaskDelete, func() error { return r.deleteTask(ctx, uid) })
}

func (r *Runtime) deleteTask(ctx context.Context, uid string) error {
	_, err := r.tasks().Delete(r.context(ctx), &tasksapi.DeleteTaskRequest{ContainerID: uid})
	if err = errgrpc.ToNative(err); errdefs.IsNotFound(err) {
		return nil
	}
	return errorf(err, "delete the task of sandbox %s", uid)
}
