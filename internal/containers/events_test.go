package containers_test

import (
	"context"
	"testing"

	"github.com/containerd/errdefs"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
)

// await reads events until one is as wanted.
func await(t *testing.T, events <-chan containers.Event, want containers.Event) {
	t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case e, ok := <-events:
			if !ok {
				t.Fatalf("the events ended without %+v", want)
			}
			if e == want {
				return
			}
		case <-deadline:
			t.Fatalf("no event %+v", want)
		}
	}
}

func TestEvents(t *testing.T) {
	r := open(t)
	ctx, cancel := context.WithCancel(t.Context())
	events := r.Events(ctx)
	await(t, events, containers.Event{Kind: containers.EventResync})
	spec := newSpec(t, r, "exit 0")
	run(t, r, spec)
	await(t, events, containers.Event{UID: spec.UID, Kind: containers.EventExit})
	if err := r.Delete(t.Context(), spec.UID); err != nil {
		t.Fatal(err)
	}
	await(t, events, containers.Event{UID: spec.UID, Kind: containers.EventDelete})
	cancel()
	for range events { // until it is closed
	}
}

// TestContainerdCrash kills containerd under running sandboxes: they go on, and so does everything that was waiting.
func TestContainerdCrash(t *testing.T) {
	env := containerstest.New(t)
	r := env.Open(t, nil)
	running, created := newSpec(t, r, "trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done"), newSpec(t, r, "sleep 1000")
	before := run(t, r, running)
	awaitLog(t, r, running.UID, "ready")
	create(t, r, created)
	events := r.Events(t.Context())
	await(t, events, containers.Event{Kind: containers.EventResync})

	reader, writer := newGate()
	type result struct {
		code int
		err  error
	}
	done := make(chan result)
	go func() {
		code, err := r.Exec(t.Context(), running.UID, containers.ExecSpec{Command: []string{"sh", "-c", "echo begun; read line; exit 9"}},
			containers.ExecIO{Stdin: reader, Stdout: writer})
		done <- result{code, err}
	}()
	<-writer.written
	<-reader.reading // it is started: its input is being copied
	// More of them are at any stage of their start when containerd is killed.
	const more = 8
	begun := make(chan result)
	late, _ := newGate()
	late.open()
	for range more {
		go func() {
			code, err := r.Exec(t.Context(), running.UID, containers.ExecSpec{Command: []string{"sh", "-c", "read line; exit 9"}},
				containers.ExecIO{Stdin: late})
			begun <- result{code, err}
		}()
	}

	env.KillContainerd(t)
	env.RestartContainerd(t)
	await(t, events, containers.Event{Kind: containers.EventResync})

	if c := get(t, r, running.UID); c.State != containers.Running || c.PID != before.PID {
		t.Errorf("before %+v, after %+v", before, c)
	}
	reader.open()
	if got := <-done; got.err != nil || got.code != 9 {
		t.Errorf("the exec that ran meanwhile: exit code %d, %v", got.code, got.err)
	}
	for range more {
		if got := <-begun; (got.err != nil || got.code != 9) && !errdefs.IsUnavailable(got.err) {
			t.Errorf("an exec that was being started: exit code %d, %v", got.code, got.err)
		}
	}
	if err := r.Start(t.Context(), created.UID); err != nil {
		t.Errorf("start of what was created before: %v", err)
	}
	if exit, err := r.Stop(t.Context(), running.UID, patience); err != nil || exit.Code != 5 {
		t.Errorf("Stop: %+v, %v", exit, err)
	}
	for _, uid := range []string{running.UID, created.UID} {
		if err := r.Delete(t.Context(), uid); err != nil {
			t.Error(err)
		}
	}
	if left, err := r.Leftovers(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// gateReader blocks until it is opened, then answers lines. It tells of the first read.
type gateReader struct{ gate, reading chan struct{} }

func (g *gateReader) open() { close(g.gate) }

func (g *gateReader) Read(p []byte) (int, error) {
	select {
	case g.reading <- struct{}{}:
	default:
	}
	<-g.gate
	return copy(p, "line\n"), nil
}

// gateWriter tells of the first write.
type gateWriter struct{ written chan struct{} }

func (g *gateWriter) Write(p []byte) (int, error) {
	select {
	case g.written <- struct{}{}:
	default:
	}
	return len(p), nil
}

func newGate() (*gateReader, *gateWriter) {
	return &gateReader{make(chan struct{}), make(chan struct{}, 1)}, &gateWriter{make(chan struct{}, 1)}
}
