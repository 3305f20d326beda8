package mount

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// newDeadFUSE is a FUSE filesystem whose server took the mount and answers
// nothing, and a namespace in which it is mounted at the directory.
func newDeadFUSE(t *testing.T) (*Tree, *os.File) {
	t.Helper()
	testenv.NeedRoot(t)
	server, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		testenv.Missing(t, "FUSE: %v", err)
	}
	t.Cleanup(func() { server.Close() })
	tree, err := NewFilesystem(Filesystem{Type: "fuse", Source: "dead", Options: []Option{
		{Key: "fd", File: server}, {Key: "rootmode", Value: "40000"}, {Key: "user_id", Value: "0"}, {Key: "group_id", Value: "0"}}})
	check(t, err)
	t.Cleanup(func() { tree.Close() })
	return tree, server
}

func TestHelperDeadline(t *testing.T) {
	tree, server := newDeadFUSE(t)
	dir := t.TempDir()
	root, err := unix.Open(dir, directoryPath, 0)
	check(t, err)
	check(t, unix.MoveMount(tree.fd(), "", root, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH))
	unix.Close(root)
	t.Cleanup(func() { check(t, unix.Unmount(dir, unix.MNT_DETACH)) })

	kind, err := FilesystemType(filepath.Join(dir, "bucket"))
	if err != nil || !MayHang(kind) {
		t.Errorf("filesystem %q, %v", kind, err)
	}
	calls := map[string]func(context.Context) error{
		"clone":  func(ctx context.Context) error { _, err := CloneInHelper(ctx, dir, "bucket"); return err },
		"statfs": func(ctx context.Context) error { _, err := StatfsInHelper(ctx, tree); return err },
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
			defer cancel()
			err := call(ctx)
			if reason(err) != ReasonHelperDeadline || !errdefs.IsUnavailable(err) || !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			waitFor(t, "the helper's end", func() bool { return AbandonedHelpers() == 0 })
		})
	}
	server.Close() // the kernel answers in its place from now on
	_, err = CloneInHelper(context.Background(), dir, "bucket")
	if err == nil || reason(err) == ReasonHelperDeadline {
		t.Error(err)
	}
	tree.Close()
}

// TestHelperEndsWithItsParent closes the socket as the parent's death does.
func TestHelperEndsWithItsParent(t *testing.T) {
	tree, _ := newDeadFUSE(t)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	theirs := os.NewFile(uintptr(pair[1]), "helper")
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{helperEnv + "=1"}
	cmd.ExtraFiles = []*os.File{theirs, tree.file}
	check(t, cmd.Start())
	theirs.Close()
	_, err = unix.Write(pair[0], []byte(`{"op":"statfs"}`))
	check(t, err)
	waitFor(t, "the helper hangs", func() bool {
		data, err := os.ReadFile("/proc/" + itoa(cmd.Process.Pid) + "/syscall")
		return err == nil && strings.HasPrefix(string(data), itoa(unix.SYS_FSTATFS)+" ") || os.IsNotExist(err)
	})
	unix.Close(pair[0])
	if err := cmd.Wait(); err == nil {
		t.Error("the helper ended as if it had answered")
	}
}

func TestDeadFUSEInASandbox(t *testing.T) {
	tree, _ := newDeadFUSE(t)
	s := newSandbox(t)
	ns := s.enter(modern())
	placed := attach(t, ns, tree, "/bucket")
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	// Nobody uses it, so nothing has to be asked of the server.
	result, err := DetachInHelper(ctx, s.proc, "/bucket", placed.Identity, DetachOptions{Force: true})
	if err != nil || result.Outcome != Detached {
		t.Errorf("%+v %v", result, err)
	}
}

func TestHelper(t *testing.T) {
	testenv.NeedRoot(t)
	ctx := context.Background()
	source := newSource(t)
	check(t, os.Mkdir(filepath.Join(source, "sub"), 0o755))
	check(t, os.Symlink("/", filepath.Join(source, "link")))
	tree, err := CloneInHelper(ctx, source, "sub")
	check(t, err)
	defer tree.Close()
	usage, err := StatfsInHelper(ctx, tree)
	if direct, directErr := tree.Statfs(); err != nil || directErr != nil || usage.TotalBytes == 0 || usage.TotalBytes != direct.TotalBytes {
		t.Errorf("%+v %v, %+v %v", usage, err, direct, directErr)
	}
	for rel, want := range map[string]string{"missing": ReasonSourceNotFound, "link/etc": ReasonSourceSymlink, "../x": ReasonSourceEscapes} {
		_, err := CloneInHelper(ctx, source, rel)
		_, direct := func() (*os.File, error) {
			root, err := OpenRoot(source)
			check(t, err)
			defer root.Close()
			return OpenBeneath(root, rel)
		}()
		if reason(err) != want || err.Error() != direct.Error() || errdefs.IsNotFound(err) != errdefs.IsNotFound(direct) {
			t.Errorf("%s: %v, directly %v", rel, err, direct)
		}
	}

	s := newSandbox(t)
	ns := s.enter(modern())
	placed := attach(t, ns, tree, "/vol")
	s.do("chdir", "/vol")
	var busy *BusyError
	if _, err := DetachInHelper(ctx, s.proc, "/vol", placed.Identity, DetachOptions{}); !errors.As(err, &busy) || len(busy.Holders) != 1 || busy.Holders[0].PID != s.cmd.Process.Pid {
		t.Errorf("%v", err)
	}
	s.do("chdir", "/")
	var steps []string
	result, err := DetachInHelper(ctx, s.proc, "/vol", placed.Identity, DetachOptions{Steps: func(step string, _ bool) { steps = append(steps, step) }})
	if err != nil || result.Outcome != Detached || result.MountPoint != "/vol" || len(steps) != 2 {
		t.Errorf("%+v %v %q", result, err, steps)
	}
	if result, err := DetachInHelper(ctx, s.proc, "/vol", placed.Identity, DetachOptions{}); err != nil || result.Outcome != Absent {
		t.Errorf("%+v %v", result, err)
	}
}

func TestMayHang(t *testing.T) {
	for kind, want := range map[string]bool{"nfs": true, "nfs4": true, "cifs": true, "ceph": true, "fuse": true, "fuse.sshfs": true, "fuseblk": true, "9p": true,
		"ext4": false, "xfs": false, "tmpfs": false, "overlay": false, "btrfs": false, "erofs": false, "fusectl": false} {
		if MayHang(kind) != want {
			t.Errorf("%s: %v", kind, !want)
		}
	}
}

func TestNoUnmountThatMayHang(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		tree, _ := newDeadFUSE(t)
		s := newSandbox(t)
		ns := s.enter(modern)
		local := attach(t, ns, clone(t, newSource(t)), "/local")
		placed := attach(t, ns, tree, "/bucket")
		for _, force := range []bool{false, true} {
			_, err := ns.Detach(context.Background(), "/bucket", placed.Identity, DetachOptions{NoHang: true, Force: force})
			if reason(err) != ReasonMayHang || !errdefs.IsFailedPrecondition(err) {
				t.Errorf("force %v: %v", force, err)
			}
		}
		if _, found, err := ns.Find(placed.Identity); err != nil || !found {
			t.Errorf("it was unmounted all the same: %v %v", found, err)
		}
		if result, err := ns.Detach(context.Background(), "/local", local.Identity, DetachOptions{NoHang: true}); err != nil || result.Outcome != Detached {
			t.Errorf("%+v %v", result, err)
		}
	})
}
