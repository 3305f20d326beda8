package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/pods"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// Containers is what the agent needs of internal/containers, whose comments say what each call does. All calls are
// idempotent.
type Containers interface {
	Create(ctx context.Context, spec containers.Spec) (containers.Container, error)
	CreateTask(ctx context.Context, uid string) (containers.Container, error)
	Start(ctx context.Context, uid string) error
	Stop(ctx context.Context, uid string, grace time.Duration) (containers.Exit, error)
	DeleteTask(ctx context.Context, uid string) (containers.Exit, error)
	Delete(ctx context.Context, uid string) error
	Get(ctx context.Context, uid string) (containers.Container, error)
	List(ctx context.Context) ([]containers.Container, error)
	// Processes are the host PIDs in the sandbox's cgroup.
	Processes(uid string) []int
	Sweep(ctx context.Context) ([]containers.Leftover, error)
	RecordVolumes(ctx context.Context, uid string, json []byte) error
	Events(ctx context.Context) <-chan containers.Event
	Exec(ctx context.Context, uid string, spec containers.ExecSpec, io containers.ExecIO) (int, error)
	Logs(ctx context.Context, uid string, options containers.LogOptions, each func(containers.LogEntry) error) error
	ImportImage(ctx context.Context, archive io.Reader, options containers.ImportOptions) ([]containers.Image, error)
	PullImage(ctx context.Context, ref string) (containers.Image, error)
	ListImages(ctx context.Context) ([]containers.Image, error)
}

// Pods is what the agent needs of internal/pods, whose comments say what each call does.
type Pods interface {
	Find(ctx context.Context, ref pods.Ref) (pods.Container, error)
	Exists(ctx context.Context, podUID string) (bool, error)
	Processes(c pods.Container) []int
	Run(ctx context.Context, h pods.Handler)
}

// Defaults of Config.
const (
	// DefaultPrepareRate and DefaultPrepareBurst bound how many sources are prepared in a second: far more than a
	// node needs, so that only a runaway loop meets them.
	DefaultPrepareRate  = 1000
	DefaultPrepareBurst = 1000
	// DefaultHeartbeat is how often followers of the inventory hear from the node, and how often it looks whether what
	// it mounted is still there. It is local work: nothing is asked of anybody else.
	DefaultHeartbeat = 10 * time.Second
	// DefaultGrace is the time between SIGTERM and SIGKILL.
	DefaultGrace = 10 * time.Second
)

// Config configures an agent. Fields without a default are required.
type Config struct {
	// Node is the name by which the scheduler knows this node.
	Node string
	// RunDir holds the journal; it must not outlive the boot (a folder in /run).
	RunDir     string
	Containers Containers
	// Pods are the Pods of this node; nil where the agent attaches to containers of its own alone.
	Pods Pods
	// PrivilegedPods lets volumes be attached to containers that can take them away or change them themselves: with
	// CAP_SYS_ADMIN or the host's PID namespace.
	PrivilegedPods bool
	// Sources are the volume types that this node can serve.
	Sources map[v1alpha1.VolumeType]volume.Source
	// DeniedTargets are paths that no volume may cover, beside the built-in ones.
	DeniedTargets []string
	// BestEffortLimits accepts size limits that nothing enforces.
	BestEffortLimits bool
	// PrepareRate (per second) and PrepareBurst bound the preparing of sources.
	PrepareRate  float64
	PrepareBurst int
	Heartbeat    time.Duration
	Clock        clock.WithTicker
	Log          *slog.Logger
	Registerer   prometheus.Registerer
}

func (c Config) withDefaults() (Config, error) {
	if c.Node == "" || c.RunDir == "" || c.Containers == nil {
		return c, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "agent configuration: node, run directory and containers are required")
	}
	if c.PrepareRate == 0 {
		c.PrepareRate = DefaultPrepareRate
	}
	if c.PrepareBurst == 0 {
		c.PrepareBurst = DefaultPrepareBurst
	}
	if c.Heartbeat == 0 {
		c.Heartbeat = DefaultHeartbeat
	}
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Registerer == nil {
		c.Registerer = prometheus.NewRegistry()
	}
	return c, nil
}

// Agent is the agent of one node.
type Agent struct {
	config    Config
	journal   *journal.Journal
	prepared  *preparedVolumes
	updater   *ContainerMountUpdater
	reaper    *reaper
	recorder  *recorder
	inventory *inventory
	offline   *offline
	metrics   *metrics
	log       *slog.Logger
	// bootID is the kernel's; instanceID changes with every start of the agent.
	bootID, instanceID string
	// stopping ends when the agent is closed.
	stopping context.Context
	stop     context.CancelFunc
	workers  sync.WaitGroup
	ready    atomic.Bool

	fenceMu sync.Mutex // serialises read-modify-write of sandbox records and epochs

	mu        sync.Mutex // guards the fields below
	sandboxes map[string]*sandbox
	podIndex  map[pods.Ref]*sandbox // the sandboxes that are containers of Pods which are not gone
}

// Open opens the agent's journal, repairs the node and starts the agent's workers. When it returns, every record is
// true again and requests may be served.
func Open(ctx context.Context, config Config) (*Agent, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("read the boot id: %w", err)
	}
	bootID := strings.TrimSpace(string(boot))
	j, err := journal.Open(config.RunDir, bootID)
	if err != nil {
		return nil, err
	}
	stopping, stop := context.WithCancel(context.WithoutCancel(ctx))
	a := &Agent{config: config, journal: j, log: config.Log, bootID: bootID, instanceID: uuid.NewString(),
		stopping: stopping, stop: stop, sandboxes: map[string]*sandbox{}, podIndex: map[pods.Ref]*sandbox{}}
	a.reaper = newReaper(a)
	a.recorder = newRecorder(a)
	a.inventory = newInventory()
	a.offline = newOffline(a)
	a.prepared = &preparedVolumes{sources: config.Sources, journal: j, log: config.Log, stopping: stopping,
		bucket: rate.NewLimiter(rate.Limit(config.PrepareRate), config.PrepareBurst),
		unused: a.reaper.wake, changed: a.preparedChanged, busy: map[string]*preparation{}, pins: map[string]int{}}
	a.updater = &ContainerMountUpdater{journal: j, prepared: a.prepared, clock: config.Clock, log: config.Log,
		changed: a.changed, unused: a.reaper.wake, nested: a.heldInside}
	if a.metrics, err = newMetrics(a); err != nil {
		stop()
		return nil, errors.Join(err, j.Close())
	}
	events := config.Containers.Events(stopping)
	if err := a.recover(ctx); err != nil {
		stop()
		return nil, errors.Join(fmt.Errorf("recover the node: %w", err), a.Close())
	}
	a.ready.Store(true)
	a.work(func() { a.watch(events) })
	a.work(a.reaper.run)
	a.work(a.recorder.run)
	a.work(a.heartbeat)
	if config.Pods != nil {
		a.work(func() { config.Pods.Run(stopping, podHandler{a}) })
	}
	return a, nil
}

func (a *Agent) work(f func()) {
	a.workers.Add(1)
	go func() {
		defer a.workers.Done()
		f()
	}()
}

// closePatience bounds how long Close waits for operations under way.
const closePatience = 2 * time.Second

// Close ends the agent. Sandboxes, their volumes and the journal stay as they are, for the next start. It does not
// wait for operations that hang.
func (a *Agent) Close() error {
	a.stop()
	a.workers.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	stopping := fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping")
	patience, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	for _, sb := range a.sandboxes {
		sb.cancel(stopping)
		release, err := sb.alone(patience)
		if err != nil {
			continue // something hangs in it, which ends with the process
		}
		sb.mu.Lock()
		sb.leave()
		sb.mu.Unlock()
		release()
	}
	return a.journal.Close()
}

// sandbox is the sandbox of a UID, made if there is none.
func (a *Agent) sandbox(uid string) *sandbox {
	a.mu.Lock()
	defer a.mu.Unlock()
	sb, ok := a.sandboxes[uid]
	if !ok {
		sb = newSandbox(uid)
		if record, ok := a.journal.Sandbox(uid); ok && record.Desired == journal.DesiredGone {
			sb.cancel(sb.terminating()) // a command for a deleted sandbox that arrives late
		}
		a.sandboxes[uid] = sb
	}
	return sb
}

// known is the sandbox of a UID that has a container of the agent's own, or ErrNotFound.
func (a *Agent) known(uid string) (*sandbox, error) {
	if err := a.notAPod(uid); err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if sb, ok := a.sandboxes[uid]; ok {
		if _, ok := sb.seen(); ok {
			return sb, nil
		}
	}
	return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no sandbox %s on node %s", uid, a.config.Node)
}

// all are the sandboxes of the node.
func (a *Agent) all() []*sandbox {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]*sandbox, 0, len(a.sandboxes))
	for _, sb := range a.sandboxes {
		out = append(out, sb)
	}
	return out
}

// changed tells whoever must know that something about a sandbox has changed.
func (a *Agent) changed(uid string) {
	a.inventory.changed(uid)
	a.recorder.changed(uid)
}

// preparedChanged is told of a volume that was prepared, or released.
func (a *Agent) preparedChanged(key string) {
	a.offline.anew(key)
	a.inventory.changedKey(key)
}
