package createhook_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/pods/createhook"
)

func serve(t *testing.T, socket string, attach func(context.Context, createhook.Request) error) (stop func()) {
	t.Helper()
	_ = os.Remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- createhook.Serve(ctx, l, attach) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestAsk(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "hook.sock")
	want := createhook.Request{PodUID: "u", Container: "main", ID: "i", PID: 7, Root: "/r", Targets: []string{"/a", "/b"}}
	stop := serve(t, socket, func(_ context.Context, r createhook.Request) error {
		if r.PodUID != want.PodUID || r.Container != want.Container || r.ID != want.ID || r.PID != want.PID || r.Root != want.Root || len(r.Targets) != 2 {
			t.Errorf("%+v", r)
		}
		if r.PID == 7 {
			want.PID = 8
			return nil
		}
		return errors.New("no volume for /a")
	})
	if err := createhook.Ask(t.Context(), socket, want); err != nil {
		t.Error(err)
	}
	if err := createhook.Ask(t.Context(), socket, want); err == nil || err.Error() != "no volume for /a" {
		t.Error(err)
	}
	stop()
}

// An agent that is away, or is replaced while it is asked, is asked when it is back.
func TestAnAgentThatIsAwayIsWaitedFor(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "hook.sock")
	asked := make(chan error, 1)
	go func() { asked <- createhook.Ask(t.Context(), socket, createhook.Request{}) }()
	reached := make(chan struct{}, 1)
	stop := serve(t, socket, func(ctx context.Context, _ createhook.Request) error {
		reached <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	})
	<-reached
	stop() // as a killed agent: without an answer, or with its last one cut off
	select {
	case err := <-asked:
		t.Fatalf("answered without an agent: %v", err)
	default:
	}
	stop = serve(t, socket, func(context.Context, createhook.Request) error { return nil })
	if err := <-asked; err != nil {
		t.Error(err)
	}
	stop()
}

func TestNobodyThere(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err := createhook.Ask(ctx, filepath.Join(t.TempDir(), "hook.sock"), createhook.Request{Targets: []string{"/data"}})
	if err == nil || !strings.Contains(err.Error(), "/data") || !strings.Contains(err.Error(), "is it running?") {
		t.Error(err)
	}
	var op *net.OpError
	if !errors.As(err, &op) {
		t.Errorf("no cause: %v", err)
	}
}

// The agent hears when a hook is killed.
func TestAHookThatIsGone(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "hook.sock")
	gone := make(chan struct{})
	reached := make(chan struct{})
	stop := serve(t, socket, func(ctx context.Context, _ createhook.Request) error {
		close(reached)
		<-ctx.Done()
		close(gone)
		return ctx.Err()
	})
	defer stop()
	ctx, cancel := context.WithCancel(t.Context())
	go func() { _ = createhook.Ask(ctx, socket, createhook.Request{}) }()
	<-reached
	cancel()
	<-gone
}
