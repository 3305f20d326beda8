package journal

import (
	"maps"
	"slices"
	"strings"
)

// Volumes are the volume records of a sandbox, sorted by target.
func (j *Journal) Volumes(sandboxUID string) []Volume {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return sorted(j.volumes[sandboxUID])
}

// AllVolumes are the volume records of all sandboxes.
func (j *Journal) AllVolumes() []Volume {
	j.mu.RLock()
	defer j.mu.RUnlock()
	var out []Volume
	for _, m := range j.volumes {
		out = append(out, sorted(m)...)
	}
	return out
}

// VolumeAt is the record that holds a target of a sandbox. A volume that was detached lazily holds it no more.
func (j *Journal) VolumeAt(sandboxUID, target string) (Volume, bool) {
	j.mu.RLock()
	defer j.mu.RUnlock()
	for _, v := range j.volumes[sandboxUID] {
		if v.Target == target && v.Phase != Lazy {
			return v, true
		}
	}
	return Volume{}, false
}

// Users are the volume records that use a prepared volume.
func (j *Journal) Users(key string) []Volume {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return sorted(j.users[key])
}

// Used says whether a prepared volume has users.
func (j *Journal) Used(key string) bool {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return len(j.users[key]) > 0
}

func sorted(m map[string]Volume) []Volume {
	return slices.SortedFunc(maps.Values(m), func(a, b Volume) int {
		if c := strings.Compare(a.Target, b.Target); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
}

// Prepared is the record of a prepared volume.
func (j *Journal) Prepared(key string) (Prepared, bool) {
	j.mu.RLock()
	defer j.mu.RUnlock()
	p, ok := j.prepared[key]
	p.Mounts = slices.Clone(p.Mounts)
	return p, ok
}

// AllPrepared are the records of all prepared volumes, sorted by key.
func (j *Journal) AllPrepared() []Prepared {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return slices.SortedFunc(maps.Values(j.prepared), func(a, b Prepared) int { return strings.Compare(a.Key, b.Key) })
}

// Sandbox is the record of a sandbox.
func (j *Journal) Sandbox(uid string) (Sandbox, bool) {
	j.mu.RLock()
	defer j.mu.RUnlock()
	s, ok := j.sandboxes[uid]
	return s, ok
}

// Generation is the newest generation seen of a sandbox for a target; 0 when none was seen.
func (j *Journal) Generation(uid, target string) int64 {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return j.generations[uid][target]
}

// Sandboxes are the records of all sandboxes, sorted by UID.
func (j *Journal) Sandboxes() []Sandbox {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return slices.SortedFunc(maps.Values(j.sandboxes), func(a, b Sandbox) int { return strings.Compare(a.UID, b.UID) })
}

// Epoch is the newest epoch seen of a lease; 0 for one never seen.
func (j *Journal) Epoch(lease string) int64 {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return j.epochs[lease]
}
