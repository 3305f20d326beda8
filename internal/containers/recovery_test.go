package containers_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// TestEveryStepCanBeTheLast stops each operation before and after each of its steps, as a kill would, and shows that the
// same call completes it and that Delete removes it.
func TestEveryStepCanBeTheLast(t *testing.T) {
	env := containerstest.Shared(t)
	clean := env.Open(t, nil)
	type operation struct {
		name  string
		steps []string
		// setUp brings the sandbox to where the operation begins.
		setUp func(t *testing.T, r *containers.Runtime, spec containers.Spec)
		do    func(t *testing.T, r *containers.Runtime, spec containers.Spec) error
		after containers.State // "" is deleted
	}
	nothing := func(*testing.T, *containers.Runtime, containers.Spec) {}
	started := func(t *testing.T, r *containers.Runtime, spec containers.Spec) {
		run(t, r, spec)
		awaitLog(t, r, spec.UID, "ready")
	}
	stopped := func(t *testing.T, r *containers.Runtime, spec containers.Spec) {
		run(t, r, spec)
		if _, err := r.Stop(t.Context(), spec.UID, 0); err != nil {
			t.Fatal(err)
		}
	}
	operations := []operation{
		{"Create", containers.CreateSteps, nothing, func(t *testing.T, r *containers.Runtime, spec containers.Spec) error {
			_, err := r.Create(t.Context(), spec)
			return err
		}, containers.Created},
		{"Start", containers.StartSteps, func(t *testing.T, r *containers.Runtime, spec containers.Spec) { create(t, r, spec) },
			func(t *testing.T, r *containers.Runtime, spec containers.Spec) error {
				return r.Start(t.Context(), spec.UID)
			},
			containers.Running},
		{"Stop", containers.StopSteps, started, func(t *testing.T, r *containers.Runtime, spec containers.Spec) error {
			_, err := r.Stop(t.Context(), spec.UID, 1)
			return err
		}, containers.Stopped},
		{"DeleteTask", containers.DeleteTaskSteps, stopped, func(t *testing.T, r *containers.Runtime, spec containers.Spec) error {
			_, err := r.DeleteTask(t.Context(), spec.UID)
			return err
		}, containers.NoTask},
		{"Delete", containers.DeleteSteps, started, func(t *testing.T, r *containers.Runtime, spec containers.Spec) error {
			return r.Delete(t.Context(), spec.UID)
		}, ""},
	}
	for _, op := range operations {
		for _, step := range op.steps {
			for _, done := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s stopped at %s done=%t", op.name, step, done), func(t *testing.T) {
					spec := newSpec(t, clean, "trap '' TERM; echo ready; while :; do sleep 0.1; done")
					op.setUp(t, clean, spec)
					dieAt(t, env, step, done, func(r *containers.Runtime) error { return op.do(t, r, spec) })

					if err := op.do(t, clean, spec); err != nil {
						t.Fatalf("the same again: %v", err)
					}
					if op.after != "" {
						if c := get(t, clean, spec.UID); c.State != op.after {
							t.Errorf("state %s, want %s", c.State, op.after)
						}
						if op.name == "Stop" || op.name == "DeleteTask" {
							if c := get(t, clean, spec.UID); c.Exit == nil || c.Exit.Code != 137 {
								t.Errorf("exit %+v", c.Exit)
							}
						}
					}
					nothingLeft(t, clean, spec.UID)

					// And Delete, right at the same place.
					if op.name != "Delete" {
						if err := clean.Delete(t.Context(), spec.UID); err != nil {
							t.Fatal(err)
						}
						op.setUp(t, clean, spec)
						dieAt(t, env, step, done, func(r *containers.Runtime) error { return op.do(t, r, spec) })
						if err := clean.Delete(t.Context(), spec.UID); err != nil {
							t.Fatalf("Delete: %v", err)
						}
						nothingLeft(t, clean, "")
					}
				})
			}
		}
	}
}

// dieAt lets an operation end in the middle: the goroutine that runs it exits there, as a killed process would, with
// locks held and nothing undone. It uses a runtime of its own, which is not used afterwards.
func dieAt(t *testing.T, env *containerstest.Env, step string, done bool, do func(*containers.Runtime) error) {
	t.Helper()
	hit := false
	r := env.Open(t, func(c *containers.Config) {
		c.Steps = func(s string, d bool) {
			if s == step && d == done && !hit {
				hit = true
				runtime.Goexit()
			}
		}
	})
	ended := make(chan error, 1)
	go func() {
		defer close(ended)
		ended <- do(r)
	}()
	err := <-ended
	if !hit {
		t.Fatalf("step %s was not taken (%v)", step, err)
	}
}

// nothingLeft says that nothing is left over, and that the directories are those of the sandbox with this UID only.
func nothingLeft(t *testing.T, r *containers.Runtime, uid string) {
	t.Helper()
	left, err := r.Leftovers(t.Context())
	if err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
	dirs, err := filepath.Glob(filepath.Dir(r.LogDir("x")) + "/../*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		if filepath.Base(dir) != uid {
			t.Errorf("left over: %s", dir)
		}
	}
}

// TestSweep lets a creation and a deletion end at each step, and sweeps.
func TestSweep(t *testing.T) {
	env := containerstest.Shared(t)
	r := env.Open(t, nil)
	bystander := newSpec(t, r, "sleep 1000")
	before := run(t, r, bystander)

	var kinds []containers.LeftoverKind
	sweep := func(t *testing.T) {
		found, err := r.Leftovers(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		removed, err := r.Sweep(t.Context())
		// containerd's garbage collector takes a snapshot that nothing refers to, and may have been first.
		missed := slices.DeleteFunc(slices.Clone(found), func(l containers.Leftover) bool {
			return slices.Contains(removed, l) || l.Kind == containers.LeftoverSnapshot
		})
		if err != nil || len(missed) > 0 || len(removed) > len(found) {
			t.Errorf("found %v, removed %v, %v", found, removed, err)
		}
		for _, l := range removed {
			kinds = append(kinds, l.Kind)
		}
		nothingLeft(t, r, bystander.UID)
	}
	for _, step := range containers.CreateSteps {
		t.Run("after "+step, func(t *testing.T) {
			spec := newSpec(t, r, "sleep 1000")
			dieAt(t, env, step, true, func(r *containers.Runtime) error {
				_, err := r.Create(t.Context(), spec)
				return err
			})
			if step == containers.StepCreateContainer || step == containers.StepCreateRelease || step == containers.StepCreateTask {
				// It has an owner now, who decides; only a lease may be left over.
				if _, err := r.Sweep(t.Context()); err != nil {
					t.Fatal(err)
				}
				if _, err := r.Create(t.Context(), spec); err != nil {
					t.Errorf("Create after Sweep: %v", err)
				}
				if err := r.Delete(t.Context(), spec.UID); err != nil {
					t.Fatal(err)
				}
				return
			}
			sweep(t)
		})
	}
	for _, step := range containers.DeleteSteps[slices.Index(containers.DeleteSteps, containers.StepDeleteContainer):] {
		t.Run("after "+step, func(t *testing.T) {
			spec := newSpec(t, r, "sleep 1000")
			run(t, r, spec)
			dieAt(t, env, step, true, func(r *containers.Runtime) error { return r.Delete(t.Context(), spec.UID) })
			sweep(t)
		})
	}
	for _, kind := range []containers.LeftoverKind{containers.LeftoverSnapshot, containers.LeftoverLease, containers.LeftoverFiles} {
		if !slices.Contains(kinds, kind) {
			t.Errorf("no leftover %s was swept: %v", kind, kinds)
		}
	}
	if c := get(t, r, bystander.UID); c.State != containers.Running || c.PID != before.PID {
		t.Errorf("the bystander was %+v, is %+v", before, c)
	}
}

// TestChildStop stops a containerd with sandboxes in it, and starts it again, as a reboot would.
func TestChildStop(t *testing.T) {
	env := containerstest.New(t)
	r := env.Open(t, nil)
	spec := newSpec(t, r, "sleep 1000")
	c := run(t, r, spec)
	sh(t, r, spec.UID, "echo kept > /file")

	again, err := containers.StartContainerd(t.Context(), env.ChildConfig())
	if err != nil || again.PID() != env.Child.PID() {
		t.Fatalf("a second start: PID %d, %v, want %d", again.PID(), err, env.Child.PID())
	}
	other := env.ChildConfig()
	other.State += "2"
	if _, err := containers.StartContainerd(t.Context(), other); err == nil {
		t.Error("a second start with another configuration was accepted")
	}
	for range 2 {
		if err := env.Child.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// A zombie, whom the machine's own PID 1 has yet to reap, has no command line.
	if cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", c.PID)); err == nil && len(cmdline) > 0 {
		t.Errorf("the sandbox's process still runs: %q", cmdline)
	}
	if _, err := os.Stat(env.ChildConfig().State); err == nil {
		t.Error("the state directory is still there")
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || bytes.Contains(mounts, []byte(env.Dir)) {
		t.Errorf("a mount is left below %s: %v", env.Dir, err)
	}
	if cgroups, err := filepath.Glob("/sys/fs/cgroup/*" + c.CgroupPath); err != nil || len(cgroups) > 0 {
		t.Errorf("cgroups are left: %v, %v", cgroups, err)
	}
	env.RestartContainerd(t)
	if c := get(t, r, spec.UID); c.State != containers.NoTask || c.Exit != nil {
		t.Errorf("after the restart: %+v", c)
	}
	if _, err := r.CreateTask(t.Context(), spec.UID); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context(), spec.UID); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, r, spec.UID, "cat /file"); got != "kept" {
		t.Errorf("the root filesystem: %q", got)
	}
}

func TestOpenWithoutContainerd(t *testing.T) {
	config := containerstest.Shared(t).Config()
	config.Address = filepath.Join(t.TempDir(), "none.sock")
	_, err := containers.Open(t.Context(), config)
	wantFault(t, err, errdefs.IsUnavailable, fault.AgentUnavailable)
	if err == nil || !strings.Contains(err.Error(), config.Address) {
		t.Errorf("the message does not name the socket: %v", err)
	}
}
