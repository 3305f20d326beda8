package standalone

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/local"
)

// Config is the configuration file of flux-sandbox: YAML, in which an unknown key is an error. Every field has a
// default; config/standalone/flux-sandbox.yaml explains them with examples.
type Config struct {
	// Node is the node's name in status and logs; the host name when empty.
	Node string `json:"node,omitempty"`
	// StateDir has what survives a reboot: the database, images and root filesystems.
	StateDir string `json:"stateDir,omitempty"`
	// RunDir has what does not: sockets and the journal. It should be on a tmpfs.
	RunDir string `json:"runDir,omitempty"`
	// Listen is the API's socket; flux-sandbox.sock in runDir when empty.
	Listen string `json:"listen,omitempty"`
	// ListenGroup is the group (a name or a number) whose members may use the API, beside root. Whoever may use it
	// can start sandboxes and use every volume root: give it to administrators only.
	ListenGroup string `json:"listenGroup,omitempty"`
	// MetricsListen is the TCP address of /metrics, say 127.0.0.1:9464; off when empty.
	MetricsListen string `json:"metricsListen,omitempty"`
	// Log says how to log.
	Log LogConfig `json:"log,omitempty"`
	// Containerd says which containerd runs the sandboxes.
	Containerd ContainerdConfig `json:"containerd,omitempty"`
	// Sandboxes bounds what each sandbox may use.
	Sandboxes SandboxConfig `json:"sandboxes,omitempty"`
	// Volumes says which volumes sandboxes may use.
	Volumes VolumeConfig `json:"volumes,omitempty"`
	// Groups are SandboxGroups that are made, or brought to this spec, at every start and on SIGHUP. Without any there
	// is one named "default" with dynamic volumes turned on.
	Groups []GroupConfig `json:"groups,omitempty"`
}

// LogConfig says how to log.
type LogConfig struct {
	// Level is debug, info, warn or error; info when empty.
	Level string `json:"level,omitempty"`
	// Format is text or json; text when empty.
	Format string `json:"format,omitempty"`
}

// ContainerdConfig says which containerd runs the sandboxes.
type ContainerdConfig struct {
	// Address is the socket of a containerd that runs already. When empty, flux-sandbox starts one of its own, which
	// outlives it, with its files in stateDir and runDir.
	Address string `json:"address,omitempty"`
	// Binary is the program of the own one; containerd in PATH when empty.
	Binary string `json:"binary,omitempty"`
	// Namespace is the containerd namespace of the sandboxes, which belongs to flux-sandbox alone.
	Namespace string `json:"namespace,omitempty"`
	// Snapshotter keeps the root filesystems; overlayfs when empty.
	Snapshotter string `json:"snapshotter,omitempty"`
	// AllowPull lets a sandbox whose image is not there have it pulled from its registry.
	AllowPull bool `json:"allowPull,omitempty"`
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
	// DeniedTargets are paths in sandboxes that no volume may cover, beside the built-in ones.
	DeniedTargets []string `json:"deniedTargets,omitempty"`
	// BestEffortLimits accepts a sizeLimit that nothing can enforce, and says so in the status, instead of refusing.
	BestEffortLimits bool `json:"bestEffortLimits,omitempty"`
	// PrepareRate (in a second; 1000 when zero) and PrepareBurst (1000) bound how fast sources are prepared.
	PrepareRate  float64 `json:"prepareRate,omitempty"`
	PrepareBurst int     `json:"prepareBurst,omitempty"`
}

// GroupConfig is a SandboxGroup.
type GroupConfig struct {
	// Namespace is "default" when empty.
	Namespace string                    `json:"namespace,omitempty"`
	Name      string                    `json:"name"`
	Spec      v1alpha1.SandboxGroupSpec `json:"spec,omitempty"`
}

// Defaults of Config.
const (
	DefaultConfigFile = "/etc/flux-sandbox/flux-sandbox.yaml"
	DefaultStateDir   = "/var/lib/flux-sandbox"
	DefaultRunDir     = "/run/flux-sandbox"
	DefaultNamespace  = "default"
)

// maxSocketPath is what fits into a socket address (unix(7)), less its end.
const maxSocketPath = 107

// LoadConfig reads a configuration file. An empty name means the default file, which need not exist.
func LoadConfig(name string) (Config, error) {
	var c Config
	optional := name == ""
	if optional {
		name = DefaultConfigFile
	}
	data, err := os.ReadFile(name)
	switch {
	case errors.Is(err, fs.ErrNotExist) && optional:
	case err != nil:
		return c, invalid("read the configuration: %w", err)
	default:
		if c, err = ParseConfig(data); err != nil {
			return c, fmt.Errorf("%s: %w", name, err)
		}
	}
	return c.withDefaults()
}

// ParseConfig decodes a configuration. It applies no defaults.
func ParseConfig(data []byte) (Config, error) {
	var c Config
	if err := yaml.UnmarshalStrict(data, &c); err != nil {
		return c, invalid("%v; every key is explained in config/standalone/flux-sandbox.yaml", strings.TrimPrefix(err.Error(), "error unmarshaling JSON: while decoding JSON: json: "))
	}
	return c, nil
}

func (c Config) withDefaults() (Config, error) {
	if c.Node == "" {
		host, err := os.Hostname()
		if err != nil {
			return c, invalid("node is not set and there is no host name: %w", err)
		}
		c.Node = strings.ToLower(host)
	}
	if errs := validation.IsDNS1123Subdomain(c.Node); len(errs) > 0 {
		return c, invalid("node %q: %s", c.Node, strings.Join(errs, "; "))
	}
	if c.StateDir == "" {
		c.StateDir = DefaultStateDir
	}
	if c.RunDir == "" {
		c.RunDir = DefaultRunDir
	}
	for key, dir := range map[string]string{"stateDir": c.StateDir, "runDir": c.RunDir} {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || dir == "/" {
			return c, invalid("%s %q: must be an absolute, clean path of a directory of its own", key, dir)
		}
	}
	c.Listen = strings.TrimPrefix(c.Listen, "unix://")
	if c.Listen == "" {
		c.Listen = filepath.Join(c.RunDir, "flux-sandbox.sock")
	}
	if !filepath.IsAbs(c.Listen) || len(c.Listen) > maxSocketPath {
		return c, invalid("listen %q: must be the absolute path of a unix socket, of at most %d bytes", c.Listen, maxSocketPath)
	}
	if len(c.Groups) == 0 {
		c.Groups = []GroupConfig{{Name: v1alpha1.DefaultGroup,
			Spec: v1alpha1.SandboxGroupSpec{FeatureGates: v1alpha1.FeatureGates{DynamicVolumeMount: true}}}}
	}
	seen := map[string]bool{}
	for i := range c.Groups {
		g := &c.Groups[i]
		if g.Namespace == "" {
			g.Namespace = DefaultNamespace
		}
		if errs := validation.IsDNS1123Label(g.Namespace); len(errs) > 0 {
			return c, invalid("groups[%d].namespace %q: %s", i, g.Namespace, strings.Join(errs, "; "))
		}
		if errs := validation.IsDNS1123Subdomain(g.Name); len(errs) > 0 {
			return c, invalid("groups[%d].name %q: %s", i, g.Name, strings.Join(errs, "; "))
		}
		if key := g.Namespace + "/" + g.Name; seen[key] {
			return c, invalid("groups: %s is there twice", key)
		} else {
			seen[key] = true
		}
	}
	if _, err := newLogger(c.Log); err != nil {
		return c, err
	}
	// The roots are checked here too, so that "config check" finds what is wrong with them.
	_, err := local.New(c.Volumes.Local, nil)
	if err != nil {
		return c, invalid("volumes.local: %w", err)
	}
	return c, nil
}

func invalid(format string, args ...any) error {
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "configuration: "+format, args...)
}

// Places of the parts below stateDir and runDir.
func (c Config) database() string       { return filepath.Join(c.StateDir, "flux-sandbox.db") }
func (c Config) sandboxState() string   { return filepath.Join(c.StateDir, "sandboxes") }
func (c Config) containerdRoot() string { return filepath.Join(c.StateDir, "containerd") }
func (c Config) containerdRun() string  { return filepath.Join(c.RunDir, "containerd") }
func (c Config) containersRun() string  { return filepath.Join(c.RunDir, "containers") }
func (c Config) journal() string        { return filepath.Join(c.RunDir, "journal") }
func (c Config) agentSocket() string    { return filepath.Join(c.RunDir, "agent.sock") }
