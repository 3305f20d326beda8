package mount

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func count(t *testing.T, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check(t, err)
	return len(entries)
}

// threadsOutside counts our threads that are in another mount namespace.
func threadsOutside(t *testing.T) int {
	t.Helper()
	var own unix.Stat_t
	check(t, unix.Stat("/proc/self/ns/mnt", &own))
	entries, err := os.ReadDir("/proc/self/task")
	check(t, err)
	n := 0
	for _, e := range entries {
		var st unix.Stat_t
		if unix.Stat("/proc/self/task/"+e.Name()+"/ns/mnt", &st) == nil && st.Ino != own.Ino {
			n++
		}
	}
	return n
}

func TestNothingLeaks(t *testing.T) {
	s := newSandbox(t)
	source := newSource(t)
	round := func() {
		p, err := OpenProcess(s.cmd.Process.Pid)
		check(t, err)
		defer p.Close()
		ns, err := Enter(p)
		check(t, err)
		defer ns.Close()
		if threadsOutside(t) == 0 {
			t.Error("no thread is in the sandbox")
		}
		placed, err := ns.Attach(context.Background(), clone(t, source), "/new/vol", nil)
		check(t, err)
		_, err = ns.Attach(context.Background(), clone(t, source), "/new", nil)
		if err == nil {
			t.Error("attached on a directory that is not empty")
		}
		tree := clone(t, source)
		if _, err := tree.Sub("missing"); err == nil {
			t.Error("opened what is missing")
		}
		tree.Close()
		if _, err := NewFilesystem(Filesystem{Type: "tmpfs", Options: []Option{{Key: "size", Value: "x"}}}); err == nil {
			t.Error("mounted with a bad option")
		}
		_, err = ns.Detach(context.Background(), "", placed.Identity, DetachOptions{})
		check(t, err)
		_, err = Holding(context.Background(), Match{Device: placed.Identity.Device, Root: placed.Identity.Root})
		check(t, err)
		Probe()
	}
	round()
	fds, goroutines := count(t, "/proc/self/fd"), runtime.NumGoroutine()
	for range 20 {
		round()
	}
	waitFor(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= goroutines })
	waitFor(t, "threads leave the sandbox", func() bool { return threadsOutside(t) == 0 })
	if got := count(t, "/proc/self/fd"); got > fds {
		t.Errorf("%d descriptors, %d before", got, fds)
	}
	if got := hostMounts(t, source); got != "" {
		t.Error("on the host:", got)
	}
}

func TestMainThreadStaysOut(t *testing.T) {
	var own unix.Stat_t
	testenv.NeedRoot(t)
	check(t, unix.Stat(fmt.Sprintf("/proc/self/task/%d/ns/mnt", os.Getpid()), &own))
	var sandboxes []*sandboxProcess
	for range 4 {
		sandboxes = append(sandboxes, newSandbox(t))
	}
	var wg sync.WaitGroup
	for round := range 32 {
		wg.Go(func() {
			ns, err := Enter(sandboxes[round%len(sandboxes)].proc)
			if err != nil {
				t.Error(err)
				return
			}
			defer ns.Close()
			var st unix.Stat_t
			if err := unix.Stat(fmt.Sprintf("/proc/self/task/%d/ns/mnt", os.Getpid()), &st); err != nil || st.Ino != own.Ino {
				t.Errorf("the main thread is in namespace %d, %v", st.Ino, err)
			}
		})
	}
	wg.Wait()
}

func TestConcurrentOperations(t *testing.T) {
	s := newSandbox(t)
	ns := s.enter(modern())
	before, err := ns.Mounts()
	check(t, err)
	source := newSource(t)
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for range 50 {
				tree, err := func() (*Tree, error) {
					root, err := OpenRoot(source)
					if err != nil {
						return nil, err
					}
					defer root.Close()
					return Clone(root)
				}()
				if err != nil {
					t.Error(err)
					return
				}
				placed, err := ns.Attach(context.Background(), tree, fmt.Sprintf("/w%d/vol", worker), nil)
				if err != nil {
					t.Error(err)
					return
				}
				if _, found, err := ns.Find(placed.Identity); !found || err != nil {
					t.Errorf("%v %v", found, err)
				}
				if _, err := ns.Detach(context.Background(), "", placed.Identity, DetachOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	after, err := ns.Mounts()
	check(t, err)
	if len(before) != len(after) {
		t.Errorf("%d mounts, %d before", len(after), len(before))
	}
}
