package containers

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/v2/defaults"
	"github.com/containerd/containerd/v2/pkg/identifiers"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/internal/containers/logfile"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"

	"github.com/containerd/errdefs"
)

// Defaults of Config.
const (
	DefaultAddress      = defaults.DefaultAddress
	DefaultNamespace    = "flux-sandbox"
	DefaultStateDir     = "/var/lib/flux-sandbox/sandboxes"
	DefaultRunDir       = "/run/flux-sandbox/containers"
	DefaultCgroupParent = "/flux-sandbox"
	DefaultLogMaxSize   = 10 << 20
	DefaultLogMaxFiles  = 3
	DefaultPidsLimit    = 1024
	DefaultConnectWait  = 10 * time.Second
)

// Config says where containerd is and where the runtime keeps its own files. Empty fields take the defaults above.
type Config struct {
	// Address is containerd's socket.
	Address string
	// Namespace is the containerd namespace, which belongs to this runtime alone: Sweep removes what it does not know.
	Namespace string
	// StateDir has a directory per sandbox that must survive a reboot, as the containers do.
	StateDir string
	// RunDir has what does not outlive the boot: FIFOs of execs, runc's state.
	RunDir string
	// InitPath and LoggerPath are flux-sandbox-init and flux-sandbox-logger. Required, absolute. The paths are recorded
	// in the containers, so they must stay valid; the files may be replaced (by rename) at any time.
	InitPath, LoggerPath string
	// CgroupParent is the cgroup above the sandboxes' cgroups, absolute within each hierarchy.
	CgroupParent string
	// Snapshotter is containerd's snapshotter of the root filesystems; default overlayfs.
	Snapshotter string
	// LogMaxSize (bytes, at least 32 KiB) bounds one log file, LogMaxFiles their number per sandbox.
	LogMaxSize  int64
	LogMaxFiles int
	// PidsLimit is the number of tasks in a sandbox whose spec has none.
	PidsLimit int64
	// AllowPull lets Create pull an image that is not there. Default: only imported images are used.
	AllowPull bool
	// RegistryConfig is a folder that says how registries are reached: a folder per registry host (docker.io, _default)
	// with a hosts.toml or certificates, as containerd's own config_path. Default: every registry by its name.
	RegistryConfig string
	// ConnectWait is how long a call waits for a containerd that does not answer (it may be restarting) before it
	// fails with ErrUnavailable.
	ConnectWait time.Duration
	// Steps is told about every step of Create, CreateTask, Start, Stop, DeleteTask and Delete. May be nil.
	Steps Observer
	// Clock stamps descriptors; default the real one.
	Clock clock.PassiveClock
}

func (c Config) withDefaults() (Config, error) {
	setDefault(&c.Address, DefaultAddress)
	setDefault(&c.Namespace, DefaultNamespace)
	setDefault(&c.StateDir, DefaultStateDir)
	setDefault(&c.RunDir, DefaultRunDir)
	setDefault(&c.CgroupParent, DefaultCgroupParent)
	setDefault(&c.Snapshotter, defaults.DefaultSnapshotter)
	setDefault(&c.LogMaxSize, DefaultLogMaxSize)
	setDefault(&c.LogMaxFiles, DefaultLogMaxFiles)
	setDefault(&c.PidsLimit, DefaultPidsLimit)
	setDefault(&c.ConnectWait, DefaultConnectWait)
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	if err := identifiers.Validate(c.Namespace); err != nil {
		return c, invalid("containerd namespace %q: %v", c.Namespace, err)
	}
	if c.RegistryConfig != "" && !filepath.IsAbs(c.RegistryConfig) {
		return c, invalid("containers configuration: RegistryConfig is %q: must be an absolute path", c.RegistryConfig)
	}
	for _, p := range []struct{ field, path string }{
		{"Address", c.Address}, {"StateDir", c.StateDir}, {"RunDir", c.RunDir}, {"InitPath", c.InitPath},
		{"LoggerPath", c.LoggerPath}, {"CgroupParent", c.CgroupParent},
	} {
		if !filepath.IsAbs(p.path) || filepath.Clean(p.path) != p.path {
			return c, invalid("containers configuration: %s is %q: must be a clean absolute path", p.field, p.path)
		}
	}
	if c.CgroupParent == "/" {
		return c, invalid("containers configuration: CgroupParent must not be the root cgroup")
	}
	if c.LogMaxSize < logfile.MinSize || c.LogMaxFiles < 1 {
		return c, invalid("containers configuration: a log of %d files of %d bytes: need at least 1 file of %d bytes",
			c.LogMaxFiles, c.LogMaxSize, logfile.MinSize)
	}
	return c, nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func invalid(format string, args ...any) error {
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, format, args...)
}

// Observer is called before (done false) and after (done true) each step of an operation. A crash test kills the
// process in it.
type Observer func(step string, done bool)

// The steps of the operations in their order. An operation skips the steps whose effect is there already; StepStopKill
// is taken only when the grace is over.
const (
	StepCreateFiles     = "create/files"
	StepCreateLease     = "create/lease"
	StepCreateSnapshot  = "create/snapshot"
	StepCreateContainer = "create/container"
	StepCreateRelease   = "create/release-lease"
	StepCreateTask      = "create/task"

	StepStart = "start/task"

	StepStopTerm   = "stop/term"
	StepStopKill   = "stop/kill"
	StepStopRecord = "stop/record-exit"

	StepTaskRecord = "delete-task/record-exit"
	StepTaskDelete = "delete-task/delete"

	StepDeleteKill      = "delete/kill"
	StepDeleteTask      = "delete/task"
	StepDeleteContainer = "delete/container"
	StepDeleteSnapshot  = "delete/snapshot"
	StepDeleteLease     = "delete/lease"
	StepDeleteCgroup    = "delete/cgroup"
	StepDeleteFiles     = "delete/files"
)

// The steps of each operation. CreateTask goes through DeleteTaskSteps, then StepCreateTask.
var (
	CreateSteps = []string{StepCreateFiles, StepCreateLease, StepCreateSnapshot, StepCreateContainer, StepCreateRelease,
		StepCreateTask}
	StartSteps      = []string{StepStart}
	StopSteps       = []string{StepStopTerm, StepStopKill, StepStopRecord}
	DeleteTaskSteps = []string{StepTaskRecord, StepTaskDelete}
	DeleteSteps     = []string{StepDeleteKill, StepDeleteTask, StepDeleteContainer, StepDeleteSnapshot, StepDeleteLease,
		StepDeleteCgroup, StepDeleteFiles}
)

// step runs one step under the observer's eyes.
func (r *Runtime) step(name string, do func() error) error {
	if err := failpoint.Step(r.config.Steps, name, do); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
