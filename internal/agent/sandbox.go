package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/semaphore"

	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/pods"
)

// lifeShares is the weight of the life lock held alone; a share is 1.
const lifeShares = 1 << 30

// sandbox is what the agent holds in memory of one sandbox. What must outlive the process is in the journal
// and in containerd.
type sandbox struct {
	uid string
	// ctx ends when the sandbox's deletion begins, and with it whatever waits on its behalf.
	ctx    context.Context
	cancel context.CancelCauseFunc

	life *semaphore.Weighted
	// verifying: a look whether its mounts are still there is under way.
	verifying atomic.Bool
	// looking: another look at a task that may have ended is due.
	looking atomic.Bool

	mu        sync.Mutex               // guards the fields below
	container *containers.Container    // as it was last seen; nil when there is none
	process   *mount.Process           // init of the task that ns belongs to
	namespace *mount.Namespace         // nil until a volume is attached or looked for
	targets   map[string]chan struct{} // a target's lock: a buffered token
	restarts  restarts
	// pod is the container of a Pod that this is, with what containerd said of it last; nil for a container of the agent's own.
	pod *podState
	// trouble is why the sandbox is not as it should be, for the inventory.
	trouble error
}

func newSandbox(uid string) *sandbox {
	ctx, cancel := context.WithCancelCause(context.Background())
	return &sandbox{uid: uid, ctx: ctx, cancel: cancel, life: semaphore.NewWeighted(lifeShares),
		targets: map[string]chan struct{}{}}
}

// lockTarget takes the lock of one target, or fails with the context's end or the sandbox's.
func (s *sandbox) lockTarget(ctx context.Context, target string) (unlock func(), err error) {
	token := s.token(target)
	select {
	case token <- struct{}{}:
		return func() { <-token }, nil
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	case <-ctx.Done():
		return nil, fault.New(context.Cause(ctx), fault.OperationPending,
			"%s of sandbox %s: another operation on this target is still under way", target, s.uid)
	}
}

// token is a target's lock: whoever can send on it has it.
func (s *sandbox) token(target string) chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	token, ok := s.targets[target]
	if !ok {
		token = make(chan struct{}, 1)
		s.targets[target] = token
	}
	return token
}

// tryTarget takes the lock of one target if it is free.
func (s *sandbox) tryTarget(target string) (unlock func(), free bool) {
	token := s.token(target)
	select {
	case token <- struct{}{}:
		return func() { <-token }, true
	default:
		return nil, false
	}
}

// share takes a share of the life lock: the sandbox's task stays as it is until unlock.
func (s *sandbox) share(ctx context.Context) (unlock func(), err error) { return s.acquire(ctx, 1) }

// alone takes the life lock for an operation that changes the task.
func (s *sandbox) alone(ctx context.Context) (unlock func(), err error) {
	return s.acquire(ctx, lifeShares)
}

func (s *sandbox) acquire(ctx context.Context, n int64) (func(), error) {
	if err := s.life.Acquire(ctx, n); err != nil {
		return nil, fault.New(err, fault.OperationPending, "sandbox %s: another operation on it is still under way", s.uid)
	}
	return func() { s.life.Release(n) }, nil
}

func (s *sandbox) terminating() error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.SandboxTerminating, "sandbox %s is being deleted", s.uid)
}

// seen is the container as it was last seen.
func (s *sandbox) seen() (containers.Container, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.container == nil {
		return containers.Container{}, false
	}
	return *s.container, true
}

// hasTask says whether there is a task that volumes can be attached to.
func hasTask(c containers.Container) bool {
	return c.State == containers.Created || c.State == containers.Running
}

// see notes the container's state. A namespace that belongs to another task is left.
func (s *sandbox) see(c *containers.Container) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c != nil {
		own := *c // the caller goes on using its own
		c = &own
	}
	s.container = c
	if s.process != nil && (c == nil || !hasTask(*c) || c.PID != s.process.PID()) {
		s.leave()
	}
}

// enter is the mount namespace of the sandbox's task. It is entered once for each task, and its thread stays
// in it, as entering costs more than attaching.
func (s *sandbox) enter() (*mount.Namespace, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.container == nil || !hasTask(*s.container) {
		return nil, s.notRunning()
	}
	if s.namespace != nil && s.process.Alive() {
		return s.namespace, nil
	}
	s.leave()
	p, err := mount.OpenProcess(s.container.PID)
	if err != nil {
		return nil, s.unlessGone(err)
	}
	// The PID may be another process' by now: only one in the sandbox's cgroup is the sandbox's.
	if err := s.owns(p); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	ns, err := mount.Enter(p)
	if fault.ReasonOf(err) == mount.ReasonNamespaceIsHost && s.pod != nil && s.pod.container.RootFS != "" {
		ns, err = mount.EnterAt(p, s.pod.container.RootFS)
	}
	if err != nil {
		return nil, errors.Join(s.unlessGone(err), p.Close())
	}
	s.process, s.namespace = p, ns
	return ns, nil
}

// owns fails unless a process, which is pinned, is in the sandbox's cgroup.
func (s *sandbox) owns(p *mount.Process) error {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID()) + "/cgroup")
	if err != nil || !p.Alive() {
		return s.notRunning()
	}
	if s.pod != nil {
		if pods.InCgroup(string(data), s.container.ID) {
			return nil
		}
		return s.notRunning()
	}
	for line := range strings.Lines(string(data)) {
		if strings.HasSuffix(strings.TrimSpace(line), "/"+s.uid) {
			return nil
		}
	}
	return s.notRunning()
}

// unlessGone is err, or that the sandbox does not run if that is what err means.
func (s *sandbox) unlessGone(err error) error {
	if fault.ReasonOf(err) == mount.ReasonNamespaceGone {
		return s.notRunning()
	}
	return err
}

// init is the init process of the task whose namespace was entered; nil when none was.
func (s *sandbox) init() *mount.Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process
}

// namespaceID is the inode number of the mount namespace of the sandbox's init; 0 when that is gone.
func (s *sandbox) namespaceID(init int) (uint64, error) {
	s.mu.Lock()
	if s.namespace != nil && s.process.PID() == init {
		defer s.mu.Unlock()
		return s.namespace.ID(), nil
	}
	s.mu.Unlock()
	return mountNamespace(init)
}

// leave ends the thread in the namespace, which would keep it and all its mounts alive. The caller holds mu.
func (s *sandbox) leave() {
	if s.namespace != nil {
		_ = s.namespace.Close() // it only ends a thread
	}
	if s.process != nil {
		_ = s.process.Close()
	}
	s.process, s.namespace = nil, nil
}

// notRunning is the error of who wants a task. The caller may hold mu.
func (s *sandbox) notRunning() error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.SandboxNotRunning,
		"sandbox %s has no running task on this node; start it first", s.uid)
}

// setTrouble notes why the sandbox is not as it should be; nil clears it. It is true when that was not known.
func (s *sandbox) setTrouble(err error) (news bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	news = fmt.Sprint(err) != fmt.Sprint(s.trouble)
	s.trouble = err
	return news
}
