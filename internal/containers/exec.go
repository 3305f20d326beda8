package containers

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/cgroup"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// ExecSpec is a command to run in a running sandbox, as the user, in the environment and with the limits of its process.
type ExecSpec struct {
	// Command is the program, searched in PATH, and its arguments.
	Command []string
	// Env is added to the sandbox's environment.
	Env []EnvVar
	// WorkingDir defaults to the sandbox's.
	WorkingDir string
}

// ExecIO are the streams of an exec; nil ones are /dev/null. Stdout and Stderr may be one writer. When Exec returns,
// the writers are no longer used; a Read of Stdin may still be pending.
type ExecIO struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// execDrain bounds the wait for output once the command has exited: a background process that it left in the sandbox
// may hold its streams for ever.
const execDrain = 2 * time.Second

// Exec runs a command in the sandbox and answers its exit code (128 plus the signal that ended it). When ctx ends, the
// command and all processes of its session are killed, and the error is the context's; likewise when a writer fails. A command that cannot be run is
// ErrInvalidArgument, a sandbox that does not run ErrFailedPrecondition.
func (r *Runtime) Exec(ctx context.Context, uid string, spec ExecSpec, streams ExecIO) (exitCode int, err error) {
	if len(spec.Command) == 0 || spec.Command[0] == "" {
		return 0, invalid("exec in sandbox %s: no command given", uid)
	}
	c, err := r.Get(ctx, uid)
	if err != nil {
		return 0, err
	}
	if c.State != Running {
		return 0, fault.New(errdefs.ErrFailedPrecondition, fault.SandboxNotRunning, "exec in sandbox %s: it is %s, not Running", uid, c.State)
	}
	e := &execution{r: r, uid: uid, id: "exec-" + strings.ToLower(rand.Text())}
	e.dir = filepath.Join(r.execDir(uid), e.id)
	request, err := e.request(ctx, spec, streams)
	if err != nil {
		return 0, err
	}
	// From here on Sweep leaves the directory and what belongs to it alone.
	r.execMu.Lock()
	r.execs[e.id] = struct{}{}
	r.execMu.Unlock()
	defer func() {
		e.clean()
		r.execMu.Lock()
		delete(r.execs, e.id)
		r.execMu.Unlock()
	}()
	if err := os.MkdirAll(e.dir, 0o700); err != nil {
		return 0, errorf(err, "exec in sandbox %s", uid)
	}
	exitCode, err = e.run(ctx, request, streams)
	return exitCode, errorf(err, "exec %q in sandbox %s", spec.Command[0], uid)
}

// execution is one running Exec.
type execution struct {
	r       *Runtime
	uid, id string
	dir     string // has the FIFOs; its name is how Sweep finds an exec that lost its Exec
	pipes   *cio.DirectIO
}

// request makes the exec's specification from the sandbox's own.
func (e *execution) request(ctx context.Context, spec ExecSpec, streams ExecIO) (*tasksapi.ExecProcessRequest, error) {
	record, err := e.r.record(ctx, e.uid)
	if err != nil {
		return nil, err
	}
	decoded, err := typeurl.UnmarshalAny(record.Spec)
	if err != nil {
		return nil, errorf(err, "read the specification of sandbox %s", e.uid)
	}
	sandbox, ok := decoded.(*oci.Spec)
	if !ok || sandbox.Process == nil {
		return nil, fmt.Errorf("the container of sandbox %s has no process specification: %w", e.uid, errdefs.ErrDataLoss)
	}
	process := *sandbox.Process
	process.Args = spec.Command
	process.Terminal = false
	if err := validateEnv(spec.Env); err != nil {
		return nil, errorf(err, "exec in sandbox %s", e.uid)
	}
	process.Env = withEnv(process.Env, spec.Env)
	if spec.WorkingDir != "" {
		if !filepath.IsAbs(spec.WorkingDir) {
			return nil, invalid("exec in sandbox %s: working directory %q: must be an absolute path", e.uid, spec.WorkingDir)
		}
		process.Cwd = filepath.Clean(spec.WorkingDir)
	}
	encoded, err := typeurl.MarshalAnyToProto(&process)
	if err != nil {
		return nil, err
	}
	request := &tasksapi.ExecProcessRequest{ContainerID: e.uid, ExecID: e.id, Spec: encoded}
	if streams.Stdin == nil && streams.Stdout == nil && streams.Stderr == nil {
		return request, nil
	}
	// The shim wants both outputs or none.
	request.Stdout, request.Stderr = filepath.Join(e.dir, "stdout"), filepath.Join(e.dir, "stderr")
	if streams.Stdin != nil {
		request.Stdin = filepath.Join(e.dir, "stdin")
	}
	return request, nil
}

func (e *execution) run(ctx context.Context, request *tasksapi.ExecProcessRequest, streams ExecIO) (int, error) {
	// The FIFOs' opening ends with this context, not the caller's: output is still read while the command is killed.
	ioCtx, cancelIO := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelIO()
	var err error
	e.pipes, err = cio.NewDirectIO(ioCtx, cio.NewFIFOSet(cio.Config{
		Stdin: request.Stdin, Stdout: request.Stdout, Stderr: request.Stderr,
	}, nil))
	if err != nil {
		return 0, err
	}
	// Once begun, the start is not given up half-way: a command of unknown PID could not be killed.
	startCtx, cancelStart := context.WithTimeout(context.WithoutCancel(ctx), cleanPatience+e.r.config.ConnectWait)
	defer cancelStart()
	if err := e.create(startCtx, request); err != nil {
		return 0, e.startError(err)
	}
	ctx, cancelWait := context.WithCancelCause(ctx)
	defer cancelWait(nil)
	output := e.copyOutput(streams, cancelWait)
	defer func() {
		e.pipes.Close()
		<-output
	}()
	pid, err := e.start(startCtx)
	if err != nil {
		return 0, e.startError(err)
	}
	if streams.Stdin != nil {
		go e.copyInput(ioCtx, streams.Stdin)
	}
	code, err := e.wait(ctx)
	if err != nil {
		// Not with ctx, which may be why we are here.
		e.kill(pid)
		return 0, err
	}
	select {
	case <-output:
	case <-time.After(execDrain):
	case <-ctx.Done():
	}
	return code, nil
}

// create makes the process. It outlasts a restart of containerd, after which a process of that id is the one that the
// lost request made.
func (e *execution) create(ctx context.Context, request *tasksapi.ExecProcessRequest) error {
	again := false
	for {
		_, err := e.r.tasks().Exec(e.r.context(ctx), request)
		err = errgrpc.ToNative(err)
		switch {
		case again && errdefs.IsAlreadyExists(err):
			return nil
		case !errdefs.IsUnavailable(err):
			return err
		}
		if lost := e.r.awaitReconnect(ctx); lost != nil {
			return err
		}
		again = true
	}
}

// start starts the process and answers its PID. When containerd is lost meanwhile, the shim knows whether the process was
// started. Where it was not, nothing is started again: runc may have run the command before it was cut off, and a shim
// that is asked twice to start one process panics when that ends (seen with 1.6), which is the sandbox's end.
func (e *execution) start(ctx context.Context) (pid int, err error) {
	started, err := e.r.tasks().Start(e.r.context(ctx), &tasksapi.StartRequest{ContainerID: e.uid, ExecID: e.id})
	if err = errgrpc.ToNative(err); err == nil {
		return int(started.Pid), nil
	}
	for errdefs.IsUnavailable(err) {
		if lost := e.r.awaitReconnect(ctx); lost != nil {
			return 0, err
		}
		var found *tasksapi.GetResponse
		found, err = e.r.tasks().Get(e.r.context(ctx), &tasksapi.GetRequest{ContainerID: e.uid, ExecID: e.id})
		if err = errgrpc.ToNative(err); err != nil {
			continue
		}
		if found.Process.Status == tasktypes.Status_CREATED {
			return 0, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable,
				"containerd was lost while the command was started: whether it ran is not known")
		}
		return int(found.Process.Pid), nil
	}
	return 0, err
}

// startError sorts out the runtime's refusals of a command that it cannot run: they are the caller's mistake.
func (e *execution) startError(err error) error {
	text := err.Error()
	if !strings.Contains(text, "OCI runtime exec failed") {
		return err
	}
	for _, sign := range []string{"executable file not found", "no such file or directory", "permission denied", "not a directory", "is a directory", "exec format error"} {
		if strings.Contains(text, sign) {
			return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "cannot run the command: %s", text)
		}
	}
	return err
}

// copyOutput copies both streams, and closes its answer when both have ended. A caller's writer that fails is the
// command's end: it would block on a full pipe.
func (e *execution) copyOutput(streams ExecIO, fail context.CancelCauseFunc) <-chan struct{} {
	stdout, stderr := streams.Stdout, streams.Stderr
	if sameWriter(stdout, stderr) {
		// Two streams into one buffer at the same time lose output.
		stdout = &lockedWriter{w: stdout}
		stderr = stdout
	}
	var copies sync.WaitGroup
	start := func(to io.Writer, from io.ReadCloser) {
		if to == nil {
			to = io.Discard
		}
		if from != nil {
			copies.Go(func() {
				if _, err := io.Copy(failingTo{to, fail}, from); err != nil {
					from.Close()
				}
			})
		}
	}
	start(stdout, e.pipes.Stdout)
	start(stderr, e.pipes.Stderr)
	ended := make(chan struct{})
	go func() {
		copies.Wait()
		close(ended)
	}()
	return ended
}

// copyInput copies stdin, and passes on its end: the shim holds the FIFO open until it is told.
func (e *execution) copyInput(ctx context.Context, stdin io.Reader) {
	_, err := io.Copy(e.pipes.Stdin, stdin)
	e.pipes.Stdin.Close()
	if err == nil && ctx.Err() == nil {
		// Fails only when the command is gone.
		_, _ = e.r.tasks().CloseIO(e.r.context(ctx), &tasksapi.CloseIORequest{ContainerID: e.uid, ExecID: e.id, Stdin: true})
	}
}

// wait waits for the command's end; it outlasts a restart of containerd.
func (e *execution) wait(ctx context.Context) (int, error) {
	for {
		answer, err := e.r.tasks().Wait(e.r.context(ctx), &tasksapi.WaitRequest{ContainerID: e.uid, ExecID: e.id})
		if err == nil {
			return int(answer.ExitStatus), nil
		}
		err = errgrpc.ToNative(err)
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		if errdefs.IsUnavailable(err) {
			if err := e.r.awaitContainerd(ctx); err != nil {
				return 0, err
			}
			continue
		}
		if errdefs.IsNotFound(err) {
			return 0, fault.New(errdefs.ErrAborted, fault.SandboxNotRunning, "the sandbox ended while the command ran")
		}
		return 0, err
	}
}

// cleanPatience bounds the clean-up of an exec, which goes on when the caller's context has ended. A shim that does not
// answer one attempt (seen once with 2.4 on a loaded machine) is asked again.
const (
	cleanPatience = 10 * time.Second
	cleanAttempts = 2
)

// kill kills the command and the processes of its session, which runc makes it the leader of.
func (e *execution) kill(leader int) {
	ctx, cancel := context.WithTimeout(context.Background(), cleanPatience)
	defer cancel()
	killSession(e.r.cgroups, e.r.cgroupPath(e.uid), leader)
	_, err := e.r.tasks().Kill(e.r.context(ctx), &tasksapi.KillRequest{ContainerID: e.uid, ExecID: e.id, Signal: uint32(unix.SIGKILL)})
	if err == nil {
		_, _ = e.r.tasks().Wait(e.r.context(ctx), &tasksapi.WaitRequest{ContainerID: e.uid, ExecID: e.id})
	}
}

// clean removes the exec from the shim and its FIFOs from the disk. What fails is left to Sweep, which finds the
// directory.
func (e *execution) clean() {
	if e.pipes != nil {
		e.pipes.Cancel()
		e.pipes.Close()
	}
	for range cleanAttempts {
		ctx, cancel := context.WithTimeout(context.Background(), cleanPatience/cleanAttempts)
		err := e.r.deleteExec(ctx, e.uid, e.id)
		cancel()
		if err == nil {
			os.RemoveAll(e.dir)
			return
		}
	}
}

// deleteExec makes the shim forget an ended exec; one that is unknown is a success.
func (r *Runtime) deleteExec(ctx context.Context, uid, execID string) error {
	_, err := r.tasks().DeleteProcess(r.context(ctx), &tasksapi.DeleteProcessRequest{ContainerID: uid, ExecID: execID})
	if err = errgrpc.ToNative(err); errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

func sameWriter(a, b io.Writer) (same bool) {
	if a == nil || b == nil {
		return false
	}
	defer func() {
		if recover() != nil { // a type that cannot be compared
			same = false
		}
	}()
	return a == b
}

// failingTo reports a writer's failure.
type failingTo struct {
	w    io.Writer
	fail context.CancelCauseFunc
}

func (f failingTo) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if err != nil {
		f.fail(fmt.Errorf("pass on the output: %w", err))
	}
	return n, err
}

type lockedWriter struct {
	mu sync.Mutex // guards w
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// killSession kills the processes of a cgroup that belong to the session of leader. A process that made a session of
// its own has left the command's, as with a terminal's hang-up.
func killSession(roots []cgroup.Root, group string, leader int) {
	if leader <= 0 {
		return
	}
	for _, pid := range cgroup.Processes(roots, group) {
		// The pidfd pins the process, so that the check and the kill are about the same one.
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		if session, err := unix.Getsid(pid); err == nil && session == leader {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
		unix.Close(fd)
	}
}
