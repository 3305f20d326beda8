package agent

import (
	"maps"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// fence refuses a command that is older than what this node has seen: from a leader that has been followed by
// another, or made from an older generation of the sandbox for the same target ("" is the sandbox itself). A
// command that passes is recorded before it is carried out.
func (a *Agent) fence(c *agentv1.Command, target string) error {
	if c.GetSandboxUid() == "" || c.GetOperationId() == "" {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "a command needs a sandbox UID and an operation id")
	}
	a.fenceMu.Lock()
	defer a.fenceMu.Unlock()
	var change journal.Change
	if err := a.fenceEpoch(c.GetLeaseUid(), c.GetEpoch(), &change); err != nil {
		return err
	}
	s, ok := a.journal.Sandbox(c.GetSandboxUid())
	if !ok {
		s = journal.Sandbox{UID: c.GetSandboxUid(), Desired: journal.DesiredNone}
	}
	if seen := s.Generations[target]; c.GetGeneration() < seen {
		return fault.New(errdefs.ErrFailedPrecondition, fault.StaleCommand,
			"a command of generation %d came after one of generation %d for sandbox %s %s: it is out of date and was ignored",
			c.GetGeneration(), seen, c.GetSandboxUid(), target)
	} else if !ok || c.GetGeneration() > seen {
		if s.Generations = maps.Clone(s.Generations); s.Generations == nil {
			s.Generations = map[string]int64{}
		}
		s.Generations[target] = c.GetGeneration()
		change.PutSandboxes = []journal.Sandbox{s}
	}
	if len(change.PutSandboxes) == 0 && len(change.PutEpochs) == 0 {
		return nil
	}
	return a.journal.Write(change)
}

// fenceOf is fence for a moment to come: it is asked when it is the command's turn.
func (a *Agent) fenceOf(c *agentv1.Command, target string) func() error {
	return func() error { return a.fence(c, target) }
}

func (a *Agent) fenceEpoch(lease string, epoch int64, change *journal.Change) error {
	seen := a.journal.Epoch(lease)
	if epoch < seen {
		return fault.New(errdefs.ErrFailedPrecondition, fault.StaleCommand,
			"a command of epoch %d came after one of epoch %d: its sender is no longer the leader", epoch, seen)
	}
	if epoch > seen {
		change.PutEpochs = map[string]int64{lease: epoch}
	}
	return nil
}

// updateSandbox changes a sandbox's record, beside what else is to be written with it.
func (a *Agent) updateSandbox(uid string, change journal.Change, update func(*journal.Sandbox)) error {
	a.fenceMu.Lock()
	defer a.fenceMu.Unlock()
	s, ok := a.journal.Sandbox(uid)
	if !ok {
		s = journal.Sandbox{UID: uid}
	}
	update(&s)
	change.PutSandboxes = append(change.PutSandboxes, s)
	return a.journal.Write(change)
}
