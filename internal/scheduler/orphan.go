package scheduler

import (
	"context"
	"math"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// collect removes a sandbox from a node that has no business there: the store has none of that UID, or has it
// on another node. It decides on a fresh read, and leaves alone what it is not sure of.
func (s *Scheduler) collect(ctx context.Context, it item) {
	if s.registry.state(it.node, it.uid) == nil {
		return
	}
	agent := s.registry.agent(it.node)
	if !agent.connected {
		return // its next inventory brings it up again
	}
	// Nothing comes after the last command about a UID that is gone.
	generation := int64(math.MaxInt64)
	sb, err := s.Store.Sandboxes().GetByUID(ctx, it.uid)
	switch {
	case err == nil && (sb.Status.Node == "" || sb.Status.Node == it.node):
		return
	case err == nil && s.registry.isPlacedOn(it.uid, it.node):
		return // we have it there: that the store says otherwise is somebody else's doing, and does not last
	case err == nil && podBacked(sb):
		return // the agent forgets what it has of a Pod that is gone; deleted, the sandbox could not come back to the node
	case err == nil:
		generation = sb.Generation
	case !errdefs.IsNotFound(err):
		s.Logger.Warn("cannot tell whether a sandbox is an orphan", "uid", it.uid, "node", it.node, "error", err)
		s.queue.addAt(it, s.Clock.Now().Add(lastRetry))
		return
	}
	id := newOperationID()
	s.Logger.Warn("the node has a sandbox that the store does not have there: it is removed", "uid", it.uid, "node", it.node, "operationId", id)
	ctx, cancel := context.WithCancelCause(s.base)
	timer := s.Clock.AfterFunc(stopTimeout, func() { cancel(errTooLong) })
	s.commands.Go(func() {
		defer cancel(nil)
		_, err := agent.Client.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Command: &agentv1.Command{
			Epoch: s.Epoch, LeaseUid: s.LeaseUID, SandboxUid: string(it.uid), Generation: generation, OperationId: id,
		}})
		timer.Stop()
		if err = commandError(ctx, err); err != nil {
			s.metrics.operations.WithLabelValues(string(verbDelete), string(fault.ReasonOf(err))).Inc()
			s.Logger.Warn("cannot remove an orphan", "uid", it.uid, "node", it.node, "operationId", id, "error", err)
			s.queue.addAt(it, s.Clock.Now().Add(firstRetry))
			return
		}
		s.metrics.operations.WithLabelValues(string(verbDelete), "OK").Inc()
		s.registry.dropState(it.node, it.uid)
		s.settleHeld()
	})
}
