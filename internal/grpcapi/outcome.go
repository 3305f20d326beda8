package grpcapi

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// attached looks in the states of a sandbox for the outcome of an added entry.
type attached struct {
	entry v1alpha1.DynamicVolume
	// row is the row that was seen last.
	row *v1alpha1.VolumeStatus
}

// decide is done when the volume is mounted; its error says why it never will be, or is not now.
func (a *attached) decide(sb *v1alpha1.Sandbox) (bool, error) {
	if sb == nil {
		return false, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "the sandbox was deleted before the volume at %s was mounted", a.entry.Target)
	}
	present := entryAt(sb, a.entry.Target)
	if present != nil && volume.SameVolume(present, &a.entry) {
		// It may have been asked for again meanwhile, after a failure.
		a.entry = *present
	}
	row := rowOf(sb, &a.entry)
	if row != nil {
		a.row = row
	}
	switch {
	case row != nil && row.Phase == v1alpha1.VolumeFailed:
		return false, rowError(sb, row)
	case present == nil && row == nil, present != nil && !volume.SameVolume(present, &a.entry):
		return false, fault.New(errdefs.ErrAborted, fault.VolumeGone,
			"the volume at %s of sandbox %s/%s was removed by another request before it was mounted", a.entry.Target, sb.Namespace, sb.Name)
	case present != nil && row != nil && row.Phase == v1alpha1.VolumeMounted:
		return true, nil
	}
	return false, checkTakesVolumes(sb)
}

func (a *attached) warnings() []string {
	var out []string
	if a.row == nil {
		return nil
	}
	if a.row.Topology == v1alpha1.TopologyForced {
		out = append(out, fmt.Sprintf("the volume lies in topology domain %q and the sandbox in %q: forceMount mounted it all the same, its traffic crosses domains",
			a.row.VolumeDomain, a.row.SandboxDomain))
	}
	if a.row.LimitEnforcement == v1alpha1.LimitBestEffort {
		out = append(out, fmt.Sprintf("nothing enforces the sizeLimit %s: the operator's policy allows that (BestEffort)", a.row.SizeLimit))
	}
	return out
}

// detached looks in the states of a sandbox for the outcome of a removal.
type detached struct {
	plan plan
	// row is the row that was seen last.
	row    *v1alpha1.VolumeStatus
	result sandboxv1.RemoveSandVolumeResponse_Result
}

// decide is done when the entry is gone; its error says why the volume stays.
func (d *detached) decide(sb *v1alpha1.Sandbox) (bool, error) {
	d.result = sandboxv1.RemoveSandVolumeResponse_DETACHED
	if sb == nil {
		return true, nil
	}
	mine := &d.plan.entry
	row := rowOf(sb, mine)
	if row != nil {
		d.row = row
	}
	present := entryAt(sb, mine.Target)
	if present == nil || volume.EntryHash(present) != volume.EntryHash(mine) {
		if row != nil && row.DetachState == v1alpha1.DetachLazy {
			d.result = sandboxv1.RemoveSandVolumeResponse_LAZY
		}
		return true, nil
	}
	// The scheduler clears the request when it has refused it; its row names the request that it answers:
	// this one, or one that came after it.
	refused := present.Detach == nil && row != nil && row.Reason != "" &&
		(row.RequestID == mine.Detach.RequestID || row.RequestID != d.plan.priorRow)
	if !refused {
		return false, nil
	}
	if row.Reason == string(fault.Busy) {
		return false, busyError(sb, row)
	}
	return false, rowError(sb, row)
}

// last is the last row of the volume. When it went without a trace the last that was seen of it may be from before
// that: then it is shown as detaching, and not as mounted.
func (d *detached) last() *v1alpha1.VolumeStatus {
	if d.row == nil || d.result == sandboxv1.RemoveSandVolumeResponse_LAZY {
		return d.row
	}
	row := d.row.DeepCopy()
	row.RequestID, row.Phase = d.plan.entry.Detach.RequestID, v1alpha1.VolumeDetaching
	row.Reason, row.Message, row.DetachState, row.Holders = "", "", "", nil
	return row
}

// entryGone is done when the entry of a plan is not in the spec any more, or no longer being detached.
func entryGone(entry v1alpha1.DynamicVolume) func(*v1alpha1.Sandbox) (bool, error) {
	hash := volume.EntryHash(&entry)
	return func(sb *v1alpha1.Sandbox) (bool, error) {
		if sb == nil {
			return true, nil
		}
		present := entryAt(sb, entry.Target)
		return present == nil || volume.EntryHash(present) != hash || present.Detach == nil, nil
	}
}

// rowError makes an error of a row that has failed.
func rowError(sb *v1alpha1.Sandbox, row *v1alpha1.VolumeStatus) error {
	reason := fault.Reason(row.Reason)
	if reason == "" {
		reason = fault.Internal
	}
	message := row.Message
	if message == "" {
		message = fmt.Sprintf("the volume at %s of sandbox %s/%s failed: %s", row.Target, sb.Namespace, sb.Name, reason)
	}
	err := fault.New(fault.KindOf(reason), reason, "%s", message)
	if row.OperationID != "" {
		err = err.With("operationId", row.OperationID)
	}
	return err
}

// busyError names who holds the volume, the first ones in its text and all of them in its details.
func busyError(sb *v1alpha1.Sandbox, row *v1alpha1.VolumeStatus) error {
	const named = 3
	who := make([]string, 0, named)
	info := &sandboxv1.BusyInfo{}
	for i, h := range row.Holders {
		info.Holders = append(info.Holders, convert.HolderProto(h))
		if i < named {
			who = append(who, fmt.Sprintf("%s (pid %d, %s)", h.Command, h.PID, h.Kind))
		}
	}
	by := "processes that could not be named"
	if len(who) > 0 {
		by = strings.Join(who, ", ")
	}
	if more := len(row.Holders) - named; more > 0 {
		by += fmt.Sprintf(" and %d more", more)
	}
	return &detailed{
		error: fault.New(errdefs.ErrFailedPrecondition, fault.Busy,
			"the volume at %s of sandbox %s/%s is in use by %s: let them close it, or remove it by force", row.Target, sb.Namespace, sb.Name, by),
		detail: info,
	}
}

// answerMargin is how long before the end of its client's deadline a call answers: a tenth of what there is,
// at most this. Later, and the client would have hung up.
const answerMargin = 200 * time.Millisecond

// waiting bounds how long a call waits: by its client's deadline less the margin, and by Options.MaxWait.
func (s *Server) waiting(ctx context.Context) (context.Context, context.CancelFunc) {
	limit := s.options.MaxWait
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		limit = min(limit, left-min(answerMargin, left/10))
	}
	return context.WithTimeout(ctx, limit)
}

// stillPending makes the answer of a call that stopped waiting: what is open, and what the client can do. err
// is that of waiter.until; any but the end of waiting is returned as it is.
func stillPending(ctx context.Context, err error, format string, args ...any) error {
	switch {
	case ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled):
		return ctx.Err()
	case errors.Is(err, errStopping):
		return fault.New(errdefs.ErrUnavailable, fault.OperationPending, "the server is stopping; %s", fmt.Sprintf(format, args...))
	case errors.Is(err, context.DeadlineExceeded):
		return fault.New(context.DeadlineExceeded, fault.OperationPending, format, args...)
	}
	return err
}

// soFar says in a message where a row stands.
func soFar(row *v1alpha1.VolumeStatus) string {
	if row == nil {
		return "not begun"
	}
	out := string(row.Phase)
	if row.Reason != "" {
		out += ", " + row.Reason
	}
	if row.Message != "" {
		out += ": " + row.Message
	}
	return out
}

func keyOf(sb *v1alpha1.Sandbox) store.Key { return store.KeyOf(sb) }
