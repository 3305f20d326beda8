package containers

import (
	"context"
	"errors"
	"os"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/containers/logfile"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// LogEntry is one line, or part of one, of a sandbox's output.
type LogEntry = logfile.Entry

// LogOptions select what Logs answers.
type LogOptions = logfile.Options

// Logs calls yield for each entry of a sandbox's log, across rotated files and restarts of its task. With Follow it goes
// on until the sandbox is deleted, opts.Until is closed, ctx ends, or yield fails. It needs no containerd. After
// DeleteTask the log has all that the task wrote.
func (r *Runtime) Logs(ctx context.Context, uid string, opts LogOptions, yield func(LogEntry) error) error {
	if err := validateUID(uid); err != nil {
		return err
	}
	switch opts.Stream {
	case "", logfile.Stdout, logfile.Stderr:
	default:
		return invalid("logs of sandbox %s: stream %q: must be stdout or stderr", uid, opts.Stream)
	}
	err := logfile.Read(ctx, r.LogDir(uid), opts, yield)
	if errors.Is(err, os.ErrNotExist) {
		return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "logs of sandbox %s: there is no sandbox of this UID", uid)
	}
	return errorf(err, "logs of sandbox %s", uid)
}
