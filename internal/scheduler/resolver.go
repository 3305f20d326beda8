package scheduler

import (
	"context"
	"strings"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// Resolver turns volumes that live outside of a node (pvc, pv, oss) into sources that an agent understands.
// Errors have a kind and a reason (package fault); of a kind that fault.IsPermanent, they are not tried again.
type Resolver interface {
	// Locate says near which topology domains a volume is, and its identity on a node, as far as it is known
	// in memory. It is called while a sandbox is placed, and must be fast.
	Locate(sb *v1alpha1.Sandbox, v *v1alpha1.DynamicVolume) (domains []string, volumeKey string)
	// Resolve prepares a volume for a node, whatever that takes, and says how it is attached there. It is
	// idempotent, and called before every attach.
	Resolve(ctx context.Context, sb *v1alpha1.Sandbox, v *v1alpha1.DynamicVolume, node string) (*ResolvedVolume, error)
}

// ResolvedVolume is a volume as one node will attach it.
type ResolvedVolume struct {
	// Domains are the topology domains near which the volume is; none when they are not known.
	Domains []string
	// VolumeKey is its identity on a node.
	VolumeKey string
	// PVCName and PVName are shown in status, as are Path and PathReason.
	PVCName, PVName string
	Path            v1alpha1.VolumePath
	PathReason      string
	// SetSource puts the source into the agent's request.
	SetSource func(*agentv1.AttachRequest)
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
