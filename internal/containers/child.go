package containers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"syscall"

	"github.com/flux-sandbox/flux-sandbox/internal/cgroup"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// ChildConfig describes a containerd of our own. All paths are absolute and clean.
type ChildConfig struct {
	// Binary is the program; default "containerd" in PATH. Its shim is searched beside it first.
	Binary string
	// Root has what survives a reboot (images, snapshots, containers), and the generated configuration.
	Root string
	// State has what does not: sockets, bundles, mounts. Stop removes it.
	State string
	// Address is the socket; default containerd.sock in State. At most 100 bytes.
	Address string
	// LogFile takes its log; default containerd.log in Root. It is kept below LogMax bytes at each start.
	LogFile string
	// Cgroup, if set, is a cgroup (absolute within each hierarchy) that containerd and its shims are put in, so that they
	// do not end with the cgroup of the caller (a systemd service's, for example). Stop removes it.
	Cgroup string
}

const (
	// maxAddress leaves room for ".ttrpc" within a socket address (unix(7): 108 bytes).
	maxAddress = 100
	// LogMax is the size beyond which a start sets a containerd's log aside as LogFile.1.
	LogMax = 10 << 20

	childConfigFile = "config.toml"
	childLockFile   = "start.lock"
	childStartWait  = 30 * time.Second
	childStopWait   = 10 * time.Second
)

// Child is a containerd that StartContainerd started or found. It goes on when this process ends.
type Child struct {
	config ChildConfig
	pid    int
}

// Address is its socket.
func (c *Child) Address() string { return c.config.Address }

// PID is its process.
func (c *Child) PID() int { return c.pid }

// StartContainerd makes sure that the described containerd runs and serves: one that an earlier process started is
// found by its argument vector (a record could be stale or, after a kill between start and record, missing), else one
// is started in a session of its own.
func StartContainerd(ctx context.Context, config ChildConfig) (*Child, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{config.Root, config.State, filepath.Dir(config.Address), filepath.Dir(config.LogFile)} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return nil, errorf(err, "start containerd")
		}
	}
	unlock, err := lockFile(ctx, filepath.Join(config.Root, childLockFile))
	if err != nil {
		return nil, err
	}
	defer unlock()

	running, err := config.find()
	if err != nil {
		return nil, err
	}
	text := config.toml()
	if running != nil {
		defer running.close()
		if have, err := os.ReadFile(config.file()); err != nil || !bytes.Equal(have, text) {
			return nil, fault.New(errdefs.ErrFailedPrecondition, fault.Conflict,
				"containerd (PID %d) runs with another configuration than %s now has: stop it first", running.pid, config.file())
		}
	} else {
		if err := writeFile(config.file(), text); err != nil {
			return nil, errorf(err, "write containerd's configuration")
		}
		if running, err = config.start(); err != nil {
			return nil, err
		}
		defer running.close()
	}
	if config.Cgroup != "" {
		// Also for one that was found: we may have been killed before.
		if err := enterCgroup(config.Cgroup, running.pid); err != nil {
			return nil, err
		}
	}
	if err := config.awaitServing(ctx, running); err != nil {
		return nil, err
	}
	return &Child{config: config, pid: running.pid}, nil
}

func (c ChildConfig) withDefaults() (ChildConfig, error) {
	setDefault(&c.Binary, "containerd")
	setDefault(&c.Address, filepath.Join(c.State, "containerd.sock"))
	setDefault(&c.LogFile, filepath.Join(c.Root, "containerd.log"))
	for field, path := range map[string]string{"Root": c.Root, "State": c.State, "Address": c.Address, "LogFile": c.LogFile} {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" {
			return c, invalid("containerd: %s is %q: must be a clean absolute path, and not the root", field, path)
		}
	}
	if c.Cgroup != "" && (!filepath.IsAbs(c.Cgroup) || filepath.Clean(c.Cgroup) != c.Cgroup || c.Cgroup == "/") {
		return c, invalid("containerd: cgroup %q: must be a clean absolute path, and not the root", c.Cgroup)
	}
	if len(c.Address) > maxAddress {
		return c, invalid("containerd: the socket's path %s has %d bytes: at most %d fit in a socket address", c.Address, len(c.Address), maxAddress)
	}
	binary, err := exec.LookPath(c.Binary)
	if err != nil {
		return c, fault.New(errdefs.ErrFailedPrecondition, fault.Internal, "find containerd: %w: install it (apt-get install containerd)", err)
	}
	c.Binary, err = filepath.Abs(binary)
	return c, err
}

func (c ChildConfig) file() string { return filepath.Join(c.Root, childConfigFile) }

// toml makes the configuration. Version 2 is understood by 1.6 and 2.x alike. What is switched off: Kubernetes' CRI, NRI
// and the restart manager, which would act on their own; plugins that touch places outside our directories; and
// snapshotters that look for devices.
func (c ChildConfig) toml() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "version = 2\nroot = %s\nstate = %s\noom_score = 0\n", strconv.Quote(c.Root), strconv.Quote(c.State))
	disabled := []string{
		"io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
		"io.containerd.internal.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.internal.v1.restart",
		"io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp", "io.containerd.nri.v1.nri",
		"io.containerd.podsandbox.controller.v1.cri", "io.containerd.sandbox.controller.v1.podsandbox",
		"io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs",
		"io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
	}
	b.WriteString("disabled_plugins = [\n")
	for _, plugin := range disabled {
		fmt.Fprintf(&b, "  %q,\n", plugin)
	}
	fmt.Fprintf(&b, "]\n\n[grpc]\n  address = %s\n\n[debug]\n  level = \"warn\"\n", strconv.Quote(c.Address))
	return b.Bytes()
}

// find finds the running containerd, nil if there is none.
func (c ChildConfig) find() (*hostProcess, error) {
	found, err := findProcesses(func(argv []string) bool {
		return filepath.Base(argv[0]) == filepath.Base(c.Binary) && argument(argv, "--config") == c.file()
	})
	if err != nil || len(found) == 0 {
		return nil, err
	}
	for _, p := range found[1:] {
		p.close()
	}
	return found[0], nil
}

func (c ChildConfig) start() (*hostProcess, error) {
	if info, err := os.Stat(c.LogFile); err == nil && info.Size() > LogMax {
		if err := os.Rename(c.LogFile, c.LogFile+".1"); err != nil {
			return nil, errorf(err, "set containerd's log aside")
		}
	}
	log, err := os.OpenFile(c.LogFile, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, errorf(err, "open containerd's log")
	}
	defer log.Close()
	cmd := exec.Command(c.Binary, "--config", c.file())
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "PATH=") || strings.HasPrefix(v, "NOTIFY_SOCKET=")
	})
	cmd.Env = append(cmd.Env, "PATH="+filepath.Dir(c.Binary)+":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	if err := cmd.Start(); err != nil {
		return nil, errorf(err, "start containerd")
	}
	p := pin(cmd.Process.Pid)
	go cmd.Wait() // reaps it, if it ends before we do
	if p == nil {
		return nil, c.ended()
	}
	return p, nil
}

// awaitServing waits until containerd answers.
func (c ChildConfig) awaitServing(parent context.Context, p *hostProcess) error {
	ctx, cancel := context.WithTimeout(parent, childStartWait)
	defer cancel()
	go func() {
		if p.wait(ctx) == nil {
			cancel()
		}
	}()
	client, err := dial(Config{Address: c.Address, Namespace: DefaultNamespace, ConnectWait: childStartWait})
	if err != nil {
		return errorf(err, "connect to containerd")
	}
	defer client.Close()
	serving, err := client.IsServing(ctx)
	switch {
	case serving:
		return nil
	case parent.Err() != nil:
		return errorf(context.Cause(parent), "wait for containerd (PID %d)", p.pid)
	case errors.Is(ctx.Err(), context.Canceled):
		return c.ended()
	}
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "containerd (PID %d) does not answer at %s (%v): see %s",
		p.pid, c.Address, err, c.LogFile)
}

// ended is the error for a containerd that did not stay, with the end of its log.
func (c ChildConfig) ended() error {
	log, _ := os.ReadFile(c.LogFile)
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	last := strings.Join(lines[max(0, len(lines)-5):], "\n")
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "containerd ended while it was started; the end of %s:\n%s", c.LogFile, last)
}

// Stop ends containerd and what it left running: the shims of its address with their sandboxes. Their mounts, cgroups
// and sockets and the state directory are removed; Root is kept, so the sandboxes are there again after the next start,
// without a task. To end sandboxes in order, stop or delete them first.
func (c *Child) Stop(ctx context.Context) error {
	unlock, err := lockFile(ctx, filepath.Join(c.config.Root, childLockFile))
	if err != nil {
		return err
	}
	defer unlock()
	if err := c.stopDaemon(ctx); err != nil {
		return err
	}
	roots, err := cgroup.Roots()
	if err != nil {
		return err
	}
	sockets := c.shimSockets()
	if err := c.stopShims(ctx, roots); err != nil {
		return err
	}
	for _, socket := range sockets {
		if info, err := os.Lstat(socket); err == nil && info.Mode()&os.ModeSocket != 0 {
			os.Remove(socket)
		}
	}
	for _, dir := range []string{c.config.State, c.config.Root} {
		if err := unmountBelow(dir); err != nil {
			return err
		}
	}
	for _, socket := range []string{c.config.Address, c.config.Address + ".ttrpc"} {
		if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
			return errorf(err, "stop containerd")
		}
	}
	if err := os.RemoveAll(c.config.State); err != nil {
		return errorf(err, "stop containerd")
	}
	if c.config.Cgroup != "" {
		return cgroup.Remove(ctx, roots, c.config.Cgroup)
	}
	return nil
}

// Kill kills the daemon alone, at once, and waits for its end. Its sandboxes run on, as after a crash.
func (c *Child) Kill(ctx context.Context) error {
	p, err := c.config.find()
	if err != nil || p == nil {
		return err
	}
	defer p.close()
	if err := p.signal(unix.SIGKILL); err != nil {
		return err
	}
	return p.wait(ctx)
}

func (c *Child) stopDaemon(ctx context.Context) error {
	p, err := c.config.find()
	if err != nil || p == nil {
		return err
	}
	defer p.close()
	if err := p.signal(unix.SIGTERM); err != nil {
		return err
	}
	gentle, cancel := context.WithTimeout(ctx, childStopWait)
	defer cancel()
	if p.wait(gentle) == nil {
		return nil
	}
	return c.Kill(ctx)
}

func (c *Child) stopShims(ctx context.Context, roots []cgroup.Root) error {
	shims, err := findProcesses(func(argv []string) bool {
		return strings.HasPrefix(filepath.Base(argv[0]), "containerd-shim") && argument(argv, "-address") == c.config.Address
	})
	if err != nil {
		return err
	}
	for _, shim := range shims {
		defer shim.close()
		own, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", shim.pid))
		if err != nil {
			continue // ended meanwhile
		}
		children := childrenOf(shim.pid)
		var cgroups []string
		if err := shim.signal(unix.SIGKILL); err != nil {
			return err
		}
		for _, child := range children {
			defer child.close()
			// The logger lives in our namespace, and ends by itself with its pipes; the others are the sandbox's.
			if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", child.pid)); err != nil || ns == own {
				continue
			}
			for _, group := range cgroupsOf(child.pid) {
				// In a hierarchy that the runtime does not use, it is in a cgroup of somebody else's.
				if filepath.Base(group) == argument(shim.argv, "-id") {
					cgroups = append(cgroups, group)
				}
			}
			if err := child.signal(unix.SIGKILL); err != nil {
				return err
			}
		}
		for _, p := range append(children, shim) {
			if err := p.wait(ctx); err != nil {
				return err
			}
		}
		slices.Sort(cgroups)
		for _, group := range slices.Compact(cgroups) {
			if err := cgroup.Remove(ctx, roots, group); err != nil {
				return err
			}
		}
	}
	return nil
}

// shimSockets are the sockets of the shims, which lie in a directory shared by all containerds of the machine. A bundle
// names its shim's in the file "address" (1.x) or "bootstrap.json" (2.x).
func (c *Child) shimSockets() []string {
	var sockets []string
	for _, name := range []string{"address", "bootstrap.json"} {
		files, _ := filepath.Glob(filepath.Join(c.config.State, "io.containerd.runtime.v2.task", "*", "*", name))
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				continue
			}
			if _, rest, ok := strings.Cut(string(data), "unix://"); ok {
				socket, _, _ := strings.Cut(rest, `"`)
				sockets = append(sockets, filepath.Clean(strings.TrimSpace(socket)))
			}
		}
	}
	return sockets
}

// unmountBelow unmounts everything below dir. What cannot be unmounted is an error, so that a removal of dir never
// reaches into a mount.
func unmountBelow(dir string) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return errorf(err, "find the mounts below %s", dir)
	}
	for _, m := range slices.Backward(mounts) { // the last mounted is the topmost
		if m.Mountpoint == dir {
			continue // the directory itself may be a mount of the administrator's
		}
		if err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmount %s: %w", m.Mountpoint, err)
		}
	}
	left, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(m.Mountpoint, dir+"/"), false
	})
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("%s is still mounted: %w", left[0].Mountpoint, errdefs.ErrFailedPrecondition)
	}
	return err
}

// enterCgroup puts a process into a cgroup of every hierarchy. A hierarchy that refuses (a v1 cpuset without CPUs, a v2
// parent with processes of its own) is left out as long as one accepts.
func enterCgroup(group string, pid int) error {
	roots, err := cgroup.Roots()
	if err != nil {
		return err
	}
	entered := false
	var errs []error
	for _, root := range roots {
		dir := filepath.Join(root.Path, group)
		err := os.MkdirAll(dir, 0o755)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		entered = true
	}
	if !entered {
		return fmt.Errorf("put containerd (PID %d) into cgroup %s: %w", pid, group, errors.Join(errs...))
	}
	return nil
}

// lockFile takes an exclusive lock, which ends with this process at the latest.
func lockFile(ctx context.Context, name string) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, errorf(err, "lock %s", name)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			f.Close()
			return nil, errorf(context.Cause(ctx), "another process starts or stops containerd (it holds %s)", name)
		}
	}
}
