package clusteragent

import (
	"cmp"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/node"
	"github.com/flux-sandbox/flux-sandbox/internal/observability"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/anchor"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/csi"
)

// Config is the configuration file of flux-sandbox-agent: YAML, in which an unknown key is an error.
// config/kubernetes/agent.yaml explains it by example.
type Config struct {
	node.Config
	// Listen is the TCP address of the agent's gRPC server.
	Listen string `json:"listen,omitempty"`
	// MetricsListen is the TCP address of /metrics, /healthz and /readyz; off when empty.
	MetricsListen string `json:"metricsListen,omitempty"`
	// Controller is the address (host:port) of the controller's service that signs certificates.
	Controller string `json:"controller,omitempty"`
	// ControllerName is the DNS name that the controller's certificate must have.
	ControllerName string `json:"controllerName,omitempty"`
	// Log says how to log.
	Log observability.LogConfig `json:"log,omitempty"`
}

// DefaultListen is the default of Config.Listen.
const DefaultListen = ":9470"

// defaultCSISocket is where the built-in CSI driver answers, unless csi.drivers says otherwise.
func defaultCSISocket(kubelet string) string {
	return filepath.Join(cmp.Or(kubelet, anchor.DefaultKubelet), "plugins", csidriver.Name, "csi.sock")
}

// ParseConfig reads a configuration. $(NAME) stands for the environment variable of that name, as in a Pod's command;
// hostname gives the default of the node's name.
func ParseConfig(data []byte, env func(string) string, hostname func() (string, error)) (Config, error) {
	var c Config
	expanded, err := expand(string(data), env)
	if err != nil {
		return c, err
	}
	if err := yaml.UnmarshalStrict([]byte(expanded), &c); err != nil {
		return c, node.Invalid("%v", strings.TrimPrefix(err.Error(), "error unmarshaling JSON: while decoding JSON: json: "))
	}
	if c.Volumes.Pool != "" || c.Volumes.PoolOvercommit != 0 {
		return c, node.Invalid("volumes.pool is a standalone server's: in a cluster, flux-sandbox-csi has a pool of its own")
	}
	if !slices.ContainsFunc(c.CSI.Drivers, func(d csi.Driver) bool { return d.Name == csidriver.Name }) {
		c.CSI.Drivers = append(c.CSI.Drivers, csi.Driver{Name: csidriver.Name, Socket: defaultCSISocket(c.Kubelet.Dir), NodeLocal: true})
	}
	if c.Config, err = c.Config.WithDefaults(hostname); err != nil {
		return c, err
	}
	if c.Listen == "" {
		c.Listen = DefaultListen
	}
	for key, address := range map[string]string{"listen": c.Listen, "controller": c.Controller, "metricsListen": c.MetricsListen} {
		if address == "" && key == "metricsListen" {
			continue
		}
		if _, _, err := net.SplitHostPort(address); err != nil {
			return c, node.Invalid("%s %q: must be host:port: %w", key, address, err)
		}
	}
	if c.ControllerName == "" {
		return c, node.Invalid("controllerName is not set: it is the DNS name of the controller's Service")
	}
	_, err = observability.NewLogger(c.Log)
	return c, err
}

// expand replaces $(NAME). One that is not set is an error: an address that is silently empty is found out late.
func expand(text string, env func(string) string) (string, error) {
	var out strings.Builder
	var errs []error
	for {
		before, rest, found := strings.Cut(text, "$(")
		out.WriteString(before)
		if !found {
			return out.String(), errors.Join(errs...)
		}
		name, after, found := strings.Cut(rest, ")")
		if !found {
			return "", node.Invalid("%q: $( without )", "$("+rest)
		}
		value := env(name)
		if value == "" {
			errs = append(errs, node.Invalid("$(%s): that environment variable is not set", name))
		}
		out.WriteString(value)
		text = after
	}
}
