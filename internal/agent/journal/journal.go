package journal

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// formatVersion is written into every journal; a newer one is refused.
const formatVersion = "1"

var (
	bucketMeta      = []byte("meta")
	bucketVolumes   = []byte("volumes")
	bucketPrepared  = []byte("prepared")
	bucketSandboxes = []byte("sandboxes")
	bucketEpochs    = []byte("epochs")

	keyFormat = []byte("format")
	keyBoot   = []byte("boot")
)

// lockWait is how long Open waits for another process that holds the journal: a predecessor that is just
// ending needs a moment, a second agent never gives way.
const lockWait = 5 * time.Second

// Journal is an open journal. It keeps its contents in memory too, so that reading costs nothing. Its methods
// may be called from several goroutines; what they return is the caller's own.
type Journal struct {
	db *bolt.DB

	mu        sync.RWMutex                 // guards the fields below, and holds them together with the file
	volumes   map[string]map[string]Volume // by sandbox UID, then record id
	users     map[string]map[string]Volume // by volume key, then record key
	prepared  map[string]Prepared
	sandboxes map[string]Sandbox
	epochs    map[string]int64
}

// Open opens the journal in a folder, or begins one. bootID is the kernel's
// (/proc/sys/kernel/random/boot_id). A second process gets ErrUnavailable.
func Open(dir, bootID string) (*Journal, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	path := filepath.Join(dir, "journal.db")
	j, err := open(path, bootID)
	var other *otherBootError
	if errors.As(err, &other) {
		if err := os.Rename(path, path+".previous-boot"); err != nil {
			return nil, fmt.Errorf("journal: set aside that of boot %s: %w", other.boot, err)
		}
		return open(path, bootID)
	}
	return j, err
}

type otherBootError struct{ boot string }

func (e *otherBootError) Error() string { return "journal of boot " + e.boot }

func open(path, bootID string) (*Journal, error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		Timeout: lockWait, NoSync: true, NoGrowSync: true, NoFreelistSync: true, FreelistType: bolt.FreelistMapType,
	})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("journal %s is held by another process: is an agent running already? %w", path, errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("journal %s cannot be opened: %v; if it is damaged, stop all sandboxes of this node and remove it: %w", path, err, errdefs.ErrDataLoss)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		meta, err := tx.CreateBucketIfNotExists(bucketMeta)
		if err != nil {
			return err
		}
		if v := meta.Get(keyFormat); v != nil && string(v) != formatVersion {
			return fmt.Errorf("journal %s has format %s, this build knows %s: use the build that wrote it: %w", path, v, formatVersion, errdefs.ErrFailedPrecondition)
		}
		if v := meta.Get(keyBoot); v != nil && string(v) != bootID {
			return &otherBootError{boot: string(v)}
		}
		if err := meta.Put(keyFormat, []byte(formatVersion)); err != nil {
			return err
		}
		if err := meta.Put(keyBoot, []byte(bootID)); err != nil {
			return err
		}
		for _, b := range [][]byte{bucketVolumes, bucketPrepared, bucketSandboxes, bucketEpochs} {
			if _, err := tx.CreateBucketIfNotExists(b); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	j := &Journal{db: db}
	if err := j.load(); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return j, nil
}

// Close closes the journal.
func (j *Journal) Close() error { return j.db.Close() }

func (j *Journal) load() error {
	j.volumes, j.users = map[string]map[string]Volume{}, map[string]map[string]Volume{}
	j.prepared, j.sandboxes, j.epochs = map[string]Prepared{}, map[string]Sandbox{}, map[string]int64{}
	return j.db.View(func(tx *bolt.Tx) error {
		volumes, err := list[Volume](tx, bucketVolumes)
		if err != nil {
			return err
		}
		prepared, err := list[Prepared](tx, bucketPrepared)
		if err != nil {
			return err
		}
		sandboxes, err := list[Sandbox](tx, bucketSandboxes)
		if err != nil {
			return err
		}
		j.apply(Change{PutVolumes: volumes, PutPrepared: prepared, PutSandboxes: sandboxes})
		return tx.Bucket(bucketEpochs).ForEach(func(k, v []byte) error {
			n, err := decode[int64]("epochs", string(k), v)
			j.epochs[leaseOf(string(k))] = n
			return err
		})
	})
}

func list[T any](tx *bolt.Tx, bucket []byte) ([]T, error) {
	var out []T
	err := tx.Bucket(bucket).ForEach(func(k, v []byte) error {
		r, err := decode[T](string(bucket), string(k), v)
		if err != nil {
			return err
		}
		out = append(out, r)
		return nil
	})
	return out, err
}

// Change is a set of writes that hold together: all of them or none.
type Change struct {
	PutVolumes      []Volume
	DeleteVolumes   []Volume
	PutPrepared     []Prepared
	DeletePrepared  []string
	PutSandboxes    []Sandbox
	DeleteSandboxes []string
	// PutEpochs are epochs by lease UID.
	PutEpochs map[string]int64
}

// Write makes a change. When it returns nil the change outlives the process.
func (j *Journal) Write(c Change) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	err := j.db.Update(func(tx *bolt.Tx) error {
		volumes, prepared, sandboxes := tx.Bucket(bucketVolumes), tx.Bucket(bucketPrepared), tx.Bucket(bucketSandboxes)
		for i := range c.DeleteVolumes {
			if err := volumes.Delete(c.DeleteVolumes[i].key()); err != nil {
				return err
			}
		}
		for i := range c.PutVolumes {
			if err := put(volumes, c.PutVolumes[i].key(), &c.PutVolumes[i]); err != nil {
				return err
			}
		}
		for _, key := range c.DeletePrepared {
			if err := prepared.Delete([]byte(key)); err != nil {
				return err
			}
		}
		for i := range c.PutPrepared {
			if err := put(prepared, []byte(c.PutPrepared[i].Key), &c.PutPrepared[i]); err != nil {
				return err
			}
		}
		for _, uid := range c.DeleteSandboxes {
			if err := sandboxes.Delete([]byte(uid)); err != nil {
				return err
			}
		}
		for i := range c.PutSandboxes {
			if err := put(sandboxes, []byte(c.PutSandboxes[i].UID), &c.PutSandboxes[i]); err != nil {
				return err
			}
		}
		for lease, epoch := range c.PutEpochs {
			if err := put(tx.Bucket(bucketEpochs), epochKey(lease), epoch); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	j.apply(c)
	return nil
}

// apply makes a change to the copy in memory. The caller holds mu, or is alone.
func (j *Journal) apply(c Change) {
	for _, v := range c.DeleteVolumes {
		j.forget(v)
	}
	for _, v := range c.PutVolumes {
		j.forget(v)
		insert(j.volumes, v.SandboxUID, v.ID, v)
		insert(j.users, v.Request.Key, string(v.key()), v)
	}
	for _, key := range c.DeletePrepared {
		delete(j.prepared, key)
	}
	for _, p := range c.PutPrepared {
		j.prepared[p.Key] = p
	}
	for _, uid := range c.DeleteSandboxes {
		delete(j.sandboxes, uid)
	}
	for _, s := range c.PutSandboxes {
		j.sandboxes[s.UID] = s
	}
	maps.Copy(j.epochs, c.PutEpochs)
}

func (j *Journal) forget(v Volume) {
	if old, ok := j.volumes[v.SandboxUID][v.ID]; ok {
		remove(j.users, old.Request.Key, string(old.key()))
		remove(j.volumes, old.SandboxUID, old.ID)
	}
}

func insert(m map[string]map[string]Volume, outer, inner string, v Volume) {
	if m[outer] == nil {
		m[outer] = map[string]Volume{}
	}
	m[outer][inner] = v
}

func remove(m map[string]map[string]Volume, outer, inner string) {
	delete(m[outer], inner)
	if len(m[outer]) == 0 {
		delete(m, outer)
	}
}

func put(b *bolt.Bucket, key []byte, v any) error {
	data, err := encode(v)
	if err != nil {
		return err
	}
	return b.Put(key, data)
}

func (v *Volume) key() []byte { return []byte(v.SandboxUID + "/" + v.ID) }

// epochKey is never empty: bbolt refuses an empty key, and a caller may have no lease.
func epochKey(lease string) []byte { return []byte("lease:" + lease) }

// leaseOf is the reverse of epochKey.
func leaseOf(key string) string { return strings.TrimPrefix(key, "lease:") }
