package agent

import (
	"slices"
	"strings"
	"time"

	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// Steps of the agent's operations, beside those that the packages below name. Each is a failpoint before and
// after it, and the crash matrix kills the process at every one.
const (
	stepPrepare        = "prepare"
	stepTree           = "tree"
	stepAttributes     = "attributes"
	stepJournalIntent  = "journal-intent"
	stepJournalMounted = "journal-mounted"
	stepJournalWaiting = "journal-waiting"

	stepJournalDetaching = "journal-detaching"
	stepJournalDetached  = "journal-detached"

	stepJournalPreparing = "journal-preparing"
	stepSourcePrepare    = "source-prepare"
	stepJournalReady     = "journal-ready"
	stepJournalReleasing = "journal-releasing"
	stepSourceRelease    = "source-release"
	stepJournalReleased  = "journal-released"

	stepJournalCreated = "journal-created"
	stepJournalStarted = "journal-started"
	stepJournalStopped = "journal-stopped"
	stepJournalGone    = "journal-gone"
	stepJournalDeleted = "journal-deleted"

	stepRecoverContainers = "containers"
	stepRecoverDeletions  = "deletions"
	stepRecoverVolumes    = "volumes"
	stepRecoverPrepared   = "prepared"
	stepRecoverSources    = "sources"
	stepRecoverTasks      = "tasks"
)

var (
	attachFailpoints = failpoint.Steps("attach", append([]string{stepPrepare, stepTree, stepAttributes,
		stepJournalIntent, stepJournalMounted, stepJournalWaiting}, mount.AttachSteps...))
	detachFailpoints = failpoint.Steps("detach", append([]string{stepJournalDetaching, stepJournalDetached}, mount.DetachSteps...))
	sourceFailpoints = failpoint.Steps("source", []string{stepJournalPreparing, stepSourcePrepare, stepJournalReady,
		stepJournalReleasing, stepSourceRelease, stepJournalReleased})
	sandboxFailpoints = failpoint.Steps("sandbox", []string{stepJournalCreated, stepJournalStarted, stepJournalStopped,
		stepJournalGone, stepJournalDeleted})
	recoverFailpoints = failpoint.Steps("recover", []string{stepRecoverContainers, stepRecoverDeletions,
		stepRecoverVolumes, stepRecoverPrepared, stepRecoverSources, stepRecoverTasks})
	containerFailpoints = failpoint.Steps("container", slices.Concat(containers.CreateSteps, containers.StartSteps,
		containers.StopSteps, containers.DeleteTaskSteps, containers.DeleteSteps))
)

// ContainerSteps observes the steps of internal/containers for failpoints: give it to containers.Config.
func ContainerSteps() containers.Observer { return containerFailpoints }

// stages measures the steps of one operation while it passes them on to their failpoints.
type stages struct {
	clock clock.PassiveClock
	next  func(step string, done bool)
	// begun are the steps under way, the innermost last; one that failed stays.
	begun   []begunStep
	Results []journal.Stage
}

type begunStep struct {
	name string
	at   time.Time
}

// stepsGuess is how many steps most operations have.
const stepsGuess = 10

func newStages(c clock.PassiveClock, next func(string, bool)) *stages {
	return &stages{clock: c, next: next, begun: make([]begunStep, 0, stepsGuess), Results: make([]journal.Stage, 0, stepsGuess)}
}

// observe is a mount.Observer. Steps of one operation come one after another, if on different threads.
func (s *stages) observe(step string, done bool) {
	if !done {
		s.begun = append(s.begun, begunStep{step, s.clock.Now()})
	}
	s.next(step, done)
	if !done {
		return
	}
	last := len(s.begun) - 1
	for s.begun[last].name != step {
		last--
	}
	d := s.clock.Since(s.begun[last].at)
	s.begun = s.begun[:last]
	if i := slices.IndexFunc(s.Results, func(r journal.Stage) bool { return r.Name == step }); i >= 0 {
		s.Results[i].Duration += d
		return
	}
	s.Results = append(s.Results, journal.Stage{Name: step, Duration: d})
}

// do runs one step.
func (s *stages) do(step string, f func() error) error {
	return failpoint.Step(s.observe, step, f)
}

// undone says what the rollback of a failed attach takes back, by the steps that were done.
func (s *stages) undone() string {
	var parts []string
	switch {
	case s.did(mount.StepMove):
		parts = append(parts, "the volume was taken out of the sandbox")
	case s.did(mount.StepTargetMkdir):
		parts = append(parts, "the directories made for it were removed")
	}
	if s.did(stepJournalIntent) {
		parts = append(parts, "its record was deleted")
	}
	return strings.Join(append(parts, "its source is released, unless another volume uses it"), ", ")
}

func (s *stages) did(step string) bool {
	return slices.ContainsFunc(s.Results, func(r journal.Stage) bool { return r.Name == step })
}
