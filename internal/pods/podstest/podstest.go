// Package podstest gives tests a containerd with CRI and NRI of their own, in which they play kubelet: they run Pods and
// their containers through the CRI, without a cluster and without a network of their own.
//
//	env := podstest.Shared(t)
//	pod := env.Run(t, podstest.Pod{})
//	c := pod.Start(t, podstest.Container{Command: []string{"sleep", "600"}})
//
// FLUX_TEST_CONTAINERD_CRI is the containerd to test with, built by hack/containerd/build.sh cri; its shim lies beside it.
// Without it, or without root, a test is skipped; where the environment variable CI is "true" it fails.
package podstest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testimage"
)

// ContainerdEnv names the environment variable with the path of the containerd.
const ContainerdEnv = "FLUX_TEST_CONTAINERD_CRI"

const (
	image      = "docker.io/library/busybox:latest"
	pauseImage = "docker.io/library/flux-pause:latest"
	patience   = 2 * time.Minute
)

// Env is a containerd. Its fields are for the configuration of what is tested.
type Env struct {
	Dir string
	// Address and NRISocket are its sockets.
	Address, NRISocket string
	// Client is in the CRI's namespace by the context that Context makes.
	Client *containerd.Client

	daemon *exec.Cmd
	conn   *grpc.ClientConn
	cri    cri.RuntimeServiceClient
	cgroup string
}

var (
	mu     sync.Mutex // guards shared
	shared *Env
	serial atomic.Int64
)

// Main runs the tests with another Main and removes the shared environment. It answers the exit code.
func Main(run func() int) int {
	code := run()
	mu.Lock()
	defer mu.Unlock()
	if shared != nil {
		if err := shared.remove(); err != nil {
			fmt.Fprintln(os.Stderr, "podstest:", err)
			code = max(code, 1)
		}
		shared = nil
	}
	return code
}

// Shared is the environment that the tests of a package share.
func Shared(tb testing.TB) *Env {
	tb.Helper()
	binary := need(tb)
	mu.Lock()
	defer mu.Unlock()
	if shared == nil {
		env, err := start(binary)
		if err != nil {
			tb.Fatal(err)
		}
		shared = env
	}
	return shared
}

// New is an environment of the test's own, for tests that stop containerd. It is removed with the test.
func New(tb testing.TB) *Env {
	tb.Helper()
	env, err := start(need(tb))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := env.remove(); err != nil {
			tb.Error(err)
		}
	})
	return env
}

func need(tb testing.TB) string {
	tb.Helper()
	testenv.NeedRoot(tb)
	testenv.NeedBinary(tb, "runc")
	binary := os.Getenv(ContainerdEnv)
	if binary == "" {
		testenv.Missing(tb, "a containerd with CRI, named by %s (hack/containerd/build.sh cri builds it)", ContainerdEnv)
	}
	return binary
}

const configTOML = `version = 3
root = %[1]q
state = %[2]q
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = %[3]q
[ttrpc]
  address = %[4]q
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = %[5]q
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  conf_dir = %[6]q
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  Root = %[7]q
[plugins.'io.containerd.nri.v1.nri']
  disable = false
  socket_path = %[8]q
  plugin_path = %[9]q
  plugin_config_path = %[9]q
`

func start(binary string) (_ *Env, err error) {
	dir, err := os.MkdirTemp("", "fluxp")
	if err != nil {
		return nil, err
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	e := &Env{Dir: dir, Address: in("c.sock"), NRISocket: in("nri/nri.sock"), cgroup: "/" + filepath.Base(dir)}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.remove())
		}
	}()
	// The users of a user namespace come through to their container's root filesystem.
	if err := os.Chmod(dir, 0o711); err != nil {
		return e, err
	}
	for _, d := range []string{"nri", "cni", "plugins", "logs"} {
		if err := os.MkdirAll(in(d), 0o755); err != nil {
			return e, err
		}
	}
	config := fmt.Sprintf(configTOML, in("root"), in("state"), e.Address, in("t.sock"), pauseImage, in("cni"), in("runc"), e.NRISocket, in("plugins"))
	if err := os.WriteFile(in("config.toml"), []byte(config), 0o600); err != nil {
		return e, err
	}
	if err := e.startDaemon(binary); err != nil {
		return e, err
	}
	return e, e.importImages()
}

func (e *Env) startDaemon(binary string) error {
	log, err := os.OpenFile(filepath.Join(e.Dir, "containerd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	e.daemon = exec.Command(binary, "--config", filepath.Join(e.Dir, "config.toml"))
	e.daemon.Env = append(os.Environ(), "PATH="+filepath.Dir(binary)+":"+os.Getenv("PATH"))
	e.daemon.Stdout, e.daemon.Stderr = log, log
	if err := e.daemon.Start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if e.conn == nil {
		if e.conn, err = grpc.NewClient("unix://"+e.Address, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
			return err
		}
		e.cri = cri.NewRuntimeServiceClient(e.conn)
	}
	if err := until(ctx, func() (bool, error) {
		_, err = e.cri.Version(ctx, &cri.VersionRequest{}, grpc.WaitForReady(true))
		return err == nil, nil
	}); err != nil {
		return fmt.Errorf("containerd does not answer: %w", err)
	}
	if e.Client == nil {
		e.Client, err = containerd.New(e.Address)
	}
	return err
}

// Context is in the CRI's namespace.
func Context(ctx context.Context) context.Context { return namespaces.WithNamespace(ctx, "k8s.io") }

func (e *Env) importImages() error {
	ctx, cancel := context.WithTimeout(Context(context.Background()), patience)
	defer cancel()
	for _, options := range []testimage.Options{{Name: image}, {Name: pauseImage, Entrypoint: []string{"sleep", "1000000"}}} {
		var archive bytes.Buffer
		if err := testimage.Write(&archive, options); err != nil {
			return err
		}
		imported, err := e.Client.Import(ctx, &archive)
		if err != nil {
			return err
		}
		for _, i := range imported {
			if err := containerd.NewImage(e.Client, i).Unpack(ctx, "overlayfs"); err != nil {
				return err
			}
		}
	}
	images := cri.NewImageServiceClient(e.conn)
	for _, name := range []string{image, pauseImage} {
		// The CRI follows containerd's events.
		if err := until(ctx, func() (bool, error) {
			r, err := images.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: name}})
			return r.GetImage() != nil, err
		}); err != nil {
			return err
		}
	}
	return nil
}

// KillContainerd kills the daemon, not its shims and containers, and returns when it is gone.
func (e *Env) KillContainerd(tb testing.TB) {
	tb.Helper()
	must(tb, e.daemon.Process.Kill())
	_ = e.daemon.Wait()
}

// RestartContainerd starts it again.
func (e *Env) RestartContainerd(tb testing.TB) {
	tb.Helper()
	must(tb, e.startDaemon(e.daemon.Path))
}

// remove removes all Pods and ends containerd.
func (e *Env) remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var errs []error
	if e.cri != nil {
		list, err := e.cri.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
		errs = append(errs, err)
		for _, p := range list.GetItems() {
			_, err := e.cri.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.GetId()})
			errs = append(errs, err)
			_, err = e.cri.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.GetId()})
			errs = append(errs, err)
		}
	}
	if e.Client != nil {
		errs = append(errs, e.Client.Close())
	}
	if e.conn != nil {
		errs = append(errs, e.conn.Close())
	}
	if e.daemon != nil && e.daemon.Process != nil {
		_ = e.daemon.Process.Signal(syscall.SIGTERM)
		_ = e.daemon.Wait()
	}
	for _, pattern := range []string{"/sys/fs/cgroup" + e.cgroup, "/sys/fs/cgroup/*" + e.cgroup} {
		dirs, _ := filepath.Glob(pattern)
		for _, d := range dirs {
			_ = os.Remove(d)
		}
	}
	return errors.Join(append(errs, os.RemoveAll(e.Dir))...)
}

// Pod is a Pod.
type Pod struct {
	Name, UID string
	// HostPID gives its containers the host's PID namespace.
	HostPID bool
	// UserNamespace gives its containers a user namespace of their own (hostUsers: false). They
	// start where runc is 1.2 or later.
	UserNamespace bool
	// Privileged lets it have privileged containers.
	Privileged bool
	// Annotations are what NRI's plugins see of it.
	Annotations map[string]string

	env    *Env
	id     string
	config *cri.PodSandboxConfig
}

// Named is a Pod that does not run yet.
func (e *Env) Named(p Pod) *Pod {
	n := strconv.FormatInt(serial.Add(1), 10)
	if p.UID == "" {
		p.UID = fmt.Sprintf("pod-%d-%s", os.Getpid(), n)
	}
	if p.Name == "" {
		p.Name = "p" + n
	}
	p.env = e
	return &p
}

// Run runs a Pod without containers. It is removed with the test.
func (e *Env) Run(tb testing.TB, p Pod) *Pod {
	tb.Helper()
	pod := e.Named(p)
	pod.Run(tb)
	return pod
}

// Run makes the Pod's sandbox.
func (p *Pod) Run(tb testing.TB) {
	tb.Helper()
	p.config = &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: p.Name, Uid: p.UID, Namespace: "default"},
		Annotations:  p.Annotations,
		LogDirectory: filepath.Join(p.env.Dir, "logs", p.UID),
		// What kubelet sets, by which the CRI knows a container's Pod.
		Labels: map[string]string{"io.kubernetes.pod.name": p.Name, "io.kubernetes.pod.uid": p.UID, "io.kubernetes.pod.namespace": "default"},
		Linux:  &cri.LinuxPodSandboxConfig{CgroupParent: p.env.cgroup, SecurityContext: &cri.LinuxSandboxSecurityContext{Privileged: p.Privileged, NamespaceOptions: p.namespaces()}},
	}
	r, err := p.env.cri.RunPodSandbox(tb.Context(), &cri.RunPodSandboxRequest{Config: p.config})
	must(tb, err)
	p.id = r.GetPodSandboxId()
	tb.Cleanup(func() { p.remove(tb) })
}

func (p *Pod) namespaces() *cri.NamespaceOption {
	o := &cri.NamespaceOption{Network: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_CONTAINER}
	if p.HostPID {
		o.Pid = cri.NamespaceMode_NODE
	}
	if p.UserNamespace {
		users := []*cri.IDMapping{{HostId: 1 << 20, Length: 1 << 16}}
		o.UsernsOptions = &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: users, Gids: users}
	}
	return o
}

// Remove ends the Pod and removes it from the node, as kubelet does with one that is deleted.
func (p *Pod) Remove(tb testing.TB) {
	tb.Helper()
	p.remove(tb)
}

func (p *Pod) remove(tb testing.TB) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if p.id == "" {
		return
	}
	_, err := p.env.cri.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.id})
	must(tb, err)
	_, err = p.env.cri.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.id})
	must(tb, err)
	p.id = ""
}

// Container is a container of a Pod.
type Container struct {
	Name    string
	Command []string
	// Privileged and Capabilities are what it may do beside the default.
	Privileged   bool
	Capabilities []string
	// Shared are host directories that are mounted Bidirectional, by their place.
	Shared map[string]string

	pod     *Pod
	attempt uint32
	// ID is the id of its present instance.
	ID string
}

// Start makes a container and starts it.
func (p *Pod) Start(tb testing.TB, c Container) *Container {
	tb.Helper()
	started, err := p.TryStart(tb.Context(), c)
	must(tb, err)
	return started
}

// TryStart is Start. A container that was made and cannot be started is there all the same.
func (p *Pod) TryStart(ctx context.Context, c Container) (*Container, error) {
	c = p.container(c)
	err := c.TryAgain(ctx)
	return &c, err
}

// container completes the description of a container.
func (p *Pod) container(c Container) Container {
	if c.Name == "" {
		c.Name = "main"
	}
	if len(c.Command) == 0 {
		c.Command = []string{"sleep", "3600"}
	}
	c.pod = p
	return c
}

// Again makes and starts another instance of the container, as kubelet does after its end. The old one stays, dead.
func (c *Container) Again(tb testing.TB) {
	tb.Helper()
	must(tb, c.TryAgain(tb.Context()))
}

// TryAgain is Again; it may be called on any goroutine.
func (c *Container) TryAgain(ctx context.Context) error {
	if err := c.create(ctx); err != nil {
		return err
	}
	return c.Run(ctx)
}

// Create makes a container and does not start it.
func (p *Pod) Create(tb testing.TB, c Container) *Container {
	tb.Helper()
	c = p.container(c)
	must(tb, c.create(tb.Context()))
	return &c
}

// Run starts a container that was made.
func (c *Container) Run(ctx context.Context) error {
	_, err := c.pod.env.cri.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ID})
	return err
}

// create makes the next instance.
func (c *Container) create(ctx context.Context) error {
	config := &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: c.Name, Attempt: c.attempt},
		Image:    &cri.ImageSpec{Image: image}, Command: c.Command,
		LogPath: c.Name + "-" + strconv.Itoa(int(c.attempt)) + ".log",
		Labels:  map[string]string{"io.kubernetes.container.name": c.Name, "io.kubernetes.pod.uid": c.pod.UID, "io.kubernetes.pod.name": c.pod.Name, "io.kubernetes.pod.namespace": "default"},
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{Privileged: c.Privileged,
			Capabilities: &cri.Capability{AddCapabilities: c.Capabilities}, NamespaceOptions: c.pod.namespaces()}},
	}
	for at, host := range c.Shared {
		config.Mounts = append(config.Mounts, &cri.Mount{ContainerPath: at, HostPath: host, Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL})
	}
	c.attempt++
	r, err := c.pod.env.cri.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: c.pod.id, Config: config, SandboxConfig: c.pod.config})
	if err != nil {
		return err
	}
	c.ID = r.GetContainerId()
	return nil
}

// Wait waits for the end of the present instance and returns its exit code.
func (c *Container) Wait(tb testing.TB) int {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	code := 0
	must(tb, until(ctx, func() (bool, error) {
		r, err := c.pod.env.cri.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.ID})
		code = int(r.GetStatus().GetExitCode())
		return r.GetStatus().GetState() == cri.ContainerState_CONTAINER_EXITED, err
	}))
	return code
}

// Kill kills the present instance and waits for its end.
func (c *Container) Kill(tb testing.TB) {
	tb.Helper()
	_, err := c.pod.env.cri.StopContainer(tb.Context(), &cri.StopContainerRequest{ContainerId: c.ID})
	must(tb, err)
	c.Wait(tb)
}

// RemoveInstance removes the present instance, which has ended, as kubelet's garbage collection does.
func (c *Container) RemoveInstance(tb testing.TB) {
	tb.Helper()
	_, err := c.pod.env.cri.RemoveContainer(tb.Context(), &cri.RemoveContainerRequest{ContainerId: c.ID})
	must(tb, err)
}

// Exec runs a script in the container, which must succeed, and returns its output.
func (c *Container) Exec(tb testing.TB, script string) string {
	tb.Helper()
	r, err := c.pod.env.cri.ExecSync(tb.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sh", "-c", script}, Timeout: 60})
	must(tb, err)
	if r.GetExitCode() != 0 {
		tb.Fatalf("%s: exit code %d: %s%s", script, r.GetExitCode(), r.GetStdout(), r.GetStderr())
	}
	return string(r.GetStdout())
}

// PID is the host's PID of the container's init.
func (c *Container) PID(tb testing.TB) int {
	tb.Helper()
	ctx := Context(tb.Context())
	container, err := c.pod.env.Client.LoadContainer(ctx, c.ID)
	must(tb, err)
	task, err := container.Task(ctx, nil)
	must(tb, err)
	return int(task.Pid())
}

// Log is what containerd logged, for messages of tests that fail.
func (e *Env) Log() string {
	text, _ := os.ReadFile(filepath.Join(e.Dir, "containerd.log"))
	lines := strings.Split(string(text), "\n")
	return strings.Join(lines[max(0, len(lines)-40):], "\n")
}

// until waits until a condition holds, which it looks at again and again.
func until(ctx context.Context, condition func() (bool, error)) error {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for {
		if ok, err := condition(); ok || err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
