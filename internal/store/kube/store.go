package kube

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Options are the options of Open. The zero value is good for a store whose user is never a leader.
type Options struct {
	// Lease is that of the leaders' election, for NextEpoch.
	Lease types.NamespacedName
	// Log hears of watches that fail; slog's default when nil.
	Log *slog.Logger
}

// Store is a store.Store on the API server.
type Store struct {
	sandboxes *collection[*sandbox]
	groups    *collection[*group]
	leases    coordination.LeaseInterface
	lease     string

	stop    context.CancelFunc
	watches sync.WaitGroup
}

var _ store.Store = (*Store)(nil)

// Open opens the store and returns when it has read all objects. config says which API server, and as whom: the user
// needs get, list, watch, create, patch and delete on sandboxes and sandboxgroups, patch on their status, and for
// NextEpoch get and patch on the Lease. Errors: ErrUnavailable when ctx ended before that, with the reason for which
// the objects could not be read.
func Open(ctx context.Context, config *rest.Config, options Options) (*Store, error) {
	if options.Log == nil {
		options.Log = slog.Default()
	}
	api, err := newRESTClient(config)
	if err != nil {
		return nil, fmt.Errorf("make a client of the API server %s: %w", config.Host, err)
	}
	coordination, err := coordination.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client of the API server %s: %w", config.Host, err)
	}
	s := &Store{
		sandboxes: newCollection(api, sandboxKind),
		groups:    newCollection(api, groupKind),
		leases:    coordination.Leases(options.Lease.Namespace),
		lease:     options.Lease.Name,
	}
	s.sandboxes.objects.log, s.groups.objects.log = options.Log, options.Log
	watching, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.watches.Go(func() { s.sandboxes.watch(watching, options.Log) })
	s.watches.Go(func() { s.groups.watch(watching, options.Log) })
	err = s.sandboxes.awaitList(ctx)
	if err == nil {
		err = s.groups.awaitList(ctx)
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("open the store on the API server %s: %w", config.Host, err)
	}
	return s, nil
}

// Sandboxes implements store.Store.
func (s *Store) Sandboxes() store.Sandboxes { return s.sandboxes }

// Groups implements store.Store.
func (s *Store) Groups() store.Groups { return s.groups }

// Refresh reads all sandboxes from the API server. Who acts on how many there are calls it when it takes office, and after a
// write of unknown outcome: a watch may be behind.
func (s *Store) Refresh(ctx context.Context) error { return s.sandboxes.refresh(ctx) }

// Close ends the watches and every Follow.
func (s *Store) Close() {
	s.stop()
	s.watches.Wait()
	s.sandboxes.objects.hub.Close()
	s.groups.objects.hub.Close()
}
