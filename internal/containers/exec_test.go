package containers_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
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
	if files, err := filepath.Glob(filepath.Join(env.Config().RunDir, "exec", spec.UID, "*")); err != nil || len(files) != 0 {
		t.Errorf("files are left: %v, %v", files, err)
	}
	cancel()
	<-done
}

// TestSweepEndsAnExecThatWasBeingStarted makes what an agent leaves that is killed between the creation of a command and
// its start: a shim that waits for somebody to read the output, and answers nothing about the sandbox meanwhile.
func TestSweepEndsAnExecThatWasBeingStarted(t *testing.T) {
	env := containerstest.Shared(t)
	r := env.Open(t, nil)
	spec := newSpec(t, r, "sleep 1000")
	run(t, r, spec)
	config := env.Config()
	client, err := containerd.New(config.Address, containerd.WithDefaultNamespace(cmp.Or(config.Namespace, containers.DefaultNamespace)))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	container, err := client.LoadContainer(t.Context(), spec.UID)
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.Task(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	oci, err := container.Spec(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	oci.Process.Args = []string{"sleep", "4344"}
	// Two: the first that is swept is kept waiting by the other.
	var started sync.WaitGroup
	for _, id := range []string{"exec-a", "exec-b"} {
		dir := filepath.Join(config.RunDir, "exec", spec.UID, id)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		fifos := cio.Config{Stdout: filepath.Join(dir, "stdout"), Stderr: filepath.Join(dir, "stderr")}
		for _, f := range []string{fifos.Stdout, fifos.Stderr} {
			if err := unix.Mkfifo(f, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		process, err := task.Exec(t.Context(), id, oci.Process, func(string) (cio.IO, error) { return unread{fifos}, nil })
		if err != nil {
			t.Fatal(err)
		}
		if id == "exec-b" {
			// As that of a killed agent: nobody reads its answer.
			started.Go(func() { _ = process.Start(t.Context()) })
		}
	}
	// It waits in the shim as soon as the command itself is there.
	testenv.Eventually(t, time.Minute, "the command is there", func() bool {
		for _, pid := range r.Processes(spec.UID) {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if strings.Contains(string(line), "4344") {
				return true
			}
		}
		return false
	})

	removed, err := r.Sweep(t.Context())
	if err != nil || len(removed) != 2 || removed[0].Kind != containers.LeftoverExec || removed[1].Kind != containers.LeftoverExec {
		t.Errorf("Sweep: %v, %v", removed, err)
	}
	started.Wait()
	if out := sh(t, r, spec.UID, "ps"); strings.Contains(out, "4344") {
		t.Errorf("a command still runs:\n%s", out)
	}
}

// unread is the IO of a process whose output nobody opens.
type unread struct{ config cio.Config }

func (u unread) Config() cio.Config { return u.config }
func (unread) Cancel()              {}
func (unread) Wait()                {}
func (unread) Close() error         { return nil }
