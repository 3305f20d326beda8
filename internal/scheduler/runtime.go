package scheduler

import (
	"sync"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// SubSandboxGroupKey names a sub-group of a group.
type SubSandboxGroupKey struct {
	Namespace, Group, SubGroup string
}

// String is namespace/group/subgroup.
func (k SubSandboxGroupKey) String() string { return k.Namespace + "/" + k.Group + "/" + k.SubGroup }

// SSGRuntime is the scheduler of one sub-group, made when its group appears and renewed as the group
// changes.
type SSGRuntime struct {
	Key SubSandboxGroupKey
	// Registry is shared by all runtimes, as nodes are.
	Registry *InMemoryRegistry
	Engine   *SandboxSchedulerEngine
	// SchedulingWeights and SchedulingStrategy are those in force, defaults filled in.
	SchedulingWeights  *SchedulingWeights
	SchedulingStrategy string
	// TopologyCache is shared by the runtimes whose groups name the same node label.
	TopologyCache *TopologyDomainCache
	VolMgr        *VolumeManager
	// Synced: the store and the agents' inventories were read, so that sandboxes may be placed.
	Synced bool

	// skewed is whether dynamic volumes were off for an agent's lack; the scheduler's mutex guards it.
	skewed bool

	mu       sync.RWMutex // guards all fields but Key, Registry, VolMgr and skewed
	group    v1alpha1.SandboxGroupSpec
	template v1alpha1.SandboxTemplate
	selector map[string]string
}

// settings are a consistent view of a runtime.
type settings struct {
	engine   *SandboxSchedulerEngine
	topology *TopologyDomainCache
	template v1alpha1.SandboxTemplate
	gate     bool
	policy   v1alpha1.VolumePolicy
	synced   bool
}

func (r *SSGRuntime) settings() settings {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return settings{
		engine:   r.Engine,
		topology: r.TopologyCache,
		template: r.template,
		gate:     r.group.FeatureGates.DynamicVolumeMount,
		policy:   r.group.VolumePolicy,
		synced:   r.Synced,
	}
}

func (r *SSGRuntime) setSynced(synced bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Synced = synced
}

// apply takes over a group's spec. The index of candidates is made anew only when what it is made of changed.
func (r *SSGRuntime) apply(group *v1alpha1.SandboxGroupSpec, sub *v1alpha1.SubSandboxGroup, topology *TopologyDomainCache) {
	r.mu.Lock()
	defer r.mu.Unlock()
	weights := DefaultWeights
	if w := group.SchedulingPolicy.Weights; w != nil {
		weights = *w
	}
	strategy := group.SchedulingPolicy.Strategy
	if strategy != StrategyPack {
		strategy = StrategySpread
	}
	var index *candidateIndex
	if r.Engine != nil && r.TopologyCache == topology && r.SchedulingStrategy == strategy && equality.Semantic.DeepEqual(r.selector, sub.NodeSelector) {
		index = r.Engine.index
	} else {
		index = r.Registry.setIndex(r.Key, topology, sub.NodeSelector, strategy == StrategyPack)
	}
	r.SchedulingWeights, r.SchedulingStrategy, r.TopologyCache, r.selector = &weights, strategy, topology, sub.NodeSelector
	r.group, r.template = *group, sub.Template
	r.Engine = &SandboxSchedulerEngine{
		registry: r.Registry,
		index:    index,
		weights:  weights,
		affinity: group.SchedulingPolicy.TopologyAffinity.Enabled,
		capacity: int(sub.Capacity),
	}
}

// subGroups are the sub-groups of a group; one named "default" when it lists none.
func subGroups(g *v1alpha1.SandboxGroup) []v1alpha1.SubSandboxGroup {
	if len(g.Spec.SubGroups) == 0 {
		return []v1alpha1.SubSandboxGroup{{Name: v1alpha1.DefaultSubGroup}}
	}
	return g.Spec.SubGroups
}
