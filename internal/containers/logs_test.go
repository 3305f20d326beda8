package containers_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

func TestAFloodOfOutputIsBounded(t *testing.T) {
	const size, files = 64 << 10, 2
	r := containerstest.Shared(t).Open(t, func(c *containers.Config) { c.LogMaxSize, c.LogMaxFiles = size, files })
	spec := newSpec(t, r, "seq 1 100000; echo error >&2; echo last")
	run(t, r, spec)
	awaitState(t, r, spec.UID, containers.Stopped)
	if exit, err := r.DeleteTask(t.Context(), spec.UID); err != nil || exit.Code != 0 {
		t.Fatalf("%+v, %v", exit, err)
	}
	var total int64
	found, err := filepath.Glob(filepath.Join(r.LogDir(spec.UID), "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range found {
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		total += info.Size()
	}
	if len(found) > files || total > files*size {
		t.Errorf("the log has %d files and %d bytes", len(found), total)
	}
	var tail []string
	if err := r.Logs(t.Context(), spec.UID, containers.LogOptions{Tail: 2, Stream: "stdout"}, func(e containers.LogEntry) error {
		tail = append(tail, e.Text)
		return nil
	}); err != nil || strings.Join(tail, " ") != "100000 last" {
		t.Errorf("the end of the log is %q, %v", tail, err)
	}
}

func TestLogsFollowASandboxToItsEnd(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "i=0; while [ $i -lt 5 ]; do echo line $i; i=$((i+1)); done; echo ready; trap 'echo bye; exit 0' TERM; while :; do sleep 0.1; done")
	run(t, r, spec)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ready, done := make(chan struct{}), make(chan error, 1)
	var lines []string
	go func() {
		done <- r.Logs(ctx, spec.UID, containers.LogOptions{Follow: true}, func(e containers.LogEntry) error {
			if e.Text == "ready" {
				close(ready)
			}
			lines = append(lines, e.Text)
			return nil
		})
	}()
	select {
	case <-ready:
	case err := <-done:
		t.Fatalf("the log ended before the sandbox: %v", err)
	}
	if _, err := r.Stop(t.Context(), spec.UID, patience); err != nil {
		t.Fatal(err)
	}
	if _, err := r.DeleteTask(t.Context(), spec.UID); err != nil {
		t.Fatal(err)
	}
	if err := r.Delete(t.Context(), spec.UID); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	var want []string
	for i := range 5 {
		want = append(want, fmt.Sprint("line ", i))
	}
	if got := strings.Join(lines, ","); !strings.HasPrefix(got, strings.Join(want, ",")+",ready") {
		t.Errorf("log %s", got)
	}
	err := r.Logs(ctx, spec.UID, containers.LogOptions{}, nil)
	wantFault(t, err, errdefs.IsNotFound, fault.SandboxNotFound)
	err = r.Logs(ctx, spec.UID, containers.LogOptions{Stream: "stdlog"}, nil)
	wantFault(t, err, errdefs.IsInvalidArgument, fault.InvalidRequest)
}
