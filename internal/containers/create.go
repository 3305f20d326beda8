package containers

import (
	"context"
	"errors"
	"os"
	"strconv"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"

	"github.com/flux-sandbox/flux-sandbox/internal/cgroup"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

const (
	runtimeName = "io.containerd.runc.v2"

	leasePrefix = "flux-create-"
	// leaseLife lets containerd's garbage collector undo a creation that nobody finishes.
	leaseLife = time.Hour
	// snapshotLabel marks our snapshots with the sandbox's UID.
	snapshotLabel = "sandbox.flux.io/uid"
)

// Create makes a sandbox up to state Created. Called again with the same spec it answers the sandbox as it is, whatever
// its state, after making a task if there is none; with another spec it is ErrAlreadyExists. An image that is not there
// is ErrNotFound, before anything is made. After any other error there may be parts, which Create completes and Delete
// removes.
func (r *Runtime) Create(ctx context.Context, spec Spec) (Container, error) {
	spec, err := spec.complete(r.config.Clock.Now())
	if err != nil {
		return Container{}, err
	}
	unlock, err := r.lock(ctx, spec.UID)
	if err != nil {
		return Container{}, err
	}
	defer unlock()

	var rootfs []mount.Mount
	record, err := r.record(ctx, spec.UID)
	switch {
	case err == nil:
		found, ok := parseDescriptor(record.ID, record.Labels)
		if !ok || found.SpecHash != spec.SpecHash {
			return Container{}, fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists,
				"sandbox %s exists with another specification: delete it first, or use another UID", spec.UID)
		}
		if err := r.step(StepCreateFiles, func() error { return r.writeFiles(spec.UID, spec.Hostname) }); err != nil {
			return Container{}, err
		}
	case errdefs.IsNotFound(err):
		if record, rootfs, err = r.createContainer(ctx, spec); err != nil {
			return Container{}, errorf(err, "create sandbox %s", spec.UID)
		}
	default:
		return Container{}, err
	}
	if err := r.step(StepCreateRelease, func() error { return r.deleteLease(ctx, spec.UID) }); err != nil {
		return Container{}, err
	}
	process, err := r.process(ctx, spec.UID)
	if err != nil {
		return Container{}, err
	}
	if stateOf(process) == NoTask {
		if err := r.createTask(ctx, record, rootfs); err != nil {
			return Container{}, errorf(err, "create sandbox %s", spec.UID)
		}
		if process, err = r.process(ctx, spec.UID); err != nil {
			return Container{}, err
		}
	}
	return r.container(record, process), nil
}

// createContainer makes the files, the snapshot and the container. The lease keeps the snapshot from the garbage
// collector until the container refers to it.
func (r *Runtime) createContainer(ctx context.Context, spec Spec) (record containers.Container, rootfs []mount.Mount, err error) {
	image, info, err := r.image(ctx, spec.Image)
	if err != nil {
		return record, nil, err
	}
	label, err := spec.Descriptor.label()
	if err != nil {
		return record, nil, err
	}
	// A command line that does not exist is found before anything is made.
	if _, err := commandLine(spec, info.config); err != nil {
		return record, nil, err
	}
	if err := r.step(StepCreateFiles, func() error { return r.writeFiles(spec.UID, spec.Hostname) }); err != nil {
		return record, nil, err
	}
	if err := r.step(StepCreateLease, func() error { return r.createLease(ctx, spec.UID) }); err != nil {
		return record, nil, err
	}
	ctx = leases.WithLease(r.context(ctx), leasePrefix+spec.UID)
	if err := r.step(StepCreateSnapshot, func() error {
		rootfs, err = r.prepare(ctx, spec.UID, image, info.parent)
		return err
	}); err != nil {
		return record, nil, err
	}
	err = r.step(StepCreateContainer, func() error {
		ociSpec, err := r.ociSpec(ctx, spec, info.config, rootfs)
		if err != nil {
			return err
		}
		encoded, err := typeurl.MarshalAny(ociSpec)
		if err != nil {
			return err
		}
		options, err := typeurl.MarshalAny(&runcoptions.Options{Root: r.runcRoot()})
		if err != nil {
			return err
		}
		record, err = r.client.ContainerService().Create(ctx, containers.Container{
			ID:          spec.UID,
			Labels:      map[string]string{DescriptorLabel: label},
			Image:       image.Name,
			Runtime:     containers.RuntimeInfo{Name: runtimeName, Options: options},
			Spec:        encoded,
			Snapshotter: r.config.Snapshotter,
			SnapshotKey: spec.UID,
		})
		return err
	})
	return record, rootfs, err
}

func (r *Runtime) createLease(ctx context.Context, uid string) error {
	// One that a crash left may be about to expire.
	if err := r.deleteLease(ctx, uid); err != nil {
		return err
	}
	_, err := r.client.LeasesService().Create(r.context(ctx), leases.WithID(leasePrefix+uid), leases.WithExpiration(leaseLife))
	return err
}

func (r *Runtime) deleteLease(ctx context.Context, uid string) error {
	err := r.client.LeasesService().Delete(r.context(ctx), leases.Lease{ID: leasePrefix + uid})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// prepare makes the sandbox's root filesystem. One that a crash left is made again: which image it has is not known.
func (r *Runtime) prepare(ctx context.Context, uid string, image images.Image, parent string) ([]mount.Mount, error) {
	labels := snapshots.WithLabels(map[string]string{snapshotLabel: uid})
	unpacked := false
	for {
		mounts, err := r.snapshotter().Prepare(ctx, uid, parent, labels)
		switch {
		case errdefs.IsAlreadyExists(err):
			if err := r.removeSnapshot(ctx, r.config.Snapshotter, uid); err != nil {
				return nil, err
			}
		case errdefs.IsNotFound(err) && !unpacked:
			// Imported without unpacking, or for another snapshotter.
			if err := r.unpack(ctx, image); err != nil {
				return nil, err
			}
			unpacked = true
		default:
			return mounts, err
		}
	}
}

func (r *Runtime) removeSnapshot(ctx context.Context, snapshotter, key string) error {
	err := r.client.SnapshotService(snapshotter).Remove(r.context(ctx), key)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// createTaskPatience bounds the wait for a creation that a killed process of ours left under way in containerd.
const (
	createTaskPatience = 15 * time.Second
	createTaskInterval = 50 * time.Millisecond
)

// createTask makes the task of a container that has none. rootfs is looked up when nil.
func (r *Runtime) createTask(ctx context.Context, record containers.Container, rootfs []mount.Mount) error {
	return r.step(StepCreateTask, func() error {
		r.cgroupParent.RLock()
		defer r.cgroupParent.RUnlock()
		if err := r.forgetExit(record.ID); err != nil {
			return err
		}
		if err := r.removeStale(ctx, record.ID); err != nil {
			return err
		}
		request, err := r.taskRequest(ctx, record, rootfs)
		if err != nil {
			return err
		}
		deadline := time.After(createTaskPatience)
		for {
			_, err := r.tasks().Create(r.context(ctx), request)
			if err = errgrpc.ToNative(err); !errdefs.IsAlreadyExists(err) {
				return err
			}
			process, getErr := r.process(ctx, record.ID)
			if getErr != nil {
				return getErr
			}
			switch stateOf(process) {
			case Created, Running:
				return nil
			case Stopped, NoTask: // the latter: hidden (see removeTask), or under way
				if delErr := r.deleteTask(ctx, record.ID); delErr != nil {
					return delErr
				}
			}
			select {
			case <-time.After(createTaskInterval):
			case <-deadline:
				return err
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	})
}

// removeStale removes what a shim that was killed left of its task; runc would refuse to use the name again.
func (r *Runtime) removeStale(ctx context.Context, uid string) error {
	state := r.runcState(uid)
	if _, err := os.Stat(state); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err := cgroup.Remove(ctx, r.cgroups, r.cgroupPath(uid)); err != nil {
		return err
	}
	return os.RemoveAll(state)
}

func (r *Runtime) taskRequest(ctx context.Context, record containers.Container, rootfs []mount.Mount) (*tasksapi.CreateTaskRequest, error) {
	if rootfs == nil {
		var err error
		if rootfs, err = r.client.SnapshotService(record.Snapshotter).Mounts(r.context(ctx), record.SnapshotKey); err != nil {
			return nil, errorf(err, "find the root filesystem of sandbox %s", record.ID)
		}
	}
	logger, err := cio.LogURIGenerator("binary", r.config.LoggerPath, map[string]string{
		"dir":   r.LogDir(record.ID),
		"size":  strconv.FormatInt(r.config.LogMaxSize, 10),
		"files": strconv.Itoa(r.config.LogMaxFiles),
	})
	if err != nil {
		return nil, err
	}
	request := &tasksapi.CreateTaskRequest{ContainerID: record.ID, Stdout: logger.String(), Stderr: logger.String()}
	for _, m := range rootfs {
		request.Rootfs = append(request.Rootfs, &types.Mount{Type: m.Type, Source: m.Source, Target: m.Target, Options: m.Options})
	}
	return request, nil
}

func (r *Runtime) lock(ctx context.Context, uid string) (unlock func(), err error) {
	if err := validateUID(uid); err != nil {
		return nil, err
	}
	unlock, err = r.locks.lock(ctx, uid)
	return unlock, errorf(err, "wait for another operation on sandbox %s", uid)
}
