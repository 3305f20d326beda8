package scheduler

import (
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
)

func TestQueue(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	q := newQueue[string](clock)
	q.add("a")
	q.add("b")
	q.add("a")
	if k, _ := q.get(); k != "a" {
		t.Fatalf("got %s", k)
	}
	q.add("a") // while a worker has it
	if k, _ := q.get(); k != "b" {
		t.Fatalf("got %s: two workers would have it", k)
	}
	q.done("a")
	if k, _ := q.get(); k != "a" {
		t.Fatalf("got %s", k)
	}
	q.done("a")
	q.done("b")

	q.addAt("c", clock.Now().Add(time.Minute))
	q.addAt("c", clock.Now().Add(time.Second)) // the earlier counts
	q.addAt("c", clock.Now().Add(time.Hour))
	clock.Step(time.Second)
	if k, _ := q.get(); k != "c" {
		t.Fatalf("got %s", k)
	}
	q.done("c")
	clock.Step(time.Hour)
	q.add("d")
	if k, _ := q.get(); k != "d" {
		t.Fatalf("got %s: a time that no longer counts came", k)
	}
	q.addAt("e", clock.Now().Add(time.Second))
	closed := make(chan bool)
	go func() {
		_, ok := q.get()
		closed <- ok
	}()
	q.close()
	if <-closed {
		t.Error("a closed queue gives keys")
	}
	if clock.HasWaiters() {
		t.Error("a timer is left")
	}
	q.add("f") // harmless
}

func TestRetryDelay(t *testing.T) {
	for n, want := range map[int32]time.Duration{0: time.Second, 1: time.Second, 2: 2 * time.Second, 5: 16 * time.Second, 9: 256 * time.Second, 10: 5 * time.Minute, 1000: 5 * time.Minute} {
		if got := retryDelay(n); got != want {
			t.Errorf("after %d failures: %v, want %v", n, got, want)
		}
	}
}
