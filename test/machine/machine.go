// Package machine runs the shipped flux-sandbox as a process in a scratch folder, for tests and benchmarks that look at
// it from outside: through its API, and through the kernel.
package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testimage"
)

// Image is the image that every machine has.
const Image = "docker.io/library/busybox:latest"

// patience bounds each wait; it is generous, as machines in CI are slow.
const patience = time.Minute

// Machine is one flux-sandbox and its scratch folder.
type Machine struct {
	// Dir is the scratch folder: run, state, and data with the volume roots tenants/{tenantId}, shared and
	// images/{tenantId}.
	Dir string
	// Bin has the built programs.
	Bin string
	// Config is the path of the configuration file.
	Config string

	Volumes   sandboxv1.SandboxVolumeServiceClient
	Sandboxes sandboxv1.SandboxServiceClient
	Images    sandboxv1.ImageServiceClient
	Named     sandboxv1.VolumeServiceClient

	conn   *grpc.ClientConn
	server *exec.Cmd
	ended  chan error
	log    *os.File
}

// New makes a machine with a server that runs and has the image. failpoints builds the server with the tag "failpoint".
// Everything is removed with the test, which fails if something cannot be.
func New(tb testing.TB, failpoints bool) *Machine {
	tb.Helper()
	testenv.NeedRoot(tb)
	containerd := testenv.NeedContainerd(tb)
	m := &Machine{Bin: Build(tb, failpoints)}
	// A short path, for the sake of sockets.
	dir, err := os.MkdirTemp("", "flux-m")
	must(tb, err)
	m.Dir, m.Config = dir, filepath.Join(dir, "flux-sandbox.yaml")
	for _, d := range []string{"tenants", "shared", "images"} {
		must(tb, os.MkdirAll(m.Data(d), 0o755))
	}
	must(tb, os.WriteFile(m.Config, fmt.Appendf(nil, `
node: machine
stateDir: %[1]s/state
runDir: %[1]s/run
containerd:
  binary: %[2]s
sandboxes:
  cgroupParent: /%[3]s
volumes:
  local:
  - path: %[1]s/data/tenants/{tenantId}
  - path: %[1]s/data/shared
    shared: true
  - path: %[1]s/data/images/{tenantId}
    backing: image
`, dir, containerd, filepath.Base(dir)), 0o644))
	m.log, err = os.Create(filepath.Join(dir, "flux-sandbox.log"))
	must(tb, err)
	m.conn, err = grpc.NewClient("unix://"+dir+"/run/flux-sandbox.sock", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: patience,
			Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.5, MaxDelay: 20 * time.Millisecond}}))
	must(tb, err)
	m.Volumes = sandboxv1.NewSandboxVolumeServiceClient(m.conn)
	m.Named = sandboxv1.NewVolumeServiceClient(m.conn)
	m.Sandboxes = sandboxv1.NewSandboxServiceClient(m.conn)
	m.Images = sandboxv1.NewImageServiceClient(m.conn)
	tb.Cleanup(func() { m.remove(tb) })
	m.Start(tb)
	m.importImage(tb)
	return m
}

// Data is a path below the data folder.
func (m *Machine) Data(elem ...string) string {
	return filepath.Join(append([]string{m.Dir, "data"}, elem...)...)
}

// Dir makes a directory of a tenant that can be a source.
func (m *Machine) TenantDir(tb testing.TB, tenant, name string) string {
	tb.Helper()
	p := m.Data("tenants", tenant, name)
	must(tb, os.MkdirAll(p, 0o755))
	return p
}

// Image is the source of an image-backed directory of a tenant.
func (m *Machine) ImageDir(tenant, name string) string { return m.Data("images", tenant, name) }

// Start starts the server and waits until it serves. env are further environment variables.
func (m *Machine) Start(tb testing.TB, env ...string) {
	tb.Helper()
	m.Launch(tb, env...)
	if !m.AwaitReady(tb) {
		tb.Fatalf("the server ended before it served:\n%s", m.Log(tb))
	}
}

// Launch starts the server without waiting for it.
func (m *Machine) Launch(tb testing.TB, env ...string) {
	tb.Helper()
	if m.server != nil {
		tb.Fatal("the server runs already")
	}
	m.server = exec.Command(filepath.Join(m.Bin, "flux-sandbox"), "serve", "--config", m.Config)
	m.server.Env = append(os.Environ(), env...)
	m.server.Stdout, m.server.Stderr = m.log, m.log
	m.server.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must(tb, m.server.Start())
	m.ended = make(chan error, 1)
	go func(server *exec.Cmd, ended chan<- error) { ended <- server.Wait() }(m.server, m.ended)
}

// AwaitReady waits until the server serves; false when it ends before.
func (m *Machine) AwaitReady(tb testing.TB) bool {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	health := healthv1.NewHealthClient(m.conn)
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case err := <-m.ended:
			m.ended <- err
			return false
		case <-ctx.Done():
			tb.Fatalf("the server does not serve:\n%s", m.Log(tb))
		case <-ticker.C:
			r, err := health.Check(ctx, &healthv1.HealthCheckRequest{})
			if err == nil && r.GetStatus() == healthv1.HealthCheckResponse_SERVING {
				return true
			}
		}
	}
}

// PID is the server's process id.
func (m *Machine) PID() int { return m.server.Process.Pid }

// Kill ends the server by SIGKILL and waits for its end.
func (m *Machine) Kill(tb testing.TB) {
	tb.Helper()
	must(tb, m.server.Process.Kill())
	m.AwaitEnd(tb)
}

// Stop ends the server by SIGTERM.
func (m *Machine) Stop(tb testing.TB) {
	tb.Helper()
	must(tb, m.server.Process.Signal(syscall.SIGTERM))
	m.AwaitEnd(tb)
}

// AwaitEnd waits for the server's end, for a minute at most.
func (m *Machine) AwaitEnd(tb testing.TB) {
	tb.Helper()
	if !m.Ended(patience) {
		tb.Fatalf("the server does not end:\n%s", m.Log(tb))
	}
}

// Ended waits for the server's end for some time.
func (m *Machine) Ended(wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-m.ended:
		m.server = nil
		return true
	case <-timer.C:
		return false
	}
}

// Log is what the server wrote.
func (m *Machine) Log(tb testing.TB) string {
	tb.Helper()
	b, err := os.ReadFile(m.log.Name())
	must(tb, err)
	const most = 16 << 10
	if len(b) > most {
		b = b[len(b)-most:]
	}
	return string(b)
}

// Reset runs "flux-sandbox reset"; the server must not be running.
func (m *Machine) Reset(tb testing.TB) {
	tb.Helper()
	out, err := exec.Command(filepath.Join(m.Bin, "flux-sandbox"), "reset", "--yes", "--config", m.Config).CombinedOutput()
	if err != nil {
		tb.Errorf("reset: %v\n%s", err, out)
	}
}

func (m *Machine) remove(tb testing.TB) {
	tb.Helper()
	if m.server != nil {
		_ = m.server.Process.Kill()
		<-m.ended
		m.server = nil
	}
	m.Reset(tb)
	_ = m.conn.Close()
	_ = m.log.Close()
	if tb.Failed() {
		tb.Logf("the server's log:\n%s", m.Log(tb))
	}
	must(tb, os.RemoveAll(m.Dir))
}

func (m *Machine) importImage(tb testing.TB) {
	tb.Helper()
	var archive bytes.Buffer
	must(tb, testimage.Write(&archive, testimage.Options{Name: Image}))
	stream, err := m.Images.ImportImage(tb.Context())
	must(tb, err)
	for archive.Len() > 0 {
		must(tb, stream.Send(&sandboxv1.ImportImageRequest{Chunk: archive.Next(1 << 20)}))
	}
	_, err = stream.CloseAndRecv()
	must(tb, err)
}

var (
	buildMu sync.Mutex          // guards built
	built   = map[bool]string{} // folder of the programs, by failpoints
)

// Build builds the programs once in the test process and returns their folder; Main or Clean removes it.
func Build(tb testing.TB, failpoints bool) string {
	tb.Helper()
	buildMu.Lock()
	defer buildMu.Unlock()
	if dir, ok := built[failpoints]; ok {
		return dir
	}
	dir, err := os.MkdirTemp("", "flux-bin")
	must(tb, err)
	built[failpoints] = dir
	tags := ""
	if failpoints {
		tags = "failpoint"
	}
	const commands = "github.com/flux-sandbox/flux-sandbox/cmd/"
	build := exec.Command("go", "build", "-tags", tags, "-o", dir+"/", commands+"flux-sandbox")
	out, err := build.CombinedOutput()
	if err == nil {
		build = exec.Command("go", "build", "-ldflags", "-s -w", "-o", dir+"/", commands+"flux-sandbox-init", commands+"flux-sandbox-logger", commands+"fluxctl")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		out, err = build.CombinedOutput()
	}
	if err != nil {
		tb.Fatalf("build: %v\n%s", err, out)
	}
	return dir
}

// Main is a TestMain: it runs the tests, removes the built programs, and returns the exit code.
func Main(m *testing.M) int {
	code := m.Run()
	if err := Clean(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

// Clean removes the built programs; for programs without Main.
func Clean() error {
	buildMu.Lock()
	defer buildMu.Unlock()
	var errs []error
	for _, dir := range built {
		errs = append(errs, os.RemoveAll(dir))
	}
	return errors.Join(errs...)
}

// Failpoints are the names of all failpoints of the build.
func (m *Machine) Failpoints(tb testing.TB) []string {
	tb.Helper()
	out, err := exec.Command(filepath.Join(m.Bin, "flux-sandbox"), "failpoints").Output()
	must(tb, err)
	return strings.Fields(string(out))
}

// Arm is the environment variable that arms a failpoint.
func Arm(point, action string) string { return failpoint.Env + "=" + point + "=" + action }

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
