package scheduler

import (
	"context"
	"iter"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Pod is what the scheduler needs to know of the Pod of a sandbox.
type Pod struct {
	Name string
	UID  types.UID
	// Node is where Kubernetes placed it; empty before.
	Node string
	// Phase is the Pod's own. Reason, a word in CamelCase, and Message say why it does not run, or not as it should.
	Phase           corev1.PodPhase
	Reason, Message string
	// Deleting: it has a deletionTimestamp.
	Deleting bool
	// Disrupted: it ended, or is to end, for no reason of its own, as by an eviction (condition DisruptionTarget).
	Disrupted bool
	// Outdated: images, CPU or memory of the template were changed after it got what it has. Updated: they were once, and it
	// is not outdated. Updating is why its containers do not run with that yet, a word in CamelCase; empty when they do.
	Outdated, Updated         bool
	Updating, UpdatingMessage string
	// Container is the one that gets the volumes; empty when the one that was named is not in the Pod.
	Container string
	// Running: that container runs.
	Running     bool
	ContainerID string
	StartedAt   time.Time
	Restarts    int32
	ExitCode    *int32
}

// Pods knows, makes and deletes the Pods of pod-backed sandboxes. The sandbox's own Pod (spec.template) has its name, and it
// as its controller; the Pod of spec.podRef belongs to somebody else, and is only read.
type Pods interface {
	// Follow yields the sandboxes about whose Pod something may have changed, until ctx ends. What changed is asked of
	// Get. The Scheduler ranges over it once.
	Follow(ctx context.Context) iter.Seq[store.Key]
	// Get is a sandbox's Pod as it is known in memory; nil when there is none. Of podRef it is the Pod that has the name,
	// whatever its UID; of template, only one that the sandbox owns. An error says that nothing is known yet: Follow
	// yields the sandbox when that changes.
	Get(sb *v1alpha1.Sandbox) (*Pod, error)
	// Read is Get from the API server itself, for what cannot be taken back.
	Read(ctx context.Context, sb *v1alpha1.Sandbox) (*Pod, error)
	// Create makes the Pod of a sandbox with a template. That it is there is success. Errors: ErrAlreadyExists, reason
	// POD_NAME_TAKEN, when a Pod of that name is somebody else's: it is left alone; ErrFailedPrecondition, reason
	// POD_REFUSED, when the API server does not take it; ErrUnavailable while an older one of the sandbox is going.
	Create(ctx context.Context, sb *v1alpha1.Sandbox) error
	// Delete deletes the Pod of that UID. That it is gone is success. Nothing is deleted that the sandbox does not own.
	Delete(ctx context.Context, sb *v1alpha1.Sandbox, uid types.UID) error
	// Kill is Delete for a Pod whose node is known not to run any more: nobody is left there to let it end in its time. What is
	// known may be old, so the API server is asked about the node first: ErrUnavailable when that one runs after all.
	Kill(ctx context.Context, sb *v1alpha1.Sandbox, uid types.UID) error
	// Update gives the Pod of that UID the images, CPU and memory of the template, in place. It is idempotent. That the Pod is
	// gone is success. Errors: ErrFailedPrecondition, reason POD_REFUSED, when the API server does not take them.
	Update(ctx context.Context, sb *v1alpha1.Sandbox, uid types.UID) error
	// Forget says that nobody asks about a sandbox any more.
	Forget(uid types.UID)
}

// podBacked says whether a sandbox is a Pod.
func podBacked(sb *v1alpha1.Sandbox) bool { return sb.Spec.Template != nil || sb.Spec.PodRef != nil }

// lookAtPods has the pod-backed sandboxes of a node looked at.
func (s *Scheduler) lookAtPods(node string) {
	for _, key := range s.cache.podsOn(node) {
		s.queue.add(item{key: key})
	}
}
