package embedded

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Options are the options of Open. The zero value is good.
type Options struct {
	// Clock gives creationTimestamp and deletionTimestamp; the system's when nil.
	Clock clock.PassiveClock
	// LockTimeout is how long Open waits for another process to let go of the file; 1 s when 0.
	LockTimeout time.Duration
	// Logger is told when late writes could not be committed in the background; slog's default when nil.
	Logger *slog.Logger

	// flushAfter is how long a late write may wait for a commit; the constant of that name when 0.
	flushAfter time.Duration
	// fault, when not nil, is asked at each stage of a commit whether that fails there.
	fault func(stage) error
	// maxFileBytes bounds the file; 0 for no bound.
	maxFileBytes int
}

// Store is a store.Store in a file.
type Store struct {
	file      *bolt.DB
	options   Options
	sandboxes *collection[*v1alpha1.Sandbox]
	groups    *collection[*v1alpha1.SandboxGroup]
	version   atomic.Uint64 // the last resourceVersion that was given out
	wake      chan struct{} // has a token when there is a batch; closed by Close
	ended     chan struct{} // closed when the committer has ended

	mu     sync.RWMutex // guards the fields below, and those of the collections
	batch  *batch       // gathers writes until the committer takes it; nil when there are none
	epoch  int64        // the last epoch that was given out
	broken error        // why no more can be written, or nil
	closed bool         // wake is closed
	late   late         // the states that are shown and not durable
	// reserved is the highest resourceVersion that no later process gives out, as the file says.
	reserved uint64
}

var _ store.Store = (*Store)(nil)

// Open opens the store in the file at path and makes the file (mode 0600) when it is missing; its
// directory must exist. Errors: ErrUnavailable when another process has it open; ErrFailedPrecondition
// when its format is newer than this build knows; ErrDataLoss when something in it cannot be read.
func Open(path string, options Options) (*Store, error) {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	if options.LockTimeout == 0 {
		options.LockTimeout = time.Second
	}
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	if options.flushAfter == 0 {
		options.flushAfter = flushAfter
	}
	s := &Store{options: options, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	s.sandboxes = newCollection(s, sandboxKind)
	s.groups = newCollection(s, groupKind)
	file, err := openFile(path, options)
	if err != nil {
		return nil, err
	}
	s.file = file
	if err := onFile(path, s.load); err != nil {
		_ = file.Close()
		return nil, err
	}
	go s.commitBatches()
	return s, nil
}

// Sandboxes implements store.Store.
func (s *Store) Sandboxes() store.Sandboxes { return s.sandboxes }

// Groups implements store.Store.
func (s *Store) Groups() store.Groups { return s.groups }

// NextEpoch implements store.Store.
func (s *Store) NextEpoch(ctx context.Context) (int64, error) {
	for {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		b, epoch, err := s.stageEpoch()
		if err != nil {
			return 0, err
		}
		switch err := b.wait(ctx, "count up the epoch"); err {
		case nil:
			return epoch, nil
		case errDropped:
		default:
			return 0, err
		}
	}
}

func (s *Store) stageEpoch() (*batch, int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, err := s.openBatch()
	if err != nil {
		return nil, 0, err
	}
	s.epoch++
	b.writes = append(b.writes, write{
		bucket: metaBucket, key: epochKey, value: strconv.AppendInt(nil, s.epoch, 10),
		done: func() {},
	})
	return b, s.epoch, nil
}

// Close commits what is not durable, ends every Follow and closes the file. Writes fail from then on. An error
// says that late writes were lost.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		<-s.ended
		return nil
	}
	if s.broken == nil {
		s.broken = errClosed
	}
	s.late.stop()
	s.closed = true
	close(s.wake)
	s.mu.Unlock()
	<-s.ended
	s.sandboxes.hub.Close()
	s.groups.hub.Close()
	return errors.Join(s.lost(), s.file.Close())
}

var errClosed error = fault.New(errdefs.ErrUnavailable, store.Unavailable, "the store is closed: the server is stopping")

// nextVersion is a resourceVersion that is higher than every one before.
func (s *Store) nextVersion() string { return strconv.FormatUint(s.version.Add(1), 10) }
