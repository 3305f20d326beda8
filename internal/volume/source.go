package volume

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// Request is a validated volume for a Source on one node. It stands in the agent's journal as JSON.
type Request struct {
	// Key is the volume's identity on the node, set by Source.Resolve.
	Key string `json:"key,omitempty"`
	// Type is the volume's type, which chose the Source.
	Type v1alpha1.VolumeType `json:"type"`
	// Source names the data, by type.
	Source string `json:"source"`
	// PersistentVolume is the name of the one that vouches for a source of type local, in place of the node's policy, or that
	// is the volume of a CSI driver. Who may use it was checked before: the node knows of no PersistentVolumes.
	PersistentVolume string `json:"persistentVolume,omitempty"`
	// CSI is the volume of a CSI driver that a source of type pv is; nil for all else.
	CSI *CSIVolume `json:"csi,omitempty"`
	// Anchor is the Pod for which kubelet published a source of type pvc; nil for all else.
	Anchor *AnchorVolume `json:"anchor,omitempty"`
	// TenantID is the tenant of the sandbox, never what the entry claims; empty for none.
	TenantID string `json:"tenantId,omitempty"`
	// ReadOnly says that the sandbox will not write. The caller makes the mount read-only.
	ReadOnly bool `json:"readOnly,omitempty"`
	// SubPath is the directory inside the volume, empty for its root. Tree gets it again; it is here for
	// sources that have to prepare less because of it.
	SubPath string `json:"subPath,omitempty"`
	// SizeLimitBytes is the hard limit, zero for none.
	SizeLimitBytes int64 `json:"sizeLimitBytes,omitempty"`
	// BestEffort is the operator's policy for limits that nothing can enforce: accept, and say so.
	BestEffort bool `json:"bestEffort,omitempty"`
}

// Prepared is what a Source made ready, and how to undo it. It survives in the agent's journal as JSON, and
// a Source of another process, maybe of a later version, gets it back from there.
type Prepared struct {
	// Key is what Resolve returned for the request.
	Key string `json:"key"`
	// Type is the volume's type, which says whose Source it is.
	Type v1alpha1.VolumeType `json:"type"`
	// Path is the way by which the source was prepared, PathReason why that one (empty where there is one).
	Path       v1alpha1.VolumePath `json:"path"`
	PathReason string              `json:"pathReason,omitempty"`
	// Limit is what holds the volume to its size.
	Limit v1alpha1.LimitEnforcement `json:"limit"`
	// CapacityBytes is the size of the volume's filesystem where it is one of its own, else zero.
	CapacityBytes int64 `json:"capacityBytes,omitempty"`
	// Details are the Source's own record. Nobody else reads it. It holds no secrets.
	Details json.RawMessage `json:"details,omitempty"`
}

// Source turns volumes of one type into detached mount trees. The agent is its only caller.
//
// Life of a volume on a node, in the agent's order of calls:
//
//	Resolve                       policy; gives the key. Nothing is journalled yet
//	journal: intent (key)
//	Prepare                       for every attach, also of a key that is prepared (but see Prompt)
//	journal: Prepared
//	Tree → attach → Close         for every attach
//	…
//	detach                        for every user
//	Release                       after the last user's mount is gone, on proof by the journal's users
//	journal: forget
//
// The agent may die between any two of them. After its start it calls Sweep with what the journal records,
// then goes on where the journal says. What a Prepare left that was cut off is removed by Sweep, or taken over by the
// next Prepare of that volume.
//
// Calls for one key never overlap, except that a Tree may overlap with other Trees and with the Prepare of a volume that
// is ready; calls for different keys do overlap, so that methods must be safe for that.
// Every call honours its context, also where it waits for the kernel.
//
// A Prepare whose error is ErrUnfinished may have left something that could not be undone, and that may even be still
// under way. The agent keeps its record of that volume until a Release, or another Prepare, has succeeded.
//
// Errors of the kinds that fault.IsPermanent knows are permanent: the same call fails again until somebody
// changes the request, the configuration or the data. All others are tried again. A failed call leaves nothing
// behind that was not there before; where that failed too, the next call or Sweep does it.
type Source interface {
	// Resolve checks the request against the node's policy (allow-list, tenant, mode, sharing) and returns
	// the volume's key, which it sets in the request as well. It has no side effects and looks at no data. A
	// refusal is permanent until the configuration changes.
	Resolve(ctx context.Context, r *Request) (key string, err error)
	// Prepare makes the source ready on this node. It is idempotent: for a volume that is ready it changes
	// nothing and returns what holds, or refuses a request that does not fit it (another size). It includes the
	// checks of Resolve.
	Prepare(ctx context.Context, r Request) (Prepared, error)
	// Tree returns a new detached tree of a prepared volume, with subPath (empty for none) applied. It sets no
	// attributes beyond those that every tree has. It may be called any number of times, also by a process that
	// did not prepare the volume; the trees are independent. The caller closes or attaches the tree. A missing
	// subPath, or one that leads through a symlink or out of the volume, is a permanent error.
	Tree(ctx context.Context, p Prepared, subPath string) (*mount.Tree, error)
	// Release undoes Prepare once the last user is gone. It deletes no data. Nothing to release is success.
	// If the kernel still holds the volume, the error is Unavailable (reason BUSY), and the call is repeated.
	Release(ctx context.Context, p Prepared) error
	// Sweep removes what a killed process left and no record owns. inUse are all Prepared of this Source in the
	// journal. It never touches data. It may run beside the other methods.
	Sweep(ctx context.Context, inUse []Prepared) error
}

// ErrUnfinished is in the chain of a Prepare's error that does not tell how far it came.
var ErrUnfinished = errors.New("what was begun may go on, and is undone later")

// Unfinished makes an error ErrUnfinished: that of a Prepare whose undoing failed as well (undo), or of which it is not
// known how far an earlier one came (undo is nil). It is of the kind and reason of the cause.
func Unfinished(cause, undo error) error { return unfinished{cause: cause, undo: undo} }

type unfinished struct{ cause, undo error }

func (u unfinished) Error() string {
	if u.undo == nil {
		return u.cause.Error()
	}
	return fmt.Sprintf("%v; undoing it failed too and is tried again: %v", u.cause, u.undo)
}

func (u unfinished) Unwrap() error { return u.cause }

func (u unfinished) Is(target error) bool { return target == ErrUnfinished }

// Undoer is implemented by a Source that can undo a Prepare that was cut off, or is unfinished, without doing it again.
type Undoer interface {
	// Unfinished is what Release undoes a Prepare of the request by.
	Unfinished(r Request) Prepared
}

// Prompt is implemented by a Source that can mount some of its volumes without waiting for anything but this node's own
// kernel and disks. The agent then spares them what it does for all others: a goroutine that can be abandoned when the
// source hangs.
type Prompt interface {
	// PromptTree is Prepare and Tree in one, of a volume that is ready: Resolve accepted the request, the agent's record
	// of the volume says that it is prepared, and nobody releases it meanwhile. It returns what they would. A volume for
	// which there would be more to check or to hold to than what Tree does by itself (a size), or that could hang, gets
	// neither a tree nor an error, and nothing was done: it takes the long way. Like a Tree it may overlap with others.
	PromptTree(r Request) (*mount.Tree, Prepared, error)
}

// PersistentPathKey is the key of a local or hostPath PersistentVolume: its path on the node.
func PersistentPathKey(path string) string {
	return Key(v1alpha1.VolumeTypeLocal, "persistentVolume", path)
}

// Key is the identity of a volume on a node: its type and what the source resolved it to. Equal identities
// give equal keys in every process and version; the key is a valid file name and tells nothing about the parts.
func Key(t v1alpha1.VolumeType, parts ...string) string {
	sum := sha256.Sum256(join(append([]string{string(t)}, parts...)...))
	return string(t) + "-" + hex.EncodeToString(sum[:16])
}
