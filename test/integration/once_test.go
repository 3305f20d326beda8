package integration

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
)

// atOnce calls f n times, all at the same moment, and waits for their end.
func atOnce(n int, f func(i int)) {
	var ready, done sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		ready.Add(1)
		done.Go(func() {
			ready.Done()
			<-start
			f(i)
		})
	}
	ready.Wait()
	close(start)
	done.Wait()
}

func TestSameTargetTwiceAtOnce(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	before := sb.Mounts(t)
	const clients = 8
	t.Run("the same entry", func(t *testing.T) {
		for round := range 20 {
			v := agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"}
			var records [clients]*agentv1.MountRecord
			var made atomic.Int32
			atOnce(clients, func(i int) {
				r, err := sb.TryAttach(t.Context(), v)
				if err != nil {
					t.Errorf("round %d: %v", round, err)
					return
				}
				if records[i] = r.GetRecord(); !r.GetAlreadyMounted() {
					made.Add(1)
				}
			})
			if got := made.Load(); got != 1 {
				t.Fatalf("round %d: %d attaches were made", round, got)
			}
			after := sb.Mounts(t)
			if len(after) != len(before)+1 || after["/data"].UniqueID != records[0].GetMountId() {
				t.Fatalf("round %d: the kernel has %+v, the record says %v", round, after, records[0])
			}
			sb.Detach(t, "/data", false)
		}
	})
	t.Run("different entries", func(t *testing.T) {
		for round := range 20 {
			var won atomic.Int32
			winner := -1
			atOnce(clients, func(i int) {
				_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: n.Dir(t, "t1", fmt.Sprint("v", i)), Target: "/data"})
				switch {
				case err == nil:
					won.Add(1)
					winner = i // a second winner is an error, and a race that the detector reports
				case !errdefs.IsAlreadyExists(err):
					t.Errorf("round %d: a loser got %v, want AlreadyExists", round, err)
				}
			})
			if won.Load() != 1 {
				t.Fatalf("round %d: %d won", round, won.Load())
			}
			if after := sb.Mounts(t); len(after) != len(before)+1 {
				t.Fatalf("round %d: the kernel has %+v", round, after)
			}
			sb.Shell(t, "touch /data/mark")
			mark := n.Dir(t, "t1", fmt.Sprint("v", winner)) + "/mark"
			if err := os.Remove(mark); err != nil {
				t.Fatalf("round %d: the winner's volume is not the one that is mounted: %v", round, err)
			}
			sb.Detach(t, "/data", false)
		}
	})
	sameMounts(t, sb, before)
}

// An image that two sandboxes share has one device, which goes with the second.
func TestSharedImageIsReleasedWithItsLastUser(t *testing.T) {
	n := agenttest.New(t, nil)
	one, two := n.Run(t, agenttest.Sandbox{Tenant: "t1"}), n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	image := agenttest.Volume{Source: n.Image("t1", "img"), Target: "/img", Size: 16 << 20}
	one.Attach(t, image)
	first := loopDevices(t, image.Source)
	image.ReadOnly = true
	two.Attach(t, image)
	if second := loopDevices(t, image.Source); len(first) != 1 || len(second) != 1 || first[0] != second[0] {
		t.Fatalf("devices %v, then %v; want the same one", first, second)
	}
	one.Shell(t, "echo hello > /img/file")
	if got := two.Shell(t, "cat /img/file"); got != "hello\n" {
		t.Errorf("the other sandbox reads %q", got)
	}
	if r := two.Exec(t, "sh", "-c", "echo x > /img/other"); r.Code == 0 {
		t.Error("the read-only mount of the two is writable")
	}
	one.Detach(t, "/img", false)
	if left := loopDevices(t, image.Source); len(left) != 1 {
		t.Errorf("devices %v after the first detach", left)
	}
	two.Shell(t, "cat /img/file")
	two.Detach(t, "/img", false)
	nothingPrepared(t, n)
	if left := loopDevices(t, image.Source); len(left) != 0 {
		t.Errorf("devices %v after the last detach", left)
	}
}

// A process that holds a volume which was detached by force keeps its source, and nothing else does.
func TestForcedDetachIsReleasedWhenItsHolderExits(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	image := agenttest.Volume{Source: n.Image("t1", "img"), Target: "/img", Size: 16 << 20}
	sb.Attach(t, image)
	// The holder tells its PID in its own namespace; the host's is among those that the detach names.
	sb.Shell(t, "(cd /img; exec sleep 3600 >/dev/null 2>&1) & while ! ls -l /proc/$!/cwd | grep -q /img; do :; done")
	if r := sb.Detach(t, "/img", false); r.GetResult() != agentv1.DetachResponse_BUSY {
		t.Fatalf("detach answered %v, want BUSY", r)
	}
	r := sb.Detach(t, "/img", true)
	if r.GetResult() != agentv1.DetachResponse_LAZY || !r.GetReleasePending() || len(r.GetHolders()) != 1 {
		t.Fatalf("forced detach answered %v", r)
	}
	if _, ok := sb.Mounts(t)["/img"]; ok {
		t.Error("it is still in the sandbox's tree")
	}
	// The target is free for another volume, the source is not released, and the same source can be attached again.
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/img"})
	other := agenttest.Volume{Source: image.Source, Target: "/again", Size: image.Size}
	sb.Attach(t, other)
	sb.Detach(t, other.Target, false)
	n.Restart(t)
	if left := loopDevices(t, image.Source); len(left) != 1 {
		t.Fatalf("devices %v while a process holds the volume", left)
	}
	if prepared := n.Inventory(t).GetPrepared(); len(prepared) != 2 {
		t.Errorf("prepared %v, want the image and the directory", prepared)
	}
	if err := syscall.Kill(int(r.GetHolders()[0].GetPid()), syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		t.Fatal(err)
	}
	agenttest.Eventually(t, "the image is released", func() bool { return len(n.Inventory(t).GetPrepared()) == 1 })
	if left := loopDevices(t, image.Source); len(left) != 0 {
		t.Errorf("devices %v after the holder's end", left)
	}
	sb.Detach(t, "/img", false)
	nothingPrepared(t, n)
}
