package mount

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// The main thread of a process cannot end. If the runtime ran a goroutine on it
// that enters a container's namespace, the process would stay there, and
// /proc/self would be wrong for good. The main goroutine keeps it occupied.
func init() { runtime.LockOSThread() }

// outcomeGrace is how long an operation that has begun is waited for after its
// context has ended. It takes microseconds; only a container whose root hangs
// (FUSE) takes longer.
const outcomeGrace = 5 * time.Second

// Namespace is one container's mount namespace and the thread that lives in it.
// Its operations run one after another. While it is open it keeps the namespace,
// and so everything mounted there, alive: close it when the container ends.
type Namespace struct {
	id      uint64
	process *Process // nil in a helper, which has the namespace's descriptor only
	jobs    chan func(*thread)
	quit    chan struct{}
	done    chan struct{} // closed when the thread has given up everything
	once    sync.Once     // guards the closing of quit
}

// thread is what the thread inside has. Only that thread touches it.
type thread struct {
	modern    bool
	root      int    // the namespace's root directory
	rootMount uint64 // id of the mount there
	mountinfo int    // mountinfo of this very thread, opened through the host's /proc
	stat      statBuffer
}

// Enter starts a thread in the mount namespace of the process. The process may
// be closed after the Namespace is.
// Reasons: NAMESPACE_GONE; NAMESPACE_IS_HOST when the process has our mount
// namespace, or one whose root is still our root (a runtime that did not pivot,
// or has not yet).
func Enter(p *Process) (*Namespace, error) { return enter(p, "", modern()) }

// EnterAt is Enter for a container whose runtime has made its mount namespace and everything in it, and has not
// pivoted yet: root is the directory in that namespace that it will pivot to, a mount point. The Namespace stays the
// container's when the runtime goes on, since pivot_root(2) moves nobody whose root is the new one already.
// Reasons: NAMESPACE_GONE; NAMESPACE_IS_HOST when root is our root or the process has our mount namespace;
// INVALID_TARGET when root is no mount point, as after the pivot.
func EnterAt(p *Process, root string) (*Namespace, error) { return enter(p, root, modern()) }

func enter(p *Process, root string, modern bool) (*Namespace, error) {
	file, err := p.namespace("mnt")
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return enterFile(int(file.Fd()), p, root, modern)
}

func enterFile(nsFD int, p *Process, root string, modern bool) (*Namespace, error) {
	const op = "enter namespace"
	name := ""
	if p != nil {
		name = strconv.Itoa(p.PID())
	}
	var own, theirs unix.Stat_t
	if err := unix.Stat("/proc/self/ns/mnt", &own); err != nil {
		return nil, failed(op, name, "cannot find our own namespace", err)
	}
	if err := unix.Fstat(nsFD, &theirs); err != nil {
		return nil, failed(op, name, "cannot identify the namespace", err)
	}
	isHost := &Error{Op: op, Path: name, Code: ReasonNamespaceIsHost, Kind: errdefs.ErrFailedPrecondition,
		Message: "the process has the host's mount namespace or root; volumes would be mounted on the host"}
	if own.Ino == theirs.Ino {
		return nil, isHost
	}
	var hostRoot unix.Statx_t
	if err := statxAt(unix.AT_FDCWD, "/", 0, unix.STATX_INO, &hostRoot); err != nil {
		return nil, failed(op, name, "cannot identify our root", err)
	}
	proc, err := unix.Open("/proc", directoryPath, 0)
	if err != nil {
		return nil, failed(op, name, "cannot open /proc", err)
	}
	defer unix.Close(proc)

	ns := &Namespace{id: theirs.Ino, process: p, jobs: make(chan func(*thread)), quit: make(chan struct{}), done: make(chan struct{})}
	started := make(chan error)
	go ns.run(started, func(t *thread) error {
		t.modern = modern
		if err := t.enter(nsFD, proc, root); err != nil {
			return wrapKernel(op, name, err)
		}
		var at unix.Statx_t
		if err := statxAt(t.root, "", unix.AT_EMPTY_PATH, unix.STATX_INO, &at); err != nil {
			return failed(op, name, "cannot identify the container's root", err)
		}
		if at.Ino == hostRoot.Ino && at.Dev_major == hostRoot.Dev_major && at.Dev_minor == hostRoot.Dev_minor {
			return isHost
		}
		return nil
	})
	if err := <-started; err != nil {
		<-ns.done
		return nil, err
	}
	if p != nil && !p.Alive() {
		ns.Close()
		return nil, ns.gone(op)
	}
	return ns, nil
}

// run is the life of the thread. It is never unlocked: the runtime ends the
// thread with the goroutine.
func (ns *Namespace) run(started chan<- error, enter func(*thread) error) {
	defer close(ns.done)
	runtime.LockOSThread()
	t := &thread{root: -1, mountinfo: -1}
	defer t.close()
	err := enter(t)
	started <- err
	if err != nil {
		return
	}
	for {
		select {
		case <-ns.quit:
			return
		case job := <-ns.jobs:
			job(t)
		}
	}
}

// enter moves the calling thread. setns(2) puts root and working directory on
// the namespace's topmost root: the one the container pivoted to. root, unless
// empty, is the one that it will pivot to.
func (t *thread) enter(nsFD, proc int, root string) error {
	if unix.Gettid() == unix.Getpid() {
		return errors.New("this is the main thread, which cannot end; main must not call runtime.UnlockOSThread")
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	unix.Umask(0) // this thread's own since the unshare: directories get the mode they are made with
	if err := unix.Setns(nsFD, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("setns: %w", err)
	}
	if root != "" {
		if err := changeRoot(root); err != nil {
			return err
		}
	}
	var err error
	if t.root, err = unix.Open("/", directoryPath, 0); err != nil {
		return fmt.Errorf("open root: %w", err)
	}
	if t.rootMount, err = t.mountID(t.root, "", unix.AT_EMPTY_PATH); err != nil {
		return fmt.Errorf("statx root: %w", err)
	}
	if t.mountinfo, err = unix.Openat(proc, "thread-self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open mountinfo: %w", err)
	}
	return nil
}

// changeRoot gives the calling thread another root, which must be a mount point.
func changeRoot(root string) error {
	fd, err := unix.Openat2(unix.AT_FDCWD, root, &unix.OpenHow{Flags: directoryPath, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return &Error{Op: "enter namespace", Path: root, Code: ReasonInvalidTarget, Kind: errdefs.ErrFailedPrecondition,
			Message: "the container's root cannot be opened in its namespace", Err: err}
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	if err := statxAt(fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO, &st); err != nil {
		return fmt.Errorf("statx %s: %w", root, err)
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return &Error{Op: "enter namespace", Path: root, Code: ReasonInvalidTarget, Kind: errdefs.ErrFailedPrecondition,
			Message: "the container's root is no mount point of its namespace"}
	}
	if err := unix.Fchdir(fd); err != nil {
		return fmt.Errorf("chdir %s: %w", root, err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("chroot %s: %w", root, err)
	}
	return nil
}

func (t *thread) close() {
	if t.root >= 0 {
		unix.Close(t.root)
	}
	if t.mountinfo >= 0 {
		unix.Close(t.mountinfo)
	}
}

// home takes the working directory off whatever it was on, which would be busy.
func (t *thread) home() { _ = unix.Fchdir(t.root) }

// mountID returns the id that this thread knows mounts by: the unique one on
// modern kernels, else the reusable one.
func (t *thread) mountID(dirfd int, name string, flags int) (uint64, error) {
	id, _, err := mountIDAt(dirfd, name, flags, t.modern)
	return id, err
}

// idOf returns the id in the sense of mountID.
func (t *thread) idOf(i Info) uint64 {
	if t.modern {
		return i.UniqueID
	}
	return uint64(i.MountID)
}

// describe looks one mount up by its id in the sense of mountID.
func (t *thread) describe(id, mask uint64) (Info, bool, error) {
	if t.modern {
		info, err := t.stat.stat(id, 0, mask)
		if err == unix.ENOENT {
			return Info{}, false, nil
		}
		return info, err == nil, err
	}
	list, err := readMountinfo(t.mountinfo)
	if err != nil {
		return Info{}, false, err
	}
	for _, i := range list {
		if uint64(i.MountID) == id {
			return i, true, nil
		}
	}
	return Info{}, false, nil
}

// find looks a recorded mount up.
func (t *thread) find(id Identity) (Info, bool, error) {
	if t.modern && id.UniqueID != 0 {
		return t.describe(id.UniqueID, statmountPlace|statmountFSType)
	}
	list, err := readMountinfo(t.mountinfo)
	if err != nil {
		return Info{}, false, err
	}
	for _, i := range list {
		if i.is(id) {
			return i, true, nil
		}
	}
	return Info{}, false, nil
}

func (t *thread) mounts() ([]Info, error) {
	if t.modern {
		return listNamespace(0, listmountRoot, &t.stat)
	}
	return readMountinfo(t.mountinfo)
}

// listNamespace lists the mounts below a mount; nsID 0 is the calling thread's
// namespace. Mounts that vanish meanwhile are left out.
func listNamespace(nsID, below uint64, buf *statBuffer) ([]Info, error) {
	ids, err := listmount(below, nsID)
	if err != nil {
		return nil, err
	}
	list := make([]Info, 0, len(ids))
	for _, id := range ids {
		info, err := buf.stat(id, nsID, statmountAll)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, info)
	}
	return list, nil
}

// ID returns the inode number of the mount namespace, as /proc/PID/ns/mnt shows it.
func (ns *Namespace) ID() uint64 { return ns.id }

// Mounts lists what is mounted in the namespace.
func (ns *Namespace) Mounts() ([]Info, error) {
	var list []Info
	err := ns.do(context.Background(), "list mounts", "", func(t *thread) (err error) {
		list, err = t.mounts()
		return err
	})
	if err != nil {
		return nil, wrapKernel("list mounts", "", err)
	}
	return list, nil
}

// Find tells where a recorded mount is now. That it was moved or is gone is a
// state and no error.
func (ns *Namespace) Find(id Identity) (Info, bool, error) {
	var info Info
	var found bool
	err := ns.do(context.Background(), "find mount", "", func(t *thread) (err error) {
		info, found, err = t.find(id)
		return err
	})
	if err != nil {
		return Info{}, false, wrapKernel("find mount", "", err)
	}
	return info, found, nil
}

// Close ends the thread. It waits for that, but not for an operation that hangs.
// It may be called twice.
func (ns *Namespace) Close() error {
	ns.once.Do(func() { close(ns.quit) })
	timer := time.NewTimer(outcomeGrace)
	defer timer.Stop()
	select {
	case <-ns.done:
	case <-timer.C:
	}
	return nil
}

func (ns *Namespace) gone(op string) error {
	return &Error{Op: op, Code: ReasonNamespaceGone, Kind: errdefs.ErrNotFound, Message: "the container's init has exited, or the namespace was closed"}
}

// job is an operation that runs, or ran, on the thread.
type job struct {
	op, path string
	result   chan error
}

// submit hands f to the thread. On an error f never runs.
func (ns *Namespace) submit(ctx context.Context, op, path string, f func(*thread) error) (*job, error) {
	j := &job{op: op, path: path, result: make(chan error, 1)}
	run := func(t *thread) {
		err := f(t)
		t.home()
		j.result <- err
	}
	if ctx.Err() == nil {
		select {
		case ns.jobs <- run:
			return j, nil
		case <-ns.quit:
			return nil, ns.gone(op)
		case <-ns.done:
			return nil, ns.gone(op)
		case <-ctx.Done():
		}
	}
	return nil, &Error{Op: op, Path: path, Code: ReasonNamespaceOccupied, Kind: errdefs.ErrUnavailable,
		Message: "not begun before the deadline", Err: context.Cause(ctx)}
}

// wait returns the operation's result. When the context ends first, it waits a
// while longer, since callers want to know. After OUTCOME_UNKNOWN the operation
// still runs: what it writes must not be read.
func (j *job) wait(ctx context.Context) error {
	select {
	case err := <-j.result:
		return err
	case <-ctx.Done():
	}
	timer := time.NewTimer(outcomeGrace)
	defer timer.Stop()
	select {
	case err := <-j.result:
		return err
	case <-timer.C:
		return &Error{Op: j.op, Path: j.path, Code: ReasonOutcomeUnknown, Kind: errdefs.ErrUnavailable,
			Message: "the kernel has not answered; look the mount up before trying again", Err: context.Cause(ctx)}
	}
}

// do runs f on the thread and waits for it.
func (ns *Namespace) do(ctx context.Context, op, path string, f func(*thread) error) error {
	j, err := ns.submit(ctx, op, path, f)
	if err != nil {
		return err
	}
	return j.wait(ctx)
}

func wrapKernel(op, path string, err error) error {
	var known *Error
	if errors.As(err, &known) {
		return err
	}
	return failed(op, path, "", err)
}

// onThrowawayThread runs f on a thread that ends with it.
func onThrowawayThread(f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			result <- errors.New("this is the main thread, which cannot end; main must not call runtime.UnlockOSThread")
			return
		}
		result <- f()
	}()
	return <-result
}
