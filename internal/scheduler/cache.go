package scheduler

import (
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// cache holds the sandboxes as the store last told of them. Nobody changes what is in it.
type cache struct {
	mu        sync.Mutex // guards all below
	sandboxes map[store.Key]*v1alpha1.Sandbox
	keys      map[types.UID]store.Key
	groups    map[store.Key]map[store.Key]struct{}
}

func newCache() *cache {
	return &cache{
		sandboxes: map[store.Key]*v1alpha1.Sandbox{},
		keys:      map[types.UID]store.Key{},
		groups:    map[store.Key]map[store.Key]struct{}{},
	}
}

func groupOf(sb *v1alpha1.Sandbox) store.Key {
	k := subGroupOf(sb)
	return store.Key{Namespace: k.Namespace, Name: k.Group}
}

// isOlder says whether one state of a sandbox is from before another. An object of another UID is none of its states.
func isOlder(sb, other *v1alpha1.Sandbox) bool {
	if sb.UID != other.UID {
		return false
	}
	n, err := resourceversion.CompareResourceVersion(sb.ResourceVersion, other.ResourceVersion)
	return err == nil && n < 0
}

// put takes over what the store told. An older state than what is there is left out: our own write may have been faster
// than the store's word of the one before.
func (c *cache) put(sb *v1alpha1.Sandbox) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := store.KeyOf(sb)
	if old := c.sandboxes[key]; old != nil {
		if isOlder(sb, old) {
			return
		}
		c.removeLocked(old)
	}
	c.putLocked(key, sb)
}

// renew takes over the result of a write of ours, unless the store said meanwhile that the object is gone, or has told of a
// later write.
func (c *cache) renew(sb *v1alpha1.Sandbox) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := store.KeyOf(sb)
	if old := c.sandboxes[key]; old != nil && old.UID == sb.UID && !isOlder(sb, old) {
		c.removeLocked(old)
		c.putLocked(key, sb)
	}
}

func (c *cache) putLocked(key store.Key, sb *v1alpha1.Sandbox) {
	c.sandboxes[key] = sb
	c.keys[sb.UID] = key
	g := groupOf(sb)
	if c.groups[g] == nil {
		c.groups[g] = map[store.Key]struct{}{}
	}
	c.groups[g][key] = struct{}{}
}

func (c *cache) remove(sb *v1alpha1.Sandbox) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.sandboxes[store.KeyOf(sb)]; old != nil && old.UID == sb.UID {
		c.removeLocked(old)
	}
}

func (c *cache) removeLocked(sb *v1alpha1.Sandbox) {
	key, g := store.KeyOf(sb), groupOf(sb)
	delete(c.sandboxes, key)
	delete(c.keys, sb.UID)
	if delete(c.groups[g], key); len(c.groups[g]) == 0 {
		delete(c.groups, g)
	}
}

func (c *cache) get(key store.Key) *v1alpha1.Sandbox {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sandboxes[key]
}

func (c *cache) keyOf(uid types.UID) (store.Key, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, ok := c.keys[uid]
	return k, ok
}

// all are all sandboxes.
func (c *cache) all() []store.Key {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.sandboxes))
}

// inGroup are the sandboxes that name a group.
func (c *cache) inGroup(group store.Key) []store.Key {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]store.Key, 0, len(c.groups[group]))
	for k := range c.groups[group] {
		out = append(out, k)
	}
	return out
}

// asking are the sandboxes that ask for a volume. It looks at all: volumes change seldom, and seldom more than twice.
func (c *cache) asking(ref VolumeRef) []store.Key {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []store.Key
	for key, sb := range c.sandboxes {
		if ref.Namespace != "" && ref.Namespace != sb.Namespace {
			continue
		}
		if slices.ContainsFunc(sb.Spec.DynamicVolumes, func(v v1alpha1.DynamicVolume) bool { return v.VolumeType == ref.Type && v.Source == ref.Source }) {
			out = append(out, key)
		}
	}
	return out
}

// onNode are the sandboxes that the store has on a node.
func (c *cache) onNode(node string) []types.UID {
	c.mu.Lock()
	defer c.mu.Unlock()
	var uids []types.UID
	for _, sb := range c.sandboxes {
		if sb.Status.Node == node {
			uids = append(uids, sb.UID)
		}
	}
	return uids
}

// isOn says whether the store has a sandbox on a node.
func (c *cache) isOn(uid types.UID, node string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	sb := c.sandboxes[c.keys[uid]]
	return sb != nil && sb.UID == uid && sb.Status.Node == node
}

// podsOn are the pod-backed sandboxes that the store has on a node.
func (c *cache) podsOn(node string) []store.Key {
	c.mu.Lock()
	defer c.mu.Unlock()
	var keys []store.Key
	for key, sb := range c.sandboxes {
		if podBacked(sb) && sb.Status.Node == node {
			keys = append(keys, key)
		}
	}
	return keys
}

// nodes are the nodes on which the store has sandboxes.
func (c *cache) nodes() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := map[string]struct{}{}
	for _, sb := range c.sandboxes {
		if sb.Status.Node != "" {
			seen[sb.Status.Node] = struct{}{}
		}
	}
	return slices.Sorted(maps.Keys(seen))
}
