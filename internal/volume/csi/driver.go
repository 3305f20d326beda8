package csi

import (
	"context"
	"strings"

	csiv1 "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// meanings says what a driver's answer means for us. What is not in it is a failure, and transient.
var meanings = map[codes.Code]struct {
	kind   error
	reason fault.Reason
}{
	// Try again: it is away, or overloaded, or at work on the volume (Aborted).
	codes.Unavailable:       {errdefs.ErrUnavailable, fault.DriverUnavailable},
	codes.DeadlineExceeded:  {errdefs.ErrUnavailable, fault.DriverUnavailable},
	codes.Canceled:          {errdefs.ErrUnavailable, fault.DriverUnavailable},
	codes.Aborted:           {errdefs.ErrUnavailable, fault.DriverUnavailable},
	codes.ResourceExhausted: {errdefs.ErrUnavailable, fault.DriverUnavailable},
	// Something broke there.
	codes.Internal: {errdefs.ErrInternal, fault.DriverFailed},
	codes.Unknown:  {errdefs.ErrInternal, fault.DriverFailed},
	codes.DataLoss: {errdefs.ErrInternal, fault.DriverFailed},
	// The volume, or what the driver was told of it, has to change first.
	codes.InvalidArgument:    {errdefs.ErrFailedPrecondition, fault.DriverRefused},
	codes.NotFound:           {errdefs.ErrFailedPrecondition, fault.DriverRefused},
	codes.AlreadyExists:      {errdefs.ErrFailedPrecondition, fault.DriverRefused},
	codes.FailedPrecondition: {errdefs.ErrFailedPrecondition, fault.DriverRefused},
	codes.OutOfRange:         {errdefs.ErrFailedPrecondition, fault.DriverRefused},
	codes.Unimplemented:      {errdefs.ErrFailedPrecondition, fault.DriverRefused},
	codes.PermissionDenied:   {errdefs.ErrFailedPrecondition, fault.DriverRefused},
	codes.Unauthenticated:    {errdefs.ErrFailedPrecondition, fault.DriverRefused},
}

// answered makes our error of a driver's. Secrets that it repeats are taken out of it.
func (d Driver) answered(call string, err error, secrets volume.Secrets) error {
	if err == nil {
		return nil
	}
	st := status.Convert(err)
	m, ok := meanings[st.Code()]
	if !ok {
		m = meanings[codes.Unknown]
	}
	message := st.Message()
	for _, value := range secrets {
		if value != "" {
			message = strings.ReplaceAll(message, value, "[secret]")
		}
	}
	return fault.New(m.kind, m.reason, "CSI driver %s, %s: %s (%s)", d.Name, call, message, st.Code()).With("code", st.Code().String())
}

// isNotFound says whether an error is a driver's NotFound.
func isNotFound(err error) bool { return fault.MetadataOf(err)["code"] == codes.NotFound.String() }

// call connects to the driver for one call or a few. A driver that was started again is so found at once.
func (d Driver) call(f func(*grpc.ClientConn) error) error {
	conn, err := grpc.NewClient("unix://"+d.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDisableServiceConfig(), grpc.WithAuthority("localhost"))
	if err != nil {
		return fault.New(errdefs.ErrUnavailable, fault.DriverUnavailable, "CSI driver %s: %w", d.Name, err)
	}
	defer conn.Close()
	return f(conn)
}

// abilities are what matters to us of what a driver can.
type abilities struct{ stages, multiWriter bool }

// ask checks that it is the driver that answers on its socket, and asks what it can.
func (d Driver) ask(ctx context.Context) (can abilities, err error) {
	err = d.call(func(conn *grpc.ClientConn) error {
		info, err := csiv1.NewIdentityClient(conn).GetPluginInfo(ctx, &csiv1.GetPluginInfoRequest{})
		if err != nil {
			return d.answered("GetPluginInfo", err, nil)
		}
		if info.GetName() != d.Name {
			return fault.New(errdefs.ErrFailedPrecondition, fault.DriverRefused,
				"at %s answers CSI driver %q, and not %s: set its socket right in the node's configuration (csi.drivers)", d.Socket, info.GetName(), d.Name)
		}
		list, err := csiv1.NewNodeClient(conn).NodeGetCapabilities(ctx, &csiv1.NodeGetCapabilitiesRequest{})
		if err != nil {
			return d.answered("NodeGetCapabilities", err, nil)
		}
		for _, c := range list.GetCapabilities() {
			switch c.GetRpc().GetType() {
			case csiv1.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME:
				can.stages = true
			case csiv1.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER:
				can.multiWriter = true
			}
		}
		return nil
	})
	return can, err
}

func (d Driver) publish(ctx context.Context, r *csiv1.NodePublishVolumeRequest) error {
	return d.call(func(conn *grpc.ClientConn) error {
		_, err := csiv1.NewNodeClient(conn).NodePublishVolume(ctx, r)
		return d.answered("NodePublishVolume", err, r.GetSecrets())
	})
}

func (d Driver) unpublish(ctx context.Context, r *csiv1.NodeUnpublishVolumeRequest) error {
	return d.call(func(conn *grpc.ClientConn) error {
		_, err := csiv1.NewNodeClient(conn).NodeUnpublishVolume(ctx, r)
		return d.answered("NodeUnpublishVolume", err, nil)
	})
}

// publishRequest is what the driver is told of a volume.
func publishRequest(v *volume.CSIVolume, target string, can abilities) *csiv1.NodePublishVolumeRequest {
	return &csiv1.NodePublishVolumeRequest{
		VolumeId: v.Handle, TargetPath: target, VolumeContext: v.Attributes, Secrets: v.Secrets, Readonly: publishedReadOnly(v),
		VolumeCapability: &csiv1.VolumeCapability{
			AccessType: &csiv1.VolumeCapability_Mount{Mount: &csiv1.VolumeCapability_MountVolume{FsType: v.FSType, MountFlags: v.MountOptions}},
			AccessMode: &csiv1.VolumeCapability_AccessMode{Mode: accessMode(v.AccessMode, can)},
		},
	}
}

// Kubernetes' words for access modes.
const (
	readWriteOnce = "ReadWriteOnce"
	readWriteMany = "ReadWriteMany"
	readOnlyMany  = "ReadOnlyMany"
)

// publishedReadOnly says whether nobody can write to a volume.
func publishedReadOnly(v *volume.CSIVolume) bool { return v.ReadOnly || v.AccessMode == readOnlyMany }

// accessMode is CSI's word for one of Kubernetes', as kubelet has it. The users of a node share one publication, which is
// several writers to a driver that tells these from one.
func accessMode(mode string, can abilities) csiv1.VolumeCapability_AccessMode_Mode {
	switch mode {
	case readWriteOnce:
		if can.multiWriter {
			return csiv1.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		}
		return csiv1.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	case readWriteMany:
		return csiv1.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	case readOnlyMany:
		return csiv1.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	}
	return csiv1.VolumeCapability_AccessMode_UNKNOWN
}
