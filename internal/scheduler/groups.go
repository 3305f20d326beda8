package scheduler

import (
	"context"
	"slices"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// followGroups keeps the runtimes as the groups are. A change counts from its event on: the group's sandboxes
// are looked at again at once, so that a gate needs neither a restart nor a resync.
func (s *Scheduler) followGroups(ctx context.Context, synced chan<- struct{}) error {
	for e := range s.Store.Groups().Follow(ctx) {
		switch e.Type {
		case store.Synced:
			close(synced)
			continue
		case store.Changed:
			s.setGroup(e.Object)
		case store.Deleted:
			s.setSubGroups(store.KeyOf(e.Object), nil)
		}
		for _, key := range s.cache.inGroup(store.KeyOf(e.Object)) {
			s.queue.add(item{key: key})
		}
	}
	return ended(ctx)
}

func (s *Scheduler) setGroup(g *v1alpha1.SandboxGroup) {
	topology := s.topology(g.Spec.SchedulingPolicy.TopologyAffinity.Key)
	var names []string
	for _, sub := range subGroups(g) {
		names = append(names, sub.Name)
		key := SubSandboxGroupKey{Namespace: g.Namespace, Group: g.Name, SubGroup: sub.Name}
		s.mu.Lock()
		r := s.runtimes[key]
		s.mu.Unlock()
		if r == nil {
			r = &SSGRuntime{Key: key, Registry: s.registry}
			r.VolMgr = newVolumeManager(r)
		}
		r.apply(&g.Spec, &sub, topology)
		s.mu.Lock()
		s.runtimes[key] = r
		r.setSynced(s.isReady())
		s.mu.Unlock()
		s.Logger.Info("sub-group is set", "subGroup", key.String(), "strategy", r.SchedulingStrategy,
			"topologyAffinity", g.Spec.SchedulingPolicy.TopologyAffinity.Enabled, "topologyKey", topology.Key(),
			"dynamicVolumeMount", g.Spec.FeatureGates.DynamicVolumeMount)
	}
	s.setSubGroups(store.KeyOf(g), names)
}

// setSubGroups drops the runtimes of a group that are not among the names.
func (s *Scheduler) setSubGroups(group store.Key, names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range s.groups[group] {
		if key := (SubSandboxGroupKey{Namespace: group.Namespace, Group: group.Name, SubGroup: name}); !slices.Contains(names, name) {
			delete(s.runtimes, key)
			s.registry.dropIndex(key)
		}
	}
	if len(names) == 0 {
		delete(s.groups, group)
		return
	}
	s.groups[group] = names
}

// topology is the cache of the domains that a node label names.
func (s *Scheduler) topology(label string) *TopologyDomainCache {
	if label == "" {
		label = v1alpha1.DefaultTopologyKey
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.topologies[label]
	if c == nil {
		c = NewTopologyDomainCache(label)
		for node, labels := range s.labels {
			c.Set(node, labels)
		}
		c.changed = s.registry.reindexNode
		s.topologies[label] = c
	}
	return c
}
