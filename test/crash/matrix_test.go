//go:build failpoint

package crash

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// backgroundWait is how long a point may take to be reached after the last answer: a release goes on by itself.
const backgroundWait = 10 * time.Second

func TestServerKilledAtEveryStep(t *testing.T) {
	w := newWorld(t)
	points := slices.DeleteFunc(w.Failpoints(t), func(p string) bool {
		// Kubelet's volumes are those of a cluster's agent alone: internal/agent kills it there. A server's own API makes sandboxes
		// that have their finalizer: internal/clustercontroller kills it where others make them.
		return strings.HasPrefix(p, "recover/") || strings.HasPrefix(p, "anchor-") || strings.HasPrefix(p, "finalizer/protect/")
	})
	all := targets(points)
	for _, p := range points {
		if !slices.ContainsFunc(all, func(g target) bool { return g.point == p }) {
			t.Errorf("%s: no scenario reaches it", p)
		}
	}
	for _, g := range all {
		w = eachOn(t, w, g.String(), func(t *testing.T) {
			rest := w.killAt(t, g)
			w.Start(t)
			w.checkRepaired(t)
			w.finish(t, rest)
			w.checkNothingLeft(t)
		})
	}
}

// eachOn is t.Run of one point on a world. The next point gets a new one when this one fails.
func eachOn(t *testing.T, w *world, name string, f func(*testing.T)) *world {
	t.Helper()
	w.next()
	began := time.Now()
	ran := false
	ok := t.Run(name, func(t *testing.T) {
		ran = true
		f(t)
	})
	switch {
	case !ok:
		return newWorld(t)
	case ran: // it was not filtered out by -run
		t.Logf("%s: %s", name, time.Since(began).Round(time.Millisecond))
	}
	return w
}

// killAt runs a target's scenario until the server dies at the point, and returns what is still to do.
func (w *world) killAt(t *testing.T, g target) (rest []step) {
	t.Helper()
	w.restart(t, g.arm(w, "kill"))
	rest, died := w.run(t, g.scenario.steps)
	if !died && !w.Ended(backgroundWait) {
		t.Fatalf("%s was never reached: nothing was killed there", g.point)
	}
	return rest
}

// checkRepaired is what must hold as soon as a server serves.
func (w *world) checkRepaired(t *testing.T) {
	t.Helper()
	w.checkConsistent(t)
	w.checkAnswers(t)
}

// disorder is a state in which a step of recovery has something to do.
type disorder struct {
	// step is the step of recovery.
	step string
	// killed is where the server was killed first, in the scenario of that name.
	killed, scenario string
	// meanwhile happens while no server runs.
	meanwhile func(ctx context.Context, w *world) error
}

var disorders = []disorder{
	{step: "containers", killed: "container/create/snapshot/after", scenario: "create with volumes, delete"},
	{step: "containers", killed: "container/create/lease/after", scenario: "create with volumes, delete"},
	{step: "deletions", killed: "sandbox/journal-gone/after", scenario: "create with volumes, delete"},
	{step: "deletions", killed: "container/delete/container/after", scenario: "create with volumes, delete"},
	{step: "volumes", killed: "attach/move/after", scenario: "add volumes"},
	{step: "volumes", killed: "detach/journal-detaching/after", scenario: "remove volumes"},
	{step: "volumes", killed: "detach/umount/after", scenario: "remove volumes"},
	{step: "volumes", killed: "detach/umount-lazy/after", scenario: "remove volumes"},
	{step: "prepared", killed: "source/source-prepare/after", scenario: "add volumes"},
	{step: "prepared", killed: "source/journal-releasing/after", scenario: "remove volumes"},
	{step: "prepared", killed: "direct-publish/publish/after", scenario: "named volume"},
	{step: "prepared", killed: "direct-release/unpublish/after", scenario: "named volume"},
	{step: "sources", killed: "image-create/format/after", scenario: "add volumes"},
	{step: "tasks", killed: "container/start/task/after", scenario: "create with volumes, delete"},
	{step: "tasks", killed: "sandbox/journal-stopped/after", scenario: "pause and resume"},
	{step: "tasks", killed: "attach/move/after", scenario: "add volumes", meanwhile: killFirstProcess},
	{step: "tasks", killed: "container/create/task/after", scenario: "create with volumes, delete", meanwhile: killFirstProcess},
}

// killFirstProcess kills the first process of every sandbox.
func killFirstProcess(ctx context.Context, w *world) error {
	list, err := w.runtime.List(ctx)
	for _, c := range list {
		if c.PID != 0 {
			err = errors.Join(err, unix.Kill(c.PID, unix.SIGKILL))
		}
	}
	return err
}

func TestServerKilledWhileItRecovers(t *testing.T) {
	w := newWorld(t)
	points := slices.DeleteFunc(w.Failpoints(t), func(p string) bool { return !strings.HasPrefix(p, "recover/") })
	for _, p := range points {
		if !slices.ContainsFunc(disorders, func(d disorder) bool { return strings.HasPrefix(p, "recover/"+d.step+"/") }) {
			t.Errorf("%s: no disorder gives it something to do", p)
		}
	}
	for _, d := range disorders {
		i := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == d.scenario })
		for _, p := range points {
			if !strings.HasPrefix(p, "recover/"+d.step+"/") {
				continue
			}
			name := p + "/after " + d.killed
			if d.meanwhile != nil {
				name += " and the death of the process"
			}
			w = eachOn(t, w, name, func(t *testing.T) {
				rest := w.killAt(t, target{point: d.killed, scenario: &scenarios[i]})
				if d.meanwhile != nil {
					must(t, d.meanwhile(t.Context(), w))
				}
				w.killRecovery(t, p)
				w.Start(t)
				w.checkRepaired(t)
				w.finish(t, rest)
				w.checkNothingLeft(t)
			})
		}
	}
}

// killRecovery starts a server that is killed at a point of its recovery.
func (w *world) killRecovery(t *testing.T, point string) {
	t.Helper()
	w.Launch(t, target{point: point, scenario: &scenario{}}.arm(w, "kill"))
	if !w.Ended(patience) {
		t.Fatalf("%s was never reached: nothing was killed there", point)
	}
}
