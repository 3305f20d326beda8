package scheduler

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// actor is what is remembered of a sandbox between two looks at it. Status is written by this scheduler
// alone, so its copy is what counts; it is read from the store once, when the sandbox is first seen.
type actor struct {
	key store.Key
	uid types.UID

	mu    sync.Mutex // guards inbox, moved and expected
	inbox []result
	// moved is when a volume that the sandbox asks for changed last.
	moved time.Time
	// expected are volumes that the sandbox is about to ask for, with the time until when that is believed (Scheduler.Expect).
	expected map[VolumeRef]time.Time

	// What is below belongs to the worker that has the sandbox's key.

	status v1alpha1.SandboxStatus
	// written is the status as it is in the store, as far as it is ours: what somebody else changed in it is written again.
	written v1alpha1.SandboxStatus
	// stored is the status that the store had at the resourceVersion version, by our last write or by the last look at what
	// others wrote.
	stored  v1alpha1.SandboxStatus
	version string
	// behind is since when a status that is not urgent waits to be written (pass.gathers); zero when none does.
	behind time.Time
	// volumes by target.
	volumes map[string]*volumeState
	// life is the command in flight that concerns the sandbox as a whole.
	life *operation
	// lifeErr is how the last such command failed, lifeRetry when it is tried again.
	lifeErr   error
	lifeRetry retry
	// lifeGeneration is the spec's generation that it failed with.
	lifeGeneration int64
	// placing is when a place is looked for again while a volume has none.
	placing retry
	// done is the last such command that succeeded. The inventory may be late: it is not given again before
	// doneUntil, whatever the inventory says.
	done      verb
	doneUntil time.Time
	// moveTo is the node to which the sandbox moves, as its own refused it.
	moveTo string
	// refused are the nodes that had no room after all.
	refused []string
	// gone: the agent has deleted what it had of the sandbox.
	gone bool
	// endedSince is when the process was first seen ended although it should run.
	endedSince time.Time
	// rebuild is when the Pod is made again after it was lost, counted the last that this counts.
	rebuild retry
	counted types.UID
	// pod is the last one that was seen, ranSince since when it runs.
	pod      types.UID
	ranSince time.Time
	// settled is the policy as of which the claims are ready for the sandbox to go; empty when they are not.
	settled v1alpha1.RetentionPolicy
	tally   tally
	// byHash has the volumes of entries that are, or may be, on the node, unsettled those whose attach failed, with the
	// time until when they may be there all the same (holds).
	byHash    map[string]VolumeRef
	unsettled map[VolumeRef]time.Time
	// failures counts the store's refusals in a row.
	failures int32
}

func (a *actor) movedAt() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.moved
}

// retry is when something is tried again.
type retry struct {
	attempts int32
	due      time.Time
}

func (r *retry) failed(now time.Time) {
	r.attempts++
	r.due = now.Add(retryDelay(r.attempts))
}

// volumeState is what is remembered of one target of a sandbox.
type volumeState struct {
	// row is the target's row of status.volumes, nil for none.
	row *v1alpha1.VolumeStatus
	// op is the command in flight.
	op *operation
	// opID names the present operation through all its attempts, purpose is what it is for.
	opID, purpose string
	retry         retry
	// failedAt is when the last attempt failed.
	failedAt time.Time
	// retained: the row outlives its entry, so it says nothing of an entry like it that is added again.
	retained bool
	// before and after are changes of the spec that follow from a result: before the status is written, or
	// after.
	before, after *specEdit
	// answered is the detach request that was answered with BUSY.
	answered *v1alpha1.DetachRequest
	// topology is how the volume's domain compared when it was attached.
	topology topologyResult
	resolved *ResolvedVolume
	// answeredID is the operation that mounted what the last attach was answered with. The inventory comes by another way: it
	// may be behind that answer until confirmBy.
	answeredID string
	confirmBy  time.Time
	// unsure is set when it may have said since that the mount is gone: the message after which it has to be confirmed.
	unsure uint64
	// settleBy is until when something that is under way on the node is waited for.
	settleBy time.Time
	// atCreate: the container of the Pod turned out not to run.
	atCreate bool
}

// operationID keeps one id through the attempts of one operation.
func (v *volumeState) operationID(purpose string) string {
	if v.opID == "" || v.purpose != purpose {
		v.opID, v.purpose, v.retry = newOperationID(), purpose, retry{}
	}
	return v.opID
}

// over says that the present operation has ended for good.
func (v *volumeState) over() { v.opID, v.purpose, v.retry = "", "", retry{} }

func newOperationID() string { return string(uuid.NewUUID()) }

// verb is what an operation does.
type verb string

const (
	verbCreate verb = "create"
	verbStart  verb = "start"
	verbStop   verb = "stop"
	verbDelete verb = "delete"
	verbAttach verb = "attach"
	verbDetach verb = "detach"
	// About the Pod that is the sandbox's own, and asked of the API server.
	verbCreatePod verb = "createPod"
	verbDeletePod verb = "deletePod"
	verbKillPod   verb = "killPod"
	verbUpdatePod verb = "updatePod"
	// About its claims, likewise.
	verbEnsureClaims verb = "ensureClaims"
	verbSettleClaims verb = "settleClaims"
)

// operation is a command to an agent that is in flight.
type operation struct {
	verb       verb
	id         string
	node       string
	generation int64
	started    time.Time
	// heard is what the inventory had said before the command.
	heard  uint64
	cancel context.CancelCauseFunc

	// settles is the policy that settleClaims follows.
	settles v1alpha1.RetentionPolicy

	target string
	// entry is the volume that is attached, or that is detached because its entry asks for it.
	entry *entry
	// hash is that of the mount that is detached.
	hash string
	// pod is what the agent has of a Pod once this is done.
	pod *agentv1.SandboxState
	// now: the container has to run.
	now bool
	// hold is the volume that is held for an attach; guarded by holds.mu while it is in flight.
	hold VolumeRef
	// waits is what is waited for before the command can be sent.
	waits atomic.Pointer[waiting]
}

// waiting is what an operation waits for; why is nil when that has ended.
type waiting struct {
	why   error
	since time.Time
}

// result is how an operation ended.
type result struct {
	op       *operation
	err      error
	state    *agentv1.SandboxState
	record   *agentv1.MountRecord
	already  bool
	detach   *agentv1.DetachResponse
	topology topologyResult
	resolved *ResolvedVolume
}

// takeInbox are the results since the last look.
func (a *actor) takeInbox() []result {
	a.mu.Lock()
	defer a.mu.Unlock()
	in := a.inbox
	a.inbox = nil
	return in
}

func (a *actor) deliver(r result) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.inbox = append(a.inbox, r)
}

func (a *actor) volume(target string) *volumeState {
	v := a.volumes[target]
	if v == nil {
		v = &volumeState{}
		a.volumes[target] = v
	}
	return v
}

// cancelVolumes abandons the volumes' commands in flight.
func (a *actor) cancelVolumes(cause error) {
	for _, v := range a.volumes {
		if v.op != nil {
			v.op.cancel(cause)
		}
	}
}

// actor returns the memory of a sandbox, made from its status when it is new.
func (s *Scheduler) actor(sb *v1alpha1.Sandbox) *actor {
	key := store.KeyOf(sb)
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.actors[key]; a != nil {
		return a
	}
	a := &actor{
		key:     key,
		uid:     sb.UID,
		status:  *sb.Status.DeepCopy(),
		written: *sb.Status.DeepCopy(),
		stored:  sb.Status,
		version: sb.ResourceVersion,
		volumes: map[string]*volumeState{},
	}
	for i := range a.status.Volumes {
		row := a.status.Volumes[i]
		v := a.volume(row.Target)
		v.row = &row
		v.opID, v.purpose = row.OperationID, "attach "+row.EntryHash
		v.retry.attempts = row.Attempts
		if row.NextRetryTime != nil {
			v.retry.due = row.NextRetryTime.Time
		}
		v.topology = topologyResult{result: row.Topology, volume: row.VolumeDomain, sandbox: row.SandboxDomain}
	}
	s.actors[key] = a
	return a
}

// forget drops the memory of a sandbox that is gone.
func (s *Scheduler) forget(key store.Key, uid types.UID) {
	s.mu.Lock()
	a := s.actors[key]
	if a == nil || a.uid == uid {
		s.mu.Unlock()
		return
	}
	delete(s.actors, key)
	delete(s.unplaced, key)
	s.mu.Unlock()
	a.cancelVolumes(errSandboxGone)
	if a.life != nil {
		a.life.cancel(errSandboxGone)
	}
	if s.Pods != nil {
		s.Pods.Forget(a.uid)
	}
	s.metrics.count(a.tally, tally{})
	s.setUses(a.uid, func() uses { return uses{} })
	s.registry.unplace(a.uid)
}
