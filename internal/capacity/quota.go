package capacity

import (
	"errors"
	"hash/fnv"
	"io"
	"os"

	"github.com/containerd/errdefs"
)

// Limit is what a directory may hold.
type Limit struct {
	// Bytes is the most that its files may take, rounded down to whole KiB; zero is no limit.
	Bytes int64
	// Inodes is the most files and directories; zero is no limit.
	Inodes int64
}

// Usage is what a project holds, and its limit.
type Usage struct {
	Bytes, Inodes int64
	Limit         Limit
}

// Limiter holds directories to a limit by project ids. A project id belongs to one directory of a filesystem.
//
// All methods may be called again with the same arguments: they are idempotent. Set and Clear of the same
// directory are not called at the same time.
type Limiter interface {
	// Supported says whether the directory's filesystem enforces project quota now: nil, or an error with
	// reason QUOTA_UNSUPPORTED. Other errors are the system's.
	Supported(dir *os.File) error
	// Project is the project id that the directory carries; zero is none.
	Project(dir *os.File) (uint32, error)
	// Set gives the directory and everything in it the project id, new entries too, and then the limit. What
	// is there already counts, and may exceed the limit: nothing more can then be written.
	Set(dir *os.File, id uint32, limit Limit) error
	// Clear removes the limit and then the project id. A directory that does not carry the id is left alone.
	Clear(dir *os.File, id uint32) error
	// Usage tells what the project holds on the directory's filesystem; an unknown project holds nothing.
	Usage(dir *os.File, id uint32) (Usage, error)
}

// The project ids that Bind gives out: a range of their own above those that people give by hand in
// /etc/projid, and below 2^31, which some tools read as negative.
const (
	firstProject = 1 << 30
	projectCount = 1 << 30
	// maxProbes bounds the search for a free id. With n volumes in use, a first choice is taken with the
	// probability n/2^30.
	maxProbes = 32
)

// Bind holds the directory to the limit under a project id that belongs to key, the volume's identity, and
// returns the id. The first choice is a hash of the key; an id under which the filesystem counts or limits
// anything already is passed over. A directory that carries an id of its key keeps it; one that carries any other
// is refused (PROJECT_CONFLICT), since its quota is somebody else's. A limit that is there and differs is refused
// with both figures: a volume's size does not change while it is used.
func Bind(l Limiter, dir *os.File, key string, limit Limit) (uint32, error) {
	carried, err := bound(l, dir, key)
	if err != nil {
		return 0, err
	}
	if carried != 0 {
		usage, err := l.Usage(dir, carried)
		if err != nil {
			return 0, err
		}
		if have := usage.Limit.Bytes; have != 0 && have != limit.Bytes&^1023 {
			return 0, fail(errdefs.ErrFailedPrecondition, ReasonSizeMismatch,
				"%s is held to %d bytes, not the requested %d: detach it everywhere first, or ask for the limit that it has",
				dir.Name(), have, limit.Bytes).sizes(limit.Bytes, have)
		}
		return carried, l.Set(dir, carried, limit)
	}
	for n := range uint32(maxProbes) {
		id := projectOf(key, n)
		usage, err := l.Usage(dir, id)
		if err != nil {
			return 0, err
		}
		if usage != (Usage{}) {
			continue
		}
		if err := l.Set(dir, id, limit); err != nil {
			return 0, errors.Join(err, l.Clear(dir, id))
		}
		return id, nil
	}
	return 0, fail(errdefs.ErrResourceExhausted, ReasonProjectConflict,
		"no free project id for %s on its filesystem after %d tries: clear project quotas that nobody uses", dir.Name(), maxProbes)
}

// Unbind undoes Bind for the same key. A directory that is not bound is success.
func Unbind(l Limiter, dir *os.File, key string) error {
	id, err := bound(l, dir, key)
	if err != nil || id == 0 {
		return err
	}
	return l.Clear(dir, id)
}

// bound is the project id that the directory carries, zero for none. It fails for an id that is not of the key.
func bound(l Limiter, dir *os.File, key string) (uint32, error) {
	id, err := l.Project(dir)
	if err != nil || id == 0 {
		return 0, err
	}
	for n := range uint32(maxProbes) {
		if projectOf(key, n) == id {
			return id, nil
		}
	}
	return 0, fail(errdefs.ErrFailedPrecondition, ReasonProjectConflict,
		"%s carries the project id %d, which is not one of its volume: another program's quota is on it; clear it by hand", dir.Name(), id)
}

func projectOf(key string, probe uint32) uint32 {
	h := fnv.New32a()
	_, _ = io.WriteString(h, key) // a hash never fails to write
	return firstProject + (h.Sum32()+probe)%projectCount
}
