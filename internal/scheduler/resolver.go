package scheduler

import (
	"context"
	"iter"
	"strings"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Resolver turns volumes that live outside of a node (pvc, pv, oss) into sources that an agent understands.
//
// Its errors have a kind and a reason (package fault); of a kind that fault.IsPermanent, they are not tried again, but
// for CLAIM_NOT_FOUND, VOLUME_NOT_FOUND and VOLUME_NOT_BOUND: those end without a change of the sandbox.
type Resolver interface {
	// Locate says where a volume is, as far as it is known in memory. It is called while a sandbox is placed, and must be
	// fast. An error that will be tried again keeps the sandbox from being placed: a node that is chosen before the volume
	// has one may be the wrong one, for good.
	Locate(w Wish) (Location, error)
	// Resolve prepares a volume for a node, whatever that takes, and says how it is attached there. It is
	// idempotent, and called before every attach.
	Resolve(ctx context.Context, w Wish, node string) (*ResolvedVolume, error)
	// Changes tells of volumes that are not any more what they were, until ctx ends: who waits for one tries again.
	Changes(ctx context.Context) iter.Seq[VolumeRef]
}

// VolumeRef is a volume as entries name it.
type VolumeRef struct {
	Type v1alpha1.VolumeType
	// Namespace is that of the sandboxes that mean this volume by Source; empty for all.
	Namespace string
	Source    string
}

// followVolumes has the sandboxes that ask for a volume looked at when it changes.
func (s *Scheduler) followVolumes(ctx context.Context) error {
	if s.Resolver == nil {
		return nil
	}
	for ref := range s.Resolver.Changes(ctx) {
		if s.Keeper != nil {
			s.queue.add(item{volume: ref})
		}
		for _, key := range s.cache.asking(ref) {
			s.mu.Lock()
			a := s.actors[key]
			s.mu.Unlock()
			if a != nil {
				a.mu.Lock()
				a.moved = s.Clock.Now()
				a.mu.Unlock()
			}
			s.queue.add(item{key: key})
		}
	}
	return nil
}

// isWaiting says whether a reason is one that ends with a change of the volume.
func isWaiting(reason fault.Reason) bool {
	switch reason {
	case fault.ClaimNotFound, fault.VolumeNotFound, fault.VolumeNotBound:
		return true
	}
	return false
}

// Wish is a volume that a sandbox asks for.
type Wish struct {
	Sandbox *v1alpha1.Sandbox
	Volume  *v1alpha1.DynamicVolume
	// TopologyKey is the node label that names topology domains in the sandbox's group.
	TopologyKey string
	// Waits is told by Resolve what it begins to wait for, as the error that it would be if it waited no more: what takes long
	// is shown with its reason. Nil where nobody asks.
	Waits func(why error)
}

// Wait tells what is waited for.
func (w Wish) Wait(why error) {
	if w.Waits != nil {
		w.Waits(why)
	}
}

// Location is where a volume is.
type Location struct {
	// Domains are the topology domains near which the volume is; none when they are not known.
	Domains []string
	// VolumeKey is its identity on a node, empty when it is not known.
	VolumeKey string
	// Reach are the nodes from which it can be used; all when nil.
	Reach *Reach
}

// Reach is a set of nodes, told by their labels.
type Reach struct {
	// Volume names the volume in messages.
	Volume string
	// Has says whether a node of that name with these labels is in the set. It is called for many nodes.
	Has func(node string, labels map[string]string) bool
	// Likely are names of nodes of the set, where that tells any: they are looked at first.
	Likely []string
}

// check refuses a node from which the volume cannot be used, whatever is forced (design, section 8).
func (r *Reach) check(node string, labels map[string]string) error {
	if r == nil || r.Has(node, labels) {
		return nil
	}
	return fault.New(errdefs.ErrFailedPrecondition, fault.UnreachableVolume,
		"%s cannot be used from node %s, where the sandbox is: its node affinity names other nodes; use a volume that this node can reach, or a new sandbox, which is placed where its volumes are",
		r.Volume, node)
}

// ResolvedVolume is a volume as one node will attach it.
type ResolvedVolume struct {
	Location
	// PVCName and PVName are shown in status, as are Path and PathReason.
	PVCName, PVName string
	Path            v1alpha1.VolumePath
	PathReason      string
	// SetSource puts the source into the agent's request.
	SetSource func(*agentv1.AttachRequest)
	// Unusable is told that the agent found nothing where the volume was to be, so that the next Resolve gets it anew; nil where
	// there is nothing to get.
	Unusable func(ctx context.Context)
}

// topologyResult is how a volume's domains compare with that of its sandbox.
type topologyResult struct {
	result          v1alpha1.Topology
	volume, sandbox string
}

// compareTopology is the rule of cross-topology mounts: whatever is not known stops nobody; another domain is
// a mismatch, which forceMount turns into Forced.
func compareTopology(c *TopologyDomainCache, domains []string, node string, force bool) topologyResult {
	t := topologyResult{result: v1alpha1.TopologyUnknown, volume: strings.Join(domains, ",")}
	if c == nil {
		return t
	}
	t.result, t.sandbox = c.Compare(domains, node)
	if t.result == v1alpha1.TopologyMismatch && force {
		t.result = v1alpha1.TopologyForced
	}
	return t
}
