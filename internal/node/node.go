package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/pods"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/anchor"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/csi"
)

// Programs are where the programs lie that run beside and inside of sandboxes. The paths are recorded in containers, so
// they must stay valid.
type Programs struct{ Init, Logger, Hook string }

// Node is a node that works.
type Node struct {
	config  Config
	sources map[v1alpha1.VolumeType]volume.Source
	child   *containers.Child // our own containerd, or nil
	runtime *containers.Runtime
	pods    *pods.Runtime // nil where Pods are off
	agent   *agent.Agent
}

// Open brings a node up: containerd, and the agent with its recovery. It fails by name where the kernel lacks what
// attaching needs.
func Open(ctx context.Context, config Config, programs Programs, log *slog.Logger, registry prometheus.Registerer) (_ *Node, err error) {
	if err := mount.Require(mount.Probe()); err != nil {
		return nil, err
	}
	for _, dir := range []string{config.StateDir, config.RunDir} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return nil, fmt.Errorf("create %s: %w", dir, err)
		}
	}
	source, err := config.source()
	if err != nil {
		return nil, Invalid("volumes.local: %w", err)
	}
	n := &Node{config: config, sources: map[v1alpha1.VolumeType]volume.Source{v1alpha1.VolumeTypeLocal: source}}
	if err := n.openCSI(log); err != nil {
		return nil, err
	}
	if config.PersistentVolumes {
		anchors, err := anchor.New(anchor.Config{Dir: config.Anchored(), Kubelet: config.Kubelet.Dir, Log: log.With("component", "anchors")})
		if err != nil {
			return nil, err
		}
		n.sources[v1alpha1.VolumeTypePVC] = anchors
	}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	if n.runtime, n.child, err = openContainers(ctx, config, programs); err != nil {
		return nil, err
	}
	settings := agent.Config{
		Node: config.Node, RunDir: config.journal(), Containers: n.runtime, Sources: n.sources,
		DeniedTargets: config.Volumes.DeniedTargets, BestEffortLimits: config.Volumes.BestEffortLimits,
		PrepareRate: config.Volumes.PrepareRate, PrepareBurst: config.Volumes.PrepareBurst,
		PrivilegedPods: config.Pods.AllowPrivileged,
		Log:            log.With("component", "agent"), Registerer: registry,
	}
	if config.Pods.Enabled {
		if n.pods, err = pods.Open(ctx, pods.Config{Address: config.Containerd.Address, Namespace: config.Pods.ContainerdNamespace,
			NRISocket: config.Pods.NRISocket, HookProgram: programs.Hook, HookSocket: config.hookSocket(), Log: log.With("component", "pods")}); err != nil {
			return nil, err
		}
		settings.Pods = n.pods
		registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flux_agent_nri_connected",
			Help: "1 while containers of Pods wait for their volumes before they start; 0 while they get them after it."}, func() float64 {
			if n.pods.Connected() {
				return 1
			}
			return 0
		}))
	}
	n.agent, err = agent.Open(ctx, settings)
	return n, err
}

// openCSI opens the source of CSI drivers' volumes, if there are any, or may have been before the configuration changed.
func (n *Node) openCSI(log *slog.Logger) error {
	drivers, dir := n.config.CSI.Drivers, n.config.Published()
	if _, err := os.Stat(dir); len(drivers) == 0 && errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	source, err := csi.New(csi.Config{Dir: dir, Drivers: drivers, Log: log.With("component", "csi")})
	if err != nil {
		return err
	}
	n.sources[v1alpha1.VolumeTypePV] = source
	return nil
}

// openContainers opens the containerd that the configuration names, or our own, which is started if need be. The Child is
// nil in the first case.
func openContainers(ctx context.Context, config Config, programs Programs) (*containers.Runtime, *containers.Child, error) {
	var child *containers.Child
	address := config.Containerd.Address
	if address == "" {
		var err error
		if child, err = containers.StartContainerd(ctx, config.child()); err != nil {
			return nil, nil, err
		}
		address = child.Address()
	}
	runtime, err := containers.Open(ctx, containers.Config{
		Address: address, Namespace: config.Containerd.Namespace, Snapshotter: config.Containerd.Snapshotter,
		AllowPull: config.Containerd.AllowPull, RegistryConfig: config.Containerd.RegistryConfig,
		StateDir: config.sandboxState(), RunDir: config.containersRun(),
		InitPath: programs.Init, LoggerPath: programs.Logger,
		CgroupParent: config.Sandboxes.CgroupParent, PidsLimit: config.Sandboxes.PidsLimit,
		LogMaxSize: config.Sandboxes.LogMaxSize, LogMaxFiles: config.Sandboxes.LogMaxFiles,
		Steps: agent.ContainerSteps(),
	})
	return runtime, child, err
}

// Agent is the node's agent.
func (n *Node) Agent() *agent.Agent { return n.agent }

// Available says whether the node has a source for a volume type.
func (n *Node) Available(t v1alpha1.VolumeType) bool {
	_, ok := n.sources[t]
	return ok
}

// Supervise keeps our own containerd running until ctx ends; it returns at once where there is none.
func (n *Node) Supervise(ctx context.Context, log *slog.Logger) {
	if n.child != nil {
		n.child.Supervise(ctx, log)
	}
}

// StopContainerd ends our own containerd, where there is one.
func (n *Node) StopContainerd(ctx context.Context) error {
	if n.child == nil {
		return nil
	}
	return n.child.Stop(ctx)
}

// Close ends the agent. Sandboxes and containerd go on.
func (n *Node) Close() {
	if n.agent != nil {
		_ = n.agent.Close()
	}
	if n.pods != nil {
		_ = n.pods.Close()
	}
	if n.runtime != nil {
		_ = n.runtime.Close()
	}
}
