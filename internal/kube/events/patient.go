package events

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
)

// after is how long the first Event after a pause waits: what it tells of goes on with writes that somebody waits for, as the
// status of a sandbox and then that of its claim, and an Event costs the API server as much as one of those. Those behind it
// follow at once.
const after = 200 * time.Millisecond

// patient is a sink that does not compete with what its Events are about. One goroutine uses it, that of the broadcaster.
type patient struct {
	sink  record.EventSink
	clock clock.WithTicker
	ended <-chan struct{}
	last  time.Time // of the last Event that was sent
}

func (p *patient) Create(event *corev1.Event) (*corev1.Event, error) {
	defer p.wait()()
	return p.sink.Create(event)
}

func (p *patient) Update(event *corev1.Event) (*corev1.Event, error) {
	defer p.wait()()
	return p.sink.Update(event)
}

func (p *patient) Patch(old *corev1.Event, data []byte) (*corev1.Event, error) {
	defer p.wait()()
	return p.sink.Patch(old, data)
}

// wait returns when an Event may be sent; what it returns is called when it is.
func (p *patient) wait() (sent func()) {
	if p.clock.Since(p.last) > after {
		pause := p.clock.NewTimer(after)
		defer pause.Stop()
		select {
		case <-pause.C():
		case <-p.ended:
		}
	}
	return func() { p.last = p.clock.Now() }
}
