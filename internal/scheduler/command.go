package scheduler

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// absorb takes over how an operation ended.
func (p *pass) absorb(r result) {
	outcome := "OK"
	if r.err != nil {
		outcome = string(fault.ReasonOf(r.err))
	}
	p.metrics.operations.WithLabelValues(string(r.op.verb), outcome).Inc()
	if r.op.target != "" {
		p.volumes.absorb(p, r)
		return
	}
	a := p.a
	if a.life != r.op {
		return
	}
	a.life = nil
	if r.err != nil {
		p.lifeFailed(r)
		return
	}
	a.lifeErr, a.lifeRetry.due = nil, time.Time{}
	a.done, a.doneUntil = r.op.verb, p.now.Add(confirmAfter)
	switch {
	case r.op.verb == verbDelete:
		a.gone = true
		p.registry.dropState(r.op.node, a.uid)
	case r.op.verb == verbSettleClaims:
		a.settled = r.op.settles
	case r.op.verb == verbCreatePod:
		p.event(p.sb, EventNormal, "PodCreated", "Pod "+p.sb.Name+" is made from the template")
	case r.op.verb == verbKillPod:
		p.event(p.sb, EventWarning, string(fault.NodeDead), "node "+r.op.node+" does not run any more, and Pod "+p.sb.Name+" with it")
	case r.op.verb == verbUpdatePod:
		p.event(p.sb, EventNormal, "PodUpdated", "Pod "+p.sb.Name+" gets the images, CPU and memory of the template, in place")
	case r.op.verb == verbDeletePod:
		p.event(p.sb, EventNormal, "PodDeleted", "Pod "+p.sb.Name+" is to end")
	case r.state != nil:
		p.registry.setState(r.op.node, a.uid, r.state, r.op.heard)
	}
	p.log(string(r.op.verb)+" done", "node", r.op.node, "operationId", r.op.id, "took", p.now.Sub(r.op.started))
}

// begin sends a command to the sandbox's agent in a goroutine of its own, and has the sandbox looked at again
// when it has ended.
func (p *pass) begin(op *operation, timeout time.Duration, run func(context.Context, *agentv1.Command) result) {
	op.node, op.generation, op.started = p.a.status.Node, p.sb.Generation, p.now
	op.heard = p.registry.heard(op.node, p.a.uid)
	ctx, cancel := context.WithCancelCause(p.base)
	op.cancel = cancel
	command := &agentv1.Command{
		Epoch:       p.Epoch,
		LeaseUid:    p.LeaseUID,
		SandboxUid:  string(p.a.uid),
		Generation:  op.generation,
		OperationId: op.id,
	}
	timer := p.Clock.AfterFunc(timeout, func() { cancel(errTooLong) })
	s, a := p.Scheduler, p.a
	s.commands.Go(func() {
		r := run(ctx, command)
		timer.Stop()
		r.op, r.err = op, commandError(ctx, r.err)
		cancel(nil)
		if s.base.Err() != nil {
			return // it was abandoned by a scheduler that ends, which is no failure of anything
		}
		a.deliver(r)
		s.queue.add(item{key: a.key})
	})
}

// commandError gives an agent's answer its kind and reason, and tells a call that we ended from one that the
// agent did.
func commandError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	cause := context.Cause(ctx)
	switch {
	case cause == nil:
		return fault.FromGRPC(err)
	case errors.Is(cause, errTooLong):
		return fault.New(errdefs.ErrUnavailable, fault.DeadlineExceeded, "%w", cause)
	}
	return cause
}
