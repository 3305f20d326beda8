package pods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Labels that containerd's CRI gives the containers of Pods (internal/cri/labels and kubelet's types).
const (
	labelPodUID    = "io.kubernetes.pod.uid"
	labelContainer = "io.kubernetes.container.name"
	labelKind      = "io.cri-containerd.kind"
	kindContainer  = "container"
)

// Ref names a container of a Pod.
type Ref struct {
	// PodUID is the Pod's metadata.uid, Container the name in its spec.
	PodUID, Container string
}

func (r Ref) String() string { return "container " + r.Container + " of Pod " + r.PodUID }

// Container is what containerd has of a container of a Pod.
type Container struct {
	Ref
	// ID is containerd's; every start of the container by kubelet has another one.
	ID string
	// Alive: there is a task whose init exists, started or not. PID is its number on the host.
	Alive bool
	// Started: its process has begun.
	Started bool
	PID     int
	// RootFS is the directory that it will pivot to, of one that has not; empty otherwise.
	RootFS string
	Facts  Facts
}

// Facts are what a container's specification says that matters to who mounts into it.
type Facts struct {
	// Runtime is containerd's name of the runtime, such as io.containerd.runc.v2.
	Runtime string
	// SysAdmin: it can have CAP_SYS_ADMIN, and with it change or take away any mount of its own.
	SysAdmin bool
	// HostPID: it has the host's PID namespace. Known while it is Alive.
	HostPID bool
	// UserNamespace: its users are others on the host (hostUsers: false in Kubernetes).
	UserNamespace bool
	// Shared are the places of its mounts that propagate to the host and others (Bidirectional in Kubernetes).
	Shared []string
}

// RuntimeRunc is the runtime that starts containers as processes of this kernel.
const RuntimeRunc = "io.containerd.runc.v2"

// Find is the container of a Ref that lives, or else the newest. ErrNotFound if there is none.
func (r *Runtime) Find(ctx context.Context, ref Ref) (Container, error) {
	if c, ok := r.findKnown(ctx, ref); ok {
		return c, nil
	}
	list, err := r.list(ctx, ref.PodUID, fmt.Sprintf("labels.%q==%q,labels.%q==%q", labelContainer, ref.Container, labelKind, kindContainer))
	if err != nil {
		return Container{}, err
	}
	// The newest first: on the way to a new one the old may still be there.
	slices.SortFunc(list, func(a, b containers.Container) int { return b.CreatedAt.Compare(a.CreatedAt) })
	var newest *Container
	for _, record := range list {
		c, err := r.container(ctx, record)
		if err != nil {
			return Container{}, err
		}
		if c.Alive {
			return c, nil
		}
		if newest == nil {
			newest = &c
		}
	}
	if newest == nil {
		return Container{}, fault.New(errdefs.ErrNotFound, fault.SandboxNotRunning, "containerd has no %s", ref)
	}
	return *newest, nil
}

// findKnown is the container of a Ref that lives, if its id is known: to list costs containerd a look at every container of
// the node.
func (r *Runtime) findKnown(ctx context.Context, ref Ref) (Container, bool) {
	for _, id := range r.known.of(ref.PodUID) {
		record, err := r.client.ContainerService().Get(r.context(ctx), id)
		if err != nil || record.Labels[labelContainer] != ref.Container || record.Labels[labelKind] != kindContainer {
			continue
		}
		if c, err := r.container(ctx, record); err == nil && c.Ref == ref && c.Alive {
			return c, true
		}
	}
	return Container{}, false
}

// Exists says whether the node has anything of a Pod, be it only its sandbox.
func (r *Runtime) Exists(ctx context.Context, podUID string) (bool, error) {
	list, err := r.list(ctx, podUID, "")
	return len(list) > 0, err
}

// list are the containers of a Pod that a further filter lets through.
func (r *Runtime) list(ctx context.Context, podUID, filter string) ([]containers.Container, error) {
	all := fmt.Sprintf("labels.%q==%q", labelPodUID, podUID)
	if filter != "" {
		all += "," + filter
	}
	list, err := r.client.ContainerService().List(r.context(ctx), all)
	if err != nil {
		return nil, fmt.Errorf("list the containers of Pod %s: %w", podUID, err)
	}
	for _, c := range list {
		r.known.put(c.ID, podUID)
	}
	return list, nil
}

// load reads one container by its id.
func (r *Runtime) load(ctx context.Context, id string) (Container, error) {
	record, err := r.client.ContainerService().Get(r.context(ctx), id)
	if err != nil {
		return Container{}, fmt.Errorf("read container %s: %w", id, err)
	}
	return r.container(ctx, record)
}

func (r *Runtime) container(ctx context.Context, record containers.Container) (Container, error) {
	c := Container{ID: record.ID, Ref: Ref{PodUID: record.Labels[labelPodUID], Container: record.Labels[labelContainer]}}
	var err error
	if c.Facts, err = factsOf(record); err != nil {
		return c, err
	}
	answer, err := r.client.TaskService().Get(r.context(ctx), &tasksapi.GetRequest{ContainerID: record.ID})
	if err = errgrpc.ToNative(err); errdefs.IsNotFound(err) {
		return c, nil
	}
	if err != nil {
		return c, fmt.Errorf("read the task of container %s: %w", record.ID, err)
	}
	switch status := answer.GetProcess().GetStatus(); status {
	case tasktypes.Status_CREATED, tasktypes.Status_RUNNING, tasktypes.Status_PAUSED, tasktypes.Status_PAUSING:
		c.Alive, c.Started, c.PID = true, status != tasktypes.Status_CREATED, int(answer.GetProcess().GetPid())
		host, err := hostPIDNamespace(c.PID)
		// proc_ns_readlink says EACCES of a process that is gone since /proc found it.
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) || errors.Is(err, unix.ESRCH) {
			c.Alive, c.Started, c.PID = false, false, 0 // it ended just now
			return c, nil
		}
		if err != nil {
			return c, fmt.Errorf("the PID namespace of container %s: %w", record.ID, err)
		}
		c.Facts.HostPID = host
	}
	return c, nil
}

// hostPIDNamespace says whether a process has our PID namespace, which is the host's. A specification does not tell: the
// CRI gives every container the namespace of its Pod's sandbox, by a path in /proc.
func hostPIDNamespace(pid int) (bool, error) {
	own, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return false, err
	}
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
	return own == theirs, err
}

// factsOf reads a container's specification.
func factsOf(record containers.Container) (Facts, error) {
	f := Facts{Runtime: record.Runtime.Name}
	if record.Spec == nil {
		return f, nil
	}
	var spec specs.Spec
	if err := json.Unmarshal(record.Spec.GetValue(), &spec); err != nil {
		return f, fmt.Errorf("the specification of container %s: %w", record.ID, err)
	}
	if spec.Process != nil && spec.Process.Capabilities != nil {
		c := spec.Process.Capabilities
		f.SysAdmin = slices.Contains(slices.Concat(c.Bounding, c.Permitted, c.Effective, c.Inheritable, c.Ambient), "CAP_SYS_ADMIN")
	}
	if spec.Linux != nil {
		f.UserNamespace = len(spec.Linux.UIDMappings) > 0 ||
			slices.ContainsFunc(spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.UserNamespace })
	}
	for _, m := range spec.Mounts {
		if slices.Contains(m.Options, "shared") || slices.Contains(m.Options, "rshared") {
			f.Shared = append(f.Shared, m.Destination)
		}
	}
	return f, nil
}

// SharedOver is the shared mount that a target lies on or in, or "".
func (f Facts) SharedOver(target string) string {
	for _, m := range f.Shared {
		if target == m || strings.HasPrefix(target, strings.TrimSuffix(m, "/")+"/") {
			return m
		}
	}
	return ""
}

// HookBudget is how long the start of a container may be held up: a quarter of NRI's default timeout, as containerd asks
// the plugins of a node for one container at a time.
const HookBudget = 500 * time.Millisecond
