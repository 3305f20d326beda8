package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// driver has the three services of CSI.
type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer
	name, node, dir string
	publishOnly     bool

	mu sync.Mutex // guards the fields below
	// busy are the volumes, and targets, at which a call is under way; failed counts calls that were answered with an error
	// on demand.
	busy   map[string]bool
	failed map[string]int
}

// attachedTo is the key of the publish context that says to which node a volume is attached.
const attachedTo = "attached-to"

func (d *driver) file(volume, name string) string { return filepath.Join(d.dir, volume, name) }

// exists refuses what is no volume.
func (d *driver) exists(volume string) error {
	if volume == "" || volume != filepath.Base(volume) || strings.HasPrefix(volume, ".") {
		return status.Errorf(codes.InvalidArgument, "%q is no volume's handle", volume)
	}
	if _, err := os.Stat(d.file(volume, "disk.img")); err != nil {
		return status.Errorf(codes.NotFound, "volume %s: %v", volume, err)
	}
	return nil
}

// GetPluginInfo implements csi.IdentityServer.
func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "1"}, nil
}

// GetPluginCapabilities implements csi.IdentityServer.
func (d *driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	if d.publishOnly {
		return &csi.GetPluginCapabilitiesResponse{}, nil
	}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{{Type: &csi.PluginCapability_Service_{
		Service: &csi.PluginCapability_Service{Type: csi.PluginCapability_Service_CONTROLLER_SERVICE}}}}}, nil
}

// Probe implements csi.IdentityServer.
func (d *driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

// ControllerGetCapabilities implements csi.ControllerServer.
func (d *driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: []*csi.ControllerServiceCapability{{Type: &csi.ControllerServiceCapability_Rpc{
		Rpc: &csi.ControllerServiceCapability_RPC{Type: csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME}}}}}, nil
}

// ControllerPublishVolume implements csi.ControllerServer.
func (d *driver) ControllerPublishVolume(_ context.Context, r *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	if err := d.exists(r.GetVolumeId()); err != nil {
		return nil, err
	}
	switch node, err := os.ReadFile(d.file(r.GetVolumeId(), "attached")); {
	case err == nil && string(node) != r.GetNodeId():
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is attached to node %s", r.GetVolumeId(), node)
	case err != nil && !errors.Is(err, os.ErrNotExist):
		return nil, err
	}
	if err := os.WriteFile(d.file(r.GetVolumeId(), "attached"), []byte(r.GetNodeId()), 0o644); err != nil {
		return nil, err
	}
	return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{attachedTo: r.GetNodeId()}}, nil
}

// ControllerUnpublishVolume implements csi.ControllerServer.
func (d *driver) ControllerUnpublishVolume(_ context.Context, r *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if err := os.Remove(d.file(r.GetVolumeId(), "attached")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

// NodeGetInfo implements csi.NodeServer.
func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	// Not the node's name: that is what CSINode is for.
	return &csi.NodeGetInfoResponse{NodeId: "host-" + d.node}, nil
}

// NodeGetCapabilities implements csi.NodeServer.
func (d *driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	if d.publishOnly {
		return &csi.NodeGetCapabilitiesResponse{}, nil
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{{Type: &csi.NodeServiceCapability_Rpc{
		Rpc: &csi.NodeServiceCapability_RPC{Type: csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}}}}}, nil
}

// NodeStageVolume implements csi.NodeServer.
func (d *driver) NodeStageVolume(_ context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	if err := d.exists(r.GetVolumeId()); err != nil {
		return nil, err
	}
	if got := r.GetPublishContext()[attachedTo]; got != "host-"+d.node {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is not attached to this node, but to %q", r.GetVolumeId(), got)
	}
	there, err := mounted(r.GetStagingTargetPath())
	if err != nil || there {
		return &csi.NodeStageVolumeResponse{}, err
	}
	return &csi.NodeStageVolumeResponse{}, mountImage(d.file(r.GetVolumeId(), "disk.img"), r.GetStagingTargetPath())
}

// NodeUnstageVolume implements csi.NodeServer.
func (d *driver) NodeUnstageVolume(_ context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, unmount(r.GetStagingTargetPath())
}

// NodePublishVolume implements csi.NodeServer.
func (d *driver) NodePublishVolume(_ context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if err := d.exists(r.GetVolumeId()); err != nil {
		return nil, err
	}
	target := r.GetTargetPath()
	if d.publishOnly {
		if err := d.noteSecrets(r); err != nil {
			return nil, err
		}
		there, err := mounted(target)
		if err != nil || there {
			return &csi.NodePublishVolumeResponse{}, err
		}
		return &csi.NodePublishVolumeResponse{}, mountImage(d.file(r.GetVolumeId(), "disk.img"), target)
	}
	staged, err := mounted(r.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	if !staged {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is not staged at %q", r.GetVolumeId(), r.GetStagingTargetPath())
	}
	if err := os.MkdirAll(target, 0o750); err != nil {
		return nil, err
	}
	if d.misbehaves(r.GetVolumeId(), "NodePublishVolume", "no-mount") {
		return &csi.NodePublishVolumeResponse{}, nil
	}
	if there, err := mounted(target); err != nil || there {
		return &csi.NodePublishVolumeResponse{}, err
	}
	if err := unix.Mount(r.GetStagingTargetPath(), target, "", unix.MS_BIND, ""); err != nil {
		return nil, err
	}
	if r.GetReadonly() && !d.misbehaves(r.GetVolumeId(), "NodePublishVolume", "ignore-read-only") {
		if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return nil, errors.Join(err, unmount(target))
		}
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// noteSecrets writes down what can be compared with secrets, and not turned back into them.
func (d *driver) noteSecrets(r *csi.NodePublishVolumeRequest) error {
	var text strings.Builder
	for _, key := range slices.Sorted(maps.Keys(r.GetSecrets())) {
		fmt.Fprintf(&text, "%s %x\n", key, sha256.Sum256([]byte(r.GetSecrets()[key])))
	}
	return os.WriteFile(d.file(r.GetVolumeId(), "secrets"), []byte(text.String()), 0o600)
}

// NodeUnpublishVolume implements csi.NodeServer.
func (d *driver) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := unmount(r.GetTargetPath()); err != nil {
		return nil, err
	}
	if err := os.Remove(r.GetTargetPath()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}
