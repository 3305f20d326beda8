// Command foreigndriver is a CSI driver that is nobody's of this project, for the tests of volumes that kubelet mounts: its
// volumes have to be attached (VolumeAttachment) and staged (NodeStageVolume) before they can be published. It is one program
// with what is otherwise four containers: controller and node services, the registrar with kubelet, and the attacher, each
// with the behaviour of the stock one as far as one node shows it.
//
// # Volumes
//
// A volume is a folder of its handle's name below -dir, with a disk image in it, which somebody else made (the volumes are
// static):
//
//	DIR/HANDLE/disk.img    an ext4 filesystem
//	DIR/HANDLE/attached    the node to which it is attached; made and removed by the controller service
//	DIR/HANDLE/calls       what was called, a line for each call's begin and one for its end
//	DIR/HANDLE/misbehave   how it is to misbehave
//
// To stage is to mount the image on a loop device of its own, to publish is a bind of that. Staging a volume that is not
// attached to the node is refused, and publishing one that is not staged.
//
// # Misbehaviour
//
// Lines of "misbehave" are read at each call, so that a test can change its mind:
//
//	CALL slow DURATION     goes on after that time
//	CALL fail CODE N       answers the first N calls with a gRPC code, by its name ("Aborted")
//	CALL hang              neither goes on nor answers before the line is gone, whatever the caller's deadline
//	NodePublishVolume ignore-read-only
//	NodePublishVolume no-mount     answers OK, with nothing mounted at the target
//
// A second call for a volume at which one is under way is Aborted, as CSI has it.
//
// # Publishing alone
//
// With -publish-only it is a driver of the other kind: it needs neither attach nor stage, mounts the image where it is to be
// published, and is called at -socket by whoever wants to, without kubelet and API server. It notes which secrets it was given:
//
//	DIR/HANDLE/secrets     a line for each: its key and the SHA-256 of its value
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

func main() {
	var d driver
	flag.StringVar(&d.name, "name", "foreign.example.com", "the driver's `name`")
	flag.StringVar(&d.node, "node", os.Getenv("NODE_NAME"), "the node's `name`")
	flag.StringVar(&d.dir, "dir", "/var/lib/foreigndriver", "`folder` of the volumes")
	kubelet := flag.String("kubelet", "/var/lib/kubelet", "kubelet's `folder`, at the same path here and there")
	flag.BoolVar(&d.publishOnly, "publish-only", false, "need neither attach nor stage")
	socket := flag.String("socket", "", "`path` of the driver's socket (default: below kubelet's folder)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, &d, *kubelet, *socket); err != nil {
		slog.Error("the driver ends", "error", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, d *driver, kubelet, socket string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if socket == "" {
		socket = filepath.Join(kubelet, "plugins", d.name, "csi.sock")
	}
	if err := os.MkdirAll(filepath.Dir(socket), 0o750); err != nil {
		return err
	}
	services := func(s *grpc.Server) {
		csi.RegisterIdentityServer(s, d)
		csi.RegisterControllerServer(s, d)
		csi.RegisterNodeServer(s, d)
	}
	var servers sync.WaitGroup
	serve := func(path string, register func(*grpc.Server)) error {
		// One that was killed left its socket.
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		listener, err := net.Listen("unix", path)
		if err != nil {
			return fmt.Errorf("listen at %s: %w", path, err)
		}
		server := grpc.NewServer(grpc.UnaryInterceptor(d.intercept))
		register(server)
		context.AfterFunc(ctx, server.Stop)
		servers.Go(func() {
			if err := server.Serve(listener); err != nil {
				cancel(err)
			}
		})
		return nil
	}
	if err := serve(socket, services); err != nil {
		return err
	}
	if d.publishOnly {
		return wait(ctx, &servers)
	}
	attach, err := newAttacher(d.name, socket)
	if err != nil {
		return err
	}
	defer attach.close()
	servers.Go(func() {
		if err := attach.run(ctx); err != nil {
			cancel(fmt.Errorf("attacher: %w", err))
		}
	})
	// Last: kubelet calls the driver as soon as it sees this one.
	err = serve(filepath.Join(kubelet, "plugins_registry", d.name+"-reg.sock"), func(s *grpc.Server) {
		registration.RegisterRegistrationServer(s, &registrar{name: d.name, endpoint: socket, refused: cancel})
	})
	if err != nil {
		return err
	}
	return wait(ctx, &servers)
}

// wait waits for the program's end, and says why it came.
func wait(ctx context.Context, servers *sync.WaitGroup) error {
	<-ctx.Done()
	servers.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// registrar is how kubelet finds the driver.
type registrar struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
	refused        context.CancelCauseFunc
}

// GetInfo implements registration.RegistrationServer.
func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: r.name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

// NotifyRegistrationStatus implements registration.RegistrationServer.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !s.GetPluginRegistered() {
		r.refused(fmt.Errorf("kubelet refuses the driver: %s", s.GetError()))
	}
	return &registration.RegistrationStatusResponse{}, nil
}
