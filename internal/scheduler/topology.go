package scheduler

import (
	"slices"
	"sync"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// TopologyDomainCache knows the topology domain of each node, by one node label. It is fed from outside,
// and reading it never leaves memory. Its methods may be called from any goroutine.
type TopologyDomainCache struct {
	key string

	mu      sync.RWMutex // guards all below
	domains map[string]string
	stale   bool
	changed func(node string)
}

// NewTopologyDomainCache makes an empty cache for the node label key; v1alpha1.DefaultTopologyKey when it is empty.
func NewTopologyDomainCache(key string) *TopologyDomainCache {
	if key == "" {
		key = v1alpha1.DefaultTopologyKey
	}
	return &TopologyDomainCache{key: key, domains: map[string]string{}}
}

// Key is the node label that names a domain.
func (c *TopologyDomainCache) Key() string { return c.key }

// Set takes a node's domain from its labels. A node without the label has no domain.
func (c *TopologyDomainCache) Set(node string, labels map[string]string) {
	c.put(node, labels[c.key])
}

// Delete forgets a node.
func (c *TopologyDomainCache) Delete(node string) { c.put(node, "") }

func (c *TopologyDomainCache) put(node, domain string) {
	c.mu.Lock()
	old, changed := c.domains[node], c.changed
	if domain == "" {
		delete(c.domains, node)
	} else {
		c.domains[node] = domain
	}
	c.mu.Unlock()
	if old != domain && changed != nil {
		changed(node)
	}
}

// Domain is the domain of a node. It is false when the node has none, or the cache is stale.
func (c *TopologyDomainCache) Domain(node string) (string, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	d, ok := c.domains[node]
	return d, ok && !c.stale
}

// SetStale says whether what feeds the cache has lost its connection. While it has, nothing is known, and
// no volume is refused for its topology.
func (c *TopologyDomainCache) SetStale(stale bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stale = stale
}

// Compare says how a volume's domains compare with those of a sandbox on a node, and the node's domain.
// A volume may be near to several domains; one in common is a match. Whatever is not known is Unknown, and
// nobody is stopped by it (design, ruling 15).
func (c *TopologyDomainCache) Compare(volume []string, node string) (v1alpha1.Topology, string) {
	domain, ok := c.Domain(node)
	switch {
	case !ok || len(volume) == 0:
		return v1alpha1.TopologyUnknown, domain
	case slices.Contains(volume, domain):
		return v1alpha1.TopologyMatch, domain
	}
	return v1alpha1.TopologyMismatch, domain
}
