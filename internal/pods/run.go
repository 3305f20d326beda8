package pods

import (
	"context"
	"fmt"
	"sync"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
)

// Handler is told what happens to the node's Pods.
type Handler interface {
	// Wants says whether anything is to be done when this container starts. It is asked for every container of the node
	// and must not wait.
	Wants(ref Ref) bool
	// Starting is told of a container that is Alive, whose process begins when it returns, but not later than the
	// context's end.
	Starting(ctx context.Context, c Container)
	// Required are the targets without whose volumes a container must not start, by the annotations of its Pod. An error is
	// why it cannot be made. It is asked for every container that is made on the node and must not wait.
	Required(ref Ref, annotations map[string]string) ([]string, error)
	// Creating attaches the required volumes of a container that is Alive, whose init waits before its pivot, in RootFS. An
	// error is why the container must not start; it may wait until the context ends.
	Creating(ctx context.Context, c Container, required []string) error
	// Changed hints that something about a Pod changed; about any when podUID is empty. It must not wait.
	Changed(podUID string)
}

const resubscribeWait = 200 * time.Millisecond

// Run tells the handler of what happens until ctx ends.
func (r *Runtime) Run(ctx context.Context, h Handler) {
	var both sync.WaitGroup
	both.Go(func() { r.followNRI(ctx, h) })
	both.Go(func() { r.followEvents(ctx, h) })
	if r.config.HookSocket != "" {
		both.Go(func() { r.serveHook(ctx, h) })
	}
	both.Wait()
}

func (r *Runtime) followEvents(ctx context.Context, h Handler) {
	for ctx.Err() == nil {
		if err := r.subscribe(ctx, h); err != nil && ctx.Err() == nil {
			r.config.Log.Warn("containerd's events of Pods broke off; trying again", "error", err)
		}
		wait(ctx, resubscribeWait)
	}
}

// subscribe passes on events until the subscription ends.
func (r *Runtime) subscribe(ctx context.Context, h Handler) error {
	ctx, cancel := context.WithCancel(r.context(ctx))
	defer cancel()
	var filters []string
	for _, topic := range []string{"/tasks/start", "/tasks/exit", "/containers/delete"} {
		filters = append(filters, fmt.Sprintf("namespace==%q,topic==%q", r.config.Namespace, topic))
	}
	envelopes, errs := r.client.EventService().Subscribe(ctx, filters...)
	if err := r.learn(ctx); err != nil {
		return err
	}
	h.Changed("")
	for {
		select {
		case envelope := <-envelopes:
			if podUID, ok := r.podOf(ctx, envelope); ok {
				h.Changed(podUID)
			}
		case err := <-errs:
			return err
		case <-ctx.Done():
			return nil
		}
	}
}

// learn notes the Pods of all containers that there are.
func (r *Runtime) learn(ctx context.Context) error {
	list, err := r.client.ContainerService().List(ctx, fmt.Sprintf("labels.%q", labelPodUID))
	if err != nil {
		return err
	}
	podUIDs := map[string]string{}
	for _, c := range list {
		podUIDs[c.ID] = c.Labels[labelPodUID]
	}
	r.known.reset(podUIDs)
	return nil
}

// podOf is the Pod that an event is about; empty when it may be any.
func (r *Runtime) podOf(ctx context.Context, envelope *events.Envelope) (string, bool) {
	decoded, err := typeurl.UnmarshalAny(envelope.Event)
	if err != nil {
		return "", false
	}
	var id string
	switch e := decoded.(type) {
	case *eventsapi.TaskStart:
		id = e.ContainerID
	case *eventsapi.TaskExit:
		if e.ID != e.ContainerID { // of an exec
			return "", false
		}
		id = e.ContainerID
	case *eventsapi.ContainerDelete:
		defer r.known.drop(e.ID)
		id = e.ID
	default:
		return "", false
	}
	if podUID, ok := r.known.get(id); ok {
		return podUID, podUID != ""
	}
	record, err := r.client.ContainerService().Get(r.context(ctx), id)
	switch {
	case errdefs.IsNotFound(err):
		return "", true
	case err != nil:
		return "", false // the subscription ends as well
	}
	podUID := record.Labels[labelPodUID]
	r.known.put(id, podUID)
	return podUID, podUID != ""
}

// wait waits for a time, or until ctx ends.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
