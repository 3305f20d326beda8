package standalone

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/user"
	"strconv"

	"golang.org/x/sync/errgroup"

	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/observability"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store/embedded"
	"github.com/flux-sandbox/flux-sandbox/internal/unixsocket"
)

// leaseUID names the lease that the epochs of a standalone server count: it has one leader, itself.
const leaseUID = "standalone"

// Reload is a source of new configurations, for SIGHUP. Only groups and nothing else are taken from them.
type Reload <-chan Config

// Run runs the server until ctx ends. ready is called once it serves; its argument is the API's address.
func Run(ctx context.Context, config Config, reload Reload, ready func(address string)) error {
	log, err := observability.NewLogger(config.Log)
	if err != nil {
		return err
	}
	registry := observability.NewRegistry()

	machine, err := openMachine(ctx, config, log, registry)
	if err != nil {
		return err
	}
	defer machine.close()

	database, err := embedded.Open(config.database(), embedded.Options{Logger: log.With("component", "store")})
	if err != nil {
		return err
	}
	defer func() {
		if err := database.Close(); err != nil {
			log.Error("cannot end the state file well", "error", err)
		}
	}()
	if err := applyGroups(ctx, database, config.Groups); err != nil {
		return err
	}
	epoch, err := database.NextEpoch(ctx)
	if err != nil {
		return err
	}
	sched, err := scheduler.New(scheduler.Config{Store: database, Agents: machine, Epoch: epoch, LeaseUID: leaseUID,
		Logger: log.With("component", "scheduler"), Registerer: registry, Resolver: machine.named})
	if err != nil {
		return err
	}
	api, err := grpcapi.New(grpcapi.Options{Store: database, Agents: machine, Authenticator: grpcapi.SocketPermissions{},
		Available: machine.Available, NamedVolumes: machine.named, Logger: log.With("component", "api")})
	if err != nil {
		return err
	}

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		machine.Supervise(ctx, log)
		return nil
	})
	group.Go(func() error { return sched.Run(ctx) })
	group.Go(func() error { return machine.named.wait(ctx) })
	group.Go(func() error { return followReload(ctx, database, reload, log) })
	if config.MetricsListen != "" {
		wait, err := observability.Serve(ctx, config.MetricsListen, registry, func() error {
			select {
			case <-sched.Ready():
				return nil
			default:
				return errors.New("what was there is not known again yet")
			}
		})
		if err != nil {
			return fmt.Errorf("metricsListen %s: %w", config.MetricsListen, err)
		}
		group.Go(wait)
	}
	group.Go(func() error {
		// Nobody is answered before what was there is known again.
		select {
		case <-sched.Ready():
		case <-ctx.Done():
			return nil
		}
		listener, err := listen(config.Listen, config.ListenGroup)
		if err != nil {
			return err
		}
		log.Info("serving", "address", config.Listen, "node", config.Node, "epoch", epoch)
		ready("unix://" + config.Listen)
		return api.Serve(ctx, listener)
	})
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	log.Info("stopped; sandboxes and their volumes go on")
	return nil
}

// listen makes a unix socket that root, and the members of a group if one is named, may use. One that a process left
// behind is replaced: a second server never comes so far, since the journal and the database have one owner.
func listen(path, group string) (net.Listener, error) {
	if group == "" {
		return unixsocket.Listen(path, nil)
	}
	return unixsocket.Listen(path, func(path string) error { return shareWith(path, group) })
}

func shareWith(path, group string) error {
	gid, err := strconv.Atoi(group)
	if err != nil {
		g, err := user.LookupGroup(group)
		if err != nil {
			return invalid("listenGroup: %w", err)
		}
		if gid, err = strconv.Atoi(g.Gid); err != nil {
			return err
		}
	}
	if err := os.Chown(path, 0, gid); err != nil {
		return err
	}
	return os.Chmod(path, 0o660)
}
