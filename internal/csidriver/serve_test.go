package csidriver

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/unixsocket"
)

func dial(t *testing.T, path string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// TestKubeletFindsTheDriver goes kubelet's way: registration socket, then the endpoint that it names.
func TestKubeletFindsTheDriver(t *testing.T) {
	w := newWorld(t)
	d := w.driver(t)
	sockets := Sockets{CSI: w.target("plugins/csi.sock"), Registration: w.target("registry/reg.sock")}
	ctx, cancel := context.WithCancel(within(t))
	ready, ended := make(chan struct{}), make(chan error, 1)
	// A socket that a killed driver left is no hindrance.
	old, err := unixsocket.Listen(sockets.CSI, nil)
	must(t, err)
	defer old.Close()
	go func() { ended <- Serve(ctx, d, sockets, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	for _, path := range []string{sockets.CSI, sockets.Registration} {
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("socket %s: %v %v, want mode 0600", path, st, err)
		}
	}
	kubelet := registration.NewRegistrationClient(dial(t, sockets.Registration))
	info, err := kubelet.GetInfo(ctx, &registration.InfoRequest{})
	must(t, err)
	if info.GetType() != registration.CSIPlugin || info.GetName() != Name {
		t.Errorf("registered as %v", info)
	}
	conn := dial(t, info.GetEndpoint())
	node, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	must(t, err)
	if got := node.GetAccessibleTopology().GetSegments()[TopologyNode]; got != "node-1" {
		t.Errorf("topology names the node %q", got)
	}
	_, err = csi.NewControllerClient(conn).CreateVolume(ctx, &csi.CreateVolumeRequest{})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("a volume without a name: %v, want InvalidArgument", err)
	}
	_, err = kubelet.NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{PluginRegistered: true})
	must(t, err)
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("the driver ended with %v", err)
	}
}

func TestRefusedDriverEnds(t *testing.T) {
	w := newWorld(t)
	d, ctx := w.driver(t), within(t)
	sockets := Sockets{CSI: w.target("csi.sock"), Registration: w.target("reg.sock")}
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- Serve(ctx, d, sockets, func() { close(ready) }) }()
	<-ready
	kubelet := registration.NewRegistrationClient(dial(t, sockets.Registration))
	_, err := kubelet.NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{Error: "not you"})
	must(t, err)
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "not you") {
		t.Errorf("the refused driver ended with %v", err)
	}
}

// Kubelet is put off until the node's domain is known; volumes are published before.
func TestRegistrationWaits(t *testing.T) {
	w := newWorld(t)
	d := w.driver(t)
	d.config.DomainKey = "domain"
	may := make(chan struct{})
	sockets := Sockets{CSI: w.target("csi.sock"), Registration: w.target("reg.sock"), Register: may}
	ctx, cancel := context.WithCancel(within(t))
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- Serve(ctx, d, sockets, func() { close(ready) }) }()
	<-ready
	kubelet := registration.NewRegistrationClient(dial(t, sockets.Registration))
	short, done := context.WithTimeout(ctx, 50*time.Millisecond)
	defer done()
	if _, err := kubelet.GetInfo(short, &registration.InfoRequest{}); status.Code(err) != codes.DeadlineExceeded && status.Code(err) != codes.Unavailable {
		t.Errorf("registered too early: %v", err)
	}
	must(t, create(ctx, d, "v", size))
	must(t, remove(ctx, d, "v"))
	d.SetDomain("pod-a")
	close(may)
	info, err := kubelet.GetInfo(ctx, &registration.InfoRequest{})
	must(t, err)
	node, err := csi.NewNodeClient(dial(t, info.GetEndpoint())).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	must(t, err)
	if got := node.GetAccessibleTopology().GetSegments(); got["domain"] != "pod-a" || got[TopologyNode] != "node-1" {
		t.Errorf("the topology is %v", got)
	}
	cancel()
	must(t, <-ended)
}

// A call that does not end does not keep the driver from ending. Calls are told of, and those that change nothing are not.
func TestAHangingCallIsGivenUp(t *testing.T) {
	w := newWorld(t)
	called, hang := make(chan string, 1), make(chan struct{})
	defer close(hang)
	d, err := New(within(t), Config{Pool: w.target("pool"), Node: "node-1", StopGrace: time.Millisecond, Called: func(method, volume string, err error) {
		called <- method + " " + volume + " " + string(fault.ReasonOf(err))
		<-hang
	}})
	must(t, err)
	defer d.Close()
	sockets := Sockets{CSI: w.target("csi.sock")}
	ctx, cancel := context.WithCancel(within(t))
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- Serve(ctx, d, sockets, func() { close(ready) }) }()
	<-ready
	conn := dial(t, sockets.CSI)
	_, err = csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{})
	must(t, err)
	go func() {
		_, _ = csi.NewNodeClient(conn).NodePublishVolume(within(t), &csi.NodePublishVolumeRequest{VolumeId: "v", TargetPath: w.target("t"), VolumeCapability: writer})
	}()
	if got, want := <-called, "NodePublishVolume v VOLUME_NOT_FOUND"; got != want {
		t.Errorf("called: %q, want %q", got, want)
	}
	cancel()
	must(t, <-ended)
}
