// Package csidrivertest gives tests the driver of package csidriver on a socket, and has it misbehave when asked to.
//
//	d := csidrivertest.New(t)
//	d.Create(t, "v", 32<<20)
//	d.On("NodePublishVolume", func(ctx context.Context, request any, next func() (any, error)) (any, error) {
//		return nil, status.Error(codes.Aborted, "not now")
//	})
package csidrivertest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// Name is the driver's.
const Name = csidriver.Name

// Hook answers a call in the driver's place; next is what the driver would do.
type Hook func(ctx context.Context, request any, next func() (any, error)) (any, error)

// Driver is a driver that serves. Its pool and socket go with the test.
type Driver struct {
	*csidriver.Driver
	// Socket is where it answers, Pool its folder.
	Socket, Pool string

	mu     sync.Mutex // guards the fields below
	hooks  map[string]Hook
	calls  map[string]int
	server *grpc.Server
}

// New starts a driver. At the end nothing of its pool may be mounted any more.
func New(tb testing.TB) *Driver {
	tb.Helper()
	testenv.NeedRoot(tb)
	testenv.NeedBinary(tb, "mkfs.ext4")
	// A socket's path is short.
	dir, err := os.MkdirTemp("", "csi")
	must(tb, err)
	d := &Driver{Socket: filepath.Join(dir, "csi.sock"), Pool: filepath.Join(dir, "pool"), hooks: map[string]Hook{}, calls: map[string]int{}}
	tb.Cleanup(func() {
		for device, file := range testenv.LoopDevices() {
			if strings.HasPrefix(file, dir+"/") {
				tb.Errorf("a loop device is left: %s: %s", device, file)
			}
		}
		must(tb, os.RemoveAll(dir))
	})
	d.Driver, err = csidriver.New(within(tb), csidriver.Config{Pool: d.Pool, Node: "node", Version: "test"})
	must(tb, err)
	tb.Cleanup(func() { must(tb, d.Close()) })
	d.Serve(tb)
	tb.Cleanup(d.Stop)
	return d
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func within(tb testing.TB) context.Context {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	tb.Cleanup(cancel)
	return ctx
}

// Serve has the driver answer on its socket, after Stop.
func (d *Driver) Serve(tb testing.TB) {
	tb.Helper()
	if err := os.Remove(d.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		tb.Fatal(err)
	}
	listener, err := net.Listen("unix", d.Socket)
	must(tb, err)
	server := grpc.NewServer(grpc.UnaryInterceptor(d.intercept))
	d.Register(server)
	d.mu.Lock()
	d.server = server
	d.mu.Unlock()
	go func() { _ = server.Serve(listener) }() // ends with Stop
}

// Stop cuts all connections, as the death of the driver does.
func (d *Driver) Stop() {
	d.mu.Lock()
	server := d.server
	d.mu.Unlock()
	server.Stop()
}

// On has a hook answer the calls of a method; nil is the driver itself.
func (d *Driver) On(method string, hook Hook) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hooks[method] = hook
}

// Calls is how often a method was called.
func (d *Driver) Calls(method string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls[method]
}

func (d *Driver) intercept(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	method := path.Base(info.FullMethod)
	d.mu.Lock()
	d.calls[method]++
	hook := d.hooks[method]
	d.mu.Unlock()
	next := func() (any, error) { return csidriver.Interceptor(ctx, request, info, handler) }
	if hook == nil {
		return next()
	}
	return hook(ctx, request, next)
}

// Create makes a volume, whose handle is its name.
func (d *Driver) Create(tb testing.TB, name string, size int64) {
	tb.Helper()
	_, err := d.CreateVolume(within(tb), &csi.CreateVolumeRequest{Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
		VolumeCapabilities: []*csi.VolumeCapability{{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER}}}})
	if err != nil {
		tb.Fatal(fmt.Errorf("create volume %s: %w", name, err))
	}
}
