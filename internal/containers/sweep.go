package containers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"
)

// LeftoverKind says what is left over.
type LeftoverKind string

// The kinds of leftovers.
const (
	LeftoverContainer LeftoverKind = "container" // without a descriptor
	LeftoverTask      LeftoverKind = "task"      // without a container
	LeftoverSnapshot  LeftoverKind = "snapshot"  // of ours, without a container
	LeftoverLease     LeftoverKind = "lease"     // of a creation
	LeftoverCgroup    LeftoverKind = "cgroup"    // without a container
	LeftoverFiles     LeftoverKind = "files"     // without a container
	LeftoverExec      LeftoverKind = "exec"      // whose Exec is gone
)

// Leftover is something in our containerd namespace, cgroup or directories that nobody owns.
type Leftover struct {
	Kind LeftoverKind
	// UID is the sandbox's that it was made for.
	UID string
	// ID is its own name: the exec's ID, the path of a cgroup or directory, else the UID.
	ID string
}

// Leftovers finds what has no owner. While operations run it may name things in the making.
func (r *Runtime) Leftovers(ctx context.Context) ([]Leftover, error) {
	ctx = r.context(ctx)
	var found []Leftover
	records, err := r.client.ContainerService().List(ctx)
	if err != nil {
		return nil, errorf(err, "find leftovers: list the containers")
	}
	recorded, owned := map[string]bool{}, map[string]bool{}
	for _, record := range records {
		recorded[record.ID] = true
		if _, owned[record.ID] = parseDescriptor(record.ID, record.Labels); !owned[record.ID] {
			found = append(found, Leftover{LeftoverContainer, record.ID, record.ID})
		}
	}
	processes, err := r.processes(ctx)
	if err != nil {
		return nil, errorf(err, "find leftovers")
	}
	for id := range processes {
		if !recorded[id] {
			found = append(found, Leftover{LeftoverTask, id, id})
		}
	}
	err = r.snapshotter().Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if uid := info.Labels[snapshotLabel]; uid == info.Name && !owned[uid] {
			found = append(found, Leftover{LeftoverSnapshot, uid, info.Name})
		}
		return nil
	}, fmt.Sprintf("labels.%q", snapshotLabel))
	if err != nil {
		return nil, errorf(err, "find leftovers: list the snapshots")
	}
	held, err := r.client.LeasesService().List(ctx)
	if err != nil {
		return nil, errorf(err, "find leftovers: list the leases")
	}
	for _, lease := range held {
		if uid, ours := strings.CutPrefix(lease.ID, leasePrefix); ours {
			found = append(found, Leftover{LeftoverLease, uid, lease.ID})
		}
	}
	for _, root := range r.cgroups {
		for _, dir := range subdirectories(filepath.Join(root.Path, r.config.CgroupParent)) {
			if uid := filepath.Base(dir); !owned[uid] {
				found = append(found, Leftover{LeftoverCgroup, uid, dir})
			}
		}
	}
	for _, parent := range []string{r.config.StateDir, filepath.Join(r.config.RunDir, "exec"), filepath.Join(r.runcRoot(), r.config.Namespace)} {
		for _, dir := range subdirectories(parent) {
			if uid := filepath.Base(dir); !owned[uid] {
				found = append(found, Leftover{LeftoverFiles, uid, dir})
			}
		}
	}
	for uid := range owned {
		for _, dir := range subdirectories(r.execDir(uid)) {
			if id := filepath.Base(dir); !r.execRuns(id) {
				found = append(found, Leftover{LeftoverExec, uid, id})
			}
		}
	}
	return found, nil
}

// Sweep removes what Leftovers finds, each after another look at it under its sandbox's lock, so that it may run beside
// other operations. It goes on after an error, and answers what it removed with all errors.
func (r *Runtime) Sweep(ctx context.Context) (removed []Leftover, err error) {
	found, err := r.Leftovers(ctx)
	if err != nil {
		return nil, err
	}
	gone := map[string]bool{} // by UID: all of an ownerless sandbox goes at once
	var errs []error
	for _, l := range found {
		did, err := gone[l.UID], error(nil)
		if !did {
			did, err = r.sweepOne(ctx, l)
			gone[l.UID] = did && l.Kind != LeftoverExec && l.Kind != LeftoverLease
		}
		if did {
			removed = append(removed, l)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("remove the leftover %s of sandbox %s: %w", l.Kind, l.UID, err))
		}
	}
	return removed, errors.Join(errs...)
}

func (r *Runtime) sweepOne(ctx context.Context, l Leftover) (removed bool, err error) {
	unlock, err := r.lock(ctx, l.UID)
	if errdefs.IsInvalidArgument(err) {
		return false, nil // nothing that we make has such a name
	}
	if err != nil {
		return false, err
	}
	defer unlock()
	if l.Kind == LeftoverExec {
		return r.sweepExec(ctx, l)
	}
	record, err := r.record(ctx, l.UID)
	if err != nil && !errdefs.IsNotFound(err) {
		return false, err
	}
	if _, owned := parseDescriptor(l.UID, record.Labels); owned {
		if l.Kind != LeftoverLease {
			return false, nil // completed meanwhile
		}
		return true, r.deleteLease(ctx, l.UID)
	}
	return true, r.delete(ctx, l.UID)
}

func (r *Runtime) execRuns(id string) bool {
	r.execMu.Lock()
	defer r.execMu.Unlock()
	_, runs := r.execs[id]
	return runs
}

// sweepExec ends an exec whose Exec was killed with its process.
func (r *Runtime) sweepExec(ctx context.Context, l Leftover) (removed bool, err error) {
	if r.execRuns(l.ID) {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, cleanPatience)
	defer cancel()
	// Also those of the sandbox's others: any of them may keep the shim from answering.
	for _, dir := range subdirectories(r.execDir(l.UID)) {
		if !r.execRuns(filepath.Base(dir)) {
			defer openEnds(dir)()
		}
	}
	listed, err := r.tasks().ListPids(r.context(ctx), &tasksapi.ListPidsRequest{ContainerID: l.UID})
	if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
		return false, err
	}
	for _, p := range listed.GetProcesses() {
		if p.Info == nil {
			continue
		}
		decoded, err := typeurl.UnmarshalAny(p.Info)
		if details, ok := decoded.(*runcoptions.ProcessDetails); err == nil && ok && details.ExecID == l.ID {
			killSession(r.cgroups, r.cgroupPath(l.UID), int(p.Pid))
			_, err := r.tasks().Wait(r.context(ctx), &tasksapi.WaitRequest{ContainerID: l.UID, ExecID: l.ID})
			if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
				return false, err
			}
		}
	}
	if err := r.deleteExec(ctx, l.UID, l.ID); err != nil {
		return false, err
	}
	err = os.RemoveAll(filepath.Join(r.execDir(l.UID), l.ID))
	return err == nil, err
}

// openEnds opens the FIFOs of an exec at both of their ends, and returns what closes them. A shim that was starting the
// command when its caller was killed waits for somebody at the other end, for half a minute and with a lock that all
// calls about the sandbox want.
func openEnds(dir string) (closeThem func()) {
	var opened []*os.File
	for _, name := range []string{"stdin", "stdout", "stderr"} {
		if f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|unix.O_NONBLOCK, 0); err == nil {
			opened = append(opened, f)
		}
	}
	return func() {
		for _, f := range opened {
			_ = f.Close()
		}
	}
}

// subdirectories are the paths of a directory's directories; none if it is not there.
func subdirectories(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var found []string
	for _, e := range entries {
		if e.IsDir() {
			found = append(found, filepath.Join(dir, e.Name()))
		}
	}
	return found
}
