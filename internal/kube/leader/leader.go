// Package leader elects the one controller that reconciles.
//
// The Lease of client-go's leader election decides. A term begins when it is won and ends when it is lost or the process
// stops; losing it ends the term's context and nothing else, so that gRPC goes on being served on every replica, and the
// replica stands for election again. Every term has an identity of its own, so that what was begun in one cannot pass for
// another, also when the same replica wins twice.
package leader

import (
	"cmp"
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// The defaults of Config's times: those of the components of Kubernetes.
const (
	DefaultLeaseDuration = 15 * time.Second
	DefaultRenewDeadline = 10 * time.Second
	DefaultRetryPeriod   = 2 * time.Second
)

// Config says how the leader is elected.
type Config struct {
	Client kubernetes.Interface
	// Namespace and Name are those of the Lease.
	Namespace, Name string
	// Identity names this replica: its Pod's name.
	Identity string
	// LeaseDuration is how long a leader that does not renew its Lease is waited for; RenewDeadline, which is shorter,
	// how long the leader tries to renew before it gives up; RetryPeriod the time between tries. The defaults when zero.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	// Log is slog's default when nil.
	Log *slog.Logger
}

// Run stands for election until ctx ends, and calls lead for every term that is won, with the identity that the Lease
// has as its holder. lead must return soon after its context has ended; no other term of this replica begins before. When
// lead returns earlier, the Lease is given up.
func Run(ctx context.Context, config Config, lead func(ctx context.Context, identity string) error) error {
	if config.Log == nil {
		config.Log = slog.Default()
	}
	for ctx.Err() == nil {
		if err := stand(ctx, config, lead); err != nil {
			config.Log.Error("the term as leader ended with an error", "error", err)
		}
		if ctx.Err() == nil {
			config.Log.Info("not the leader; standing for election again")
			pause(ctx, cmp.Or(config.RetryPeriod, DefaultRetryPeriod))
		}
	}
	return nil
}

// stand stands for one election and serves its term. The Lease is given up only after lead has returned, so that terms do
// not overlap unless the Lease was lost.
func stand(ctx context.Context, config Config, lead func(context.Context, string) error) error {
	elected, resign := context.WithCancel(context.WithoutCancel(ctx))
	defer resign()
	lock := &lock{LeaseLock: resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: config.Namespace, Name: config.Name},
		Client:     config.Client.CoordinationV1(),
		LockConfig: resourcelock.ResourceLockConfig{Identity: config.Identity + "_" + uuid.NewString()},
	}}
	defer context.AfterFunc(ctx, func() {
		if !lock.won.Load() {
			resign()
		}
	})()
	var served error
	ended := make(chan struct{})
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Name:            config.Name,
		Lock:            lock,
		LeaseDuration:   cmp.Or(config.LeaseDuration, DefaultLeaseDuration),
		RenewDeadline:   cmp.Or(config.RenewDeadline, DefaultRenewDeadline),
		RetryPeriod:     cmp.Or(config.RetryPeriod, DefaultRetryPeriod),
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(lease context.Context) {
				defer close(ended)
				defer resign()
				lease, cancel := context.WithCancel(lease)
				defer cancel()
				defer context.AfterFunc(ctx, cancel)()
				served = lead(lease, lock.Identity())
			},
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return err
	}
	elector.Run(elected)
	if lock.won.Load() {
		<-ended
	}
	return served
}

// lock is a LeaseLock that tells whether it was won: after that the elector calls OnStartedLeading, if only later.
type lock struct {
	resourcelock.LeaseLock
	won atomic.Bool
}

// RecordEvent is what the elector calls first when it has won.
func (l *lock) RecordEvent(string) { l.won.Store(true) }

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
