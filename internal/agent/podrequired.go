package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/pods"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// requiredAgain is the time between two looks at whether a container has what it requires: commands and sources come
// when they come.
const requiredAgain = 20 * time.Millisecond

// Required reads the annotations of a Pod that will not have a container start without its volumes.
func (podHandler) Required(ref pods.Ref, annotations map[string]string) ([]string, error) {
	value, ok := annotations[v1alpha1.AnnotationRequiredVolumes]
	if !ok {
		return nil, nil
	}
	container := annotations[v1alpha1.AnnotationContainer]
	if container == "" {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest,
			"the annotation %s needs %s beside it, with the name of the container that has the volumes", v1alpha1.AnnotationRequiredVolumes, v1alpha1.AnnotationContainer)
	}
	if container != ref.Container {
		return nil, nil
	}
	var required []string
	for target := range strings.SplitSeq(value, ",") {
		target = strings.TrimSpace(target)
		if err := volume.CheckTarget(target, nil); err != nil {
			return nil, fmt.Errorf("annotation %s: %w", v1alpha1.AnnotationRequiredVolumes, err)
		}
		required = append(required, target)
	}
	return required, nil
}

// Creating attaches what waits for a container that has not pivoted, until what it requires is there.
func (h podHandler) Creating(ctx context.Context, c pods.Container, required []string) error {
	ctx, cancel := joined(ctx, h.a.stopping)
	defer cancel()
	again := time.NewTicker(requiredAgain)
	defer again.Stop()
	for {
		err := h.a.podCreating(ctx, c, required)
		if err == nil || fault.IsPermanent(err) {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return err
		}
	}
}

// podCreating is one attempt of Creating.
func (a *Agent) podCreating(ctx context.Context, c pods.Container, required []string) error {
	sb, ok := a.podAt(c.Ref)
	if !ok {
		return fault.New(errdefs.ErrUnavailable, fault.VolumeNotFound,
			"required volumes %v: no Sandbox has volumes for container %s of this Pod: is there one with a podRef, and is the annotation %s the same container?", required, c.Ref.Container, v1alpha1.AnnotationContainer)
	}
	if err := a.adoptCreating(ctx, sb, c); err != nil {
		return err
	}
	var late atomic.Bool // what is attached here is attached before the start
	if err := a.attachToPod(ctx, sb, c.ID, &late); err != nil {
		return err
	}
	for _, target := range required {
		if v, ok := a.journal.VolumeAt(sb.uid, target); !ok || v.Phase != journal.Mounted {
			return fault.New(errdefs.ErrUnavailable, fault.VolumeNotFound,
				"required volume %s: the Sandbox of this Pod has no volume there on this node; it has %v", target, a.targets(sb.uid))
		}
	}
	a.log.Info("a container starts with the volumes that it requires", "sandbox", sb.uid, "container", c.ID, "required", required)
	return nil
}

// adoptCreating notes that this is the sandbox's container now, and enters its namespace: the pinned init is how it is
// known to live while containerd does not have its task.
func (a *Agent) adoptCreating(ctx context.Context, sb *sandbox, c pods.Container) error {
	if sb.isCreating(c.ID) {
		return nil
	}
	release, err := sb.alone(ctx)
	if err != nil {
		return err
	}
	defer release()
	if p, _ := sb.podIdentity(); sb.ctx.Err() != nil || p.UID != c.PodUID || p.Container != c.Container {
		return fault.New(errdefs.ErrUnavailable, fault.PodGone, "sandbox %s is being deleted, or another Pod's by now", sb.uid)
	}
	if err := a.adopt(sb, &c, true); err != nil {
		return err
	}
	if err := sb.takesVolume(""); err != nil {
		return err
	}
	if _, err = sb.enter(); errdefs.IsNotFound(err) || fault.ReasonOf(err) == fault.SandboxNotRunning {
		return errors.Join(fault.New(errdefs.ErrFailedPrecondition, fault.SandboxNotRunning, "container %s has ended before it began", c.ID), err)
	}
	return err
}

// isCreating says whether a container that is held has not pivoted yet, as far as is known, and its init lives.
func (s *sandbox) isCreating(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pod == nil {
		return false
	}
	c := &s.pod.container
	return c.ID == id && c.RootFS != "" && !c.Started && s.process != nil && s.process.Alive()
}

// targets are those of a sandbox's volumes.
func (a *Agent) targets(uid string) []string {
	list := []string{}
	for _, v := range a.journal.Volumes(uid) {
		if v.Phase != journal.Lazy {
			list = append(list, v.Target)
		}
	}
	slices.Sort(list)
	return list
}
