package standalone

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/flux-sandbox/flux-sandbox/internal/observability"
)

// Reset removes every sandbox of the machine and everything that flux-sandbox keeps: containers, images, the own
// containerd, database, journal, sockets. The data of volumes stays. The server must not be running: the journal has one
// owner, and Reset wants to be it.
func Reset(ctx context.Context, config Config) error {
	log, err := observability.NewLogger(config.Log)
	if err != nil {
		return err
	}
	n, err := openMachine(ctx, config, log, prometheus.NewRegistry())
	if err != nil {
		return err
	}
	err = n.Agent().RemoveAll(ctx)
	n.close()
	if err != nil {
		return fmt.Errorf("remove the sandboxes: %w", err)
	}
	if err := n.StopContainerd(ctx); err != nil {
		return err
	}
	var errs []error
	for _, p := range append(config.Places(), config.Listen, config.database(), config.database()+".lock", config.agentSocket(), config.csiSocket()) {
		errs = append(errs, os.RemoveAll(p))
	}
	errs = append(errs, removeEmptyPool(config.Volumes.Pool))
	// Only if they are empty: somebody may have put something else there, and what a CSI driver left mounted is data.
	for _, dir := range []string{config.Published(), config.StateDir, config.RunDir} {
		if entries, err := os.ReadDir(dir); err == nil && len(entries) == 0 {
			errs = append(errs, os.Remove(dir))
		}
	}
	return errors.Join(errs...)
}
