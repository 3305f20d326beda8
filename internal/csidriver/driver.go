package csidriver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

const (
	// Name is the driver's name.
	Name = "local.csi.sandbox.flux.io"
	// LockFile is the file in a pool by which one process at a time has it.
	LockFile = "lock"
	// TopologyNode is the topology key of the node that a volume lies on.
	TopologyNode = "topology." + Name + "/node"
)

// defaultStopGrace is enough for a publish; a large volume that is being made is given up, and made again.
const defaultStopGrace = 5 * time.Second

// Config says where and how a driver works.
type Config struct {
	// Pool is the folder of the images. It is made if it is not there.
	Pool string
	// Node is the node's name.
	Node string
	// DomainKey and Domain are the label and the value of the node's topology domain; Domain is empty where it has none.
	// SetDomain changes it.
	DomainKey, Domain string
	// Overcommit is by what factor thin volumes may promise more than is free; 1 when zero.
	Overcommit float64
	// Version is told to the callers.
	Version string
	// StopGrace is how long calls may go on when Serve ends; 5 seconds when zero.
	StopGrace time.Duration
	// Called, if set, is told of every call of Serve's that is to change something, once it is answered: the method's name
	// and the volume's.
	Called func(method, volume string, err error)
}

// Driver serves CSI's three services. New makes one.
type Driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer

	config Config
	pool   *capacity.Pool
	// records is the folder that pool has open, whatever lies at its path by now.
	records *os.Root
	loops   capacity.Loops
	lock    *os.File

	mu     sync.Mutex // guards the fields below
	busy   map[string]bool
	domain string
}

var (
	imageSteps     = failpoint.Steps("csi-image", capacity.CreateSteps)
	deviceSteps    = failpoint.Steps("csi-device", capacity.AttachSteps)
	createSteps    = failpoint.Steps("csi-create", []string{"image", "record"})
	deleteSteps    = failpoint.Steps("csi-delete", []string{"forget", "remove"})
	publishSteps   = failpoint.Steps("csi-publish", []string{"target", "device", "mount"})
	unpublishSteps = failpoint.Steps("csi-unpublish", []string{"unmount", "target"})
)

// New opens the pool and repairs what a killed driver left in it. The caller closes the Driver.
func New(ctx context.Context, config Config) (*Driver, error) {
	switch {
	case config.Node == "":
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "the driver needs the name of its node")
	case !filepath.IsAbs(config.Pool):
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "the pool %q is no absolute path", config.Pool)
	case config.Overcommit != 0 && config.Overcommit < 1:
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "the overcommit %g is below 1", config.Overcommit)
	}
	if err := os.MkdirAll(config.Pool, 0o700); err != nil {
		return nil, fmt.Errorf("make the pool: %w", err)
	}
	dir, err := os.Open(config.Pool)
	if err != nil {
		return nil, fmt.Errorf("open the pool: %w", err)
	}
	config.StopGrace = cmp.Or(config.StopGrace, defaultStopGrace)
	records, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the pool: %w", err), dir.Close())
	}
	d := &Driver{config: config, domain: config.Domain, busy: map[string]bool{}, loops: capacity.Loops{Observe: deviceSteps},
		pool: &capacity.Pool{Dir: dir, Overcommit: config.Overcommit, Observe: imageSteps}, records: records}
	if err := d.open(ctx); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// open takes the pool for this process and repairs it.
func (d *Driver) open(ctx context.Context) (err error) {
	if err := d.checkOwn(); err != nil {
		return err
	}
	d.lock, err = d.records.OpenFile(LockFile, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, unix.EROFS) {
		d.lock, err = d.records.Open(LockFile) // what is published from a disk that turned read-only must still go
	}
	if err != nil {
		return fmt.Errorf("lock the pool %s: %w", d.config.Pool, err)
	}
	err = unix.Flock(int(d.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fault.New(errdefs.ErrUnavailable, fault.Busy, "another driver has the pool %s: wait until it has ended", d.config.Pool)
	}
	if err != nil {
		return fmt.Errorf("lock the pool %s: %w", d.config.Pool, err)
	}
	return d.repair(ctx)
}

// Close lets go of the pool. Published volumes stay.
func (d *Driver) Close() error {
	err := errors.Join(d.pool.Dir.Close(), d.records.Close())
	if d.lock != nil {
		err = errors.Join(err, d.lock.Close())
	}
	return err
}

// SetDomain changes the node's topology domain. Kubelet is told when the driver registers the next time.
func (d *Driver) SetDomain(domain string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.domain = domain
}

// Register registers the driver's services.
func (d *Driver) Register(s grpc.ServiceRegistrar) {
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
}

// Interceptor makes gRPC statuses of the driver's errors: every server of a Driver needs it.
func Interceptor(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	response, err := handler(ctx, request)
	return response, fault.ToGRPC(err)
}

// turn makes this call the only one for a volume, until done is called.
func (d *Driver) turn(id string) (done func(), err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.busy[id] {
		return nil, fault.New(errdefs.ErrAborted, fault.OperationPending, "another call for the volume %s is under way: try again", id)
	}
	d.busy[id] = true
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.busy, id)
	}, nil
}

func invalid(format string, args ...any) error {
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, format, args...)
}
