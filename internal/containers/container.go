package containers

import (
	"context"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// State is the state of a sandbox's task.
type State string

// The states.
const (
	// Created: namespaces, root filesystem and PID exist, the sandbox's process has not begun.
	Created State = "Created"
	// Running: started and not ended.
	Running State = "Running"
	// Stopped: ended, not yet deleted. The mount namespace is gone.
	Stopped State = "Stopped"
	// NoTask: the container is there and nothing of a task: after a reboot, DeleteTask, or a crash of the shim.
	NoTask State = "NoTask"
)

// Reasons of an Exit, as Kubernetes calls them.
const (
	ReasonCompleted = "Completed"
	ReasonError     = "Error"
	ReasonOOMKilled = "OOMKilled"
)

// Exit tells how a task ended.
type Exit struct {
	// Code is the exit code of the sandbox's process, or 128 plus the signal that ended it.
	Code int `json:"code"`
	// At is when.
	At time.Time `json:"at"`
	// Reason is one of ReasonCompleted, ReasonError, ReasonOOMKilled.
	Reason string `json:"reason"`
}

// Container is what containerd knows of a sandbox.
type Container struct {
	Descriptor
	// ID is containerd's name of it: the UID.
	ID string
	// Image is the normalised reference.
	Image string
	State State
	// PID is the host's PID of the sandbox's PID 1, in states Created and Running.
	PID int
	// Exit is set in state Stopped, and in NoTask if the last task's end was recorded (a reboot loses it).
	Exit *Exit
	// Volumes is what RecordVolumes recorded last, or nil.
	Volumes []byte
	// CgroupPath is the sandbox's cgroup within each hierarchy.
	CgroupPath string
}

// Get reads a sandbox's state from containerd; ErrNotFound if it has no container.
func (r *Runtime) Get(ctx context.Context, uid string) (Container, error) {
	if err := validateUID(uid); err != nil {
		return Container{}, err
	}
	record, err := r.record(ctx, uid)
	if err != nil {
		return Container{}, err
	}
	process, err := r.process(ctx, uid)
	if err != nil {
		return Container{}, err
	}
	return r.container(record, process), nil
}

// List reads all sandboxes. Containers without a descriptor are left out; Sweep deals with them.
func (r *Runtime) List(ctx context.Context) ([]Container, error) {
	ctx = r.context(ctx)
	records, err := r.client.ContainerService().List(ctx)
	if err != nil {
		return nil, errorf(err, "list the sandboxes")
	}
	processes, err := r.processes(ctx)
	if err != nil {
		return nil, err
	}
	var found []Container
	for _, record := range records {
		if _, ok := parseDescriptor(record.ID, record.Labels); ok {
			found = append(found, r.container(record, processes[record.ID]))
		}
	}
	return found, nil
}

func (r *Runtime) record(ctx context.Context, uid string) (containers.Container, error) {
	record, err := r.client.ContainerService().Get(r.context(ctx), uid)
	if errdefs.IsNotFound(err) {
		return record, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "sandbox %s: containerd has no container of this UID", uid)
	}
	return record, errorf(err, "find the container of sandbox %s", uid)
}

// process reads the state of a task; nil if there is none.
func (r *Runtime) process(ctx context.Context, uid string) (*tasktypes.Process, error) {
	answer, err := r.tasks().Get(r.context(ctx), &tasksapi.GetRequest{ContainerID: uid})
	if err = errgrpc.ToNative(err); errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, errorf(err, "read the task of sandbox %s", uid)
	}
	return answer.Process, nil
}

func (r *Runtime) processes(ctx context.Context) (map[string]*tasktypes.Process, error) {
	answer, err := r.tasks().List(r.context(ctx), &tasksapi.ListTasksRequest{})
	if err != nil {
		return nil, errorf(errgrpc.ToNative(err), "list the tasks")
	}
	found := map[string]*tasktypes.Process{}
	for _, p := range answer.Tasks {
		// ContainerID is empty in containerd's answer; ID is the container's for a task's first process.
		found[p.ID] = p
	}
	return found, nil
}

func (r *Runtime) container(record containers.Container, process *tasktypes.Process) Container {
	c := Container{ID: record.ID, Image: record.Image, CgroupPath: r.cgroupPath(record.ID)}
	c.Descriptor, _ = parseDescriptor(record.ID, record.Labels)
	if volumes := record.Extensions[VolumesExtension]; volumes != nil {
		c.Volumes = volumes.GetValue()
	}
	c.State = stateOf(process)
	switch c.State {
	case Created, Running:
		c.PID = int(process.Pid)
	case Stopped:
		exit := r.exitOf(record.ID, process)
		c.Exit = &exit
	case NoTask:
		c.Exit = r.recordedExit(record.ID)
	}
	return c
}

func stateOf(process *tasktypes.Process) State {
	if process == nil {
		return NoTask
	}
	switch process.Status {
	case tasktypes.Status_CREATED:
		return Created
	case tasktypes.Status_RUNNING, tasktypes.Status_PAUSED, tasktypes.Status_PAUSING:
		return Running
	default:
		// A task whose state containerd cannot tell is one whose shim or process died.
		return Stopped
	}
}

// exitOf makes the Exit of a stopped task. The cgroup, which lives until the task is deleted, tells of an OOM kill:
// containerd's event about it may be lost.
func (r *Runtime) exitOf(uid string, process *tasktypes.Process) Exit {
	exit := Exit{Code: int(process.ExitStatus), At: process.ExitedAt.AsTime(), Reason: ReasonError}
	switch {
	case exit.Code == 0:
		exit.Reason = ReasonCompleted
	case exit.Code == exitKilled && r.oomKills(uid) > 0:
		exit.Reason = ReasonOOMKilled
	}
	return exit
}

// exitKilled is the exit code of a process that SIGKILL ended.
const exitKilled = 128 + 9
