package containers

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/typeurl/v2"
)

// EventKind says what an Event hints at.
type EventKind string

// The kinds of events.
const (
	// EventExit: the task ended.
	EventExit EventKind = "Exit"
	// EventOOM: the kernel killed a process of the sandbox for lack of memory.
	EventOOM EventKind = "OOM"
	// EventDelete: the container was deleted.
	EventDelete EventKind = "Delete"
	// EventResync: events may have been missed, about any sandbox; read the state of all.
	EventResync EventKind = "Resync"
)

// Event hints that the state of a sandbox changed. Events may be lost (then a Resync follows, if the loss can be seen)
// or repeated; the state is what Get and List answer.
type Event struct {
	// UID is empty for EventResync.
	UID  string
	Kind EventKind
}

const (
	eventBuffer = 256
	// barrierTopic carries our own events, by which we see that a subscription works.
	barrierTopic    = "/flux-sandbox/barrier"
	barrierInterval = 100 * time.Millisecond
	resubscribeWait = 200 * time.Millisecond
)

// Events subscribes to containerd's events until ctx ends, when the channel is closed. Every time the subscription is
// established, also the first, a Resync follows; a reader that is too slow gets a Resync instead of what it missed.
func (r *Runtime) Events(ctx context.Context) <-chan Event {
	out := make(chan Event, eventBuffer)
	go func() {
		defer close(out)
		for ctx.Err() == nil {
			r.subscribe(ctx, out)
			select {
			case <-time.After(resubscribeWait):
			case <-ctx.Done():
			}
		}
	}()
	return out
}

// subscribe passes on events until the subscription ends.
func (r *Runtime) subscribe(ctx context.Context, out chan<- Event) {
	ctx, cancel := context.WithCancel(r.context(ctx))
	defer cancel()
	var filters []string
	for _, topic := range []string{"/tasks/exit", "/tasks/oom", "/containers/delete", barrierTopic} {
		filters = append(filters, fmt.Sprintf("namespace==%q,topic==%q", r.config.Namespace, topic))
	}
	envelopes, errs := r.client.EventService().Subscribe(ctx, filters...)

	// containerd does not say when a subscription is in effect. So events of our own are sent until one comes back:
	// whatever happens from then on is seen, whatever happened before is covered by the Resync.
	barrier := "barrier-" + rand.Text()
	publish := func() {
		_ = r.client.EventService().Publish(ctx, barrierTopic, &eventsapi.TaskPaused{ContainerID: barrier})
	}
	publish()
	ticker := time.NewTicker(barrierInterval)
	defer ticker.Stop()

	// The reader is never waited for: containerd would keep a slow one's events in its memory. What does not fit in the
	// channel is dropped, and a Resync owed.
	owed := false
	for {
		var resync chan<- Event
		if owed {
			resync = out
		}
		select {
		case envelope := <-envelopes:
			event, ok := eventOf(envelope, barrier)
			switch {
			case !ok || owed:
			case event.Kind == EventResync:
				owed = true
				ticker.Stop()
			default:
				select {
				case out <- event:
				default:
					owed = true
				}
			}
		case resync <- Event{Kind: EventResync}:
			owed = false
		case <-ticker.C:
			publish()
		case <-errs:
			return
		case <-ctx.Done():
			return
		}
	}
}

// eventOf translates containerd's event; the barrier's return is a Resync.
func eventOf(envelope *events.Envelope, barrier string) (Event, bool) {
	decoded, err := typeurl.UnmarshalAny(envelope.Event)
	if err != nil {
		return Event{}, false
	}
	switch e := decoded.(type) {
	case *eventsapi.TaskPaused:
		return Event{Kind: EventResync}, envelope.Topic == barrierTopic && e.ContainerID == barrier
	case *eventsapi.TaskExit:
		// The exit of an exec has its own ID.
		return Event{UID: e.ContainerID, Kind: EventExit}, e.ID == e.ContainerID
	case *eventsapi.TaskOOM:
		return Event{UID: e.ContainerID, Kind: EventOOM}, true
	case *eventsapi.ContainerDelete:
		return Event{UID: e.ID, Kind: EventDelete}, true
	}
	return Event{}, false
}
