package mount

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func TestAttachShowsTheSource(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t)
		ns := s.enter(modern)
		source := newSource(t)
		tree := clone(t, source)
		detached, err := tree.Identity()
		check(t, err)
		var steps []string
		placed, err := ns.Attach(context.Background(), tree, "/data/deep/vol", func(step string, done bool) {
			if !done && !slices.Contains(steps, step) {
				steps = append(steps, step)
			}
		})
		check(t, err)

		if want := []string{StepTargetResolve, StepTargetMkdir, StepMove, StepVerify}; !slices.Equal(steps, want) {
			t.Errorf("steps %q, want %q", steps, want)
		}
		if st, err := os.Stat(s.path("/data/deep")); err != nil || st.Mode().Perm() != 0o755 {
			t.Errorf("created directory: %v, %v", st, err)
		}
		if data, err := os.ReadFile(s.path("/data/deep/vol/file")); string(data) != "content" {
			t.Errorf("inside: %q, %v", data, err)
		}
		if got := s.do("write", "/data/deep/vol/new"); got != "ok" {
			t.Errorf("writing inside: %s", got)
		}
		if _, err := os.Stat(filepath.Join(source, "new")); err != nil {
			t.Error(err)
		}
		if got := hostMounts(t, source); got != "" {
			t.Error("on the host:", got)
		}
		id := placed.Identity
		if id.MountID != detached.MountID || id.Device != detached.Device || (modern && id.UniqueID != detached.UniqueID) {
			t.Errorf("detached %+v, attached %+v", detached, id)
		}
		if !strings.HasSuffix(source, id.Root) {
			t.Errorf("root %q of %q", id.Root, source)
		}
		info, found, err := ns.Find(id)
		check(t, err)
		if !found || info.MountPoint != "/data/deep/vol" || !info.NoSUID || !info.NoDev || info.ReadOnly || info.Shared {
			t.Errorf("found %v: %+v", found, info)
		}

		result, err := ns.Detach(context.Background(), "/data/deep/vol", id, DetachOptions{})
		check(t, err)
		if result.Outcome != Detached || result.MountPoint != "/data/deep/vol" {
			t.Errorf("detach: %+v", result)
		}
		if again, err := ns.Detach(context.Background(), "/data/deep/vol", id, DetachOptions{}); err != nil || again.Outcome != Absent {
			t.Errorf("second detach: %+v, %v", again, err)
		}
		if left, err := os.ReadDir(s.path("/data/deep/vol")); err != nil || len(left) != 0 {
			t.Errorf("the directory that was made has %v, %v", left, err)
		}
	})
}

func TestTargetsRefused(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t)
		ns := s.enter(modern)
		source := newSource(t)
		s.mkdir("/full/x")
		s.mkdir("/real")
		check(t, os.WriteFile(s.path("/plain"), nil, 0o644))
		for link, to := range map[string]string{"/link": "/outside", "/dangling": "/nowhere", "/rel": "real", "/magic": "/proc/1/root"} {
			check(t, os.Symlink(to, s.path(link)))
		}
		attach(t, ns, clone(t, source), "/volume")
		list, err := ns.Mounts()
		check(t, err)
		for _, tc := range []struct{ target, reason string }{
			{"relative", ReasonInvalidTarget},
			{"", ReasonInvalidTarget},
			{"/", ReasonInvalidTarget},
			{"/a/../b", ReasonInvalidTarget},
			{"/a/", ReasonInvalidTarget},
			{"/a//b", ReasonInvalidTarget},
			{"/./a", ReasonInvalidTarget},
			{"/a\x00b", ReasonInvalidTarget},
			{"/" + strings.Repeat("a/", unix.PathMax/2) + "a", ReasonInvalidTarget},
			{"/link", ReasonTargetSymlink},
			{"/link/new", ReasonTargetSymlink},
			{"/dangling", ReasonTargetSymlink},
			{"/rel", ReasonTargetSymlink},
			{"/rel/new", ReasonTargetSymlink},
			{"/magic/new", ReasonTargetSymlink},
			{"/proc/1/root", ReasonTargetOnVolume},
			{"/plain", ReasonTargetNotDirectory},
			{"/plain/below", ReasonTargetNotDirectory},
			{"/full", ReasonTargetNotEmpty},
			{"/volume", ReasonTargetOnVolume},
			{"/volume/new", ReasonTargetOnVolume},
			{"/other", ReasonTargetOnVolume},
			{"/other/new", ReasonTargetOnVolume},
			{"/shm", ReasonTargetOnVolume},
		} {
			_, err := ns.Attach(context.Background(), clone(t, source), tc.target, nil)
			if reason(err) != tc.reason {
				t.Errorf("%.40q: %v, want %s", tc.target, err, tc.reason)
			}
			if tc.reason == ReasonInvalidTarget && !errdefs.IsInvalidArgument(err) || tc.reason != ReasonInvalidTarget && !errdefs.IsFailedPrecondition(err) {
				t.Errorf("%.40q: kind of %v", tc.target, err)
			}
		}
		after, err := ns.Mounts()
		check(t, err)
		if !slices.Equal(list, after) {
			t.Errorf("mounts changed:\n%v\n%v", list, after)
		}
		for _, left := range []string{"/volume/new", "/other/new", "/outside/new", "/real/new", "/nowhere"} {
			if _, err := os.Lstat(s.path(left)); !os.IsNotExist(err) {
				t.Errorf("%s was left: %v", left, err)
			}
		}
	})
}

func TestTargetBelowTmpfs(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t)
		ns := s.enter(modern)
		placed := attach(t, ns, clone(t, newSource(t)), "/shm/new/vol")
		if info, found, err := ns.Find(placed.Identity); err != nil || !found || info.MountPoint != "/shm/new/vol" {
			t.Errorf("%v %v %v", info, found, err)
		}
		_, err := ns.Detach(context.Background(), "", placed.Identity, DetachOptions{})
		check(t, err)
	})
}

func TestSharedParentIsRefused(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t, sharedEnv+"=1")
		_, err := s.enter(modern).Attach(context.Background(), clone(t, newSource(t)), "/data/vol", nil)
		if reason(err) != ReasonTargetShared {
			t.Error(err)
		}
		if _, err := os.Stat(s.path("/data")); !os.IsNotExist(err) {
			t.Errorf("created directories are left: %v", err)
		}
	})
}

func TestReadOnlyRoot(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t)
		ns := s.enter(modern)
		s.mkdir("/there")
		check(t, ns.do(context.Background(), "", "", func(*thread) error {
			return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
		}))
		_, err := ns.Attach(context.Background(), clone(t, newSource(t)), "/missing", nil)
		if reason(err) != ReasonTargetReadOnly {
			t.Error(err)
		}
		attach(t, ns, clone(t, newSource(t)), "/there")
	})
}

func TestReadOnlyIsNeverWritable(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t)
		ns := s.enter(modern)
		source := newSource(t)
		s.mkdir("/vol")
		if got := s.do("write-loop", "/vol/file"); got != "ok" {
			t.Fatal(got)
		}
		const rounds = 200
		for range rounds {
			tree := clone(t, source)
			check(t, tree.SetAttributes(Attributes{ReadOnly: true, NoExec: true}))
			// The loop leaves a file of its own in the directory below.
			placed, err := ns.Attach(context.Background(), tree, "/vol", nil)
			if reason(err) == ReasonTargetNotEmpty {
				check(t, ns.do(context.Background(), "", "", func(t *thread) error { return ignoreGone(unix.Unlinkat(t.root, "vol/file", 0)) }))
				continue
			}
			check(t, err)
			if !placed.ReadOnly {
				t.Fatal("not read-only")
			}
			if got := s.do("write", "/vol/file"); got != "EROFS" {
				t.Fatalf("write: %s", got)
			}
			_, err = ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{Force: true})
			check(t, err)
		}
		s.do("stop")
		if s.do("writes") == "0" {
			t.Error("the loop never wrote: it shows nothing")
		}
		if data, err := os.ReadFile(filepath.Join(source, "file")); string(data) != "content" {
			t.Errorf("the source was written: %q, %v", data, err)
		}
	})
}

func ignoreGone(err error) error {
	if err == unix.ENOENT {
		return nil
	}
	return err
}

func TestAttachUsesTheTreeUp(t *testing.T) {
	s := newSandbox(t)
	ns := s.enter(modern())
	tree := clone(t, newSource(t))
	attach(t, ns, tree, "/vol")
	if _, err := ns.Attach(context.Background(), tree, "/vol2", nil); reason(err) != ReasonTreeClosed {
		t.Error(err)
	}
	if _, err := tree.Identity(); reason(err) != ReasonTreeClosed {
		t.Error(err)
	}
	check(t, tree.Close())
	check(t, tree.Close())
}

func TestAttachAfterTheDeadline(t *testing.T) {
	s := newSandbox(t)
	ns := s.enter(modern())
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := ns.Attach(ctx, clone(t, newSource(t)), "/vol", nil)
	if reason(err) != ReasonNamespaceOccupied || !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
	if _, err := os.Stat(s.path("/vol")); !os.IsNotExist(err) {
		t.Errorf("something was done: %v", err)
	}
}

func TestEndedSandbox(t *testing.T) {
	s := newSandbox(t)
	ns := s.enter(modern())
	placed := attach(t, ns, clone(t, newSource(t)), "/vol")
	s.end()
	if s.proc.Alive() {
		t.Error("alive after its end")
	}
	_, err := ns.Attach(context.Background(), clone(t, newSource(t)), "/vol2", nil)
	if reason(err) != ReasonNamespaceGone || !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	if result, err := ns.Detach(context.Background(), "/vol", placed.Identity, DetachOptions{}); err != nil || result.Outcome != Detached {
		t.Errorf("detach: %+v, %v", result, err)
	}
	if _, err := Enter(s.proc); reason(err) != ReasonNamespaceGone {
		t.Errorf("enter: %v", err)
	}
	check(t, ns.Close())
	check(t, ns.Close())
	if _, err := ns.Mounts(); reason(err) != ReasonNamespaceGone {
		t.Errorf("closed: %v", err)
	}
}

func TestHostIsNeverEntered(t *testing.T) {
	testenv.NeedRoot(t)
	p, err := OpenProcess(os.Getpid())
	check(t, err)
	defer p.Close()
	if _, err := Enter(p); reason(err) != ReasonNamespaceIsHost {
		t.Error(err)
	}
	// A copy of our namespace that did not pivot.
	nested := newNested(t, 0)
	fd := nested.namespace(t)
	defer unix.Close(fd)
	if _, err := enterFile(fd, nil, "", modern()); reason(err) != ReasonNamespaceIsHost {
		t.Error(err)
	}
}
