package agent

import (
	"fmt"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// fence refuses a command that is older than what this node has seen: from a leader that has been followed by
// another, or made from an older generation of the sandbox for the same target ("" is the sandbox itself). A
// command that passes is recorded before it is carried out; one that is refused is not.
func (a *Agent) fence(c *agentv1.Command, target string) error {
	passed, err := a.pass(c, target)
	if err != nil {
		return err
	}
	return passed.record()
}

// fenceOf is fence for a moment to come: it is asked when it is the command's turn.
func (a *Agent) fenceOf(c *agentv1.Command, target string) func() error {
	return func() error { return a.fence(c, target) }
}

// passOf is pass for a moment to come.
func (a *Agent) passOf(c *agentv1.Command, target string) func() (*passage, error) {
	return func() (*passage, error) { return a.pass(c, target) }
}

// pass is fence for a command that holds the lock of its target for as long as it takes, and so decides itself when its
// generation is recorded: no other command for the target can come before. The epoch, which is about all targets, is
// recorded at once.
func (a *Agent) pass(c *agentv1.Command, target string) (*passage, error) {
	uid := c.GetSandboxUid()
	if uid == "" || c.GetOperationId() == "" {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "a command needs a sandbox UID and an operation id")
	}
	seen := a.journal.Generation(uid, target)
	if c.GetGeneration() < seen {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.StaleCommand,
			"a command of generation %d came after one of generation %d for sandbox %s %s: it is out of date and was ignored",
			c.GetGeneration(), seen, uid, target)
	}
	if err := a.fenceEpoch(c.GetLeaseUid(), c.GetEpoch()); err != nil {
		return nil, err
	}
	p := &passage{journal: a.journal}
	if c.GetGeneration() > seen {
		p.left = []journal.Generation{{SandboxUID: uid, Target: target, Generation: c.GetGeneration()}}
	}
	return p, nil
}

// passage is a command that passed the fence, and what is left to be recorded of that.
type passage struct {
	journal *journal.Journal
	left    []journal.Generation
}

// write makes a change and records the passage with it, as one.
func (p *passage) write(change journal.Change) error {
	change.PutGenerations = append(change.PutGenerations, p.left...)
	if err := p.journal.Write(change); err != nil {
		return err
	}
	p.left = nil
	return nil
}

// record records the passage by itself, unless it is.
func (p *passage) record() error {
	if len(p.left) == 0 {
		return nil
	}
	return p.write(journal.Change{})
}

// answered records a passage that nothing was recorded with, now that its command ends with err: also after a failure
// nothing older may follow.
func (p *passage) answered(err error) error {
	recordErr := p.record()
	switch {
	case recordErr == nil:
		return err
	case err == nil:
		return recordErr
	}
	return fmt.Errorf("%w; that it was asked for could not be recorded: %v", err, recordErr)
}

// fenceEpoch refuses an epoch that has been followed by another, and records one that is new.
func (a *Agent) fenceEpoch(lease string, epoch int64) error {
	a.fenceMu.Lock()
	defer a.fenceMu.Unlock()
	seen := a.journal.Epoch(lease)
	switch {
	case epoch < seen:
		return fault.New(errdefs.ErrFailedPrecondition, fault.StaleCommand,
			"a command of epoch %d came after one of epoch %d: its sender is no longer the leader", epoch, seen)
	case epoch == seen:
		return nil
	}
	return a.journal.Write(journal.Change{PutEpochs: map[string]int64{lease: epoch}})
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
