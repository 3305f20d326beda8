package integration

import (
	"context"
	"encoding/json"
	"path/filepath"
	"testing"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// hooks is the real source of local volumes with a hook before each of its calls: what a hook returns as an error is the
// call's answer, and as long as it does not return the call hangs. Hooks are set before the agent starts.
type hooks struct {
	volume.Source
	prepare func(ctx context.Context, r volume.Request) error
	tree    func(ctx context.Context, p volume.Prepared) error
	release func(ctx context.Context, p volume.Prepared) error
	// prepared is told of the end of each Prepare.
	prepared func(r volume.Request)
}

// install puts the hooks between an agent and its source.
func (h *hooks) install(c *agent.Config) {
	wrapped := *h
	wrapped.Source = c.Sources[v1alpha1.VolumeTypeLocal]
	c.Sources[v1alpha1.VolumeTypeLocal] = &wrapped
}

func (h *hooks) Prepare(ctx context.Context, r volume.Request) (volume.Prepared, error) {
	if h.prepared != nil {
		defer h.prepared(r)
	}
	if h.prepare != nil {
		if err := h.prepare(ctx, r); err != nil {
			return volume.Prepared{}, err
		}
	}
	return h.Source.Prepare(ctx, r)
}

func (h *hooks) Tree(ctx context.Context, p volume.Prepared, subPath string) (*mount.Tree, error) {
	if h.tree != nil {
		if err := h.tree(ctx, p); err != nil {
			return nil, err
		}
	}
	return h.Source.Tree(ctx, p, subPath)
}

func (h *hooks) Release(ctx context.Context, p volume.Prepared) error {
	if h.release != nil {
		if err := h.release(ctx, p); err != nil {
			return err
		}
	}
	return h.Source.Release(ctx, p)
}

// loopDevices are the loop devices of an image-backed volume, as the kernel has them.
func loopDevices(t *testing.T, source string) []string {
	t.Helper()
	var devices []string
	for device, file := range testenv.LoopDevices() {
		if file == source+".img" {
			devices = append(devices, filepath.Base(device))
		}
	}
	return devices
}

// sameMounts checks that a sandbox has the mounts that it had.
func sameMounts(t *testing.T, sb *agenttest.Sandbox, before map[string]mount.Info) {
	t.Helper()
	after := sb.Mounts(t)
	for at, m := range after {
		if was, ok := before[at]; !ok || was.UniqueID != m.UniqueID {
			t.Errorf("the sandbox has a new mount at %s: %+v", at, m)
		}
	}
	for at := range before {
		if _, ok := after[at]; !ok {
			t.Errorf("the sandbox lost its mount at %s", at)
		}
	}
}

// nothingPrepared waits until the agent has released every source.
func nothingPrepared(t *testing.T, n *agenttest.Node) {
	t.Helper()
	agenttest.Eventually(t, "every source is released", func() bool { return len(n.Inventory(t).GetPrepared()) == 0 })
}

// recordAt is the agent's record of a target, nil if it has none.
func recordAt(t *testing.T, sb *agenttest.Sandbox, target string) *agentv1.MountRecord {
	t.Helper()
	for _, v := range sb.State(t).GetVolumes() {
		if v.GetTarget() == target {
			return v
		}
	}
	return nil
}

// sourceOf is the directory of a prepared volume, for hooks: tests may look into what is the source's own.
func sourceOf(p volume.Prepared) string {
	var details struct{ Prefix, Rel string }
	_ = json.Unmarshal(p.Details, &details) // a volume that is not prepared has none
	return filepath.Join(details.Prefix, details.Rel)
}
