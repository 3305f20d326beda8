package csidriver

import (
	"context"
	"io/fs"
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

const (
	// ParameterAllocation says how a StorageClass's volumes take their space: "thin" (default) or "preallocated".
	ParameterAllocation = "allocation"
	// ParameterTenant is whose a volume is. It is for named volumes, which have no claim that says so.
	ParameterTenant = "tenantId"
	// defaultSize is that of a volume for which nobody says one.
	defaultSize = 1 << 30
	// sizeUnit is what sizes are rounded up to: a filesystem's block.
	sizeUnit = 4096
)

// ControllerGetCapabilities implements csi.ControllerServer.
func (d *Driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	var list []*csi.ControllerServiceCapability
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		list = append(list, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}})
	}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: list}, nil
}

// CreateVolume implements csi.ControllerServer.
func (d *Driver) CreateVolume(ctx context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	want, err := d.wanted(r)
	if err != nil {
		return nil, err
	}
	id := idOf(want.Name)
	done, err := d.turn(id)
	if err != nil {
		return nil, err
	}
	defer done()
	have, err := d.load(id)
	if errdefs.IsNotFound(err) {
		have = want
		err = d.create(ctx, id, want)
	} else if err == nil {
		err = have.matches(want, r.GetCapacityRange())
	}
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: id, CapacityBytes: have.Size,
		AccessibleTopology: []*csi.Topology{{Segments: d.segments()}}}}, nil
}

func (d *Driver) create(ctx context.Context, id string, want record) error {
	// What a torn create or delete left has another's data.
	if err := d.pool.Remove(ctx, d.pool.Dir, id); err != nil {
		return err
	}
	if err := failpoint.Step(createSteps, "image", func() error {
		// Anybody may write to the root: whose volume it is, is only known where it is mounted (fsGroup).
		image, _, err := d.pool.Create(ctx, d.pool.Dir, id, capacity.Spec{Size: want.Size, Filesystem: want.Filesystem,
			Preallocate: want.Preallocated, RootMode: 0o777 | fs.ModeSticky})
		if err == nil {
			image.Close()
		}
		return err
	}); err != nil {
		return err
	}
	return failpoint.Step(createSteps, "record", func() error { return d.save(id, want) })
}

// wanted is the record of the volume that is asked for.
func (d *Driver) wanted(r *csi.CreateVolumeRequest) (record, error) {
	want := record{Name: r.GetName(), Filesystem: capacity.Ext4}
	switch {
	case want.Name == "":
		return want, invalid("a volume needs a name")
	case r.GetVolumeContentSource() != nil:
		return want, invalid("the volume %s cannot be made from a snapshot or a volume: the driver has no such thing", want.Name)
	case len(r.GetMutableParameters()) > 0:
		return want, invalid("the volume %s cannot have mutable parameters: the driver has none", want.Name)
	case len(r.GetVolumeCapabilities()) == 0:
		return want, invalid("the volume %s needs a capability", want.Name)
	}
	for _, c := range r.GetVolumeCapabilities() {
		if err := checkCapability(c); err != nil {
			return want, err
		}
		if f := c.GetMount().GetFsType(); f != "" {
			want.Filesystem = capacity.Filesystem(f)
		}
	}
	for key, value := range r.GetParameters() {
		switch {
		case key == ParameterTenant:
			want.TenantID = value
		case key == ParameterAllocation && (value == "thin" || value == "preallocated"):
			want.Preallocated = value == "preallocated"
		default:
			return want, invalid("parameter %s=%q is not known: the driver has %s=thin|preallocated", key, value, ParameterAllocation)
		}
	}
	if required := r.GetAccessibilityRequirements().GetRequisite(); len(required) > 0 && !d.reaches(required) {
		return want, fault.New(errdefs.ErrResourceExhausted, fault.UnreachableVolume,
			"the volume %s is wanted elsewhere: this driver makes volumes on node %s only", want.Name, d.config.Node)
	}
	var err error
	want.Size, err = sizeFor(r.GetCapacityRange(), want.Filesystem)
	return want, err
}

// sizeFor is the size of a new volume: what is required, but no less than the filesystem needs.
func sizeFor(asked *csi.CapacityRange, filesystem capacity.Filesystem) (int64, error) {
	required, limit := asked.GetRequiredBytes(), asked.GetLimitBytes()
	if required < 0 || limit < 0 || required > math.MaxInt64-sizeUnit {
		return 0, fault.New(errdefs.ErrOutOfRange, fault.InvalidSize, "%d to %d bytes is no size", required, limit)
	}
	size := required
	if size == 0 {
		size = defaultSize
		if limit > 0 {
			size = min(size, limit/sizeUnit*sizeUnit)
		}
	}
	size = max((size+sizeUnit-1)/sizeUnit*sizeUnit, filesystem.MinSize())
	if limit > 0 && size > limit {
		return 0, fault.New(errdefs.ErrOutOfRange, fault.InvalidSize,
			"the volume would have %d bytes (blocks of %d; %s needs %d), above the limit of %d", size, sizeUnit, filesystem, filesystem.MinSize(), limit)
	}
	return size, nil
}

// matches says whether the volume that is there is the one that is asked for.
func (have record) matches(want record, asked *csi.CapacityRange) error {
	limit := asked.GetLimitBytes()
	if have.Name != want.Name || have.Filesystem != want.Filesystem || have.Preallocated != want.Preallocated || have.TenantID != want.TenantID ||
		have.Size < asked.GetRequiredBytes() || limit > 0 && have.Size > limit || have.Size > want.Size && asked.GetRequiredBytes() > 0 {
		return fault.New(errdefs.ErrAlreadyExists, fault.Conflict,
			"a volume %s exists with other properties: it has %d bytes, %s, preallocated %t, tenant %q; asked for were %d bytes, %s, preallocated %t, tenant %q",
			have.Name, have.Size, have.Filesystem, have.Preallocated, have.TenantID, want.Size, want.Filesystem, want.Preallocated, want.TenantID)
	}
	return nil
}

// DeleteVolume implements csi.ControllerServer. A volume that is published is refused.
func (d *Driver) DeleteVolume(ctx context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id := r.GetVolumeId()
	if id == "" {
		return nil, invalid("delete: which volume?")
	}
	if !validID.MatchString(id) {
		return &csi.DeleteVolumeResponse{}, nil // no volume of ours, so it is not there
	}
	done, err := d.turn(id)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := d.checkUnused(id); err != nil {
		return nil, err
	}
	if err := failpoint.Step(deleteSteps, "forget", func() error { return d.forget(id) }); err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, failpoint.Step(deleteSteps, "remove", func() error { return d.pool.Remove(ctx, d.pool.Dir, id) })
}

func (d *Driver) checkUnused(id string) error {
	image, err := capacity.OpenImage(d.pool.Dir, id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer image.Close()
	used, err := d.loops.InUse(image)
	if err != nil || !used {
		return err
	}
	return fault.New(errdefs.ErrFailedPrecondition, fault.Busy, "the volume %s is in use: unpublish it first", id)
}

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (d *Driver) ValidateVolumeCapabilities(_ context.Context, r *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if r.GetVolumeId() == "" || len(r.GetVolumeCapabilities()) == 0 {
		return nil, invalid("a volume id and capabilities are needed")
	}
	if _, err := d.load(r.GetVolumeId()); err != nil {
		return nil, err
	}
	for _, c := range r.GetVolumeCapabilities() {
		if err := checkCapability(c); err != nil {
			return &csi.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil
		}
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: r.GetVolumeContext(), VolumeCapabilities: r.GetVolumeCapabilities(), Parameters: r.GetParameters()}}, nil
}

// GetCapacity implements csi.ControllerServer: what the pool can still promise.
func (d *Driver) GetCapacity(_ context.Context, r *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if t := r.GetAccessibleTopology(); t != nil && !d.reaches([]*csi.Topology{t}) {
		return &csi.GetCapacityResponse{}, nil
	}
	available, err := d.pool.Available()
	if err != nil {
		return nil, err
	}
	return &csi.GetCapacityResponse{AvailableCapacity: available}, nil
}

// checkCapability refuses what the driver cannot do.
func checkCapability(c *csi.VolumeCapability) error {
	if c.GetMount() == nil {
		return invalid("volumes are filesystems: access type mount only")
	}
	switch mode := c.GetAccessMode().GetMode(); mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
	default:
		return invalid("access mode %s is not possible: a volume lies on one node", mode)
	}
	if f := c.GetMount().GetFsType(); f != "" && capacity.Filesystem(f).MinSize() == 0 {
		return invalid("filesystem %q is not known: %s or %s", f, capacity.Ext4, capacity.XFS)
	}
	for _, flag := range c.GetMount().GetMountFlags() {
		if flag != "ro" && flag != "rw" && flag != "noexec" && flag != "nosuid" && flag != "nodev" {
			return invalid("mount flag %q is not possible: ro, rw, noexec, nosuid, nodev are", flag)
		}
	}
	return nil
}

// segments are the node's topology.
func (d *Driver) segments() map[string]string {
	d.mu.Lock()
	domain := d.domain
	d.mu.Unlock()
	s := map[string]string{TopologyNode: d.config.Node}
	if domain != "" {
		s[d.config.DomainKey] = domain
	}
	return s
}

// reaches says whether the node is in one of the topologies.
func (d *Driver) reaches(list []*csi.Topology) bool {
	mine := d.segments()
	for _, t := range list {
		in := true
		for key, value := range t.GetSegments() {
			in = in && mine[key] == value
		}
		if in {
			return true
		}
	}
	return false
}
