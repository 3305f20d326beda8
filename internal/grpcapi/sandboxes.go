package grpcapi

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/validation"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// The page sizes of ListSandboxes.
const (
	defaultSandboxPage = 500
	maxSandboxPage     = 1000
	// maxPageBytes is where a page ends before it has as many as asked for. gRPC's clients take 4 MiB, and one
	// sandbox alone may be nearly that large.
	maxPageBytes = 2 << 20
)

// sandboxService serves SandboxService.
type sandboxService struct {
	sandboxv1.UnimplementedSandboxServiceServer
	*Server
}

// CreateSandbox stores a sandbox and, if asked, waits until it runs.
func (s *sandboxService) CreateSandbox(ctx context.Context, req *sandboxv1.CreateSandboxRequest) (*sandboxv1.Sandbox, error) {
	sb, err := s.newSandbox(ctx, req.GetSandbox())
	if err != nil {
		return nil, err
	}
	group, err := s.groupOf(ctx, sb.Namespace, sb.Spec.Group)
	if err != nil {
		return nil, err
	}
	if err := s.checkAgainstGroup(sb, group); err != nil {
		return nil, err
	}
	for i := range sb.Spec.DynamicVolumes {
		// As in a sandbox that was shown: what was asked of the old one is not asked of the new one.
		sb.Spec.DynamicVolumes[i].RequestID, sb.Spec.DynamicVolumes[i].Detach = newID(), nil
	}
	waitCtx, cancel := s.waiting(ctx)
	defer cancel()
	if sb.Name != "" {
		sb, err = s.store.Sandboxes().Create(ctx, sb)
	} else {
		sb, err = s.createNamed(ctx, sb)
	}
	if err != nil {
		return nil, err
	}
	annotateSandbox(ctx, sb)
	if req.GetWait() {
		err = s.waitPhase(ctx, waitCtx, &sb, "running", started)
		if err != nil {
			return nil, err
		}
	}
	return convert.SandboxProto(sb), nil
}

// createNamed makes names until one is free; a second attempt is hardly ever needed.
func (s *sandboxService) createNamed(ctx context.Context, sb *v1alpha1.Sandbox) (*v1alpha1.Sandbox, error) {
	const attempts = 5
	var err error
	for range attempts {
		named := sb.DeepCopy()
		named.Name = "sandbox-" + rand.String(8)
		var created *v1alpha1.Sandbox
		if created, err = s.store.Sandboxes().Create(ctx, named); !errdefs.IsAlreadyExists(err) {
			return created, err
		}
	}
	return nil, err
}

// started is done when a new sandbox runs or has ended, and fails when it stays Pending for a reason that
// does not go away by itself.
func started(sb *v1alpha1.Sandbox) (bool, error) {
	if sb == nil {
		return false, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "the sandbox was deleted before it ran")
	}
	switch sb.Status.Phase {
	case v1alpha1.SandboxRunning, v1alpha1.SandboxSucceeded, v1alpha1.SandboxFailed, v1alpha1.SandboxPaused:
		return true, nil
	case v1alpha1.SandboxTerminating:
		return false, fault.New(errdefs.ErrFailedPrecondition, fault.SandboxTerminating, "the sandbox was deleted before it ran")
	case v1alpha1.SandboxPending:
		if sb.Status.Reason == "" {
			return false, nil
		}
		reason := fault.Reason(sb.Status.Reason)
		err := fault.New(fault.KindOf(reason), reason, "sandbox %s cannot start: %s; it stays Pending until that changes or it is deleted", keyOf(sb), sb.Status.Message)
		if fault.IsPermanent(err) {
			return false, err
		}
	}
	return false, nil
}

// waitPhase waits with the states of a sandbox and leaves the last one in *sb.
func (s *Server) waitPhase(ctx, waitCtx context.Context, sb **v1alpha1.Sandbox, wished string, decide func(*v1alpha1.Sandbox) (bool, error)) error {
	last := *sb
	err := s.waiter.until(waitCtx, *sb, func(now *v1alpha1.Sandbox) (bool, error) {
		if now != nil {
			last = now
		}
		return decide(now)
	})
	*sb = last
	phase := string(last.Status.Phase)
	if phase == "" {
		phase = string(v1alpha1.SandboxPending)
	}
	why := ""
	if last.Status.Reason != "" || last.Status.Message != "" {
		why = fmt.Sprintf(" (%s: %s)", last.Status.Reason, last.Status.Message)
	}
	return stillPending(ctx, err, "sandbox %s is not %s yet, but %s%s; that goes on: look with: fluxctl get %s", keyOf(last), wished, phase, why, last.Name)
}

// GetSandbox reads a sandbox.
func (s *sandboxService) GetSandbox(ctx context.Context, req *sandboxv1.GetSandboxRequest) (*sandboxv1.Sandbox, error) {
	sb, err := s.resolveMessage(ctx, req.GetSandbox(), "get", "")
	if err != nil {
		return nil, err
	}
	return convert.SandboxProto(sb), nil
}

// ListSandboxes lists sandboxes by namespace and name.
func (s *sandboxService) ListSandboxes(ctx context.Context, req *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
	size, err := pageSize(req.GetPageSize(), defaultSandboxPage, maxSandboxPage)
	if err != nil {
		return nil, err
	}
	if err := checkNamespace(req.GetNamespace()); err != nil {
		return nil, err
	}
	tenant, err := s.permit(ctx, Access{Verb: "list", Namespace: req.GetNamespace()})
	if err != nil {
		return nil, err
	}
	options := store.ListOptions{Namespace: req.GetNamespace(), Continue: req.GetPageToken()}
	if req.GetLabelSelector() != "" {
		options.Labels, err = labels.Parse(req.GetLabelSelector())
		if err != nil {
			return nil, invalid("label_selector %q is not valid: %v", req.GetLabelSelector(), err)
		}
	}
	resp := &sandboxv1.ListSandboxesResponse{}
	bytes, last := 0, (*v1alpha1.Sandbox)(nil)
	// A caller with a tenant is shown its own only, so a page of the store may hold fewer than asked for.
	for {
		options.Limit = size - len(resp.Sandboxes)
		page, err := s.store.Sandboxes().List(ctx, options)
		if err != nil {
			return nil, err
		}
		for _, sb := range page.Items {
			if holdTo(tenant, sb) != nil {
				continue
			}
			m := convert.SandboxProto(sb)
			if bytes += proto.Size(m); bytes > maxPageBytes && len(resp.Sandboxes) > 0 {
				resp.NextPageToken = store.After(last)
				return resp, nil
			}
			resp.Sandboxes, last = append(resp.Sandboxes, m), sb
		}
		options.Continue = page.Continue
		if page.Continue == "" || len(resp.Sandboxes) == size {
			resp.NextPageToken = page.Continue
			return resp, nil
		}
	}
}

// DeleteSandbox deletes a sandbox and, if asked, waits until nothing of it is left.
func (s *sandboxService) DeleteSandbox(ctx context.Context, req *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
	sb, err := s.resolveMessage(ctx, req.GetSandbox(), "delete", "")
	if err != nil {
		return nil, err
	}
	waitCtx, cancel := s.waiting(ctx)
	defer cancel()
	if err := s.store.Sandboxes().Delete(ctx, keyOf(sb), store.Preconditions{UID: sb.UID}); err != nil {
		return nil, err
	}
	if req.GetWait() {
		gone := func(now *v1alpha1.Sandbox) (bool, error) { return now == nil, nil }
		if err := s.waitPhase(ctx, waitCtx, &sb, "gone", gone); err != nil {
			return nil, err
		}
	}
	return &sandboxv1.DeleteSandboxResponse{}, nil
}

// PauseSandbox sets spec.paused and, if asked, waits until the sandbox is as wished.
func (s *sandboxService) PauseSandbox(ctx context.Context, req *sandboxv1.PauseSandboxRequest) (*sandboxv1.Sandbox, error) {
	sb, err := s.resolveMessage(ctx, req.GetSandbox(), "update", "")
	if err != nil {
		return nil, err
	}
	paused := req.GetPaused()
	annotate(ctx, slog.Bool("paused", paused))
	waitCtx, cancel := s.waiting(ctx)
	defer cancel()
	sb, err = s.store.Sandboxes().UpdateSpec(ctx, keyOf(sb), store.Preconditions{UID: sb.UID}, func(fresh *v1alpha1.Sandbox) error {
		if fresh.DeletionTimestamp != nil {
			return fault.New(errdefs.ErrFailedPrecondition, fault.SandboxTerminating, "sandbox %s is being deleted and can be neither paused nor resumed", keyOf(fresh))
		}
		if paused && fresh.Spec.PodRef != nil {
			return fault.New(errdefs.ErrFailedPrecondition, fault.InvalidRequest,
				"sandbox %s is Pod %s of somebody else's and cannot be paused: stop the Pod instead", keyOf(fresh), fresh.Spec.PodRef.Name)
		}
		if phase := fresh.Status.Phase; paused && (phase == v1alpha1.SandboxSucceeded || phase == v1alpha1.SandboxFailed) {
			return fault.New(errdefs.ErrFailedPrecondition, fault.SandboxNotRunning, "sandbox %s has ended (%s) and cannot be paused", keyOf(fresh), phase)
		}
		fresh.Spec.Paused = paused
		return nil
	})
	if err != nil {
		return nil, err
	}
	if req.GetWait() {
		wished := "running"
		if paused {
			wished = "paused"
		}
		if err := s.waitPhase(ctx, waitCtx, &sb, wished, pausedOr(paused)); err != nil {
			return nil, err
		}
	}
	return convert.SandboxProto(sb), nil
}

// pausedOr is done when a sandbox is paused, or has left that state.
func pausedOr(paused bool) func(*v1alpha1.Sandbox) (bool, error) {
	return func(sb *v1alpha1.Sandbox) (bool, error) {
		switch {
		case sb == nil || sb.Spec.Paused != paused:
			return false, fault.New(errdefs.ErrAborted, fault.Conflict, "the sandbox was changed or deleted by another request meanwhile: look again")
		case paused:
			phase := sb.Status.Phase
			return phase == v1alpha1.SandboxPaused || phase == v1alpha1.SandboxSucceeded || phase == v1alpha1.SandboxFailed, nil
		case sb.Status.Phase == v1alpha1.SandboxPaused, sb.Status.ObservedGeneration < sb.Generation:
			return false, nil
		}
		return started(sb)
	}
}

// WatchSandboxes streams every sandbox, a mark, and what changes. The watch of one sandbox ends with it.
func (s *sandboxService) WatchSandboxes(req *sandboxv1.WatchSandboxesRequest, stream grpc.ServerStreamingServer[sandboxv1.SandboxEvent]) error {
	ctx, cancel := s.untilStop(stream.Context())
	defer cancel()
	if err := checkNamespace(req.GetNamespace()); err != nil {
		return err
	}
	var one *v1alpha1.Sandbox
	var tenant string
	var err error
	var keys []store.Key
	if req.GetSandbox() != nil {
		if req.GetNamespace() != "" {
			return invalid("namespace and sandbox exclude each other: sandbox has a namespace of its own")
		}
		if one, err = s.resolveMessage(ctx, req.GetSandbox(), "watch", ""); err != nil {
			return err
		}
		keys = []store.Key{keyOf(one)}
	} else if tenant, err = s.permit(ctx, Access{Verb: "watch", Namespace: req.GetNamespace()}); err != nil {
		return err
	}
	seen := false
	for event := range s.store.Sandboxes().Follow(ctx, keys...) {
		m := &sandboxv1.SandboxEvent{Type: eventTypes[event.Type]}
		if sb := event.Object; event.Type != store.Synced {
			if req.GetNamespace() != "" && sb.Namespace != req.GetNamespace() || holdTo(tenant, sb) != nil || one != nil && sb.UID != one.UID {
				continue
			}
			seen = true
			m.Sandbox = convert.SandboxProto(sb)
		} else if one != nil && !seen {
			return store.SandboxKind.NotFound(keyOf(one))
		}
		if err := stream.Send(m); err != nil {
			return err
		}
		if one != nil && event.Type == store.Deleted {
			return nil
		}
	}
	return s.streamEnd(stream.Context(), "watch again")
}

var eventTypes = map[store.EventType]sandboxv1.SandboxEvent_Type{
	store.Changed: sandboxv1.SandboxEvent_UPDATED,
	store.Deleted: sandboxv1.SandboxEvent_DELETED,
	store.Synced:  sandboxv1.SandboxEvent_SYNCED,
}

// groupOf reads the group that a sandbox of the namespace names. That it does not exist is a precondition of
// whatever is asked for, not the thing that was asked for.
func (s *Server) groupOf(ctx context.Context, namespace, name string) (*v1alpha1.SandboxGroup, error) {
	if name == "" {
		name = v1alpha1.DefaultGroup
	}
	group, err := s.store.Groups().Get(ctx, store.Key{Namespace: namespace, Name: name})
	if errdefs.IsNotFound(err) {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.GroupNotFound,
			"sandbox group %s/%s does not exist: create it, or name another", namespace, name)
	}
	return group, err
}

// checkNamespace checks a namespace that may be empty.
func checkNamespace(namespace string) error {
	if namespace == "" {
		return nil
	}
	for _, problem := range validation.IsDNS1123Label(namespace) {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidName, "namespace %q: %s", namespace, problem)
	}
	return nil
}

// objectMeta is what a request may say of the metadata of a new sandbox.
func objectMeta(m *sandboxv1.Sandbox) metav1.ObjectMeta {
	meta := metav1.ObjectMeta{
		Namespace:   m.GetNamespace(),
		Name:        m.GetName(),
		Labels:      m.GetLabels(),
		Annotations: m.GetAnnotations(),
		Finalizers:  []string{v1alpha1.FinalizerVolumes},
	}
	if meta.Namespace == "" {
		meta.Namespace = DefaultNamespace
	}
	return meta
}
