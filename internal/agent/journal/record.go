package journal

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// VolumePhase is how far a volume record has come.
type VolumePhase string

// The phases of a volume record.
const (
	// Intent: the attach was begun; nothing is known of how far it came.
	Intent VolumePhase = "Intent"
	// Waiting: the source is prepared; it is attached when the sandbox's next task is created.
	Waiting VolumePhase = "Waiting"
	// Mounted: attached and verified.
	Mounted VolumePhase = "Mounted"
	// Detaching: the detach was begun.
	Detaching VolumePhase = "Detaching"
	// Lazy: gone from the sandbox's tree, but processes, or a mount namespace inside the sandbox, still hold it.
	Lazy VolumePhase = "Lazy"
)

// Volume is the record of one volume of one sandbox.
type Volume struct {
	SandboxUID string `json:"sandboxUID"`
	// ID is unique among the sandbox's records: the id of the operation that made it.
	ID        string              `json:"id"`
	Target    string              `json:"target"`
	EntryHash string              `json:"entryHash"`
	Kind      v1alpha1.VolumeKind `json:"kind"`
	// Request is what was asked of the source; its Key names the prepared volume.
	Request volume.Request `json:"request"`
	Phase   VolumePhase    `json:"phase"`
	// Mount is where it is, once it is mounted.
	Mount mount.Identity `json:"mount,omitzero"`
	// Left is, for a volume that waits for its container's next task, where it was in what was taken for the last one. A
	// task that containerd does not know yet may have it still.
	Left     mount.Identity      `json:"left,omitzero"`
	Attached v1alpha1.AttachTime `json:"attached,omitempty"`
	// Path, Limit and CapacityBytes are what the source said of it, for this request.
	Path          v1alpha1.VolumePath       `json:"path,omitempty"`
	Limit         v1alpha1.LimitEnforcement `json:"limit,omitempty"`
	CapacityBytes int64                     `json:"capacityBytes,omitempty"`
	// DetachState is what is left of a detach, in phase Lazy.
	DetachState v1alpha1.DetachState `json:"detachState,omitempty"`
	// Stages are how long the steps of its attach took.
	Stages []Stage `json:"stages,omitempty"`
}

// Stage is how long one step of an attach took.
type Stage struct {
	Name     string        `json:"name"`
	Duration time.Duration `json:"duration"`
}

// PreparedPhase is how far a prepared volume has come.
type PreparedPhase string

// The phases of a prepared volume.
const (
	Preparing PreparedPhase = "Preparing"
	Ready     PreparedPhase = "Ready"
	Releasing PreparedPhase = "Releasing"
)

// Prepared is the record of one source on this node. Its users are the volume records with its key: they
// are read, never counted.
type Prepared struct {
	Key      string          `json:"key"`
	Phase    PreparedPhase   `json:"phase"`
	Request  volume.Request  `json:"request"`
	Prepared volume.Prepared `json:"prepared,omitzero"`
	// Mounts are what users had mounted of it: it is released when none of them is left in any mount
	// namespace of the node.
	Mounts []mount.Match `json:"mounts,omitempty"`
}

// Desired is what was last asked of a sandbox's process.
type Desired string

// The desired states of a process.
const (
	// DesiredNone: nothing was asked yet.
	DesiredNone Desired = ""
	// DesiredCreated: it waits for its volumes and for the start.
	DesiredCreated Desired = "Created"
	DesiredRunning Desired = "Running"
	DesiredStopped Desired = "Stopped"
	// DesiredGone: the sandbox is deleted, or being so; the record fences late commands.
	DesiredGone Desired = "Gone"
)

// Sandbox is the record of one sandbox.
type Sandbox struct {
	UID        string    `json:"uid"`
	Desired    Desired   `json:"desired"`
	Restarts   int32     `json:"restarts,omitempty"`
	StartedAt  time.Time `json:"startedAt,omitzero"`
	ExitedAt   time.Time `json:"exitedAt,omitzero"`
	ExitCode   *int32    `json:"exitCode,omitempty"`
	ExitReason string    `json:"exitReason,omitempty"`
	// DeletedAt is when it was deleted, or its Pod was seen to be gone.
	DeletedAt time.Time `json:"deletedAt,omitzero"`
	// Pod is the Pod that has its container; zero for a container of the agent's own.
	Pod Pod `json:"pod,omitzero"`
}

// Pod is what is known of a sandbox that is a container of a Pod.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	Container string `json:"container"`
	TenantID  string `json:"tenantID,omitempty"`
	// ContainerID is the container that the records of mounts are about; empty when there is none that lives.
	ContainerID string `json:"containerID,omitempty"`
	// Seen: the node had something of the Pod. From then on, that there is nothing means that it is gone.
	Seen bool `json:"seen,omitempty"`
	Gone bool `json:"gone,omitempty"`
}

// Generation is the newest generation of a sandbox that was seen in a command for a target; "" is the sandbox itself.
type Generation struct {
	SandboxUID string `json:"sandboxUID"`
	Target     string `json:"target"`
	Generation int64  `json:"generation"`
}

// head is the first record of a file.
type head struct {
	Format int    `json:"format"`
	Boot   string `json:"boot"`
}

// entry is a Change as it is written.
type entry struct {
	Volumes          []Volume         `json:"volumes,omitempty"`
	DroppedVolumes   []volumeID       `json:"droppedVolumes,omitempty"`
	Prepared         []Prepared       `json:"prepared,omitempty"`
	DroppedPrepared  []string         `json:"droppedPrepared,omitempty"`
	Sandboxes        []Sandbox        `json:"sandboxes,omitempty"`
	DroppedSandboxes []string         `json:"droppedSandboxes,omitempty"`
	Generations      []Generation     `json:"generations,omitempty"`
	Epochs           map[string]int64 `json:"epochs,omitempty"`
}

// volumeID is what tells volume records apart.
type volumeID struct {
	SandboxUID string `json:"sandboxUID"`
	ID         string `json:"id"`
}

func (v *Volume) id() volumeID { return volumeID{SandboxUID: v.SandboxUID, ID: v.ID} }

func (c Change) entry() entry {
	e := entry{Volumes: c.PutVolumes, Prepared: c.PutPrepared, DroppedPrepared: c.DeletePrepared, Sandboxes: c.PutSandboxes,
		DroppedSandboxes: c.DeleteSandboxes, Generations: c.PutGenerations, Epochs: c.PutEpochs}
	for i := range c.DeleteVolumes {
		e.DroppedVolumes = append(e.DroppedVolumes, c.DeleteVolumes[i].id())
	}
	return e
}

// decode reads what a record holds. What follows the JSON value is an error too.
func decode[T any](data []byte) (T, error) {
	var v T
	if err := json.Unmarshal(data, &v); err != nil {
		return v, fmt.Errorf("it does not decode: %w", err)
	}
	return v, nil
}
