package mount

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func TestBusy(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		for kind, words := range map[string][]string{
			"cwd": {"chdir", "/vol"},
			"fd":  {"open", "/vol/file"},
			"map": {"map", "/vol/file"},
		} {
			t.Run(kind, func(t *testing.T) {
				s := newSandbox(t)
				ns := s.enter(modern)
				placed := attach(t, ns, clone(t, newSource(t)), "/vol")
				if got := s.do(words...); got != "ok" {
					t.Fatal(got)
				}
				_, err := ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{})
				var busy *BusyError
				if !errors.As(err, &busy) || busy.Reason() != ReasonBusy || !errdefs.IsFailedPrecondition(err) {
					t.Fatal(err)
				}
				want := Holder{PID: s.cmd.Process.Pid, Command: commandOf(t, s.cmd.Process.Pid), Kind: kind}
				if busy.Target != "/vol" || len(busy.Holders) != 1 || busy.Holders[0] != want {
					t.Errorf("%+v, want %+v", busy, want)
				}
				if !strings.Contains(err.Error(), want.String()) {
					t.Errorf("message %q does not name %s", err, want)
				}
				if _, found, err := ns.Find(placed.Identity); !found || err != nil {
					t.Errorf("after a refusal: %v %v", found, err)
				}

				result, err := ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{Force: true})
				check(t, err)
				if result.Outcome != Lazy || len(result.Holders) != 1 || result.Holders[0] != want {
					t.Errorf("%+v", result)
				}
				if _, found, err := ns.Find(placed.Identity); found || err != nil {
					t.Errorf("after the lazy detach: %v %v", found, err)
				}
				if entries, err := os.ReadDir(s.path("/vol")); err != nil || len(entries) > 0 {
					t.Errorf("still visible: %v %v", entries, err)
				}
				users, err := Users(context.Background(), placed.Identity)
				if err != nil || len(users) != 1 || users[0] != want {
					t.Errorf("users %v, %v", users, err)
				}
				s.end()
				users, err = Users(context.Background(), placed.Identity)
				if err != nil || len(users) != 0 {
					t.Errorf("users after the end %v, %v", users, err)
				}
			})
		}
	})
}

func commandOf(t *testing.T, pid int) string {
	t.Helper()
	data, err := os.ReadFile("/proc/" + itoa(pid) + "/comm")
	check(t, err)
	return strings.TrimSpace(string(data))
}

func TestBusyByProgramAndThread(t *testing.T) {
	testenv.NeedRoot(t)
	busybox := testenv.NeedBinary(t, "busybox")
	s := newSandbox(t)
	ns := s.enter(modern())
	source := newSource(t)
	program, err := os.ReadFile(busybox)
	check(t, err)
	check(t, os.WriteFile(filepath.Join(source, "busybox"), program, 0o755))
	placed := attach(t, ns, clone(t, source), "/vol")

	cmd := exec.Command(s.path("/vol/busybox"), "cat")
	in, err := cmd.StdinPipe()
	check(t, err)
	check(t, cmd.Start())
	_, err = ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{})
	var busy *BusyError
	if !errors.As(err, &busy) || len(busy.Holders) != 1 || busy.Holders[0].Kind != "exe" || busy.Holders[0].PID != cmd.Process.Pid {
		t.Errorf("%v", err)
	}
	in.Close()
	check(t, cmd.Wait())

	// A thread with a working directory of its own.
	n := newNested(t, 0)
	vol, err := os.Open(s.path("/vol"))
	check(t, err)
	check(t, n.do(func() error { return unix.Fchdir(int(vol.Fd())) }))
	vol.Close()
	_, err = ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{})
	if !errors.As(err, &busy) || len(busy.Holders) != 1 || busy.Holders[0].Kind != "cwd" || busy.Holders[0].PID != os.Getpid() {
		t.Errorf("%v", err)
	}
	check(t, n.do(func() error { return unix.Chdir("/") }))
	if r, err := ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{}); err != nil || r.Outcome != Detached {
		t.Errorf("%+v %v", r, err)
	}
}

func TestNestedMountIsNotBroken(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		for _, place := range []string{"/vol/inner", "/vol"} {
			t.Run(place, func(t *testing.T) {
				s := newSandbox(t)
				ns := s.enter(modern)
				source := newSource(t)
				check(t, os.Mkdir(filepath.Join(source, "inner"), 0o755))
				placed := attach(t, ns, clone(t, source), "/vol")
				check(t, ns.do(context.Background(), "", "", func(*thread) error { return unix.Mount("none", place, "tmpfs", 0, "") }))
				for _, force := range []bool{false, true} {
					_, err := ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{Force: force})
					if reason(err) != ReasonNestedMount || !strings.Contains(err.Error(), place) {
						t.Errorf("force %v: %v", force, err)
					}
				}
				check(t, ns.do(context.Background(), "", "", func(*thread) error { return unix.Unmount(place, 0) }))
				if r, err := ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{Force: true}); err != nil || r.Outcome != Detached {
					t.Errorf("%+v %v", r, err)
				}
			})
		}
	})
}

func TestDetachNeedsAnIdentity(t *testing.T) {
	s := newSandbox(t)
	if _, err := s.enter(modern()).Detach(context.Background(), "/shm", Identity{}, DetachOptions{}); !errdefs.IsInvalidArgument(err) {
		t.Error(err)
	}
}

func TestHolding(t *testing.T) {
	testenv.NeedRoot(t)
	scanned := func(ctx context.Context, m Match) ([]NamespaceRef, error) { return holdingScanned(ctx, m) }
	for name, holding := range map[string]func(context.Context, Match) ([]NamespaceRef, error){"listed": Holding, "scanned": scanned} {
		t.Run(name, func(t *testing.T) {
			s := newSandbox(t)
			ns := s.enter(modern())
			source := newSource(t)
			placed := attach(t, ns, clone(t, source), "/vol")
			match := Match{Device: placed.Identity.Device, Root: placed.Identity.Root}
			ids := func() []uint64 {
				t.Helper()
				refs, err := holding(context.Background(), match)
				check(t, err)
				var ids []uint64
				for _, r := range refs {
					ids = append(ids, r.ID)
				}
				return ids
			}
			if got := ids(); len(got) != 1 || got[0] != ns.ID() {
				t.Errorf("attached: %v, want %d", got, ns.ID())
			}
			if name == "listed" {
				refs, err := Holding(context.Background(), match)
				if err != nil || len(refs) != 1 || len(refs[0].PIDs) != 1 || refs[0].PIDs[0] != s.cmd.Process.Pid || len(refs[0].Mounts) != 1 || refs[0].Mounts[0].MountPoint != "/vol" {
					t.Errorf("%+v %v", refs, err)
				}
			}
			n := newNested(t, s.cmd.Process.Pid)
			if got := ids(); len(got) != 2 {
				t.Errorf("with a nested namespace: %v", got)
			}
			if _, err := ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{}); err != nil {
				t.Error(err)
			}
			if got := ids(); len(got) != 1 || got[0] == ns.ID() {
				t.Errorf("after the detach: %v", got)
			}
			// Hidden below another mount over the root.
			if name == "listed" {
				check(t, n.do(func() error { return unix.Mount("none", "/", "tmpfs", 0, "") }))
				if got := ids(); len(got) != 1 {
					t.Errorf("hidden: %v", got)
				}
			}
			// Held by a descriptor alone.
			fd := n.namespace(t)
			defer unix.Close(fd)
			tid := n.tid
			n.close()
			waitFor(t, "the thread's end", func() bool { return unix.Access("/proc/self/task/"+itoa(tid), unix.F_OK) != nil })
			if got := ids(); name == "listed" && len(got) != 1 {
				t.Errorf("held by a descriptor: %v", got)
			}
			unix.Close(fd)
			waitFor(t, "the nested namespace's end", func() bool { return len(ids()) == 0 })
		})
	}
}

func TestHoldingByDescriptorScanned(t *testing.T) {
	s := newSandbox(t)
	placed := attach(t, s.enter(modern()), clone(t, newSource(t)), "/vol")
	n := newNested(t, s.cmd.Process.Pid)
	fd := n.namespace(t)
	defer unix.Close(fd)
	tid := n.tid
	n.close()
	waitFor(t, "the thread's end", func() bool { return unix.Access("/proc/self/task/"+itoa(tid), unix.F_OK) != nil })
	refs, err := holdingScanned(context.Background(), Match{Device: placed.Identity.Device, Root: placed.Identity.Root})
	if err != nil || len(refs) != 2 {
		t.Errorf("%+v %v", refs, err)
	}
}

func TestSuperblockUsers(t *testing.T) {
	testenv.NeedRoot(t)
	tree, err := NewFilesystem(Filesystem{Type: "tmpfs"})
	check(t, err)
	defer tree.Close()
	s := newSandbox(t)
	ns := s.enter(modern())
	placed := attach(t, ns, tree, "/vol")
	f, err := os.Create(s.path("/vol/f"))
	check(t, err)
	_, err = ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{Force: true})
	check(t, err)
	users, err := SuperblockUsers(context.Background(), placed.Identity.Device)
	if err != nil || len(users) != 1 || users[0].PID != os.Getpid() {
		t.Errorf("%v %v", users, err)
	}
	_, err = io.WriteString(f, "goes on")
	check(t, errors.Join(err, f.Close()))
	if users, err := SuperblockUsers(context.Background(), placed.Identity.Device); err != nil || len(users) != 0 {
		t.Errorf("%v %v", users, err)
	}
}
