package pods

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"golang.org/x/sys/unix"
)

const (
	// pluginName and pluginIndex are how containerd's log and other plugins know ours. Plugins are called in the order of
	// their indices; ours changes nothing that another could want to see.
	pluginName  = "flux-sandbox"
	pluginIndex = "90"
	// reconnectBase is the time to the first attempt to connect again, doubled up to reconnectMax.
	reconnectBase = 100 * time.Millisecond
	reconnectMax  = 5 * time.Second
)

// followNRI keeps the plugin connected until ctx ends.
func (r *Runtime) followNRI(ctx context.Context, h Handler) {
	delay, last := reconnectBase, ""
	for ctx.Err() == nil {
		began := time.Now()
		err := r.serveNRI(ctx, h)
		if ctx.Err() != nil {
			return
		}
		if err.Error() != last {
			last = err.Error()
			r.config.Log.Warn("containers start without waiting for their volumes, which are attached right after", "nriSocket", r.config.NRISocket, "error", err)
		}
		if time.Since(began) > reconnectMax {
			delay, last = reconnectBase, ""
		}
		wait(ctx, delay)
		delay = min(2*delay, reconnectMax)
	}
}

// errDisconnected: containerd, or this plugin's lateness, ended the connection.
var errDisconnected = errors.New("the connection to NRI ended")

// serveNRI serves one connection, until it ends.
func (r *Runtime) serveNRI(ctx context.Context, h Handler) error {
	unlock, err := lockDirectory(filepath.Dir(r.config.NRISocket))
	if err != nil {
		return err
	}
	defer unlock()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", r.config.NRISocket)
	if err != nil {
		return err
	}
	defer conn.Close()
	// Start waits for containerd, which may hang: its end is the connection's.
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	closed := make(chan struct{})
	p := &plugin{runtime: r, handler: h}
	defer p.close() // the stub's end does not wait for calls under way
	s, err := stub.New(p, stub.WithPluginName(pluginName), stub.WithPluginIdx(pluginIndex),
		stub.WithConnection(conn), stub.WithOnClose(sync.OnceFunc(func() { close(closed) })), stub.WithLogger(quiet{r.config.Log}))
	if err != nil {
		return err
	}
	defer s.Stop()
	if err := s.Start(ctx); err != nil {
		return fmt.Errorf("register the plugin: %w", err)
	}
	r.connected.Store(true)
	defer r.connected.Store(false)
	r.config.Log.Info("connected to NRI", "nriSocket", r.config.NRISocket)
	select {
	case <-closed:
		return errDisconnected
	case <-ctx.Done():
		return ctx.Err()
	}
}

// lockDirectory takes the lock on a directory that says whose plugin is connected. It leaves no file behind.
func lockDirectory(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("another agent's plugin has the lock on %s: is one running already? %w", dir, err)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { f.Close() }, nil
}

// plugin is what NRI calls. The stub finds its methods by interfaces.
type plugin struct {
	runtime *Runtime
	handler Handler

	gate   sync.RWMutex // held shared by every call, and by close alone
	closed bool
}

// enter begins a call, unless the plugin is closed.
func (p *plugin) enter() (leave func(), ok bool) {
	p.gate.RLock()
	if p.closed {
		p.gate.RUnlock()
		return nil, false
	}
	return p.gate.RUnlock, true
}

// close waits for the calls under way; none comes through to the handler afterwards.
func (p *plugin) close() {
	p.gate.Lock()
	defer p.gate.Unlock()
	p.closed = true
}

// changed passes on a hint.
func (p *plugin) changed(podUID string) {
	if leave, ok := p.enter(); ok {
		defer leave()
		p.handler.Changed(podUID)
	}
}

var (
	_ stub.SynchronizeInterface     = (*plugin)(nil)
	_ stub.CreateContainerInterface = (*plugin)(nil)
	_ stub.StartContainerInterface  = (*plugin)(nil)
	_ stub.StopContainerInterface   = (*plugin)(nil)
	_ stub.RemovePodInterface       = (*plugin)(nil)
)

// Synchronize comes when the plugin is connected: whatever happened before was missed.
func (p *plugin) Synchronize(context.Context, []*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
	p.changed("")
	return nil, nil
}

// CreateContainer comes when a container is made. One that requires volumes gets a hook, and nothing else changes.
func (p *plugin) CreateContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	leave, ok := p.enter()
	if !ok {
		return nil, nil, nil
	}
	defer leave()
	ref := Ref{PodUID: pod.GetUid(), Container: c.GetName()}
	required, err := p.handler.Required(ref, pod.GetAnnotations())
	if err != nil || len(required) == 0 {
		return nil, nil, err
	}
	hook, err := p.runtime.hook(ref, required)
	if err != nil {
		return nil, nil, err
	}
	adjustment := &api.ContainerAdjustment{}
	adjustment.AddHooks(&api.Hooks{CreateRuntime: []*api.Hook{hook}})
	return adjustment, nil, nil
}

// StartContainer comes before the first instruction of a container.
func (p *plugin) StartContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	leave, ok := p.enter()
	if !ok {
		return nil
	}
	defer leave()
	ref := Ref{PodUID: pod.GetUid(), Container: c.GetName()}
	if !p.handler.Wants(ref) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, HookBudget)
	defer cancel()
	found, err := p.runtime.load(ctx, c.GetId())
	switch {
	case err != nil:
		p.runtime.config.Log.Error("a container that starts cannot be read; its volumes are attached later", "container", c.GetId(), "error", err)
	case found.Ref != ref || !found.Alive:
		p.runtime.config.Log.Error("a container that starts is another one for containerd; its volumes are attached later", "container", c.GetId(), "wanted", ref.String(), "found", found.Ref.String())
	default:
		p.handler.Starting(ctx, found)
	}
	return nil
}

func (p *plugin) StopContainer(_ context.Context, pod *api.PodSandbox, _ *api.Container) ([]*api.ContainerUpdate, error) {
	p.changed(pod.GetUid())
	return nil, nil
}

func (p *plugin) RemovePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	p.changed(pod.GetUid())
	return nil
}

// quiet passes on what the stub says: its ordinary steps are of interest to who looks for an error alone.
type quiet struct{ log *slog.Logger }

func (q quiet) Debugf(_ context.Context, format string, args ...any) {
	q.log.Debug("nri: " + fmt.Sprintf(format, args...))
}

func (q quiet) Infof(_ context.Context, format string, args ...any) {
	q.log.Debug("nri: " + fmt.Sprintf(format, args...))
}

func (q quiet) Warnf(_ context.Context, format string, args ...any) {
	q.log.Warn("nri: " + fmt.Sprintf(format, args...))
}

func (q quiet) Errorf(_ context.Context, format string, args ...any) {
	q.log.Error("nri: " + fmt.Sprintf(format, args...))
}
