package events

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	testclock "k8s.io/utils/clock/testing"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// sink notes what is sent.
type sink struct{ sent chan string }

func (s *sink) Create(e *corev1.Event) (*corev1.Event, error) {
	s.sent <- "create " + e.Name
	return e, nil
}
func (s *sink) Update(e *corev1.Event) (*corev1.Event, error) {
	s.sent <- "update " + e.Name
	return e, nil
}
func (s *sink) Patch(e *corev1.Event, _ []byte) (*corev1.Event, error) {
	s.sent <- "patch " + e.Name
	return e, nil
}

// The first Event after a pause waits, those behind it do not, and the end of the process ends the waiting.
func TestAnEventWaitsForWhatItTellsOf(t *testing.T) {
	s, clock, ended := &sink{sent: make(chan string, 10)}, testclock.NewFakeClock(time.Unix(1000, 0)), make(chan struct{})
	p := &patient{sink: s, clock: clock, ended: ended}
	event := func(n int) *corev1.Event {
		e := &corev1.Event{}
		e.Name = fmt.Sprint(n)
		return e
	}
	returned := make(chan struct{})
	begin := func(do func()) {
		go func() {
			do()
			returned <- struct{}{}
		}()
	}
	waits := func() {
		t.Helper()
		testenv.Eventually(t, 10*time.Second, "it waits", clock.HasWaiters)
		if len(s.sent) > 0 {
			t.Fatalf("sent at once: %s", <-s.sent)
		}
	}
	sent := func(want string) {
		t.Helper()
		<-returned
		if got := <-s.sent; got != want {
			t.Errorf("sent %s, want %s", got, want)
		}
	}

	begin(func() { _, _ = p.Create(event(1)) })
	waits()
	clock.Step(after)
	sent("create 1")
	begin(func() { _, _ = p.Patch(event(1), nil) })
	sent("patch 1")
	clock.Step(after)
	begin(func() { _, _ = p.Update(event(1)) })
	sent("update 1")
	clock.Step(after + 1)
	begin(func() { _, _ = p.Create(event(2)) })
	waits()
	close(ended)
	sent("create 2")
}
