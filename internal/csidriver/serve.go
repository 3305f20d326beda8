package csidriver

import (
	"context"
	"errors"
	"fmt"
	"path"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcstop"
	"github.com/flux-sandbox/flux-sandbox/internal/unixsocket"
)

// Sockets are where a driver is called.
type Sockets struct {
	// CSI is the socket of the CSI services, as this process sees it: ".../plugins/local.csi.sandbox.flux.io/csi.sock".
	CSI string
	// KubeletCSI is the same socket as kubelet sees it; CSI when empty.
	KubeletCSI string
	// Registration is the socket by which kubelet finds the driver, ".../plugins_registry/NAME-reg.sock". Empty where
	// there is no kubelet.
	Registration string
	// Register is closed when kubelet may register the driver: the node's domain is known. Volumes are published before.
	// Nil is at once.
	Register <-chan struct{}
}

// Serve answers on the sockets until ctx ends, and calls ready once it does. Both are for root alone. A call that is
// under way is answered first, if it ends within Config.StopGrace.
func Serve(ctx context.Context, d *Driver, sockets Sockets, ready func()) error {
	if sockets.KubeletCSI == "" {
		sockets.KubeletCSI = sockets.CSI
	}
	group, ctx := errgroup.WithContext(ctx)
	serve := func(path string, register func(*grpc.Server)) error {
		listener, err := unixsocket.Listen(path, nil) // New has the pool's lock, so no other driver answers there
		if err != nil {
			return err
		}
		server := grpc.NewServer(grpc.ChainUnaryInterceptor(Interceptor, d.observe))
		register(server)
		group.Go(func() error {
			if err := server.Serve(listener); !errors.Is(err, grpc.ErrServerStopped) { // stopped before it began
				return err
			}
			return nil
		})
		group.Go(func() error {
			<-ctx.Done()
			grpcstop.Within(server, d.config.StopGrace)
			return nil
		})
		return nil
	}
	err := serve(sockets.CSI, func(s *grpc.Server) { d.Register(s) })
	// Last: kubelet calls the driver as soon as it sees this one.
	if err == nil && sockets.Registration != "" {
		failed := make(chan error, 1)
		err = serve(sockets.Registration, func(s *grpc.Server) {
			registration.RegisterRegistrationServer(s, &registrar{endpoint: sockets.KubeletCSI, may: sockets.Register, failed: failed})
		})
		group.Go(func() error {
			select {
			case err := <-failed:
				return err
			case <-ctx.Done():
				return nil
			}
		})
	}
	if err != nil {
		group.Go(func() error { return err })
	} else {
		ready()
	}
	return group.Wait()
}

// observe is an interceptor that tells Config.Called.
func (d *Driver) observe(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	response, err := handler(ctx, request)
	volume := ""
	switch r := request.(type) {
	case *csi.CreateVolumeRequest:
		volume = idOf(r.GetName())
	case *csi.DeleteVolumeRequest:
		volume = r.GetVolumeId()
	case *csi.NodePublishVolumeRequest:
		volume = r.GetVolumeId()
	case *csi.NodeUnpublishVolumeRequest:
		volume = r.GetVolumeId()
	default:
		return response, err
	}
	if d.config.Called != nil {
		d.config.Called(path.Base(info.FullMethod), volume, err)
	}
	return response, err
}

// registrar is kubelet's plugin registration, which otherwise a sidecar answers.
type registrar struct {
	registration.UnimplementedRegistrationServer
	endpoint string
	may      <-chan struct{} // nil is yes
	failed   chan<- error
}

// GetInfo implements registration.RegistrationServer. Kubelet asks again after an error.
func (r *registrar) GetInfo(ctx context.Context, _ *registration.InfoRequest) (*registration.PluginInfo, error) {
	if r.may != nil {
		select {
		case <-r.may:
		case <-ctx.Done():
			return nil, fault.New(errdefs.ErrUnavailable, fault.AgentRecovering, "the node's topology domain is not known yet, as the API server does not answer")
		}
	}
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: Name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

// NotifyRegistrationStatus implements registration.RegistrationServer. A refused driver ends: started again, it is
// registered again.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !s.GetPluginRegistered() {
		select {
		case r.failed <- fmt.Errorf("kubelet refused the driver: %s", s.GetError()):
		default: // it ends already
		}
	}
	return &registration.RegistrationStatusResponse{}, nil
}
