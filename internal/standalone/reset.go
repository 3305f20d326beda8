package standalone

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/prometheus/client_golang/prometheus"
)

// Reset removes every sandbox of the machine and everything that flux-sandbox keeps: containers, images, the own
// containerd, database, journal, sockets. The data of volumes stays. The server must not be running: the journal has one
// owner, and Reset wants to be it.
func Reset(ctx context.Context, config Config) error {
	log, err := newLogger(config.Log)
	if err != nil {
		return err
	}
	n, err := openNode(ctx, config, log, prometheus.NewRegistry())
	if err != nil {
		return err
	}
	err = n.agent.RemoveAll(ctx)
	n.close()
	if err != nil {
		return fmt.Errorf("remove the sandboxes: %w", err)
	}
	if n.child != nil {
		if err := n.child.Stop(ctx); err != nil {
			return err
		}
	}
	var errs []error
	for _, p := range []string{config.Listen, config.database(), config.database() + ".lock", config.sandboxState(), config.containerdRoot(),
		config.containerdRun(), config.containersRun(), config.journal(), config.agentSocket()} {
		errs = append(errs, os.RemoveAll(p))
	}
	// Only if they are empty: somebody may have put something else there.
	for _, dir := range []string{config.StateDir, config.RunDir} {
		if entries, err := os.ReadDir(dir); err == nil && len(entries) == 0 {
			errs = append(errs, os.Remove(dir))
		}
	}
	return errors.Join(errs...)
}
