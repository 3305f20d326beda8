package containers

import (
	"context"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/oci"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/cgroup"
)

// InitTarget is where the sandbox sees its PID 1's program. /dev is a tmpfs of the sandbox's own in every image, so
// nothing is left in its root filesystem, and no volume may be attached there.
const InitTarget = "/dev/flux-sandbox-init"

// defaultPath is the PATH of an image that has none; it is containerd's.
const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// cpuPeriod is the kernel's default CFS period in microseconds.
const cpuPeriod = 100_000

// capabilities is Docker's default set without CAP_MKNOD; doc.go says why.
var capabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_NET_BIND_SERVICE",
	"CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// ociSpec makes the specification of a sandbox's container.
func (r *Runtime) ociSpec(ctx context.Context, spec Spec, image ocispec.ImageConfig, rootfs []mount.Mount) (*oci.Spec, error) {
	args, err := commandLine(spec, image)
	if err != nil {
		return nil, err
	}
	user, err := resolveUser(image.User, rootfs)
	if err != nil {
		return nil, err
	}
	workdir := "/"
	if image.WorkingDir != "" {
		workdir = filepath.Join("/", image.WorkingDir)
	}
	if spec.WorkingDir != "" {
		workdir = filepath.Clean(spec.WorkingDir)
	}
	generated, err := oci.GenerateSpec(r.context(ctx), nil, &containers.Container{ID: spec.UID},
		oci.WithHostname(spec.Hostname),
		oci.WithNoNewPrivileges,
		oci.WithCapabilities(capabilities),
		oci.WithCgroup(r.cgroupPath(spec.UID)),
	)
	if err != nil {
		return nil, errorf(err, "make the OCI specification of sandbox %s", spec.UID)
	}
	generated.Linux.RootfsPropagation = "rprivate"
	p := generated.Process
	p.Args = append([]string{InitTarget, workdir, "--"}, args...)
	p.Env = image.Env
	if len(p.Env) == 0 {
		p.Env = []string{defaultPath}
	}
	p.Env = withEnv(p.Env, spec.Env)
	p.Cwd = workdir
	p.User = user
	p.Rlimits = openFiles()
	generated.Linux.Resources.CPU, generated.Linux.Resources.Memory, generated.Linux.Resources.Pids = r.limits(spec.Resources)
	generated.Mounts = append(generated.Mounts, r.mounts(spec.UID)...)
	if root, ok := cgroup.Controller(r.cgroups, "memory"); ok && root.V2 {
		// Programs look up their limits there. On cgroup v1 it would be a mount per controller, some 30 ms of creation.
		generated.Linux.Namespaces = append(generated.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace})
		generated.Mounts = append(generated.Mounts, specs.Mount{
			Source: "cgroup", Destination: "/sys/fs/cgroup", Type: "cgroup", Options: []string{"ro", "nosuid", "noexec", "nodev"},
		})
	}
	// Last, as the profile depends on the capabilities.
	if err := seccomp.WithDefaultProfile()(ctx, nil, nil, generated); err != nil {
		return nil, errorf(err, "make the seccomp profile of sandbox %s", spec.UID)
	}
	return generated, nil
}

// commandLine joins the image's and the sandbox's command as Kubernetes does.
func commandLine(spec Spec, image ocispec.ImageConfig) ([]string, error) {
	entrypoint, args := image.Entrypoint, image.Cmd
	if len(spec.Command) > 0 {
		entrypoint, args = spec.Command, nil
	}
	if len(spec.Args) > 0 {
		args = spec.Args
	}
	line := slices.Concat(entrypoint, args)
	if len(line) == 0 || line[0] == "" {
		return nil, invalid("sandbox %s: neither it nor its image %s says which command to run: set command", spec.UID, spec.Image)
	}
	return line, nil
}

// withEnv adds variables to an environment, replacing those of the same name.
func withEnv(env []string, add []EnvVar) []string {
	env = slices.Clone(env)
	for _, v := range add {
		env = slices.DeleteFunc(env, func(old string) bool { return strings.HasPrefix(old, v.Name+"=") })
		env = append(env, v.Name+"="+v.Value)
	}
	return env
}

// mounts are the files that we provide.
func (r *Runtime) mounts(uid string) []specs.Mount {
	readOnly := func(source, target string) specs.Mount {
		return specs.Mount{Source: source, Destination: target, Type: "bind", Options: []string{"bind", "ro", "nosuid", "nodev"}}
	}
	file := func(name string) string { return filepath.Join(r.stateDir(uid), name) }
	return []specs.Mount{
		readOnly(r.config.InitPath, InitTarget),
		readOnly(file(hostsFile), "/etc/hosts"),
		readOnly(file(hostnameFile), "/etc/hostname"),
		readOnly(file(resolvFile), "/etc/resolv.conf"),
	}
}

func (r *Runtime) limits(want Resources) (*specs.LinuxCPU, *specs.LinuxMemory, *specs.LinuxPids) {
	var cpu *specs.LinuxCPU
	if want.CPUMilli > 0 {
		period := uint64(cpuPeriod)
		quota := want.CPUMilli * cpuPeriod / 1000
		// 1024 shares are one CPU, 2 the kernel's minimum.
		shares := uint64(max(want.CPUMilli*1024/1000, 2))
		cpu = &specs.LinuxCPU{Period: &period, Quota: &quota, Shares: &shares}
	}
	var memory *specs.LinuxMemory
	if want.MemoryBytes > 0 {
		limit := want.MemoryBytes
		memory = &specs.LinuxMemory{Limit: &limit}
		if swapLimited(r.cgroups) {
			memory.Swap = &limit // memory and swap together: no swap
		}
	}
	pids := want.PidsLimit
	setDefault(&pids, r.config.PidsLimit)
	return cpu, memory, &specs.LinuxPids{Limit: &pids}
}

// openFiles gives the usual soft limit and lets programs raise it as far as this process may, up to the kernel's default
// ceiling (fs.nr_open): containerd, unless it can exceed its own limit, has the same.
func openFiles() []specs.POSIXRlimit {
	const soft, ceiling = 1024, 1 << 20
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &own); err != nil {
		own.Max = soft
	}
	hard := min(own.Max, ceiling)
	return []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: min(soft, hard), Hard: hard}}
}
