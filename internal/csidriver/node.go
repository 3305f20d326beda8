package csidriver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// NodeGetInfo implements csi.NodeServer.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.config.Node, AccessibleTopology: &csi.Topology{Segments: d.segments()}}, nil
}

// NodeGetCapabilities implements csi.NodeServer.
func (d *Driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	var list []*csi.NodeServiceCapability
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		list = append(list, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}}})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: list}, nil
}

// NodePublishVolume implements csi.NodeServer.
func (d *Driver) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	id, target := r.GetVolumeId(), r.GetTargetPath()
	if id == "" || r.GetVolumeCapability() == nil {
		return nil, invalid("publish: a volume id and a capability are needed")
	}
	if err := checkTarget(target); err != nil {
		return nil, err
	}
	if err := checkCapability(r.GetVolumeCapability()); err != nil {
		return nil, err
	}
	done, err := d.turn(id)
	if err != nil {
		return nil, err
	}
	defer done()
	volume, err := d.load(id)
	if err != nil {
		return nil, err
	}
	image, err := d.image(id, volume)
	if err != nil {
		return nil, err
	}
	defer image.Close()

	flags := r.GetVolumeCapability().GetMount().GetMountFlags()
	attributes := mount.Attributes{NoExec: slices.Contains(flags, "noexec"),
		ReadOnly: r.GetReadonly() || slices.Contains(flags, "ro") ||
			r.GetVolumeCapability().GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY}
	there, err := d.published(image, target)
	if err != nil {
		return nil, err
	}
	if there.here != nil {
		if there.here.ReadOnly != attributes.ReadOnly || there.here.NoExec != attributes.NoExec {
			return nil, fault.New(errdefs.ErrAlreadyExists, fault.Conflict,
				"the volume %s is published at %s with other attributes: unpublish it first", id, target)
		}
		return &csi.NodePublishVolumeResponse{}, nil
	}
	if there.elsewhere > 0 && r.GetVolumeCapability().GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.Busy,
			"the volume %s is for one user at a time and is published at another path: unpublish it there", id)
	}
	if there.top != nil {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.TargetInUse, "something else is mounted at %s: unmount it", target)
	}
	return &csi.NodePublishVolumeResponse{}, d.publish(ctx, image, volume, target, attributes)
}

// image opens the image of a volume, which must be what it was made as.
func (d *Driver) image(id string, volume record) (*os.File, error) {
	image, err := capacity.OpenImage(d.pool.Dir, id)
	if errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) {
		return nil, damaged(id, "%w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("the volume %s: %w", id, err)
	}
	if err := capacity.CheckSize(image, volume.Size); err != nil {
		image.Close()
		return nil, damaged(id, "%w", err)
	}
	return image, nil
}

func (d *Driver) publish(ctx context.Context, image *os.File, volume record, target string, attributes mount.Attributes) error {
	if err := failpoint.Step(publishSteps, "target", func() error {
		if err := os.Mkdir(target, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
			return fault.New(errdefs.ErrFailedPrecondition, fault.InvalidTarget, "make the target: %w", err)
		}
		return nil
	}); err != nil {
		return err
	}
	fd, err := unix.Open(target, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fault.New(errdefs.ErrFailedPrecondition, fault.InvalidTarget, "the target %s is no directory: %w", target, err)
	}
	dir := os.NewFile(uintptr(fd), target)
	defer dir.Close()

	var device *capacity.Device
	if err := failpoint.Step(publishSteps, "device", func() error {
		device, err = d.loops.Attach(ctx, image)
		return err
	}); err != nil {
		return err
	}
	// The superblock holds the device from the mount on.
	defer device.Close()
	return failpoint.Step(publishSteps, "mount", func() error {
		tree, err := mount.NewFilesystem(mount.Filesystem{Type: string(volume.Filesystem), Source: device.Path})
		if err != nil {
			return err
		}
		defer tree.Close()
		if err := tree.SetAttributes(attributes); err != nil {
			return err
		}
		return tree.Place(dir)
	})
}

// NodeUnpublishVolume implements csi.NodeServer. Where nothing is mounted, only the target is removed.
func (d *Driver) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	id, target := r.GetVolumeId(), r.GetTargetPath()
	if id == "" {
		return nil, invalid("unpublish: which volume?")
	}
	if err := checkTarget(target); err != nil {
		return nil, err
	}
	done, err := d.turn(id)
	if err != nil {
		return nil, err
	}
	defer done()
	there, err := d.publishedByID(id, target)
	if err != nil {
		return nil, err
	}
	if there.here == nil && there.top != nil {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.TargetInUse,
			"what is mounted at %s is not the volume %s: it is left alone", target, id)
	}
	if there.here != nil {
		if err := failpoint.Step(unpublishSteps, "unmount", func() error {
			err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
			if errors.Is(err, unix.EBUSY) {
				return fault.New(errdefs.ErrUnavailable, fault.Busy, "unmount %s: a process uses it: %w", target, err)
			}
			if err != nil {
				return fmt.Errorf("unmount %s: %w", target, err)
			}
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return &csi.NodeUnpublishVolumeResponse{}, failpoint.Step(unpublishSteps, "target", func() error {
		// rmdir alone: whatever lies in a target that is not mounted is not removed.
		if err := unix.Rmdir(target); err != nil && !errors.Is(err, unix.ENOENT) {
			return fault.New(errdefs.ErrFailedPrecondition, fault.InvalidTarget, "remove the target %s: %w", target, err)
		}
		return nil
	})
}

// NodeGetVolumeStats implements csi.NodeServer.
func (d *Driver) NodeGetVolumeStats(_ context.Context, r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	id, path := r.GetVolumeId(), r.GetVolumePath()
	if id == "" || path == "" {
		return nil, invalid("statistics: a volume id and a path are needed")
	}
	if _, err := d.load(id); err != nil {
		return nil, err
	}
	there, err := d.publishedByID(id, filepath.Clean(path))
	if err != nil {
		return nil, err
	}
	if there.here == nil {
		return nil, fault.New(errdefs.ErrNotFound, fault.VolumeNotFound, "the volume %s is not published at %s", id, path)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return nil, fmt.Errorf("statistics of %s: %w", path, err)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: int64(st.Blocks) * st.Bsize, Available: int64(st.Bavail) * st.Bsize, Used: int64(st.Blocks-st.Bfree) * st.Bsize},
		{Unit: csi.VolumeUsage_INODES, Total: int64(st.Files), Available: int64(st.Ffree), Used: int64(st.Files - st.Ffree)},
	}}, nil
}

// checkTarget refuses paths that are not absolute and clean: what is compared with mountinfo must be one path.
func checkTarget(target string) error {
	if !filepath.IsAbs(target) || filepath.Clean(target) != target || target == "/" {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidTarget, "the target %q is no absolute, clean path", target)
	}
	return nil
}

// publication is what the kernel says of a volume and a target.
type publication struct {
	here      *mount.Info // the volume's mount at the target, on top
	top       *mount.Info // whatever is mounted at the target, on top
	elsewhere int         // mounts of the volume at other paths
}

// publishedByID is published for a volume of which nothing but the mounts may be left: its image may be gone, replaced by
// another, or on a disk that cannot be written any more. What is mounted must go all the same.
func (d *Driver) publishedByID(id, target string) (publication, error) {
	var image *os.File
	if validID.MatchString(id) {
		var err error
		if image, err = capacity.OpenImage(d.pool.Dir, id); err == nil {
			defer image.Close()
		}
	}
	p, err := d.published(image, target)
	if err != nil || p.here != nil || p.top == nil {
		return p, err
	}
	if name, err := capacity.AttachedName(p.top.Device); err != nil {
		return p, err
	} else if name != "" && name == capacity.LoopName(id) {
		p.here = p.top
	}
	return p, nil
}

// published compares the image's loop device with the mounts of this namespace. image may be nil.
func (d *Driver) published(image *os.File, target string) (publication, error) {
	var p publication
	device := ""
	if image != nil {
		loop, err := d.loops.Lookup(image)
		if err != nil {
			return p, err
		}
		if loop != nil {
			defer loop.Close()
			device = fmt.Sprintf("%d:%d", unix.Major(loop.Number), unix.Minor(loop.Number))
		}
	}
	// mountinfo has real paths: the target's parents may be symbolic links.
	if parent, err := filepath.EvalSymlinks(filepath.Dir(target)); err == nil {
		target = filepath.Join(parent, filepath.Base(target))
	}
	mounts, err := mount.Mounts()
	if err != nil {
		return p, err
	}
	for _, m := range mounts {
		ours := device != "" && m.Device == device
		switch {
		case m.MountPoint == target: // the last one in the list is on top
			p.top, p.here = &m, nil
			if ours {
				p.here = &m
			}
		case ours:
			p.elsewhere++
		}
	}
	return p, nil
}
