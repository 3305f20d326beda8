package standalone

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/version"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// namedVolumes are what claims are in a cluster: volumes of the built-in CSI driver, which runs in this process. The agent
// calls it by its socket, as it calls any other. A volume NAMESPACE/NAME is the driver's NAMESPACE.NAME (a namespace has
// no dot).
type namedVolumes struct {
	driver *csidriver.Driver
	stop   context.CancelFunc
	ended  chan struct{}
	err    error // of the driver's server, once ended is closed

	mu        sync.Mutex // guards followers
	followers map[chan scheduler.VolumeRef]struct{}
}

var (
	_ scheduler.Resolver   = (*namedVolumes)(nil)
	_ grpcapi.NamedVolumes = (*namedVolumes)(nil)
)

// openNamedVolumes starts the driver.
func openNamedVolumes(ctx context.Context, config Config) (*namedVolumes, error) {
	driver, err := csidriver.New(ctx, csidriver.Config{Pool: config.Volumes.Pool, Node: config.Node, Overcommit: config.Volumes.PoolOvercommit, Version: version.String()})
	if fault.ReasonOf(err) == fault.Busy {
		return nil, fault.New(errdefs.ErrUnavailable, fault.Busy, "another flux-sandbox runs with the pool %s: stop it first, or give this one a stateDir, a runDir and a pool of its own", config.Volumes.Pool)
	}
	if err != nil {
		return nil, fmt.Errorf("named volumes: %w", err)
	}
	// It ends with close, not with ctx: the agent may need it until its own end.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	n := &namedVolumes{driver: driver, stop: stop, ended: make(chan struct{}), followers: map[chan scheduler.VolumeRef]struct{}{}}
	ready := make(chan struct{})
	go func() {
		defer close(n.ended)
		n.err = csidriver.Serve(serving, driver, csidriver.Sockets{CSI: config.csiSocket()}, func() { close(ready) })
	}()
	select {
	case <-ready:
		return n, nil
	case <-n.ended:
		return nil, errors.Join(fmt.Errorf("named volumes: %w", n.err), driver.Close())
	}
}

// wait returns when the driver's server ends, or ctx.
func (n *namedVolumes) wait(ctx context.Context) error {
	select {
	case <-n.ended:
		return n.err
	case <-ctx.Done():
		return nil
	}
}

// close ends the driver. What is published stays.
func (n *namedVolumes) close() {
	n.stop()
	<-n.ended
	_ = n.driver.Close()
}

// removeEmptyPool removes a pool without volumes.
func removeEmptyPool(pool string) error {
	entries, err := os.ReadDir(pool)
	if err != nil || len(entries) > 1 || len(entries) == 1 && entries[0].Name() != csidriver.LockFile {
		return nil // there is none, or there is data
	}
	return errors.Join(os.RemoveAll(filepath.Join(pool, csidriver.LockFile)), os.Remove(pool))
}

func fullName(namespace, name string) string { return namespace + "." + name }

// find is the volume that a sandbox asks for.
func (n *namedVolumes) find(w scheduler.Wish) (csidriver.Volume, error) {
	e := w.Volume
	if e.VolumeType != v1alpha1.VolumeTypePVC {
		return csidriver.Volume{}, fault.New(errdefs.ErrFailedPrecondition, fault.VolumeTypeOff, "volumes of type %s are not available on this machine: use local or pvc", e.VolumeType)
	}
	v, err := n.driver.Volume(fullName(w.Sandbox.Namespace, e.Source))
	if errdefs.IsNotFound(err) {
		return v, fault.New(errdefs.ErrNotFound, fault.ClaimNotFound, "there is no volume %s in namespace %s: make it (fluxctl volume create %s --size 1Gi); it is tried again", e.Source, w.Sandbox.Namespace, e.Source)
	}
	if err != nil {
		return v, err
	}
	if v.TenantID != w.Sandbox.Spec.TenantID {
		return v, fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch, "volume %s is tenant %q's, and the sandbox is tenant %q's: use a volume of its own", e.Source, v.TenantID, w.Sandbox.Spec.TenantID)
	}
	if e.SizeLimit != "" {
		limit, err := volume.ParseSize(e.SizeLimit)
		if err != nil {
			return v, err
		}
		if v.Size > limit {
			return v, fault.New(errdefs.ErrFailedPrecondition, fault.LimitNotEnforced, "volume %s has %d bytes, more than the sizeLimit of %d: ask for at least that, or leave sizeLimit out", e.Source, v.Size, limit).
				With("requested", strconv.FormatInt(limit, 10)).With("actual", strconv.FormatInt(v.Size, 10))
		}
	}
	return v, nil
}

// Locate implements scheduler.Resolver.
func (n *namedVolumes) Locate(w scheduler.Wish) (scheduler.Location, error) {
	v, err := n.find(w)
	if err != nil {
		return scheduler.Location{}, err
	}
	return scheduler.Location{VolumeKey: volume.CSIKey(csidriver.Name, v.ID)}, nil
}

// Resolve implements scheduler.Resolver.
func (n *namedVolumes) Resolve(_ context.Context, w scheduler.Wish, _ string) (*scheduler.ResolvedVolume, error) {
	v, err := n.find(w)
	if err != nil {
		return nil, err
	}
	return &scheduler.ResolvedVolume{
		Location: scheduler.Location{VolumeKey: volume.CSIKey(csidriver.Name, v.ID)}, PVCName: w.Volume.Source, Path: v1alpha1.VolumePathDirect,
		SetSource: func(r *agentv1.AttachRequest) {
			r.Source = &agentv1.AttachRequest_Csi{Csi: &agentv1.CSISource{Driver: csidriver.Name, VolumeHandle: v.ID, AccessMode: "ReadWriteOnce", PersistentVolume: v.Name}}
		},
	}, nil
}

// Changes implements scheduler.Resolver.
func (n *namedVolumes) Changes(ctx context.Context) iter.Seq[scheduler.VolumeRef] {
	const pending = 1024
	changes := make(chan scheduler.VolumeRef, pending)
	n.mu.Lock()
	n.followers[changes] = struct{}{}
	n.mu.Unlock()
	return func(yield func(scheduler.VolumeRef) bool) {
		defer func() {
			n.mu.Lock()
			delete(n.followers, changes)
			n.mu.Unlock()
		}()
		for {
			select {
			case ref := <-changes:
				if !yield(ref) {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}
}

// changed tells who waits for a volume. What does not fit is found out when it is tried again in its time.
func (n *namedVolumes) changed(namespace, name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for f := range n.followers {
		select {
		case f <- scheduler.VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: namespace, Source: name}:
		default:
		}
	}
}

// Create implements grpcapi.NamedVolumes.
func (n *namedVolumes) Create(ctx context.Context, v grpcapi.NamedVolume) (grpcapi.NamedVolume, error) {
	full := fullName(v.Namespace, v.Name)
	parameters := map[string]string{csidriver.ParameterAllocation: "thin"}
	if v.Preallocated {
		parameters[csidriver.ParameterAllocation] = "preallocated"
	}
	if v.TenantID != "" {
		parameters[csidriver.ParameterTenant] = v.TenantID
	}
	if _, err := n.driver.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: full, Parameters: parameters,
		CapacityRange: &csi.CapacityRange{RequiredBytes: v.Size},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: v.Filesystem}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
		}}}); err != nil {
		return v, err
	}
	made, err := n.driver.Volume(full)
	if err != nil {
		return v, err
	}
	n.changed(v.Namespace, v.Name)
	return described(made), nil
}

// List implements grpcapi.NamedVolumes.
func (n *namedVolumes) List(context.Context) ([]grpcapi.NamedVolume, error) {
	list, err := n.driver.Volumes()
	all := make([]grpcapi.NamedVolume, 0, len(list))
	for _, v := range list {
		all = append(all, described(v))
	}
	return all, err
}

func described(v csidriver.Volume) grpcapi.NamedVolume {
	namespace, name, _ := strings.Cut(v.Name, ".")
	return grpcapi.NamedVolume{Namespace: namespace, Name: name, TenantID: v.TenantID, Size: v.Size, Filesystem: string(v.Filesystem), Preallocated: v.Preallocated}
}

// releasePoll is how often Delete looks whether the node has let go of a volume.
const releasePoll = 20 * time.Millisecond

// Delete implements grpcapi.NamedVolumes.
func (n *namedVolumes) Delete(ctx context.Context, namespace, name string) (bool, error) {
	v, err := n.driver.Volume(fullName(namespace, name))
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	// A damaged one can be deleted.
	if err != nil && !errdefs.IsDataLoss(err) {
		return false, err
	}
	ticker := time.NewTicker(releasePoll)
	defer ticker.Stop()
	for {
		_, err = n.driver.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.ID})
		if reason := fault.ReasonOf(err); err == nil || reason != fault.Busy && reason != fault.OperationPending {
			n.changed(namespace, name)
			return err == nil, err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return false, fault.New(errdefs.ErrFailedPrecondition, fault.Busy,
				"volume %s is named by no sandbox, but is not released yet: a mount namespace still has it; try again when that has ended", name)
		}
	}
}
