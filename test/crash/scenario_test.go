//go:build failpoint

package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

const (
	tenant = "t1"
	// victim is the one sandbox of a scenario.
	victim = "victim"
)

// step is one request, or a few that belong together. It may be done again after an error, whatever it did before.
type step struct {
	name string
	do   func(ctx context.Context, w *world) error
}

// scenario is a way through the life of a sandbox, at whose end nothing is left.
type scenario struct {
	name string
	// points are the failpoints at which it is disturbed: patterns of path.Match. "N*" before one means the point's Nth
	// hit, as the first is in an earlier step; "!" takes away what an earlier pattern has.
	points []string
	// also arms a further failpoint: how, the scenario's steps know.
	also  func(w *world) string
	steps []step
}

var scenarios = []scenario{
	{
		name: "create with volumes, delete",
		points: []string{"container/create/*/*", "container/start/*/*", "container/stop/term/*", "container/stop/record-exit/*",
			"container/delete-task/*/*", "container/delete/*/*", "!container/delete/kill/*", "!container/delete/task/*",
			"sandbox/*/*", "finalizer/release/*", "!sandbox/journal-stopped/*",
			"attach/journal-intent/*", "attach/move/*", "attach/journal-mounted/*"},
		steps: []step{create(fullVictim), remove},
	},
	{
		name:   "add volumes",
		points: []string{"attach/*/*", "!attach/journal-waiting/*", "source/*/*", "image-create/*/*", "loop-attach/*/*"},
		steps:  []step{create(plainVictim), addDirectory, addImage, addToFull, remove},
	},
	{
		name:   "remove volumes",
		points: []string{"detach/*/*", "2*source/journal-releas*/*", "2*source/source-release/*"},
		steps:  []step{create(fullVictim), addDirectory, removeDirectory, removeBusy, removeBusyForced, remove},
	},
	{
		// The CSI driver is in the server's process, and dies with it.
		name: "named volume",
		points: []string{"csi-create/*/*", "csi-image/*/*", "csi-device/*/*", "csi-publish/*/*", "csi-unpublish/*/*", "csi-delete/*/*",
			"direct-publish/*/*", "direct-release/*/*", "source/*/*",
			"2*direct-publish/publish/*", "2*csi-publish/mount/*", "2*direct-release/unpublish/*", "2*csi-unpublish/unmount/*"},
		steps: []step{create(plainVictim), createNamed, addNamed, writeNamed, removeNamed, addNamed, readNamed, removeNamed, deleteNamed, remove},
	},
	{
		name: "restart of the process",
		points: []string{"container/delete-task/*/*", "2*container/create/task/*", "2*container/start/task/*",
			"2*sandbox/journal-started/*", "4*attach/move/*", "4*attach/journal-mounted/*"},
		steps: []step{create(fullVictim), addDirectory, killProcess, remove},
	},
	{
		name: "pause and resume",
		points: []string{"sandbox/journal-stopped/*", "container/stop/*/*", "!container/stop/kill/*",
			"container/delete-task/*/*", "2*container/create/task/*",
			"2*sandbox/journal-started/*", "4*attach/move/*"},
		steps: []step{create(fullVictim), addImage, pause(true), pause(false), remove},
	},
	{
		// The server dies after it answered and before what it answered is in its file.
		name:   "a lull after a volume was added",
		points: []string{"store/flush/*"},
		steps:  []step{create(plainVictim), addDirectory, lull, removeDirectory, lull, remove},
	},
	{
		name:   "volume of a sandbox that never comes",
		points: []string{"attach/journal-waiting/*"},
		steps:  []step{attachAtCreate},
	},
	{
		name:   "created and never started",
		points: []string{"container/stop/kill/*"},
		steps:  []step{createStuck, remove},
	},
	{
		name:   "deleted while it is created",
		points: []string{"container/delete/kill/*", "container/delete/task/*"},
		also:   func(w *world) string { return "container/create/task/after=pause(" + w.pauseFile() + ")" },
		steps:  []step{createAndDelete, remove},
	},
}

// pauseFile is there while the server pauses at a failpoint.
func (w *world) pauseFile() string { return filepath.Join(w.Dir, "pause") }

func ref(name string) *sandboxv1.SandboxRef {
	return &sandboxv1.SandboxRef{Namespace: "default", Name: name}
}

func (w *world) directory(name string) string { return w.Data("tenants", tenant, name) }

// plainVictim has no volumes.
func plainVictim(*world) *sandboxv1.SandboxSpec {
	return &sandboxv1.SandboxSpec{TenantId: tenant, Image: machine.Image, RestartPolicy: "Always",
		Command: []string{"sh", "-c", "mkdir -p /full; touch /full/file; exec sleep 3600"}}
}

// fullVictim has a static volume, and a dynamic one in which its process sits.
func fullVictim(w *world) *sandboxv1.SandboxSpec {
	s := plainVictim(w)
	s.WorkingDir = "/busy"
	s.VolumeMounts = []*sandboxv1.VolumeMount{{Source: w.directory("static"), Target: "/static", Mode: "ro"}}
	s.DynamicVolumes = []*sandboxv1.DynamicVolume{{VolumeType: "local", Source: w.directory("busy"), Target: "/busy"}}
	return s
}

func create(spec func(*world) *sandboxv1.SandboxSpec) step {
	return step{"create", func(ctx context.Context, w *world) error {
		_, err := w.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Wait: true,
			Sandbox: &sandboxv1.Sandbox{Name: victim, Spec: spec(w)}})
		if reason(err) == fault.SandboxExists {
			return w.awaitPhase(ctx, "Running")
		}
		return err
	}}
}

// createStuck makes a sandbox that cannot start, as a volume of it is missing.
var createStuck = step{"create with a missing volume", func(ctx context.Context, w *world) error {
	spec := fullVictim(w)
	spec.DynamicVolumes[0].Source = w.directory("missing")
	_, err := w.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Wait: true,
		Sandbox: &sandboxv1.Sandbox{Name: victim, Spec: spec}})
	if reason(err) == fault.SandboxExists {
		return nil
	}
	return expect(err, fault.SourceNotFound)
}}

// createAndDelete deletes a sandbox while its creation stands at a failpoint, if that is armed.
var createAndDelete = step{"delete while it is created", func(ctx context.Context, w *world) error {
	_, err := w.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Sandbox: &sandboxv1.Sandbox{Name: victim, Spec: plainVictim(w)}})
	if err != nil && reason(err) != fault.SandboxExists {
		return err
	}
	if err := w.awaitPauseOr(ctx, func() bool {
		sb, err := w.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Sandbox: ref(victim)})
		return err != nil || sb.GetStatus().GetPhase() == "Running" || sb.GetStatus().GetPhase() == "Terminating"
	}); err != nil {
		return err
	}
	defer os.Remove(w.pauseFile())
	_, err = w.Sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Sandbox: ref(victim)})
	if err != nil && reason(err) != fault.SandboxNotFound {
		return err
	}
	// The command to create it has been called off once the agent has that to delete it, and refuses all others. Until
	// then a detach waits for the creation, which stands still.
	return await(ctx, func(ctx context.Context) error {
		sb, err := w.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Sandbox: ref(victim)})
		if reason(err) == fault.SandboxNotFound {
			return nil
		}
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		defer cancel()
		_, err = w.agent.Detach(ctx, &agentv1.DetachRequest{Command: &agentv1.Command{SandboxUid: sb.GetUid(), OperationId: "look"}, Target: "/none"})
		return expect(err, fault.SandboxTerminating)
	})
}}

// lull asks for nothing that changes anything, for longer than the store lets status wait.
var lull = step{"a lull", func(ctx context.Context, w *world) error {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for range 60 {
		if _, err := w.Volumes.ListSandVolumes(ctx, &sandboxv1.ListSandVolumesRequest{Sandbox: ref(victim)}); err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}}

var remove = step{"delete", func(ctx context.Context, w *world) error {
	_, err := w.Sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Sandbox: ref(victim), Wait: true})
	if reason(err) == fault.SandboxNotFound {
		return nil
	}
	return err
}}

func add(source func(*world) string, target, size string) func(context.Context, *world) error {
	return func(ctx context.Context, w *world) error {
		added, err := w.Volumes.AddSandVolume(ctx, &sandboxv1.AddSandVolumeRequest{Sandbox: ref(victim),
			Volume: &sandboxv1.DynamicVolume{VolumeType: "local", Source: source(w), Target: target, SizeLimit: size}})
		if err == nil && added.GetVolume().GetPhase() != "Mounted" {
			err = fmt.Errorf("added, but %s", added.GetVolume().GetPhase())
		}
		return err
	}
}

func more(w *world) string { return w.directory("more") }

var (
	addDirectory = step{"add a directory at a place that is missing", add(more, "/a/b/c", "")}
	addImage     = step{"add a new image", add((*world).image, "/image", "16Mi")}
	addToFull    = step{"add to a directory that is not empty", func(ctx context.Context, w *world) error {
		if err := await(ctx, func(ctx context.Context) error { return w.has(ctx, "/full/file") }); err != nil {
			return err
		}
		return expect(add(more, "/full", "")(ctx, w), "TARGET_NOT_EMPTY")
	}}
)

// takeAway removes a volume; the answer must be one of those.
func takeAway(ctx context.Context, w *world, target string, force bool, results ...sandboxv1.RemoveSandVolumeResponse_Result) error {
	removed, err := w.Volumes.RemoveSandVolume(ctx, &sandboxv1.RemoveSandVolumeRequest{Sandbox: ref(victim), Target: target, Force: force})
	if err == nil && !slices.Contains(results, removed.GetResult()) {
		err = fmt.Errorf("the answer is %v", removed.GetResult())
	}
	return err
}

var (
	removeDirectory = step{"remove a volume", func(ctx context.Context, w *world) error {
		return takeAway(ctx, w, "/a/b/c", false, sandboxv1.RemoveSandVolumeResponse_DETACHED, sandboxv1.RemoveSandVolumeResponse_ABSENT)
	}}
	removeBusy = step{"remove a volume in use", func(ctx context.Context, w *world) error {
		// It is in use once the process has gone there.
		if err := await(ctx, func(ctx context.Context) error { return w.sitsIn(ctx, w.directory("busy"), "/busy") }); err != nil {
			return err
		}
		err := takeAway(ctx, w, "/busy", false, sandboxv1.RemoveSandVolumeResponse_DETACHED, sandboxv1.RemoveSandVolumeResponse_ABSENT)
		if w.processDies && err == nil {
			return nil
		}
		return expect(err, fault.Busy)
	}}
	removeBusyForced = step{"remove a volume in use by force", func(ctx context.Context, w *world) error {
		return takeAway(ctx, w, "/busy", true, sandboxv1.RemoveSandVolumeResponse_LAZY, sandboxv1.RemoveSandVolumeResponse_ABSENT)
	}}
)

// The named volume of a scenario.
var (
	createNamed = step{"make a named volume", func(ctx context.Context, w *world) error {
		_, err := w.Named.CreateVolume(ctx, &sandboxv1.CreateVolumeRequest{Name: "kept", TenantId: tenant, Size: "16Mi"})
		return err
	}}
	addNamed = step{"add the named volume", func(ctx context.Context, w *world) error {
		added, err := w.Volumes.AddSandVolume(ctx, &sandboxv1.AddSandVolumeRequest{Sandbox: ref(victim),
			Volume: &sandboxv1.DynamicVolume{VolumeType: "pvc", Source: "kept", Target: "/kept", SizeLimit: "16Mi"}})
		if err == nil && added.GetVolume().GetPhase() != "Mounted" {
			err = fmt.Errorf("added, but %s", added.GetVolume().GetPhase())
		}
		return err
	}}
	removeNamed = step{"remove the named volume", func(ctx context.Context, w *world) error {
		return takeAway(ctx, w, "/kept", false, sandboxv1.RemoveSandVolumeResponse_DETACHED, sandboxv1.RemoveSandVolumeResponse_ABSENT)
	}}
	writeNamed = step{"write to the named volume", func(ctx context.Context, w *world) error {
		c, err := w.task(ctx, victim)
		if err == nil {
			err = os.WriteFile(fmt.Sprintf("/proc/%d/root/kept/file", c.PID), []byte("kept"), 0o600)
		}
		return err
	}}
	readNamed   = step{"look for what was written", func(ctx context.Context, w *world) error { return w.has(ctx, "/kept/file") }}
	deleteNamed = step{"delete the named volume", func(ctx context.Context, w *world) error {
		_, err := w.Named.DeleteVolume(ctx, &sandboxv1.DeleteVolumeRequest{Name: "kept"})
		return err
	}}
)

// has is nil when the victim has a file.
func (w *world) has(ctx context.Context, file string) error {
	c, err := w.task(ctx, victim)
	if err == nil {
		_, err = os.Stat(fmt.Sprintf("/proc/%d/root%s", c.PID, file))
	}
	return err
}

// sitsIn is nil when a process of the victim has its working directory in a volume (not below it, where the first
// process was before the volume came), or when the volume is not there.
func (w *world) sitsIn(ctx context.Context, source, target string) error {
	c, err := w.task(ctx, victim)
	if err != nil {
		return err
	}
	want, err := os.Stat(source)
	if err != nil {
		return err
	}
	for _, pid := range w.runtime.Processes(c.UID) {
		if cwd, err := os.Stat(fmt.Sprintf("/proc/%d/cwd", pid)); err == nil && os.SameFile(cwd, want) {
			return nil
		}
	}
	volumes, alive, err := w.volumesIn(c.PID)
	if err != nil || !alive || slices.ContainsFunc(volumes, func(p place) bool { return p.target == target }) {
		return errors.Join(fmt.Errorf("no process sits in %s", source), err)
	}
	return nil
}

// killProcess kills the sandbox's first process, and waits until there is another one with the same volumes.
var killProcess = step{"kill the process", func(ctx context.Context, w *world) error {
	killed := 0
	return await(ctx, func(ctx context.Context) error {
		now, err := w.task(ctx, victim)
		switch {
		case err != nil:
			return err
		case now.State != containers.Running:
			return fmt.Errorf("the task is %s", now.State)
		case killed == 0:
			killed = now.PID
			if err := unix.Kill(killed, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
		if now.PID == killed {
			return fmt.Errorf("process %d still runs", killed)
		}
		volumes, _, err := w.volumesIn(now.PID)
		if err == nil && len(volumes) != 3 {
			err = fmt.Errorf("the new process has %v", volumes)
		}
		return err
	})
}}

func pause(paused bool) step {
	return step{fmt.Sprintf("pause %v", paused), func(ctx context.Context, w *world) error {
		_, err := w.Sandboxes.PauseSandbox(ctx, &sandboxv1.PauseSandboxRequest{Sandbox: ref(victim), Paused: paused, Wait: true})
		return err
	}}
}

// attachAtCreate prepares a volume for a sandbox that the scheduler does not know: it has it deleted.
var attachAtCreate = step{"attach at creation", func(ctx context.Context, w *world) error {
	uid := uuid.NewString()
	_, err := w.agent.Attach(ctx, &agentv1.AttachRequest{
		Command: &agentv1.Command{SandboxUid: uid, OperationId: "late-" + uid}, When: agentv1.When_AT_CREATE, TenantId: tenant,
		Target: "/late", Mode: "rw", EntryHash: "late", Source: &agentv1.AttachRequest_Local{Local: &agentv1.LocalSource{Path: w.directory("more")}}})
	return err
}}

func reason(err error) fault.Reason {
	if err == nil {
		return ""
	}
	return fault.ReasonOf(fault.FromGRPC(err))
}

// expect is nil for an error of the reason.
func expect(err error, want fault.Reason) error {
	switch {
	case err == nil:
		return fmt.Errorf("succeeded: want %s", want)
	case reason(err) != want:
		return fmt.Errorf("want %s: %w", want, err)
	}
	return nil
}

func (w *world) awaitPhase(ctx context.Context, phase string) error {
	return await(ctx, func(ctx context.Context) error { return w.isPhase(ctx, phase) })
}

// isPhase is nil when the victim is in that phase.
func (w *world) isPhase(ctx context.Context, phase string) error {
	sb, err := w.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Sandbox: ref(victim)})
	if err == nil && sb.GetStatus().GetPhase() != phase {
		err = fmt.Errorf("the sandbox is %s: want %s (%s)", sb.GetStatus().GetPhase(), phase, sb.GetStatus().GetMessage())
	}
	return err
}

// awaitPauseOr waits until the server pauses at a failpoint, or something else is so.
func (w *world) awaitPauseOr(ctx context.Context, other func() bool) error {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for {
		if _, err := os.Stat(w.pauseFile()); err == nil || other() {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("the server does not reach the failpoint: %w", ctx.Err())
		}
	}
}

// target is one point, at one of its hits, in one scenario.
type target struct {
	point    string
	hit      string // "", or "2*" for the second
	scenario *scenario
}

func (g target) String() string { return g.scenario.name + "/" + g.hit + g.point }

// arm is the environment that arms the point with an action.
func (g target) arm(w *world, action string) string {
	env := machine.Arm(g.point, g.hit+action)
	if g.scenario.also != nil {
		env += ";" + g.scenario.also(w)
	}
	return env
}

// targets are those of the points, in the order of the scenarios.
func targets(points []string) []target {
	var all []target
	for i := range scenarios {
		s := &scenarios[i]
		var chosen []target
		for _, pattern := range s.points {
			hit := ""
			if n, rest, ok := strings.Cut(pattern, "*"); ok && strings.Trim(n, "0123456789") == "" {
				hit, pattern = n+"*", rest
			}
			pattern, not := strings.CutPrefix(pattern, "!")
			fits := func(point string) bool {
				ok, _ := path.Match(pattern, point)
				return ok
			}
			if not {
				chosen = slices.DeleteFunc(chosen, func(g target) bool { return fits(g.point) })
				continue
			}
			for _, p := range points {
				if fits(p) {
					chosen = append(chosen, target{p, hit, s})
				}
			}
		}
		all = append(all, chosen...)
	}
	return all
}
