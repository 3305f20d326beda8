package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

const reasonInjected = "INJECTED"

func injected() error {
	return fault.New(errdefs.ErrUnavailable, reasonInjected, "injected failure")
}

// A failure at any step of an attach undoes the steps before it, and its error says which those were.
func TestContainerMountUpdaterRollsBack(t *testing.T) {
	for name, c := range map[string]struct {
		hooks hooks
		// spoil makes the attach to /at/volume fail.
		spoil  func(t *testing.T, sb *agenttest.Sandbox)
		reason string
		undone []string
	}{
		"the source cannot be prepared": {
			hooks:  hooks{prepare: func(context.Context, volume.Request) error { return injected() }},
			reason: reasonInjected,
			undone: []string{"attach /at/volume: prepare the source"}, // nothing was done before
		},
		"the source cannot be mounted": {
			hooks:  hooks{tree: func(context.Context, volume.Prepared) error { return injected() }},
			reason: reasonInjected,
			undone: []string{"its source is released"},
		},
		"the target is a symlink": {
			spoil:  func(t *testing.T, sb *agenttest.Sandbox) { sb.Shell(t, "mkdir /at && ln -s /tmp /at/volume") },
			reason: "TARGET_SYMLINK",
			undone: []string{"its record was deleted", "its source is released"},
		},
		"the target has files": {
			spoil:  func(t *testing.T, sb *agenttest.Sandbox) { sb.Shell(t, "mkdir -p /at/volume/file") },
			reason: "TARGET_NOT_EMPTY",
			undone: []string{"its record was deleted", "its source is released"},
		},
		"the sandbox's mounts propagate": {
			spoil: func(t *testing.T, sb *agenttest.Sandbox) {
				if got := enter(t, sb.PID(t), same).do("shared"); got != "ok" {
					t.Fatal(got)
				}
			},
			reason: "TARGET_SHARED",
			undone: []string{"the directories made for it were removed", "its record was deleted", "its source is released"},
		},
		"the sandbox's process is gone": {
			spoil: func(t *testing.T, sb *agenttest.Sandbox) {
				pid := sb.PID(t)
				must(t, syscall.Kill(pid, syscall.SIGKILL))
				agenttest.Eventually(t, "the process is gone", func() bool { return sb.State(t).GetPhase() == "Stopped" })
			},
			reason: "SANDBOX_NOT_RUNNING",
			undone: []string{"its source is released"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := agenttest.New(t, c.hooks.install)
			sb := n.Run(t, agenttest.Sandbox{Tenant: "t1", Restart: "Never"})
			if c.spoil != nil {
				c.spoil(t, sb)
			}
			running := sb.PID(t) != 0
			image := agenttest.Volume{Source: n.Image("t1", "img"), Target: "/at/volume", Size: 16 << 20}
			var had = sb.State(t).GetVolumes()
			if running {
				before := sb.Mounts(t)
				defer func() { sameMounts(t, sb, before) }()
			}
			_, err := sb.TryAttach(t.Context(), image)
			if err == nil || string(fault.ReasonOf(err)) != c.reason {
				t.Fatalf("%v (reason %s), want %s", err, fault.ReasonOf(err), c.reason)
			}
			for _, part := range c.undone {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("the error does not say %q: %v", part, err)
				}
			}
			if got := sb.State(t).GetVolumes(); len(got) != len(had) {
				t.Errorf("the inventory has %v", got)
			}
			nothingPrepared(t, n)
			if left := loopDevices(t, image.Source); len(left) != 0 {
				t.Errorf("loop devices %v", left)
			}
		})
	}
}

// smallJournal is a tmpfs for an agent's journal that can be filled up.
type smallJournal struct {
	dir    string
	filler *os.File
	size   int64
}

func newSmallJournal(t *testing.T) *smallJournal {
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,mode=0700"))
	t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
	f, err := os.Create(filepath.Join(dir, "filler"))
	must(t, err)
	return &smallJournal{dir: dir, filler: f}
}

// fill leaves no free page.
func (j *smallJournal) fill(t *testing.T) {
	page := make([]byte, os.Getpagesize())
	for {
		n, err := j.filler.WriteAt(page, j.size)
		if errors.Is(err, unix.ENOSPC) {
			return
		}
		must(t, err)
		j.size += int64(n)
	}
}

// free makes some pages free again.
func (j *smallJournal) free(t *testing.T, pages int) {
	j.size -= int64(pages * os.Getpagesize())
	must(t, j.filler.Truncate(j.size))
}

// The journal's filesystem fills up at one write or another of an attach. Whichever it is, the sandbox is as before, and
// when there is space again everything goes on.
func TestContainerMountUpdaterRollsBackWhenTheJournalIsFull(t *testing.T) {
	small := newSmallJournal(t)
	n := agenttest.New(t, func(c *agent.Config) { c.RunDir = small.dir })
	t.Cleanup(func() { must(t, errors.Join(small.filler.Truncate(0), small.filler.Close())) }) // before the node is cleaned up
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	source := n.Dir(t, "t1", "data")
	attached, failures := 0, map[string]int{}
	small.fill(t)
	for i := 0; i < 400 && (failures["before"] == 0 || failures["after"] == 0); i++ {
		target := fmt.Sprintf("/v/%0*d", 1+i%64, i) // of many lengths, so that the space ends now in this record, now in that
		before := sb.Mounts(t)
		_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: source, Target: target})
		if err == nil {
			attached++
			if _, ok := sb.Mounts(t)[target]; !ok {
				t.Fatalf("%s: attached, but the kernel does not have it", target)
			}
			continue
		}
		if !strings.Contains(err.Error(), "no space left on device") {
			t.Fatalf("%s: %v", target, err)
		}
		sameMounts(t, sb, before)
		complete := fault.ReasonOf(err) != fault.RollbackFailed
		if complete == (recordAt(t, sb, target) != nil) {
			t.Errorf("%s: record %v after %v", target, recordAt(t, sb, target), err)
		}
		if strings.Contains(err.Error(), "taken out of the sandbox") || !complete {
			failures["after"]++
		} else {
			failures["before"]++
		}
		if t.Failed() {
			return
		}
		small.free(t, 1+len(failures))
		if r, err := sb.TryDetach(t.Context(), target, false); err != nil && !strings.Contains(err.Error(), "no space left on device") {
			t.Errorf("detach of what is not there: %v, %v", r, err)
		}
	}
	t.Logf("%d attached; failures before and after the mount: %v", attached, failures)
	if failures["before"] == 0 || failures["after"] == 0 {
		t.Error("the journal did not fail at both")
	}
	must(t, small.filler.Truncate(0))
	small.size = 0
	n.Restart(t)
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "after"), Target: "/v/after"})
	for _, v := range sb.State(t).GetVolumes() {
		sb.Detach(t, v.GetTarget(), false)
	}
	nothingPrepared(t, n)
	if got := sb.State(t).GetVolumes(); len(got) != 0 {
		t.Errorf("records %v", got)
	}
}
