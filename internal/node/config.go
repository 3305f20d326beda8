package node

import (
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/anchor"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/csi"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/local"
)

// Config is the part of a configuration file that is about the node. Every field has a default.
type Config struct {
	// Node is the node's name in status and logs; the host name when empty.
	Node string `json:"node,omitempty"`
	// StateDir has what survives a reboot: images and root filesystems.
	StateDir string `json:"stateDir,omitempty"`
	// RunDir has what does not: sockets and the journal. It should be on a tmpfs.
	RunDir string `json:"runDir,omitempty"`
	// Containerd says which containerd runs the sandboxes.
	Containerd ContainerdConfig `json:"containerd,omitempty"`
	// Sandboxes bounds what each sandbox may use.
	Sandboxes SandboxConfig `json:"sandboxes,omitempty"`
	// Volumes says which volumes sandboxes may use.
	Volumes VolumeConfig `json:"volumes,omitempty"`
	// Pods says whether volumes may be attached to containers of Pods.
	Pods PodsConfig `json:"pods,omitempty"`
	// CSI says which CSI drivers the agent may call.
	CSI CSIConfig `json:"csi,omitempty"`
	// Kubelet says where kubelet has what it mounts for Pods.
	Kubelet KubeletConfig `json:"kubelet,omitempty"`
	// PersistentVolumes accepts the paths of local and hostPath PersistentVolumes as sources. It stands in no file: it is
	// set where nobody but a cluster's controller can command the agent.
	PersistentVolumes bool `json:"-"`
}

// CSIConfig says which CSI drivers the agent may call.
type CSIConfig struct {
	// Drivers are those whose volumes the agent publishes itself (the direct path). They must need no staging, and work
	// outside of kubelet's folders: a driver in a Pod needs the folder csi of runDir at the same path, with
	// mountPropagation Bidirectional.
	Drivers []csi.Driver `json:"drivers,omitempty"`
}

// KubeletConfig is about the node's kubelet.
type KubeletConfig struct {
	// Dir is its folder (--root-dir); /var/lib/kubelet when empty.
	Dir string `json:"dir,omitempty"`
}

// PodsConfig is about containers that kubelet runs. They must be those of the containerd at containerd.address.
type PodsConfig struct {
	// Enabled lets volumes be attached to them.
	Enabled bool `json:"enabled,omitempty"`
	// ContainerdNamespace is the containerd namespace of the CRI; k8s.io when empty.
	ContainerdNamespace string `json:"containerdNamespace,omitempty"`
	// NRISocket is where containerd takes plugins; /var/run/nri/nri.sock when empty. Where there is none, a Pod's container
	// gets its volumes right after its start instead of before.
	NRISocket string `json:"nriSocket,omitempty"`
	// AllowPrivileged lets volumes be attached to containers with CAP_SYS_ADMIN or the host's PID namespace, which can undo
	// what makes a volume read-only, or keep one that is detached.
	AllowPrivileged bool `json:"allowPrivileged,omitempty"`
}

// ContainerdConfig says which containerd runs the sandboxes.
type ContainerdConfig struct {
	// Address is the socket of a containerd that runs already. When empty, one of our own is started, which
	// outlives us, with its files in stateDir and runDir.
	Address string `json:"address,omitempty"`
	// Binary is the program of the own one; containerd in PATH when empty.
	Binary string `json:"binary,omitempty"`
	// Namespace is the containerd namespace of the sandboxes, which belongs to us alone.
	Namespace string `json:"namespace,omitempty"`
	// Snapshotter keeps the root filesystems; overlayfs when empty.
	Snapshotter string `json:"snapshotter,omitempty"`
	// AllowPull lets a sandbox whose image is not there have it pulled from its registry.
	AllowPull bool `json:"allowPull,omitempty"`
	// RegistryConfig is a folder that says how registries are reached, as containerd's config_path does (a folder
	// per registry host, with a hosts.toml); the registries themselves when empty.
	RegistryConfig string `json:"registryConfig,omitempty"`
}

// SandboxConfig bounds what each sandbox may use.
type SandboxConfig struct {
	// PidsLimit is the most processes and threads; 1024 when zero.
	PidsLimit int64 `json:"pidsLimit,omitempty"`
	// LogMaxSize (bytes; 10 MiB when zero) and LogMaxFiles (3 when zero) bound the log on disk.
	LogMaxSize  int64 `json:"logMaxSize,omitempty"`
	LogMaxFiles int   `json:"logMaxFiles,omitempty"`
	// CgroupParent is the cgroup above those of the sandboxes; /flux-sandbox when empty.
	CgroupParent string `json:"cgroupParent,omitempty"`
}

// VolumeConfig says which volumes sandboxes may use.
type VolumeConfig struct {
	// Local are the directories whose content may become volumes. Nothing else on the machine can.
	Local []local.Root `json:"local,omitempty"`
	// Pool is the folder of named volumes (disk images of a fixed size), which a standalone server has; volumes in stateDir
	// when empty. PoolOvercommit is by what factor they may promise more than is free; 1 when zero.
	Pool           string  `json:"pool,omitempty"`
	PoolOvercommit float64 `json:"poolOvercommit,omitempty"`
	// DeniedTargets are paths in sandboxes that no volume may cover, beside the built-in ones.
	DeniedTargets []string `json:"deniedTargets,omitempty"`
	// BestEffortLimits accepts a sizeLimit that nothing can enforce, and says so in the status, instead of refusing.
	BestEffortLimits bool `json:"bestEffortLimits,omitempty"`
	// PrepareRate (in a second; 1000 when zero) and PrepareBurst (1000) bound how fast sources are prepared.
	PrepareRate  float64 `json:"prepareRate,omitempty"`
	PrepareBurst int     `json:"prepareBurst,omitempty"`
}

// Defaults of Config.
const (
	DefaultStateDir = "/var/lib/flux-sandbox"
	DefaultRunDir   = "/run/flux-sandbox"
)

// WithDefaults fills in what is not set and checks the rest. hostname gives the default of Node.
func (c Config) WithDefaults(hostname func() (string, error)) (Config, error) {
	if c.Node == "" {
		host, err := hostname()
		if err != nil {
			return c, Invalid("node is not set and there is no host name: %w", err)
		}
		c.Node = strings.ToLower(host)
	}
	if errs := validation.IsDNS1123Subdomain(c.Node); len(errs) > 0 {
		return c, Invalid("node %q: %s", c.Node, strings.Join(errs, "; "))
	}
	if c.StateDir == "" {
		c.StateDir = DefaultStateDir
	}
	if c.RunDir == "" {
		c.RunDir = DefaultRunDir
	}
	if c.Kubelet.Dir == "" {
		c.Kubelet.Dir = anchor.DefaultKubelet
	}
	for key, dir := range map[string]string{"stateDir": c.StateDir, "runDir": c.RunDir, "kubelet.dir": c.Kubelet.Dir} {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || dir == "/" {
			return c, Invalid("%s %q: must be an absolute, clean path of a directory of its own", key, dir)
		}
	}
	if c.Pods.Enabled && c.Containerd.Address == "" {
		return c, Invalid("pods.enabled needs containerd.address: the socket of the containerd that kubelet uses")
	}
	if s := c.Pods.NRISocket; s != "" && !filepath.IsAbs(s) {
		return c, Invalid("pods.nriSocket %q: must be an absolute path", s)
	}
	if v := c.Volumes; v.PrepareRate < 0 || v.PrepareBurst < 0 {
		return c, Invalid("volumes.prepareRate %g and prepareBurst %d: must not be negative, or no source would ever be prepared", v.PrepareRate, v.PrepareBurst)
	}
	if err := csi.CheckDrivers(c.CSI.Drivers); err != nil {
		return c, Invalid("csi.drivers: %w", err)
	}
	// The roots are checked here too, so that a check of the configuration finds what is wrong with them.
	if _, err := c.source(); err != nil {
		return c, Invalid("volumes.local: %w", err)
	}
	return c, nil
}

// Invalid says what is wrong with a configuration.
func Invalid(format string, args ...any) error {
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "configuration: "+format, args...)
}

// Places of the parts below stateDir and runDir.
func (c Config) sandboxState() string   { return filepath.Join(c.StateDir, "sandboxes") }
func (c Config) containerdRoot() string { return filepath.Join(c.StateDir, "containerd") }
func (c Config) containerdRun() string  { return filepath.Join(c.RunDir, "containerd") }
func (c Config) containersRun() string  { return filepath.Join(c.RunDir, "containers") }
func (c Config) journal() string        { return filepath.Join(c.RunDir, "journal") }
func (c Config) hookSocket() string     { return filepath.Join(c.RunDir, "hook.sock") }

// Published is the folder of volumes that CSI drivers publish. It is no Place: what is mounted there is data.
func (c Config) Published() string { return filepath.Join(c.RunDir, "csi") }

// Anchored is the folder of volumes that kubelet publishes for anchors: their guards are mounted there. It is no Place.
func (c Config) Anchored() string { return filepath.Join(c.RunDir, "guards") }

// source makes the source of volumes of type local.
func (c Config) source() (*local.Source, error) {
	var options []local.Option
	if c.PersistentVolumes {
		denied := []string{c.StateDir, c.RunDir}
		if address := c.Containerd.Address; address != "" {
			denied = append(denied, filepath.Dir(address))
		}
		options = append(options, local.PersistentVolumes(denied...))
	}
	return local.New(c.Volumes.Local, nil, options...)
}

// Places are the files and folders that a node makes below stateDir and runDir.
func (c Config) Places() []string {
	return []string{c.sandboxState(), c.containerdRoot(), c.containerdRun(), c.containersRun(), c.journal(), c.hookSocket()}
}

// child is the configuration of a containerd of our own.
func (c Config) child() containers.ChildConfig {
	return containers.ChildConfig{Binary: c.Containerd.Binary, Root: c.containerdRoot(), State: c.containerdRun(),
		Cgroup: c.cgroupParent() + "-containerd"}
}

func (c Config) cgroupParent() string {
	if c.Sandboxes.CgroupParent != "" {
		return c.Sandboxes.CgroupParent
	}
	return containers.DefaultCgroupParent
}
