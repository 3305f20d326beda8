package containers_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

func TestExec(t *testing.T) {
	env := containerstest.Shared(t)
	r := env.Open(t, nil)
	spec := newSpec(t, r, "sleep 1000")
	spec.Env = []containers.EnvVar{{Name: "OF", Value: "sandbox"}}
	run(t, r, spec)
	exec := func(e containers.ExecSpec, streams containers.ExecIO) (int, error) {
		t.Helper()
		return r.Exec(t.Context(), spec.UID, e, streams)
	}

	t.Run("exit codes", func(t *testing.T) {
		for script, want := range map[string]int{"exit 0": 0, "exit 3": 3, "kill -9 $$": 137} {
			if code, err := exec(containers.ExecSpec{Command: []string{"sh", "-c", script}}, containers.ExecIO{}); err != nil || code != want {
				t.Errorf("%s: %d, %v, want %d", script, code, err, want)
			}
		}
	})
	t.Run("both streams apart", func(t *testing.T) {
		var out, errout bytes.Buffer
		code, err := exec(containers.ExecSpec{Command: []string{"sh", "-c", "echo out; echo err >&2"}}, containers.ExecIO{Stdout: &out, Stderr: &errout})
		if err != nil || code != 0 || out.String() != "out\n" || errout.String() != "err\n" {
			t.Errorf("%d, %v, stdout %q, stderr %q", code, err, out.String(), errout.String())
		}
	})
	t.Run("both streams in one buffer lose nothing", func(t *testing.T) {
		var both bytes.Buffer
		code, err := exec(containers.ExecSpec{Command: []string{"sh", "-c", "seq 1 5000 & seq 1 5000 >&2; wait"}}, containers.ExecIO{Stdout: &both, Stderr: &both})
		if got := strings.Count(both.String(), "\n"); err != nil || code != 0 || got != 10000 {
			t.Errorf("%d, %v, %d lines", code, err, got)
		}
	})
	t.Run("large input and output", func(t *testing.T) {
		data := bytes.Repeat([]byte("0123456789abcdef"), 1<<18) // 4 MiB
		hash := sha256.New()
		code, err := exec(containers.ExecSpec{Command: []string{"cat"}}, containers.ExecIO{Stdin: bytes.NewReader(data), Stdout: hash})
		if err != nil || code != 0 || !bytes.Equal(hash.Sum(nil), func() []byte { s := sha256.Sum256(data); return s[:] }()) {
			t.Errorf("%d, %v: the output is not the input", code, err)
		}
	})
	t.Run("environment and working directory", func(t *testing.T) {
		var out bytes.Buffer
		code, err := exec(containers.ExecSpec{Command: []string{"sh", "-c", "echo $OF $EXEC $PWD"}, WorkingDir: "/tmp", Env: []containers.EnvVar{{Name: "EXEC", Value: "x"}}},
			containers.ExecIO{Stdout: &out})
		if err != nil || code != 0 || out.String() != "sandbox x /tmp\n" {
			t.Errorf("%d, %v, %q", code, err, out.String())
		}
	})
	t.Run("refusals", func(t *testing.T) {
		for name, e := range map[string]containers.ExecSpec{
			"no command": {}, "not found": {Command: []string{"no-such-program"}}, "not executable": {Command: []string{"/etc/passwd"}},
			"relative directory": {Command: []string{"true"}, WorkingDir: "tmp"}, "bad variable": {Command: []string{"true"}, Env: []containers.EnvVar{{}}},
		} {
			_, err := exec(e, containers.ExecIO{})
			if !errdefs.IsInvalidArgument(err) {
				t.Errorf("%s: %v", name, err)
			}
		}
		_, err := r.Exec(t.Context(), "unknown", containers.ExecSpec{Command: []string{"true"}}, containers.ExecIO{})
		wantFault(t, err, errdefs.IsNotFound, fault.SandboxNotFound)
		created := newSpec(t, r, "true")
		create(t, r, created)
		_, err = r.Exec(t.Context(), created.UID, containers.ExecSpec{Command: []string{"true"}}, containers.ExecIO{})
		wantFault(t, err, errdefs.IsFailedPrecondition, fault.SandboxNotRunning)
	})
	t.Run("a cancelled command is killed with its children", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		begun, w := io.Pipe()
		done := make(chan error, 1)
		go func() {
			_, err := r.Exec(ctx, spec.UID, containers.ExecSpec{Command: []string{"sh", "-c", "sleep 4242 & echo begun; sleep 4242"}}, containers.ExecIO{Stdout: w})
			w.CloseWithError(err)
			done <- err
		}()
		if _, err := begun.Read(make([]byte, 16)); err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		// A killed process is gone from ps once PID 1 has reaped it.
		sh(t, r, spec.UID, "for i in $(seq 500); do ps | grep -q '[4]242' || exit 0; usleep 10000; done; ps; exit 1")
	})
	t.Run("a failing writer ends the command", func(t *testing.T) {
		_, err := exec(containers.ExecSpec{Command: []string{"yes"}}, containers.ExecIO{Stdout: failingWriter{}})
		if !errors.Is(err, errReaderGone) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("a background process does not keep the caller", func(t *testing.T) {
		var out bytes.Buffer
		code, err := exec(containers.ExecSpec{Command: []string{"sh", "-c", "sleep 1000 & echo done"}}, containers.ExecIO{Stdout: &out})
		if err != nil || code != 0 || out.String() != "done\n" {
			t.Errorf("%d, %v, %q", code, err, out.String())
		}
	})
	t.Run("the end of the sandbox ends it", func(t *testing.T) {
		other := newSpec(t, r, "sleep 1000")
		run(t, r, other)
		begun, w := io.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			code, err := r.Exec(t.Context(), other.UID, containers.ExecSpec{Command: []string{"sh", "-c", "echo begun; sleep 1000"}}, containers.ExecIO{Stdout: w})
			w.Close()
			if err == nil && code != 137 {
				t.Errorf("exit code %d", code)
			}
		}()
		if _, err := begun.Read(make([]byte, 16)); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Stop(t.Context(), other.UID, 0); err != nil {
			t.Fatal(err)
		}
		select {
		case <-done:
		case <-time.After(patience):
			t.Fatal("Exec did not return")
		}
	})

	files, err := filepath.Glob(filepath.Join(env.Config().RunDir, "exec", spec.UID, "*"))
	if err != nil || len(files) > 0 {
		t.Errorf("files are left: %v, %v", files, err)
	}
}

var errReaderGone = errors.New("the reader is gone")

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errReaderGone }

// TestSweepEndsAnExecWithoutItsCaller makes what a killed agent leaves: a command that runs, with nobody to wait for it.
func TestSweepEndsAnExecWithoutItsCaller(t *testing.T) {
	env := containerstest.Shared(t)
	dying := env.Open(t, nil)
	spec := newSpec(t, dying, "sleep 1000")
	run(t, dying, spec)
	begun, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, err := dying.Exec(ctx, spec.UID, containers.ExecSpec{Command: []string{"sh", "-c", "echo begun; sleep 4343"}}, containers.ExecIO{Stdout: w})
		w.CloseWithError(err)
	}()
	if _, err := begun.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}

	next := env.Open(t, nil)
	removed, err := next.Sweep(t.Context())
	if err != nil || len(removed) != 1 || removed[0].Kind != containers.LeftoverExec || removed[0].UID != spec.UID {
		t.Errorf("Sweep: %v, %v", removed, err)
	}
	if out := sh(t, next, spec.UID, "ps"); strings.Contains(out, "4343") {
		t.Errorf("the command still runs:\n%s", out)
	}
	if c := get(t, next, spec.UID); c.State != containers.Running {
		t.Errorf("the sandbox is %s", c.State)
	}
	if _, err := os.Stat(filepath.Join(env.Config().RunDir, "exec", spec.UID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("files are left: %v", err)
	}
	cancel()
	<-done
}
