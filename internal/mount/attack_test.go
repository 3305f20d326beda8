package mount

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// attackRounds is how often a volume is attached and detached under attack,
// shared out among the attackers. Refused rounds come on top.
const attackRounds = 2000

// TestAttackedTargets attaches and detaches while the sandbox changes what is at
// the target, from inside, and from a nested namespace that does not have the
// mounts, where even a mount point can be renamed and removed.
func TestAttackedTargets(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		names := []string{"leaf", "parent", "rename", "exchange", "remove"}
		sides := []string{"inside", "nested"}
		for _, name := range names {
			for _, from := range sides {
				t.Run(name+" "+from, func(t *testing.T) {
					testAttacked(t, modern, name, from == "nested", attackRounds/len(names)/len(sides))
				})
			}
		}
	})
}

func testAttacked(t *testing.T, modern bool, attacker string, fromNested bool, rounds int) {
	const target = "/a/b"
	s := newSandbox(t)
	s.mkdir("/a/b")
	ns := s.enter(modern)
	source := newSource(t)
	before, err := ns.Mounts()
	check(t, err)

	if fromNested {
		n := newNested(t, s.cmd.Process.Pid)
		var stop atomic.Bool
		finished := make(chan error, 1)
		go func() {
			finished <- n.do(func() error { attackers[attacker](target, &stop); return nil })
		}()
		t.Cleanup(func() {
			stop.Store(true)
			<-finished
		})
	} else {
		s.do("attack", attacker, target)
	}

	var attached, refused, raced, moved, absent int
	for round := 0; attached < rounds && round < 100*rounds; round++ {
		placed, err := ns.Attach(context.Background(), clone(t, source), target, nil)
		switch {
		case err == nil:
			attached++
		case errdefs.IsAborted(err):
			raced++
			continue
		case slices.Contains([]string{ReasonTargetSymlink, ReasonTargetNotEmpty, ReasonTargetNotDirectory}, reason(err)):
			// A directory that an attacker filled or replaced: refused as it should be.
			refused++
			continue
		default:
			t.Fatalf("round %d: %v", round, err)
		}
		if info, found, err := ns.Find(placed.Identity); err != nil {
			t.Fatal(err)
		} else if found && info.MountPoint != target {
			moved++ // after it was answered
		}
		result, err := ns.Detach(context.Background(), target, placed.Identity, DetachOptions{})
		for again := 0; errdefs.IsAborted(err) && again < 100; again++ { // it gave up, and left the mount there
			raced++
			result, err = ns.Detach(context.Background(), target, placed.Identity, DetachOptions{})
		}
		if err != nil {
			t.Fatalf("round %d: detach: %v", round, err)
		}
		if result.Outcome == Absent {
			absent++
		}
	}
	t.Logf("%d attached (%d of them moved later, %d unmounted by the attacker), %d refused, %d gave up", attached, moved, absent, refused, raced)

	if attached < rounds {
		t.Errorf("only %d of %d attached", attached, rounds)
	}
	after, err := ns.Mounts()
	check(t, err)
	if !slices.Equal(before, after) {
		t.Errorf("mounts in the sandbox:\nbefore %v\nafter %v", before, after)
	}
	if got := hostMounts(t, source); got != "" {
		t.Error("on the host:", got)
	}
	if entries, err := os.ReadDir(s.path("/outside")); err != nil || len(entries) > 0 {
		t.Errorf("behind the link: %v, %v", entries, err)
	}
	if entries, err := os.ReadDir(source); err != nil || len(entries) != 1 {
		t.Errorf("source: %v, %v", entries, err)
	}
}

// TestDetachHitsNoOtherVolume detaches one of two volumes whose parents change
// places all the time.
func TestDetachHitsNoOtherVolume(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t)
		s.mkdir("/a/b")
		s.mkdir("/twin/b")
		ns := s.enter(modern)
		other := attach(t, ns, clone(t, newSource(t)), "/twin/b")
		source := newSource(t)
		s.do("attack", "exchange", "/a/b")
		const rounds = 300
		for done := 0; done < rounds; {
			placed, err := ns.Attach(context.Background(), clone(t, source), "/a/b", nil)
			if reason(err) == ReasonTargetOnVolume || errdefs.IsAborted(err) {
				continue // the other volume is there at the moment
			}
			check(t, err)
			if r, err := ns.Detach(context.Background(), "", placed.Identity, DetachOptions{Force: done%2 == 0}); err != nil || r.Outcome != Detached {
				t.Fatalf("%+v %v", r, err)
			}
			if _, found, err := ns.Find(other.Identity); err != nil || !found {
				t.Fatalf("round %d took the other volume: %v", done, err)
			}
			done++
		}
	})
}

// TestMisplacedIsMoved shows the retry without relying on luck: the observer
// renames the directory between the lookup and the move.
func TestMisplacedIsMoved(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t)
		s.mkdir("/a/b")
		ns := s.enter(modern)
		moves := 0
		placed, err := ns.Attach(context.Background(), clone(t, newSource(t)), "/a/b", func(step string, done bool) {
			if step == StepMove && !done {
				if moves++; moves == 1 {
					// On the thread inside: these are the sandbox's paths.
					_ = unix.Rename("/a", "/elsewhere")
					_ = unix.Mkdir("/a", 0o755)
				}
			}
		})
		check(t, err)
		if moves != 2 {
			t.Errorf("%d moves, want 2", moves)
		}
		if got := mountsAt(t, ns, placed.Identity.Device, placed.Identity.Root); !slices.Equal(got, []string{"/a/b"}) {
			t.Errorf("mounted at %q", got)
		}
		if entries, err := os.ReadDir(s.path("/elsewhere/b")); err != nil || len(entries) > 0 {
			t.Errorf("%v, %v", entries, err)
		}
	})
}

// TestAttachGivesUp shows that nothing is left when the target never holds still.
func TestAttachGivesUp(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t)
		ns := s.enter(modern)
		before, err := ns.Mounts()
		check(t, err)
		var undone bool
		_, err = ns.Attach(context.Background(), clone(t, newSource(t)), "/a/b", func(step string, done bool) {
			switch {
			case step == StepMove && !done:
				_ = unix.Renameat2(unix.AT_FDCWD, "/a", unix.AT_FDCWD, "/a"+string(rune('a'+len(step))), 0)
				_ = unix.Rename("/a", "/x")
				_ = unix.Rmdir("/x/b")
			case step == StepAttachUndo && done:
				undone = true
			}
		})
		if reason(err) != ReasonAttachRaced || !errdefs.IsAborted(err) || !undone {
			t.Errorf("%v, undone %v", err, undone)
		}
		after, err := ns.Mounts()
		check(t, err)
		if !slices.Equal(before, after) {
			t.Errorf("mounts in the sandbox:\nbefore %v\nafter %v", before, after)
		}
	})
}

// TestMovedAndRemovedWhileMounted does what a nested namespace can do.
func TestMovedAndRemovedWhileMounted(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t)
		s.mkdir("/a")
		ns := s.enter(modern)
		n := newNested(t, s.cmd.Process.Pid)
		moved := attach(t, ns, clone(t, newSource(t)), "/a/moved")
		removed := attach(t, ns, clone(t, newSource(t)), "/a/removed")
		check(t, n.do(func() error { return unix.Rename("/a/moved", "/a/new name") }))
		check(t, n.do(func() error { return unix.Rename("/a", "/b\\c") }))
		check(t, n.do(func() error { return unix.Rmdir("/b\\c/removed") }))

		info, found, err := ns.Find(moved.Identity)
		if err != nil || !found || info.MountPoint != "/b\\c/new name" {
			t.Errorf("%v %v %v", info, found, err)
		}
		if _, found, err := ns.Find(removed.Identity); found || err != nil {
			t.Errorf("found %v, %v", found, err)
		}
		if r, err := ns.Detach(context.Background(), "/a/moved", moved.Identity, DetachOptions{}); err != nil || r.Outcome != Detached || r.MountPoint != "/b\\c/new name" {
			t.Errorf("%+v %v", r, err)
		}
		if r, err := ns.Detach(context.Background(), "/a/removed", removed.Identity, DetachOptions{}); err != nil || r.Outcome != Absent {
			t.Errorf("%+v %v", r, err)
		}
		if _, err := os.Stat(filepath.Join(s.path("/b\\c"), "new name")); err != nil {
			t.Error(err)
		}
	})
}
