package pods

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/api"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/pods/createhook"
	"github.com/flux-sandbox/flux-sandbox/internal/unixsocket"
)

// hookGrace is how much longer the runtime lets the hook be than that is patient, so that its own words are what it fails
// with.
const hookGrace = 10 * time.Second

// hook is the OCI hook of a container that requires volumes.
func (r *Runtime) hook(ref Ref, required []string) (*api.Hook, error) {
	if r.config.HookProgram == "" || r.config.HookSocket == "" {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.FeatureDisabled,
			"%s requires volumes at %v, and this node's agent of FluxSandbox cannot hold up its start: it has no flux-sandbox-hook", ref, required)
	}
	return &api.Hook{
		Path:    r.config.HookProgram,
		Args:    []string{"flux-sandbox-hook", r.config.HookSocket, ref.PodUID, ref.Container, strings.Join(required, ","), r.config.HookPatience.String()},
		Timeout: api.Int(int64((r.config.HookPatience + hookGrace) / time.Second)),
	}, nil
}

// serveHook answers the hooks until ctx ends.
func (r *Runtime) serveHook(ctx context.Context, h Handler) {
	for ctx.Err() == nil {
		l, err := unixsocket.Listen(r.config.HookSocket, nil)
		if err == nil {
			err = createhook.Serve(ctx, l, func(ctx context.Context, q createhook.Request) error { return r.answerHook(ctx, h, q) })
		}
		if err != nil {
			r.config.Log.Error("containers that require volumes cannot start; trying again", "socket", r.config.HookSocket, "error", err)
		}
		wait(ctx, reconnectMax)
	}
}

// answerHook attaches what a container requires.
func (r *Runtime) answerHook(ctx context.Context, h Handler, q createhook.Request) error {
	c, err := r.load(ctx, q.ID)
	if err != nil {
		return err
	}
	if c.PodUID != q.PodUID || c.Ref.Container != q.Container {
		return fmt.Errorf("container %s is %s for containerd, not %s of Pod %s", q.ID, c.Ref, q.Container, q.PodUID)
	}
	// Its task is not containerd's yet: the hook is part of making it.
	c.Alive, c.Started, c.PID, c.RootFS = true, false, q.PID, q.Root
	if c.Facts.HostPID, err = hostPIDNamespace(q.PID); err != nil {
		return fmt.Errorf("the PID namespace of container %s: %w", q.ID, err)
	}
	if err := h.Creating(ctx, c, q.Targets); err != nil {
		r.config.Log.Warn("a container does not start, as volumes that it requires are not there", "container", q.ID, "required", q.Targets, "error", err)
		return err
	}
	return nil
}
