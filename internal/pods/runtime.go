package pods

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/cgroup"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/pods/createhook"
)

// Defaults of Config.
const (
	// DefaultNamespace is the namespace in which containerd's CRI has everything.
	DefaultNamespace = "k8s.io"
	// DefaultNRISocket is containerd's.
	DefaultNRISocket = "/var/run/nri/nri.sock"
)

// Config says where the node's containerd is.
type Config struct {
	// Address is the socket of the containerd that kubelet uses.
	Address string
	// Namespace is that of its CRI; DefaultNamespace when empty.
	Namespace string
	// NRISocket is its socket for plugins; DefaultNRISocket when empty. Where there is none, containers get their volumes
	// right after their start.
	NRISocket string
	// HookProgram is flux-sandbox-hook as the runtime finds it, HookSocket where it asks (package createhook). Without
	// them a container that requires volumes is not made.
	HookProgram, HookSocket string
	// HookPatience is how long a start waits for required volumes; createhook.Patience when zero.
	HookPatience time.Duration
	Log          *slog.Logger
}

// Runtime reads the containers of this node's Pods. It is safe for concurrent use.
type Runtime struct {
	config    Config
	client    *containerd.Client
	pids      cgroup.Root // the hierarchy in which processes are looked for
	known     knownContainers
	connected atomic.Bool
}

// Open connects to containerd; ErrUnavailable when none answers. Later the connection is made again by itself.
func Open(ctx context.Context, config Config) (*Runtime, error) {
	if config.Namespace == "" {
		config.Namespace = DefaultNamespace
	}
	if config.NRISocket == "" {
		config.NRISocket = DefaultNRISocket
	}
	if config.HookPatience == 0 {
		config.HookPatience = createhook.Patience
	}
	if config.Log == nil {
		config.Log = slog.New(slog.DiscardHandler)
	}
	roots, err := cgroup.Roots()
	if err != nil {
		return nil, fmt.Errorf("pods: %w", err)
	}
	client, err := containerd.New(config.Address)
	if err != nil {
		return nil, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "pods: no containerd at %s: %w", config.Address, err)
	}
	r := &Runtime{config: config, client: client, known: knownContainers{pods: map[string]string{}}}
	r.pids, _ = cgroup.Controller(roots, "pids") // without it, every process of the node is looked at
	if _, err := client.Version(r.context(ctx)); err != nil {
		client.Close()
		return nil, fmt.Errorf("pods: connect to containerd at %s: %w", config.Address, err)
	}
	return r, nil
}

// Close closes the connection to containerd.
func (r *Runtime) Close() error { return r.client.Close() }

// Connected says whether the NRI plugin is connected, so that containers wait for their volumes.
func (r *Runtime) Connected() bool { return r.connected.Load() }

func (r *Runtime) context(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, r.config.Namespace)
}

// knownContainers are the Pods of containers by their id: the event of a container that was deleted names the id alone. What it
// has of a Pod may lag behind containerd.
type knownContainers struct {
	mu   sync.Mutex // guards pods
	pods map[string]string
}

// reset forgets what was missed of deletions while there was no subscription.
func (k *knownContainers) reset(podUIDs map[string]string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = podUIDs
}

func (k *knownContainers) put(id, podUID string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods[id] = podUID
}

func (k *knownContainers) get(id string) (podUID string, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	podUID, ok = k.pods[id]
	return podUID, ok
}

// of are the containers of a Pod.
func (k *knownContainers) of(podUID string) (ids []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, of := range k.pods {
		if of == podUID {
			ids = append(ids, id)
		}
	}
	return ids
}

func (k *knownContainers) drop(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.pods, id)
}
