package clustercontroller

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/kube"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// Whatever is in the way when the pools are opened is tried again, however long it takes, and said meanwhile.
func TestOpeningThePoolsGoesOnUntilItIsDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testenv.Log
		p := newPools()
		said := func(want string) {
			t.Helper()
			_, err := p.get()
			if !errdefs.IsUnavailable(err) || fault.ReasonOf(err) != store.Unavailable || !strings.Contains(err.Error(), "try again") || !strings.Contains(err.Error(), want) {
				t.Errorf("callers are told %v, without %q", err, want)
			}
		}
		// An obstacle stands for longer than a change of the definitions is looked at, and is found again at least every half a minute.
		const stands = 10 * time.Minute
		began := time.Now()
		tries := map[string]int{}
		obstacle := func(n int, what string) error {
			if time.Since(began) >= time.Duration(n)*stands {
				return nil
			}
			tries[what]++
			return errors.New(what)
		}
		o := &opener{log: slog.New(slog.NewTextHandler(&log, nil)), are: p.are,
			watch:  func(context.Context, *sync.WaitGroup, func()) error { return obstacle(1, "no watch") },
			served: func(context.Context) (bool, error) { return true, obstacle(2, "the API server is away") },
			open: func(ctx context.Context) (*kube.Pools, error) {
				if err := obstacle(3, "no client"); err != nil {
					return nil, err
				}
				if obstacle(4, "no right to list") != nil {
					<-ctx.Done() // what does not come to an end by itself
					return nil, errors.Join(ctx.Err(), errors.New("no right to list"))
				}
				return &kube.Pools{}, nil
			}}
		done := make(chan struct{})
		go func() { defer close(done); o.run(t.Context()) }()
		synctest.Wait()
		for _, want := range []string{"no watch", "the API server is away", "no client", "no right to list"} {
			<-time.After(stands / 2)
			synctest.Wait()
			said(want)
			if !log.Has(want) {
				t.Errorf("the log does not say %q", want)
			}
			<-time.After(stands / 2)
		}
		<-done
		if _, err := p.get(); err != nil {
			t.Error(err)
		}
		<-p.opened
		least, most := int(stands/(lastLook+lastRead)), 8+int(stands/lastLook)
		for what, n := range tries {
			if n < least || n > most {
				t.Errorf("%q was met %d times in %s", what, n, stands)
			}
		}
	})
}

// A controller that ends does not wait for pools that cannot be opened, wherever that is.
func TestOpeningThePoolsEnds(t *testing.T) {
	fails := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	for name, o := range map[string]*opener{
		"in a pause": {served: func(context.Context) (bool, error) { return false, errors.New("away") }},
		"asking":     {served: func(ctx context.Context) (bool, error) { return false, fails(ctx) }},
		"reading": {served: func(context.Context) (bool, error) { return true, nil },
			open: func(ctx context.Context) (*kube.Pools, error) { return nil, fails(ctx) }},
		"waiting for a definition": {served: func(context.Context) (bool, error) { return false, nil }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPools()
				o.log, o.are = slog.New(slog.DiscardHandler), p.are
				o.watch = func(ctx context.Context, running *sync.WaitGroup, _ func()) error {
					running.Go(func() { <-ctx.Done() })
					return nil
				}
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan struct{})
				go func() { defer close(done); o.run(ctx) }()
				<-time.After(time.Second)
				_, told := p.get()
				cancel()
				synctest.Wait()
				select {
				case <-done:
				default:
					t.Error("it goes on")
				}
				if _, err := p.get(); err == nil || err.Error() != told.Error() {
					t.Errorf("its end is told as a failure: %v", err)
				}
			})
		})
	}
}
