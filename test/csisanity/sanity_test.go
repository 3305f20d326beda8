// Package csisanity runs the whole sanity suite of the Kubernetes CSI project against our driver, with real loop
// devices and mounts (root).
package csisanity

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"google.golang.org/grpc"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func TestSanity(t *testing.T) {
	dir := t.TempDir()
	driver, err := csidriver.New(context.Background(), csidriver.Config{Pool: filepath.Join(dir, "pool"), Node: "node-1",
		DomainKey: "unifiedbus.com/superpod", Domain: "pod-a", Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	defer driver.Close()
	socket := filepath.Join(dir, "csi.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.UnaryInterceptor(csidriver.Interceptor))
	driver.Register(server)
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()

	config := sanity.NewTestConfig()
	config.Address = "unix:" + socket
	config.TargetPath, config.StagingPath = filepath.Join(dir, "target"), filepath.Join(dir, "staging")
	config.TestVolumeSize = 32 << 20
	sanity.Test(t, config)

	// The suite deletes what it makes.
	for _, pattern := range []string{"*.img", "*.json", ".flux-tmp-*"} {
		if left, _ := filepath.Glob(filepath.Join(dir, "pool", pattern)); len(left) > 0 {
			t.Errorf("left in the pool: %v", left)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), dir) {
		t.Errorf("mounts are left below %s (%v)", dir, err)
	}
	for device, file := range testenv.LoopDevices() {
		if strings.HasPrefix(file, dir) {
			t.Errorf("loop device left: %s: %s", device, file)
		}
	}
}
