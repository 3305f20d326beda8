package standalone

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// applyGroups makes the configured groups, and brings those that exist to the configured spec. Others are left alone.
func applyGroups(ctx context.Context, s store.Store, groups []GroupConfig) error {
	for _, g := range groups {
		object := &v1alpha1.SandboxGroup{Spec: g.Spec}
		object.Namespace, object.Name = g.Namespace, g.Name
		_, err := s.Groups().Create(ctx, object)
		if errdefs.IsAlreadyExists(err) {
			_, err = s.Groups().UpdateSpec(ctx, store.KeyOf(object), store.Preconditions{}, func(o *v1alpha1.SandboxGroup) error {
				o.Spec = *g.Spec.DeepCopy()
				return nil
			})
		}
		if err != nil {
			return fmt.Errorf("apply the configured group %s/%s: %w", g.Namespace, g.Name, err)
		}
	}
	return nil
}

// followReload applies the groups of every new configuration.
func followReload(ctx context.Context, s store.Store, reload Reload, log *slog.Logger) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case c := <-reload:
			if err := applyGroups(ctx, s, c.Groups); err != nil {
				log.Error("the groups of the new configuration could not be applied", "error", err)
				continue
			}
			log.Info("applied the groups of the new configuration", "groups", len(c.Groups))
		}
	}
}
