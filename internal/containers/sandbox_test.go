package containers_test

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// patience bounds what a test waits for; it says nothing about how fast things are.
const patience = time.Minute

func open(t *testing.T) *containers.Runtime {
	t.Helper()
	return containerstest.Shared(t).Open(t, nil)
}

var lastUID atomic.Int64

// newSpec is a sandbox with a UID of its own, deleted with the test, that runs a shell script.
func newSpec(t *testing.T, r *containers.Runtime, script string) containers.Spec {
	t.Helper()
	name := strings.ToLower(regexp.MustCompile("[^A-Za-z0-9]+").ReplaceAllString(t.Name(), "-"))
	spec := containers.Spec{
		Descriptor: containers.Descriptor{
			UID: fmt.Sprintf("uid-%d", lastUID.Add(1)), Namespace: "default", Name: name,
			TenantID: "acme", Group: "default", SubGroup: "default", RestartPolicy: "Never",
		},
		Image: containerstest.Image, Command: []string{"sh", "-c", script},
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := r.Delete(ctx, spec.UID); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return spec
}

func create(t *testing.T, r *containers.Runtime, spec containers.Spec) containers.Container {
	t.Helper()
	c, err := r.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// run creates and starts a sandbox.
func run(t *testing.T, r *containers.Runtime, spec containers.Spec) containers.Container {
	t.Helper()
	create(t, r, spec)
	if err := r.Start(t.Context(), spec.UID); err != nil {
		t.Fatal(err)
	}
	return get(t, r, spec.UID)
}

func get(t *testing.T, r *containers.Runtime, uid string) containers.Container {
	t.Helper()
	c, err := r.Get(t.Context(), uid)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// sh runs a script in a sandbox and answers its output without the last line's end. It must succeed.
func sh(t *testing.T, r *containers.Runtime, uid, script string) string {
	t.Helper()
	var out bytes.Buffer
	code, err := r.Exec(t.Context(), uid, containers.ExecSpec{Command: []string{"sh", "-c", script}},
		containers.ExecIO{Stdout: &out, Stderr: &out})
	if err != nil || code != 0 {
		t.Fatalf("%s: exit code %d, %v: %s", script, code, err, out.String())
	}
	return strings.TrimSuffix(out.String(), "\n")
}

// awaitLog reads a sandbox's log until a line contains text.
func awaitLog(t *testing.T, r *containers.Runtime, uid, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	found := false
	err := r.Logs(ctx, uid, containers.LogOptions{Follow: true}, func(e containers.LogEntry) error {
		if strings.Contains(e.Text, text) {
			found = true
			cancel()
		}
		return nil
	})
	if !found {
		t.Fatalf("%q did not appear in the log: %v", text, err)
	}
}

// awaitState waits for a state, on events and a slow ticker.
func awaitState(t *testing.T, r *containers.Runtime, uid string, want containers.State) containers.Container {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	events := r.Events(ctx)
	for {
		c := get(t, r, uid)
		if c.State == want {
			return c
		}
		select {
		case <-events:
		case <-time.After(time.Second):
		case <-ctx.Done():
			t.Fatalf("sandbox %s is %s, never became %s", uid, c.State, want)
		}
	}
}

func wantFault(t *testing.T, err error, is func(error) bool, reason fault.Reason) {
	t.Helper()
	if !is(err) || fault.ReasonOf(err) != reason {
		t.Errorf("got error %v (reason %s), want reason %s", err, fault.ReasonOf(err), reason)
	}
}

func TestLifecycle(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "trap 'exit 7' TERM; echo begun > /begun; echo ready; while :; do sleep 0.1; done")

	created := create(t, r, spec)
	if created.State != containers.Created || created.PID == 0 {
		t.Fatalf("after Create: %+v", created)
	}
	again := create(t, r, spec)
	if again.PID != created.PID {
		t.Errorf("a second Create made another task: PID %d, then %d", created.PID, again.PID)
	}
	for range 2 {
		if err := r.Start(t.Context(), spec.UID); err != nil {
			t.Fatal(err)
		}
	}
	awaitLog(t, r, spec.UID, "ready")
	running := get(t, r, spec.UID)
	if running.State != containers.Running || running.PID != created.PID {
		t.Errorf("after Start: %+v, want PID %d", running, created.PID)
	}
	if running.TenantID != "acme" || running.Name != spec.Name || running.RestartPolicy != "Never" || running.SpecHash == "" || running.CreatedAt.IsZero() {
		t.Errorf("descriptor %+v", running.Descriptor)
	}
	_, err := r.CreateTask(t.Context(), spec.UID)
	wantFault(t, err, errdefs.IsFailedPrecondition, fault.Conflict)
	_, err = r.DeleteTask(t.Context(), spec.UID)
	wantFault(t, err, errdefs.IsFailedPrecondition, fault.Conflict)

	for range 2 {
		exit, err := r.Stop(t.Context(), spec.UID, patience)
		if err != nil || exit.Code != 7 || exit.Reason != containers.ReasonError {
			t.Errorf("Stop: %+v, %v", exit, err)
		}
	}
	if c := get(t, r, spec.UID); c.State != containers.Stopped || c.Exit == nil || c.Exit.Code != 7 {
		t.Errorf("after Stop: %+v", c)
	}
	err = r.Start(t.Context(), spec.UID)
	wantFault(t, err, errdefs.IsFailedPrecondition, fault.SandboxNotRunning)

	for range 2 {
		exit, err := r.DeleteTask(t.Context(), spec.UID)
		if err != nil || exit.Code != 7 {
			t.Errorf("DeleteTask: %+v, %v", exit, err)
		}
	}
	if c := get(t, r, spec.UID); c.State != containers.NoTask || c.Exit == nil || c.Exit.Code != 7 {
		t.Errorf("after DeleteTask: %+v", c)
	}

	// A restart: the same root filesystem, another process.
	remade, err := r.CreateTask(t.Context(), spec.UID)
	if err != nil || remade.State != containers.Created || remade.PID == created.PID {
		t.Fatalf("CreateTask: %+v, %v", remade, err)
	}
	if err := r.Start(t.Context(), spec.UID); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, r, spec.UID, "cat /begun"); got != "begun" {
		t.Errorf("the root filesystem lost a file: %q", got)
	}

	for range 2 {
		if err := r.Delete(t.Context(), spec.UID); err != nil {
			t.Fatal(err)
		}
	}
	_, err = r.Get(t.Context(), spec.UID)
	wantFault(t, err, errdefs.IsNotFound, fault.SandboxNotFound)
	if left, err := r.Leftovers(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("after Delete: %v, %v", left, err)
	}
	if err := r.Start(t.Context(), spec.UID); !errdefs.IsNotFound(err) {
		t.Errorf("Start of a deleted sandbox: %v", err)
	}
}

func TestCreatedMeansNotBegun(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "echo begun")
	c := create(t, r, spec)
	var entries []containers.LogEntry
	read := func() {
		entries = nil
		if err := r.Logs(t.Context(), spec.UID, containers.LogOptions{}, func(e containers.LogEntry) error {
			entries = append(entries, e)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	// What PID 1 is before the start, is the runtime's own program.
	if comm := procFile(t, c.PID, "comm"); !strings.HasPrefix(comm, "runc") {
		t.Errorf("before Start PID 1 is %q", comm)
	}
	if read(); len(entries) > 0 {
		t.Errorf("before Start there is output: %v", entries)
	}
	if err := r.Start(t.Context(), spec.UID); err != nil {
		t.Fatal(err)
	}
	awaitState(t, r, spec.UID, containers.Stopped)
	if _, err := r.DeleteTask(t.Context(), spec.UID); err != nil {
		t.Fatal(err)
	}
	if read(); len(entries) != 1 || entries[0].Text != "begun" || entries[0].Stream != "stdout" {
		t.Errorf("log %v", entries)
	}
}

func TestExitCodes(t *testing.T) {
	r := open(t)
	tests := []struct {
		name, script string
		command      []string
		want         containers.Exit
	}{
		{name: "success", script: "exit 0", want: containers.Exit{Code: 0, Reason: containers.ReasonCompleted}},
		{name: "failure", script: "exit 42", want: containers.Exit{Code: 42, Reason: containers.ReasonError}},
		{name: "signal", script: "kill -TERM $$", want: containers.Exit{Code: 143, Reason: containers.ReasonError}},
		{name: "killed", script: "kill -KILL $$", want: containers.Exit{Code: 137, Reason: containers.ReasonError}},
		{name: "not found", command: []string{"no-such-program"}, want: containers.Exit{Code: 127, Reason: containers.ReasonError}},
		{name: "not executable", command: []string{"/etc/passwd"}, want: containers.Exit{Code: 126, Reason: containers.ReasonError}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			spec := newSpec(t, r, test.script)
			if test.command != nil {
				spec.Command = test.command
			}
			run(t, r, spec)
			exit := awaitState(t, r, spec.UID, containers.Stopped).Exit
			if exit.Code != test.want.Code || exit.Reason != test.want.Reason || exit.At.IsZero() {
				t.Errorf("got %+v, want %+v", exit, test.want)
			}
		})
	}
}

func TestStopKillsWhatIgnoresTerm(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "trap '' TERM; echo ready; while :; do sleep 0.1; done")
	run(t, r, spec)
	awaitLog(t, r, spec.UID, "ready")
	exit, err := r.Stop(t.Context(), spec.UID, 100*time.Millisecond)
	if err != nil || exit.Code != 137 || exit.Reason != containers.ReasonError {
		t.Errorf("Stop: %+v, %v", exit, err)
	}
}

func TestStopRightAfterTheStartIsHeard(t *testing.T) {
	r := open(t)
	for range 5 {
		spec := newSpec(t, r, "sleep 1000")
		run(t, r, spec)
		exit, err := r.Stop(t.Context(), spec.UID, 5*time.Second)
		if err != nil || exit.Code == 137 {
			t.Errorf("Stop: %+v, %v: it was killed, as it had not heard SIGTERM", exit, err)
		}
	}
}

func TestStopOfACreatedSandbox(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "echo begun")
	create(t, r, spec)
	if _, err := r.Stop(t.Context(), spec.UID, patience); err != nil {
		t.Fatal(err)
	}
	if c := get(t, r, spec.UID); c.State != containers.Stopped {
		t.Errorf("after Stop: %+v", c)
	}
}

func TestCreateRefusals(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "sleep 1000")
	create(t, r, spec)
	other := spec
	other.Args = []string{"x"}
	_, err := r.Create(t.Context(), other)
	wantFault(t, err, errdefs.IsAlreadyExists, fault.SandboxExists)

	tests := []struct {
		name   string
		change func(*containers.Spec)
		is     func(error) bool
		reason fault.Reason
		says   string
	}{
		{"image not there", func(s *containers.Spec) { s.Image = "example.test/nothing:1" }, errdefs.IsNotFound, fault.ImageNotFound, "fluxctl image import"},
		{"image malformed", func(s *containers.Spec) { s.Image = "UPPER CASE" }, errdefs.IsInvalidArgument, fault.InvalidImage, "UPPER CASE"},
		{"no image", func(s *containers.Spec) { s.Image = "" }, errdefs.IsInvalidArgument, fault.InvalidRequest, "image"},
		{"UID a path", func(s *containers.Spec) { s.UID = "../x" }, errdefs.IsInvalidArgument, fault.InvalidRequest, "UID"},
		{"UID empty", func(s *containers.Spec) { s.UID = "" }, errdefs.IsInvalidArgument, fault.InvalidRequest, "UID"},
		{"hostname", func(s *containers.Spec) { s.Hostname = "a b" }, errdefs.IsInvalidArgument, fault.InvalidRequest, "host name"},
		{"workdir relative", func(s *containers.Spec) { s.WorkingDir = "x" }, errdefs.IsInvalidArgument, fault.InvalidRequest, "absolute"},
		{"env name", func(s *containers.Spec) { s.Env = []containers.EnvVar{{Name: "A=B"}} }, errdefs.IsInvalidArgument, fault.InvalidRequest, "A=B"},
		{"env NUL", func(s *containers.Spec) { s.Env = []containers.EnvVar{{Name: "A", Value: "\x00"}} }, errdefs.IsInvalidArgument, fault.InvalidRequest, "NUL"},
		{"argument NUL", func(s *containers.Spec) { s.Args = []string{"\x00"} }, errdefs.IsInvalidArgument, fault.InvalidRequest, "NUL"},
		{"memory too small", func(s *containers.Spec) { s.Resources.MemoryBytes = 1 << 20 }, errdefs.IsInvalidArgument, fault.InvalidRequest, "memory"},
		{"CPU too small", func(s *containers.Spec) { s.Resources.CPUMilli = 1 }, errdefs.IsInvalidArgument, fault.InvalidRequest, "CPU"},
		{"pids too small", func(s *containers.Spec) { s.Resources.PidsLimit = 1 }, errdefs.IsInvalidArgument, fault.InvalidRequest, "processes"},
		{"labels too long", func(s *containers.Spec) { s.Labels = map[string]string{"x": strings.Repeat("x", 5000)} }, errdefs.IsInvalidArgument, fault.InvalidRequest, "labels"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			spec := newSpec(t, r, "sleep 1000")
			bad := spec
			test.change(&bad)
			_, err := r.Create(t.Context(), bad)
			wantFault(t, err, test.is, test.reason)
			if err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("the message does not say %q: %v", test.says, err)
			}
			if left, err := r.Leftovers(t.Context()); err != nil || len(left) > 0 {
				t.Errorf("the refusal left %v, %v", left, err)
			}
		})
	}
}

func TestRecordVolumesChangesNothingElse(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "sleep 1000")
	before := create(t, r, spec)
	for _, record := range []string{`[{"target":"/data"}]`, `[]`} {
		if err := r.RecordVolumes(t.Context(), spec.UID, []byte(record)); err != nil {
			t.Fatal(err)
		}
		after := get(t, r, spec.UID)
		if string(after.Volumes) != record {
			t.Errorf("recorded %s, read %s", record, after.Volumes)
		}
		if after.Image != before.Image || after.PID != before.PID || after.SpecHash != before.SpecHash || after.State != before.State {
			t.Errorf("before %+v, after %+v", before, after)
		}
	}
	// The specification is still there, and its task can be made again.
	if _, err := r.Stop(t.Context(), spec.UID, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := r.CreateTask(t.Context(), spec.UID); err != nil {
		t.Errorf("after RecordVolumes: %v", err)
	}
	err := r.RecordVolumes(t.Context(), "unknown", []byte("[]"))
	wantFault(t, err, errdefs.IsNotFound, fault.SandboxNotFound)
}

func TestListHasAllSandboxes(t *testing.T) {
	r := open(t)
	states := map[string]containers.State{}
	for _, start := range []bool{false, true} {
		spec := newSpec(t, r, "sleep 1000")
		create(t, r, spec)
		states[spec.UID] = containers.Created
		if start {
			if err := r.Start(t.Context(), spec.UID); err != nil {
				t.Fatal(err)
			}
			states[spec.UID] = containers.Running
		}
	}
	list, err := r.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != len(states) {
		t.Errorf("%d sandboxes: %+v", len(list), list)
	}
	for _, c := range list {
		if c.State != states[c.UID] || c.PID == 0 || c.Name == "" {
			t.Errorf("%+v, want state %s", c, states[c.UID])
		}
	}
}
