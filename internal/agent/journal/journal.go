package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/errdefs"
)

// formatVersion is written into every journal; another one is refused. Format 1 was a bbolt database (oldName).
const formatVersion = 2

// The files in a journal's folder.
const (
	logName  = "journal.log"
	lockName = "journal.lock"
	oldName  = "journal.db"
	// newSuffix is the log while it is written anew, bootSuffix that of another boot.
	newSuffix  = ".new"
	bootSuffix = ".previous-boot"
)

// Journal is an open journal. It keeps its contents in memory too, so that reading costs nothing. Its methods
// may be called from several goroutines; what they return is the caller's own.
type Journal struct {
	path, boot string
	lock       *os.File

	mu          sync.RWMutex // guards the fields below, and holds them together with the file
	log         log
	volumes     map[string]map[string]Volume // by sandbox UID, then record id
	users       map[string]map[string]Volume // by volume key, then record key
	prepared    map[string]Prepared
	sandboxes   map[string]Sandbox
	generations map[string]map[string]int64 // by sandbox UID, then target
	epochs      map[string]int64
}

// Open opens the journal in a folder, or begins one. bootID is the kernel's
// (/proc/sys/kernel/random/boot_id). A second process gets ErrUnavailable.
func Open(dir, bootID string) (*Journal, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	path := filepath.Join(dir, logName)
	lock, err := lockFile(filepath.Join(dir, lockName), lockWait)
	if errors.Is(err, errLocked) {
		return nil, fmt.Errorf("journal %s is held by another process: is an agent running already? %w", path, errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("journal %s cannot be locked: %w", path, err)
	}
	j := &Journal{path: path, boot: bootID, lock: lock, log: log{deadBase: compactBase},
		volumes: map[string]map[string]Volume{}, users: map[string]map[string]Volume{}, prepared: map[string]Prepared{},
		sandboxes: map[string]Sandbox{}, generations: map[string]map[string]int64{}, epochs: map[string]int64{}}
	if err := j.load(); err != nil {
		return nil, errors.Join(err, j.Close())
	}
	return j, nil
}

// Close closes the journal.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	// Another process may have the journal from here on.
	return errors.Join(j.log.close(), j.lock.Close())
}

// load reads the file, if there is one of this boot, and begins it anew with what holds.
func (j *Journal) load() error {
	old := filepath.Join(filepath.Dir(j.path), oldName)
	if _, err := os.Lstat(old); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s is a journal of a build that was never released, which this one does not read: "+
			"delete the sandboxes of this node with that build, then remove the file (after a reboot, remove it): %w", old, errdefs.ErrFailedPrecondition)
	}
	data, err := os.ReadFile(j.path)
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return fmt.Errorf("journal: %w", err)
	default:
		boot, err := j.replay(data)
		if err != nil {
			return err
		}
		if boot != j.boot {
			if err := os.Rename(j.path, j.path+bootSuffix); err != nil {
				return fmt.Errorf("journal: set aside that of boot %s: %w", boot, err)
			}
		}
	}
	if err := j.compact(); err != nil {
		return fmt.Errorf("journal %s cannot be written: %w", j.path, err)
	}
	return nil
}

// replay makes every change of a file, and returns the boot that it is of. Of another boot nothing more is read.
func (j *Journal) replay(data []byte) (boot string, err error) {
	rest := data
	for n := 0; len(rest) > 0 || n == 0; n++ {
		damaged := func(err error) error {
			return fmt.Errorf("journal %s is damaged at byte %d (record %d): %v; stop all sandboxes of this node and remove it: %w",
				j.path, len(data)-len(rest), n, err, errdefs.ErrDataLoss)
		}
		body, after, err := firstFrame(rest)
		if errors.Is(err, errTorn) && n > 0 {
			return boot, nil // never acknowledged
		}
		if err != nil {
			return "", damaged(err) // a file begins to exist with its first record in it
		}
		if n == 0 {
			h, err := decode[head](body)
			switch {
			case err != nil:
				return "", damaged(err)
			case h.Format == 0:
				return "", damaged(errors.New("it does not name a format"))
			case h.Format != formatVersion:
				return "", fmt.Errorf("journal %s has format %d, this build knows %d: use the build that wrote it: %w",
					j.path, h.Format, formatVersion, errdefs.ErrFailedPrecondition)
			case h.Boot != j.boot:
				return h.Boot, nil
			}
			boot = h.Boot
		} else {
			c, err := decode[entry](body)
			if err != nil {
				return "", damaged(err)
			}
			j.apply(c)
		}
		rest = after
	}
	return boot, nil
}

// Change is a set of writes that hold together: all of them or none. What is deleted is deleted first.
type Change struct {
	PutVolumes      []Volume
	DeleteVolumes   []Volume
	PutPrepared     []Prepared
	DeletePrepared  []string
	PutSandboxes    []Sandbox
	DeleteSandboxes []string
	// PutGenerations and PutEpochs (by lease UID) are what was seen of them. The highest of each stays, in whichever order
	// they are written.
	PutGenerations []Generation
	PutEpochs      map[string]int64
}

// Write makes a change. When it returns nil the change outlives the process.
func (j *Journal) Write(c Change) error {
	e := c.entry()
	frame, err := appendFrame(make([]byte, 0, frameGuess), e)
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.log.append(frame); err != nil {
		return fmt.Errorf("journal %s: %w", j.path, err)
	}
	j.apply(e)
	if j.log.overgrown() {
		// The change is safe already, and a log that could not be written anew goes on as it is: when it cannot grow any
		// more, a write says so.
		if err := j.compact(); err != nil {
			j.log.postpone()
		}
	}
	return nil
}

// frameGuess is more than most records have, in bytes.
const frameGuess = 2 << 10

// compact writes a log of what holds beside the present one, and puts it in its place. The caller holds mu, or is alone.
func (j *Journal) compact() error {
	data, err := appendFrame(nil, head{Format: formatVersion, Boot: j.boot})
	add := func(e entry) {
		if err == nil {
			data, err = appendFrame(data, e)
		}
	}
	for _, volumes := range j.volumes {
		for _, v := range volumes {
			add(entry{Volumes: []Volume{v}})
		}
	}
	for _, p := range j.prepared {
		add(entry{Prepared: []Prepared{p}})
	}
	for _, s := range j.sandboxes {
		add(entry{Sandboxes: []Sandbox{s}})
	}
	for uid, generations := range j.generations {
		e := entry{}
		for target, n := range generations {
			e.Generations = append(e.Generations, Generation{SandboxUID: uid, Target: target, Generation: n})
		}
		add(e)
	}
	if len(j.epochs) > 0 {
		add(entry{Epochs: j.epochs})
	}
	if err != nil {
		return err
	}
	return j.log.replace(j.path, data)
}

// apply makes a change to the copy in memory. The caller holds mu, or is alone.
func (j *Journal) apply(e entry) {
	for _, k := range e.DroppedVolumes {
		j.forget(k)
	}
	for _, v := range e.Volumes {
		j.forget(v.id())
		insert(j.volumes, v.SandboxUID, v.ID, v)
		insert(j.users, v.Request.Key, v.key(), v)
	}
	for _, key := range e.DroppedPrepared {
		delete(j.prepared, key)
	}
	for _, p := range e.Prepared {
		j.prepared[p.Key] = p
	}
	for _, uid := range e.DroppedSandboxes {
		delete(j.sandboxes, uid)
		delete(j.generations, uid)
	}
	for _, s := range e.Sandboxes {
		j.sandboxes[s.UID] = s
	}
	for _, g := range e.Generations {
		if j.generations[g.SandboxUID] == nil {
			j.generations[g.SandboxUID] = map[string]int64{}
		}
		raise(j.generations[g.SandboxUID], g.Target, g.Generation)
	}
	for lease, epoch := range e.Epochs {
		raise(j.epochs, lease, epoch)
	}
}

func raise(m map[string]int64, key string, to int64) {
	if old, ok := m[key]; !ok || to > old {
		m[key] = to
	}
}

func (j *Journal) forget(k volumeID) {
	if old, ok := j.volumes[k.SandboxUID][k.ID]; ok {
		remove(j.users, old.Request.Key, old.key())
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

func (v *Volume) key() string { return v.SandboxUID + "/" + v.ID }
