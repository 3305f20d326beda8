//go:build failpoint

package crash

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
)

// place is one mount as the kernel shows it in a sandbox, or as the agent says it is there.
type place struct{ target, device, root string }

// mountsOf reads the mounts of a process from the kernel; false when the process is gone.
func mountsOf(pid int) ([]place, bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil || len(b) == 0 {
		return nil, false
	}
	var found []place
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 {
			found = append(found, place{target: f[4], device: f[2], root: f[3]})
		}
	}
	return found, true
}

// volumesIn are the mounts of a sandbox that one without volumes does not have. Every mount that that one has must be
// there.
func (w *world) volumesIn(pid int) (volumes []place, alive bool, err error) {
	mounts, alive := mountsOf(pid)
	missing := maps.Clone(w.plain)
	for _, m := range mounts {
		if !w.plain[m.target] {
			volumes = append(volumes, m)
		}
		delete(missing, m.target)
	}
	if alive && len(missing) > 0 {
		err = fmt.Errorf("mounts are missing in the sandbox: %v", slices.Sorted(maps.Keys(missing)))
	}
	return volumes, alive, err
}

// learnPlain learns what is mounted in a sandbox without volumes.
func (w *world) learnPlain(t *testing.T) {
	t.Helper()
	w.plain = map[string]bool{}
	steps := []step{create(plainVictim), {"look", func(ctx context.Context, w *world) error {
		c, err := w.task(ctx, victim)
		if err != nil {
			return err
		}
		mounts, alive := mountsOf(c.PID)
		if !alive {
			return errors.New("the sandbox has no process")
		}
		for _, m := range mounts {
			w.plain[m.target] = true
		}
		return nil
	}}, remove}
	w.finish(t, steps)
}

// task is the container of a sandbox that has a task.
func (w *world) task(ctx context.Context, name string) (containers.Container, error) {
	sb, err := w.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Sandbox: ref(name)})
	if err != nil {
		return containers.Container{}, err
	}
	c, err := w.runtime.Get(ctx, sb.GetUid())
	if err == nil && c.PID == 0 {
		err = fmt.Errorf("sandbox %s has no task: %s", name, c.State)
	}
	return c, err
}

// inventory is all that the agent says is on the node.
func (w *world) inventory(ctx context.Context) (*agentv1.InventoryUpdate, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := w.agent.Inventory(ctx, &agentv1.InventoryRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	return stream.Recv()
}

// checkConsistent holds what is mounted in every sandbox against what the agent says. The scheduler may be at work at
// the same time; so the agent is asked before and after the kernel, and only an answer that did not change counts.
func (w *world) checkConsistent(t *testing.T) {
	t.Helper()
	var wrong error
	must(t, await(t.Context(), func(ctx context.Context) error {
		before, err := w.mounted(ctx)
		if err != nil {
			return err
		}
		wrong = w.compare(before)
		after, err := w.mounted(ctx)
		if err != nil {
			return err
		}
		if len(before) != len(after) || !maps.EqualFunc(before, after, func(a, b taskVolumes) bool {
			return a.pid == b.pid && !a.moving && !b.moving && slices.Equal(a.volumes, b.volumes)
		}) {
			return errors.New("the agent does not come to rest")
		}
		return nil
	}))
	if wrong != nil {
		t.Fatal(wrong)
	}
}

// taskVolumes are the volumes of a sandbox by the agent's word.
type taskVolumes struct {
	pid     int // 0 without a task
	moving  bool
	volumes []place
}

// mounted is what the agent says is mounted, by sandbox.
func (w *world) mounted(ctx context.Context) (map[string]taskVolumes, error) {
	inventory, err := w.inventory(ctx)
	if err != nil {
		return nil, err
	}
	list, err := w.runtime.List(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]taskVolumes{}
	for _, c := range list {
		found[c.UID] = taskVolumes{pid: c.PID}
	}
	for _, s := range inventory.GetSandboxes() {
		v := found[s.GetUid()]
		for _, m := range s.GetVolumes() {
			switch {
			case m.GetPhase() == "Mounted":
				v.volumes = append(v.volumes, place{target: m.GetTarget(), device: m.GetDev(), root: m.GetRoot()})
			case m.GetPhase() != "Prepared" && m.GetDetachState() == "":
				v.moving = true
			}
		}
		slices.SortFunc(v.volumes, func(a, b place) int { return strings.Compare(a.target, b.target) })
		found[s.GetUid()] = v
	}
	return found, nil
}

// compare holds the agent's word against the kernel.
func (w *world) compare(said map[string]taskVolumes) error {
	for uid, v := range said {
		real, alive, err := w.volumesIn(v.pid)
		if err != nil {
			return err
		}
		slices.SortFunc(real, func(a, b place) int { return strings.Compare(a.target, b.target) })
		if alive && !slices.Equal(real, v.volumes) {
			return fmt.Errorf("sandbox %s: the kernel shows %v, the agent says %v", uid, real, v.volumes)
		}
	}
	return nil
}

// checkAnswers waits until the API says what the kernel shows, and nothing is under way.
func (w *world) checkAnswers(t *testing.T) {
	t.Helper()
	if err := await(t.Context(), func(ctx context.Context) error {
		list, err := w.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{})
		if err != nil {
			return err
		}
		for _, sb := range list.GetSandboxes() {
			if err := w.answers(ctx, sb); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func (w *world) answers(ctx context.Context, sb *sandboxv1.Sandbox) error {
	list, err := w.Volumes.ListSandVolumes(ctx, &sandboxv1.ListSandVolumesRequest{Sandbox: ref(sb.GetName())})
	if err != nil {
		return err
	}
	var said []string
	for _, v := range list.GetVolumes() {
		switch {
		case v.GetPhase() == "Mounted":
			said = append(said, v.GetTarget())
		case v.GetPhase() == "Attaching", v.GetPhase() == "Detaching" && v.GetDetachState() == "":
			return fmt.Errorf("%s: %s is still %s", sb.GetName(), v.GetTarget(), v.GetPhase())
		}
	}
	c, err := w.runtime.Get(ctx, sb.GetUid())
	if err != nil || c.PID == 0 {
		return nil // not created yet, stopped, or gone: nothing can be mounted
	}
	real, alive, err := w.volumesIn(c.PID)
	if err != nil {
		return err
	}
	var targets []string
	for _, m := range real {
		targets = append(targets, m.target)
	}
	slices.Sort(said)
	slices.Sort(targets)
	if alive && !slices.Equal(said, targets) {
		return fmt.Errorf("%s (%s): mounted are %v, the API says %v", sb.GetName(), sb.GetStatus().GetPhase(), targets, said)
	}
	return nil
}
