package mount

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Calls that may wait for a dead file server are made by a helper: this binary,
// executed again. It gets one request over a socket, answers it and ends. When
// the deadline passes it is killed; when it cannot die, it is abandoned, and
// this process stays able to exit. It ends by itself when the socket is closed:
// not by Pdeathsig, which fires when the thread that started it ends.

const (
	helperEnv = "FLUX_MOUNT_HELPER"
	// helperSocket is the descriptor of its socket in the helper, the first of
	// os/exec's ExtraFiles; what a request refers to follows.
	helperSocket = 3
	helperFile   = 4
	helperMax    = 256 << 10 // a message is no longer
)

type helperOp string

const (
	helperClone  helperOp = "clone"
	helperMount  helperOp = "clone mounted"
	helperStatfs helperOp = "statfs"
	helperOnline helperOp = "look at"
	helperDetach helperOp = "detach"
)

type helperRequest struct {
	Op       helperOp `json:"op"`
	Root     string   `json:"root,omitempty"`
	Rel      string   `json:"rel,omitempty"`
	Target   string   `json:"target,omitempty"`
	Identity Identity `json:"identity"`
	Force    bool     `json:"force,omitempty"`
}

type helperAnswer struct {
	Error  *wireError   `json:"error,omitempty"`
	Usage  Usage        `json:"usage"`
	Detach DetachResult `json:"detach"`
}

// abandoned counts helpers that were killed and have not died.
var abandoned atomic.Int64

// AbandonedHelpers returns how many helpers were killed at their deadline and
// still hang in the kernel.
func AbandonedHelpers() int { return int(abandoned.Load()) }

// CloneInHelper is OpenRoot, OpenBeneath and Clone in a helper, for sources on
// filesystems that MayHang. Reasons: those, HELPER_DEADLINE, HELPER_FAILED.
func CloneInHelper(ctx context.Context, root, rel string) (*Tree, error) {
	_, fd, err := runHelper(ctx, helperRequest{Op: helperClone, Root: root, Rel: rel}, nil)
	return passedTree(helperClone, fd, err)
}

// CloneMountedInHelper is CloneMounted in a helper.
func CloneMountedInHelper(ctx context.Context, at string, id Identity, subPath string) (*Tree, error) {
	_, fd, err := runHelper(ctx, helperRequest{Op: helperMount, Root: at, Rel: subPath, Identity: id}, nil)
	return passedTree(helperMount, fd, err)
}

// passedTree is the tree that a helper passed.
func passedTree(op helperOp, fd int, err error) (*Tree, error) {
	if err != nil {
		return nil, err
	}
	if fd < 0 {
		return nil, helperFailed(op, "it answered without a tree", nil)
	}
	return &Tree{file: os.NewFile(uintptr(fd), "tree")}, nil
}

// StatfsInHelper is Tree.Statfs in a helper.
func StatfsInHelper(ctx context.Context, t *Tree) (Usage, error) {
	if err := t.open("statfs"); err != nil {
		return Usage{}, err
	}
	answer, _, err := runHelper(ctx, helperRequest{Op: helperStatfs}, []*os.File{t.file})
	return answer.Usage, err
}

// OnlineInHelper is Tree.Online in a helper.
func OnlineInHelper(ctx context.Context, t *Tree) error {
	if err := t.open("look at"); err != nil {
		return err
	}
	_, _, err := runHelper(ctx, helperRequest{Op: helperOnline}, []*os.File{t.file})
	return err
}

// DetachInHelper is Namespace.Detach in a helper, for mounts of filesystems
// that MayHang. After HELPER_DEADLINE the mount may or may not be gone: Find it.
func DetachInHelper(ctx context.Context, p *Process, target string, id Identity, opts DetachOptions) (DetachResult, error) {
	file, err := p.namespace("mnt")
	if err != nil {
		return DetachResult{}, err
	}
	defer file.Close()
	opts.Steps.before(StepDetachHelper)
	defer opts.Steps.after(StepDetachHelper)
	answer, _, err := runHelper(ctx, helperRequest{Op: helperDetach, Target: target, Identity: id, Force: opts.Force}, []*os.File{file})
	return answer.Detach, err
}

func helperFailed(op helperOp, message string, err error) error {
	return &Error{Op: "helper " + string(op), Code: ReasonHelperFailed, Kind: errdefs.ErrUnavailable, Message: message, Err: err}
}

// runHelper starts a helper, hands it the request and files, and waits for its
// answer or the end of the context. A returned descriptor is the caller's; it
// is -1 when the helper passed none.
func runHelper(ctx context.Context, req helperRequest, files []*os.File) (helperAnswer, int, error) {
	body, err := json.Marshal(req)
	if err != nil {
		return helperAnswer{}, -1, helperFailed(req.Op, "cannot encode the request", err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return helperAnswer{}, -1, failed("helper "+string(req.Op), "", "cannot make a socket", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "helper")
	if err := unix.SetNonblock(pair[0], true); err != nil {
		unix.Close(pair[0])
		theirs.Close()
		return helperAnswer{}, -1, helperFailed(req.Op, "cannot set up the socket", err)
	}
	ours := os.NewFile(uintptr(pair[0]), "helper")
	defer ours.Close()

	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{helperEnv + "=1"}
	cmd.Dir = "/"
	cmd.ExtraFiles = append([]*os.File{theirs}, files...)
	// Not killed together with the foreground process group of a terminal.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		return helperAnswer{}, -1, helperFailed(req.Op, "cannot start it", err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // how it ended is told by the socket
	}()
	stop := context.AfterFunc(ctx, func() { _ = ours.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	answer, fd, err := exchange(ours, body)
	if err == nil {
		select {
		case <-ended: // it answers last
		case <-ctx.Done(): // its end can wait for a server too
		}
		if answer.Error != nil {
			if fd >= 0 {
				unix.Close(fd)
			}
			return helperAnswer{}, -1, answer.Error.decode()
		}
		return answer, fd, nil
	}
	_ = cmd.Process.Kill()
	if ctx.Err() == nil {
		<-ended
		return helperAnswer{}, -1, helperFailed(req.Op, "it ended without an answer", err)
	}
	abandoned.Add(1)
	go func() {
		<-ended
		abandoned.Add(-1)
	}()
	return helperAnswer{}, -1, &Error{Op: "helper " + string(req.Op), Path: req.Root + req.Target, Code: ReasonHelperDeadline, Kind: errdefs.ErrUnavailable,
		Message: "the filesystem did not answer in time; is its server alive?", Err: context.Cause(ctx)}
}

func exchange(socket *os.File, body []byte) (helperAnswer, int, error) {
	var answer helperAnswer
	if _, err := socket.Write(body); err != nil {
		return answer, -1, err
	}
	conn, err := socket.SyscallConn()
	if err != nil {
		return answer, -1, err
	}
	buf, oob := make([]byte, helperMax), make([]byte, unix.CmsgSpace(4))
	var n, oobn int
	var recvErr error
	err = conn.Read(func(fd uintptr) bool {
		n, oobn, _, _, recvErr = unix.Recvmsg(int(fd), buf, oob, unix.MSG_CMSG_CLOEXEC)
		return recvErr != unix.EAGAIN && recvErr != unix.EINTR
	})
	if err = errors.Join(err, recvErr); err != nil {
		return answer, -1, err
	}
	if n == 0 {
		return answer, -1, errors.New("the socket was closed")
	}
	passed := -1
	if messages, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(messages) == 1 {
		if fds, err := unix.ParseUnixRights(&messages[0]); err == nil && len(fds) == 1 {
			passed = fds[0]
		}
	}
	if err := json.Unmarshal(buf[:n], &answer); err != nil {
		if passed >= 0 {
			unix.Close(passed)
		}
		return answer, -1, err
	}
	return answer, passed, nil
}

// RunHelperIfAsked does the work of a helper and exits when this process was
// started as one; else it returns at once. It must be called first in main, of
// every binary that uses the functions ending in InHelper.
func RunHelperIfAsked() {
	if os.Getenv(helperEnv) == "" {
		return
	}
	// It ends by syscall.Exit: os.Exit lets a binary that was built with the race detector sleep for a second first.
	os.Unsetenv(helperEnv)
	unix.CloseOnExec(helperSocket)
	buf := make([]byte, helperMax)
	n, err := unix.Read(helperSocket, buf)
	var req helperRequest
	if err != nil || n == 0 || json.Unmarshal(buf[:n], &req) != nil {
		syscall.Exit(1)
	}
	go func() {
		// Nothing more is sent: this returns when the other side is gone.
		for {
			if _, err := unix.Read(helperSocket, make([]byte, 1)); err != unix.EINTR {
				syscall.Exit(1)
			}
		}
	}()
	answer, tree, err := req.run()
	if err != nil {
		answer.Error = encodeError(err)
	}
	var rights []byte
	if tree != nil {
		rights = unix.UnixRights(tree.fd())
	}
	body, err := json.Marshal(answer)
	if err == nil {
		err = unix.Sendmsg(helperSocket, body, rights, nil, 0)
	}
	runtime.KeepAlive(tree)
	if err != nil {
		syscall.Exit(1)
	}
	syscall.Exit(0)
}

func (req helperRequest) run() (answer helperAnswer, tree *Tree, err error) {
	switch req.Op {
	case helperClone:
		root, err := OpenRoot(req.Root)
		if err != nil {
			return answer, nil, err
		}
		dir, err := OpenBeneath(root, req.Rel)
		if err != nil {
			return answer, nil, err
		}
		tree, err = Clone(dir)
		return answer, tree, err
	case helperMount:
		tree, err = CloneMounted(req.Root, req.Identity, req.Rel)
		return answer, tree, err
	case helperStatfs:
		answer.Usage, err = statfs(helperFile)
		return answer, nil, err
	case helperOnline:
		return answer, nil, online(helperFile, "")
	case helperDetach:
		ns, err := enterFile(helperFile, nil, "", modern())
		if err != nil {
			return answer, nil, err
		}
		answer.Detach, err = ns.Detach(context.Background(), req.Target, req.Identity, DetachOptions{Force: req.Force})
		return answer, nil, err
	}
	return answer, nil, helperFailed(req.Op, "unknown operation", nil)
}

// wireError carries an error of this package through a socket.
type wireError struct {
	Op      string   `json:"op,omitempty"`
	Path    string   `json:"path,omitempty"`
	Code    string   `json:"code"`
	Message string   `json:"message,omitempty"`
	Kind    string   `json:"kind,omitempty"`
	Errno   uint     `json:"errno,omitempty"`
	Holders []Holder `json:"holders,omitempty"`
}

var wireKinds = []error{errdefs.ErrNotFound, errdefs.ErrInvalidArgument, errdefs.ErrFailedPrecondition, errdefs.ErrAborted,
	errdefs.ErrUnavailable, errdefs.ErrNotImplemented, errdefs.ErrPermissionDenied, errdefs.ErrResourceExhausted}

func encodeError(err error) *wireError {
	var busy *BusyError
	if errors.As(err, &busy) {
		return &wireError{Code: ReasonBusy, Path: busy.Target, Holders: busy.Holders}
	}
	w := &wireError{Code: ReasonKernel, Message: err.Error()}
	var e *Error
	if errors.As(err, &e) {
		w.Op, w.Path, w.Code, w.Message = e.Op, e.Path, e.Code, e.Message
		var errno unix.Errno
		if errors.As(e.Err, &errno) {
			w.Errno = uint(errno)
		} else if e.Err != nil {
			w.Message = strings.TrimPrefix(fmt.Sprintf("%s: %s", e.Message, e.Err), ": ")
		}
	}
	for _, kind := range wireKinds {
		if errors.Is(err, kind) {
			w.Kind = kind.Error()
		}
	}
	return w
}

func (w *wireError) decode() error {
	if w.Code == ReasonBusy {
		return &BusyError{Target: w.Path, Holders: w.Holders}
	}
	e := &Error{Op: w.Op, Path: w.Path, Code: w.Code, Message: w.Message, Kind: errdefs.ErrInternal}
	for _, kind := range wireKinds {
		if kind.Error() == w.Kind {
			e.Kind = kind
		}
	}
	if w.Errno != 0 {
		e.Err = unix.Errno(w.Errno)
	}
	return e
}
