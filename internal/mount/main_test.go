package mount

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

const (
	sandboxEnv = "FLUX_MOUNT_TEST_SANDBOX"
	rootEnv    = "FLUX_MOUNT_TEST_ROOT"
	sharedEnv  = "FLUX_MOUNT_TEST_SHARED"
	pivotEnv   = "FLUX_MOUNT_TEST_PIVOT" // wait for the word to pivot
	reexecTest = "FLUX_MOUNT_TEST_REEXEC"
)

func TestMain(m *testing.M) {
	RunHelperIfAsked()
	switch {
	case os.Getenv(sandboxEnv) != "":
		sandboxMain()
	case os.Getenv(reexecTest) != "":
		reexecMain()
	}
	os.Exit(m.Run())
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// waitFor polls a condition of the kernel that nothing announces.
func waitFor(t testing.TB, what string, condition func() bool) {
	t.Helper()
	testenv.Eventually(t, 30*time.Second, what, condition)
}

// sandboxProcess is a process with a pivoted root on a tmpfs in a mount and PID
// namespace of its own: what a container's init is to the engine.
type sandboxProcess struct {
	testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Scanner
	proc  *Process
	ended atomic.Bool
}

func newSandbox(t testing.TB, env ...string) *sandboxProcess {
	t.Helper()
	testenv.NeedRoot(t)
	s := &sandboxProcess{TB: t, cmd: exec.Command("/proc/self/exe")}
	s.cmd.Env = append([]string{sandboxEnv + "=1", rootEnv + "=" + t.TempDir()}, env...)
	s.cmd.Stderr = os.Stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	var err error
	s.in, err = s.cmd.StdinPipe()
	check(t, err)
	out, err := s.cmd.StdoutPipe()
	check(t, err)
	s.out = bufio.NewScanner(out)
	check(t, s.cmd.Start())
	t.Cleanup(s.end)
	if got := s.read(); got != "ready" {
		t.Fatalf("sandbox says %q", got)
	}
	s.proc, err = OpenProcess(s.cmd.Process.Pid)
	check(t, err)
	t.Cleanup(func() { s.proc.Close() })
	return s
}

func (s *sandboxProcess) end() {
	if s.ended.CompareAndSwap(false, true) {
		s.in.Close()
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	}
}

func (s *sandboxProcess) read() string {
	s.Helper()
	if !s.out.Scan() {
		s.Fatalf("sandbox has ended: %v", s.out.Err())
	}
	return s.out.Text()
}

// do makes the sandbox's process do something and returns its answer.
func (s *sandboxProcess) do(words ...string) string {
	s.Helper()
	_, err := fmt.Fprintln(s.in, strings.Join(words, " "))
	check(s, err)
	return s.read()
}

// path is a file of the sandbox as the host reaches it.
func (s *sandboxProcess) path(name string) string {
	return fmt.Sprintf("/proc/%d/root%s", s.cmd.Process.Pid, name)
}

func (s *sandboxProcess) mkdir(name string) {
	s.Helper()
	check(s, os.MkdirAll(s.path(name), 0o755))
}

func (s *sandboxProcess) enter(modern bool) *Namespace {
	s.Helper()
	ns, err := enter(s.proc, "", modern)
	check(s, err)
	s.Cleanup(func() { ns.Close() })
	return ns
}

// source is a host directory with a file.
func newSource(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	check(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o644))
	return dir
}

func clone(t testing.TB, dir string) *Tree {
	t.Helper()
	root, err := OpenRoot(dir)
	check(t, err)
	defer root.Close()
	tree, err := Clone(root)
	check(t, err)
	t.Cleanup(func() { tree.Close() })
	return tree
}

func attach(t testing.TB, ns *Namespace, tree *Tree, target string) Placed {
	t.Helper()
	placed, err := ns.Attach(context.Background(), tree, target, nil)
	check(t, err)
	return placed
}

func reason(err error) string {
	if r, ok := err.(interface{ Reason() string }); ok {
		return r.Reason()
	}
	return fmt.Sprint(err)
}

// hostMounts returns the lines of our own mountinfo that have to do with a
// directory or device of the test. Other programs mount at the same time.
func hostMounts(t testing.TB, mark string) string {
	t.Helper()
	data, err := os.ReadFile("/proc/thread-self/mountinfo")
	check(t, err)
	if strings.HasPrefix(mark, os.TempDir()) {
		mark = filepath.Base(filepath.Dir(mark)) // t.TempDir's own part of the path
	}
	var lines strings.Builder
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, mark) {
			lines.WriteString(line)
		}
	}
	return lines.String()
}

func mountsAt(t testing.TB, ns *Namespace, device, root string) []string {
	t.Helper()
	list, err := ns.Mounts()
	check(t, err)
	var places []string
	for _, m := range list {
		if m.Device == device && m.Root == root {
			places = append(places, m.MountPoint)
		}
	}
	return places
}

// bothKernels runs a test with and without what came after the kernel floor.
func bothKernels(t *testing.T, f func(t *testing.T, modern bool)) {
	testenv.NeedRoot(t)
	t.Run("floor", func(t *testing.T) { f(t, false) })
	t.Run("modern", func(t *testing.T) {
		if !modern() {
			testenv.Missing(t, "a kernel with unique mount ids")
		}
		f(t, true)
	})
}

// sandboxMain is the process inside.
func sandboxMain() {
	die := func(what string, err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, what, err)
			os.Exit(1)
		}
	}
	root := os.Getenv(rootEnv)
	die("private", unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	die("tmpfs", unix.Mount("none", root, "tmpfs", 0, ""))
	for _, dir := range []string{"proc", "tmp", "shm", "outside", "other"} {
		die("mkdir", os.Mkdir(filepath.Join(root, dir), 0o755))
	}
	die("proc", unix.Mount("proc", filepath.Join(root, "proc"), "proc", 0, ""))
	die("shm", unix.Mount("none", filepath.Join(root, "shm"), "tmpfs", 0, ""))
	die("other", unix.Mount("none", filepath.Join(root, "other"), "ramfs", 0, ""))
	in := bufio.NewScanner(os.Stdin)
	if os.Getenv(pivotEnv) != "" {
		fmt.Println("ready")
		in.Scan()
	}
	die("chdir", unix.Chdir(root))
	die("pivot", unix.PivotRoot(".", "."))
	die("umount", unix.Unmount(".", unix.MNT_DETACH))
	die("chdir", unix.Chdir("/"))
	if os.Getenv(sharedEnv) != "" {
		die("shared", unix.Mount("", "/", "", unix.MS_SHARED, ""))
	}
	fmt.Println("ready")
	var stop atomic.Bool
	var writes atomic.Int64
	var keep []any
	answer := func(err error) {
		var errno unix.Errno
		if e, ok := err.(*os.PathError); ok {
			err = e.Err
		}
		errno, _ = err.(unix.Errno)
		switch {
		case err == nil:
			fmt.Println("ok")
		default:
			fmt.Println(unix.ErrnoName(errno))
		}
	}
	for in.Scan() {
		words := strings.Fields(in.Text())
		switch words[0] {
		case "chdir":
			answer(unix.Chdir(words[1]))
		case "open":
			f, err := os.Open(words[1])
			keep = append(keep, f)
			answer(err)
		case "map":
			f, err := os.Open(words[1])
			if err == nil {
				var data []byte
				data, err = unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
				keep = append(keep, data)
				f.Close()
			}
			answer(err)
		case "nobody":
			cmd := exec.Command(words[1], words[2:]...)
			cmd.SysProcAttr = asNobody
			cmd.Stdin, cmd.Stderr = os.Stdin, os.Stderr // there is no /dev/null
			out, err := cmd.Output()
			fmt.Println(strings.TrimSpace(string(out)), err)
		case "write":
			answer(os.WriteFile(words[1], []byte("written inside"), 0o644))
		case "remount":
			answer(unix.Mount("", words[1], "", unix.MS_REMOUNT|unix.MS_BIND, ""))
		case "write-loop":
			go func() {
				for !stop.Load() {
					if os.WriteFile(words[1], []byte("written inside"), 0o644) == nil {
						writes.Add(1)
					}
				}
			}()
			answer(nil)
		case "writes":
			fmt.Println(writes.Load())
		case "attack":
			go attackers[words[1]](words[2], &stop)
			answer(nil)
		case "stop":
			stop.Store(true)
			answer(nil)
		}
	}
	runtime.KeepAlive(keep)
	os.Exit(0)
}

// attackers change what is at a target "/a/b" in a loop.
var attackers = map[string]func(target string, stop *atomic.Bool){
	// The target is a directory and a symbolic link in turn.
	"leaf": func(target string, stop *atomic.Bool) {
		link := target + ".link"
		_ = os.Symlink("/outside", link)
		for !stop.Load() {
			_ = unix.Renameat2(unix.AT_FDCWD, link, unix.AT_FDCWD, target, unix.RENAME_EXCHANGE)
		}
	},
	// Its parent is.
	"parent": func(target string, stop *atomic.Bool) {
		parent := filepath.Dir(target)
		link := parent + ".link"
		_ = os.Symlink("/outside", link)
		for !stop.Load() {
			_ = unix.Renameat2(unix.AT_FDCWD, link, unix.AT_FDCWD, parent, unix.RENAME_EXCHANGE)
		}
	},
	// Its parent is renamed away and back.
	"rename": func(target string, stop *atomic.Bool) {
		parent := filepath.Dir(target)
		for !stop.Load() {
			_ = os.Rename(parent, "/moved")
			_ = os.Rename("/moved", parent)
		}
	},
	// Two parents change places.
	"exchange": func(target string, stop *atomic.Bool) {
		parent := filepath.Dir(target)
		_ = os.MkdirAll("/twin/"+filepath.Base(target), 0o755)
		for !stop.Load() {
			_ = unix.Renameat2(unix.AT_FDCWD, "/twin", unix.AT_FDCWD, parent, unix.RENAME_EXCHANGE)
		}
	},
	// The target is removed and made.
	"remove": func(target string, stop *atomic.Bool) {
		for !stop.Load() {
			_ = unix.Rmdir(target)
			_ = unix.Mkdir(target, 0o755)
		}
	},
}
