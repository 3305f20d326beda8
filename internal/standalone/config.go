package standalone

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/node"
	"github.com/flux-sandbox/flux-sandbox/internal/observability"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/csi"
)

// Config is the configuration file of flux-sandbox: YAML, in which an unknown key is an error. Every field has a
// default; config/standalone/flux-sandbox.yaml explains them with examples.
type Config struct {
	node.Config
	// Listen is the API's socket; flux-sandbox.sock in runDir when empty.
	Listen string `json:"listen,omitempty"`
	// ListenGroup is the group (a name or a number) whose members may use the API, beside root. Whoever may use it
	// can start sandboxes and use every volume root: give it to administrators only.
	ListenGroup string `json:"listenGroup,omitempty"`
	// MetricsListen is the TCP address of /metrics, say 127.0.0.1:9464; off when empty.
	MetricsListen string `json:"metricsListen,omitempty"`
	// Log says how to log.
	Log observability.LogConfig `json:"log,omitempty"`
	// Groups are SandboxGroups that are made, or brought to this spec, at every start and on SIGHUP. Without any there
	// is one named "default" with dynamic volumes turned on.
	Groups []GroupConfig `json:"groups,omitempty"`
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
	var err error
	if c.Config, err = c.Config.WithDefaults(os.Hostname); err != nil {
		return c, err
	}
	c.Listen = strings.TrimPrefix(c.Listen, "unix://")
	if c.Listen == "" {
		c.Listen = filepath.Join(c.RunDir, "flux-sandbox.sock")
	}
	if !filepath.IsAbs(c.Listen) || len(c.Listen) > maxSocketPath {
		return c, invalid("listen %q: must be the absolute path of a unix socket, of at most %d bytes", c.Listen, maxSocketPath)
	}
	if c.Volumes.Pool == "" {
		c.Volumes.Pool = filepath.Join(c.StateDir, "volumes")
	}
	if !filepath.IsAbs(c.Volumes.Pool) || filepath.Clean(c.Volumes.Pool) != c.Volumes.Pool {
		return c, invalid("volumes.pool %q: must be an absolute, clean path", c.Volumes.Pool)
	}
	for _, r := range c.Volumes.Local {
		// The driver takes the images in its pool for its own, and whoever writes to one writes past the limit of its volume.
		static, _, _ := strings.Cut(r.Path, "/{")
		if volume.Denied(static, []string{c.Volumes.Pool}) != "" {
			return c, invalid("volumes.pool %s and volumes.local path %s: one contains the other; give each a folder of its own", c.Volumes.Pool, r.Path)
		}
	}
	if o := c.Volumes.PoolOvercommit; o != 0 && o < 1 {
		return c, invalid("volumes.poolOvercommit %g: must be at least 1", o)
	}
	if len(c.csiSocket()) > maxSocketPath {
		return c, invalid("runDir %q: too long for the sockets in it", c.RunDir)
	}
	for _, d := range c.CSI.Drivers {
		if d.Name == csidriver.Name {
			return c, invalid("csi.drivers: %s is built in here", d.Name)
		}
	}
	c.CSI.Drivers = append(slices.Clip(c.CSI.Drivers), csi.Driver{Name: csidriver.Name, Socket: c.csiSocket(), NodeLocal: true})
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
	_, err = observability.NewLogger(c.Log)
	return c, err
}

func invalid(format string, args ...any) error { return node.Invalid(format, args...) }

// Places of our parts below stateDir and runDir.
func (c Config) database() string    { return filepath.Join(c.StateDir, "flux-sandbox.db") }
func (c Config) agentSocket() string { return filepath.Join(c.RunDir, "agent.sock") }
func (c Config) csiSocket() string   { return filepath.Join(c.RunDir, "csi.sock") }
