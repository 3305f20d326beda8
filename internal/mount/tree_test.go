package mount

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func itoa(n int) string { return strconv.Itoa(n) }

// sourceTree has a directory with what a subPath may and may not be.
func sourceTree(t *testing.T) string {
	t.Helper()
	top := t.TempDir()
	for _, dir := range []string{"vol/a/b", "vol-sibling", "vol/ab"} {
		check(t, os.MkdirAll(filepath.Join(top, dir), 0o755))
	}
	check(t, os.WriteFile(filepath.Join(top, "vol/a/b/file"), []byte("content"), 0o644))
	check(t, os.WriteFile(filepath.Join(top, "vol/plain"), nil, 0o644))
	for link, to := range map[string]string{"root": "/", "up": "..", "sibling": "../vol-sibling", "inner": "a"} {
		check(t, os.Symlink(to, filepath.Join(top, "vol", link)))
	}
	return filepath.Join(top, "vol")
}

var badSubPaths = []struct {
	name   string
	suffix string
	is     func(error) bool
}{
	{"", "INVALID", errdefs.IsInvalidArgument},
	{"a\x00b", "INVALID", errdefs.IsInvalidArgument},
	{strings.Repeat("x", 300), "INVALID", errdefs.IsInvalidArgument},
	{"..", "ESCAPES", errdefs.IsInvalidArgument},
	{"a/../../vol-sibling", "ESCAPES", errdefs.IsInvalidArgument},
	{"a/..", "ESCAPES", errdefs.IsInvalidArgument},
	{"/a", "ESCAPES", errdefs.IsInvalidArgument},
	{"/etc", "ESCAPES", errdefs.IsInvalidArgument},
	{"root", "SYMLINK", errdefs.IsFailedPrecondition},
	{"root/etc", "SYMLINK", errdefs.IsFailedPrecondition},
	{"up", "SYMLINK", errdefs.IsFailedPrecondition},
	{"up/vol-sibling", "SYMLINK", errdefs.IsFailedPrecondition},
	{"sibling", "SYMLINK", errdefs.IsFailedPrecondition},
	{"inner", "SYMLINK", errdefs.IsFailedPrecondition},
	{"inner/b", "SYMLINK", errdefs.IsFailedPrecondition},
	{"missing", "NOT_FOUND", errdefs.IsNotFound},
	{"a/missing", "NOT_FOUND", errdefs.IsNotFound},
	{"-sibling", "NOT_FOUND", errdefs.IsNotFound},
	{"plain", "NOT_DIRECTORY", errdefs.IsFailedPrecondition},
	{"plain/below", "NOT_DIRECTORY", errdefs.IsFailedPrecondition},
}

// reasonFor is the reason for a bad path of a source or a subPath.
func reasonFor(what, suffix string) string {
	if suffix == "INVALID" {
		return map[string]string{"SOURCE": ReasonInvalidSource, "SUBPATH": ReasonInvalidSubPath}[what]
	}
	return what + "_" + suffix
}

func TestPathsBeneath(t *testing.T) {
	vol := sourceTree(t)
	root, err := OpenRoot(vol)
	check(t, err)
	defer root.Close()
	for _, tc := range badSubPaths {
		if _, err := OpenBeneath(root, tc.name); reason(err) != reasonFor("SOURCE", tc.suffix) || !tc.is(err) {
			t.Errorf("source %.20q: %v", tc.name, err)
		}
		if _, err := OpenSubPath(root, tc.name); reason(err) != reasonFor("SUBPATH", tc.suffix) || !tc.is(err) {
			t.Errorf("subPath %.20q: %v", tc.name, err)
		}
	}
	for _, good := range []string{".", "a", "a/b", "./a", "ab"} {
		f, err := OpenBeneath(root, good)
		check(t, err)
		if got, err := os.Readlink("/proc/self/fd/" + itoa(int(f.Fd()))); err != nil || got != filepath.Join(vol, good) {
			t.Errorf("%s: %s %v", good, got, err)
		}
		f.Close()
	}
	if _, err := os.Stat(filepath.Join(vol, "missing")); !os.IsNotExist(err) {
		t.Error("a subPath was created")
	}
}

func TestRoots(t *testing.T) {
	vol := sourceTree(t)
	for _, tc := range []struct{ root, reason string }{
		{"relative", ReasonInvalidSource},
		{"", ReasonInvalidSource},
		{vol + "/", ReasonInvalidSource},
		{vol + "/a/../b", ReasonInvalidSource},
		{vol + "/inner", ReasonSourceSymlink},
		{vol + "/inner/b", ReasonSourceSymlink},
		{"/proc/self/root", ReasonSourceSymlink},
		{vol + "/missing", ReasonSourceNotFound},
		{vol + "/plain", ReasonSourceNotDirectory},
	} {
		if _, err := OpenRoot(tc.root); reason(err) != tc.reason {
			t.Errorf("%s: %v", tc.root, err)
		}
	}
}

func TestSub(t *testing.T) {
	testenv.NeedRoot(t)
	direct := func(tree *Tree, sub string) (*Tree, error) { return tree.Sub(sub) }
	workbench := func(tree *Tree, sub string) (*Tree, error) {
		dir, err := OpenSubPath(tree.file, sub)
		if err != nil {
			return nil, err
		}
		defer dir.Close()
		return tree.subAttached(int(dir.Fd()))
	}
	for name, sub := range map[string]func(*Tree, string) (*Tree, error){"direct": direct, "workbench": workbench} {
		t.Run(name, func(t *testing.T) {
			vol := sourceTree(t)
			tree := clone(t, vol)
			check(t, tree.SetAttributes(Attributes{ReadOnly: true}))
			for _, tc := range badSubPaths {
				if _, err := sub(tree, tc.name); reason(err) != reasonFor("SUBPATH", tc.suffix) || !tc.is(err) {
					t.Errorf("%.20q: %v", tc.name, err)
				}
			}
			inner, err := sub(tree, "a/b")
			check(t, err)
			defer inner.Close()
			s := newSandbox(t)
			ns := s.enter(modern())
			placed := attach(t, ns, inner, "/inner")
			if data, err := os.ReadFile(s.path("/inner/file")); string(data) != "content" {
				t.Errorf("%q, %v", data, err)
			}
			if !placed.ReadOnly || s.do("write", "/inner/file") != "EROFS" {
				t.Error("the sub tree lost ro")
			}
			equal, err := sub(tree, ".")
			check(t, err)
			defer equal.Close()
			if data, err := os.ReadFile(s.path(attach(t, ns, equal, "/equal").Target + "/a/b/file")); string(data) != "content" {
				t.Errorf("%q, %v", data, err)
			}
			// The tree itself can still be used.
			whole := attach(t, ns, tree, "/whole")
			if entries, err := os.ReadDir(s.path("/whole/a")); err != nil || len(entries) != 1 {
				t.Errorf("%v %v", entries, err)
			}
			if !whole.ReadOnly {
				t.Error("the tree lost ro")
			}
			if got := hostMounts(t, vol); got != "" {
				t.Error("on the host:", got)
			}
		})
	}
}

func TestNosuidNodevNoexec(t *testing.T) {
	s := newSandbox(t)
	ns := s.enter(modern())
	source := newSource(t)
	check(t, unix.Mknod(filepath.Join(source, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	busybox := testenv.NeedBinary(t, "busybox")
	program, err := os.ReadFile(busybox)
	check(t, err)
	check(t, os.WriteFile(filepath.Join(source, "busybox"), program, 0o755))
	check(t, os.Chmod(filepath.Join(source, "busybox"), 0o755|os.ModeSetuid))
	attach(t, ns, clone(t, source), "/vol")
	if got := s.do("open", "/vol/null"); got != "EACCES" {
		t.Errorf("device: %s", got)
	}
	if got := s.do("nobody", "/vol/busybox", "id", "-u"); got != "65534 <nil>" {
		t.Errorf("setuid program ran as %s", got)
	}
	tree := clone(t, source)
	check(t, tree.SetAttributes(Attributes{NoExec: true}))
	attach(t, ns, tree, "/noexec")
	if out, err := exec.Command(s.path("/noexec/busybox"), "id").CombinedOutput(); err == nil {
		t.Errorf("program ran: %s", out)
	}
}

func TestCloneOfSharedIsPrivate(t *testing.T) {
	testenv.NeedRoot(t)
	s := newSandbox(t)
	ns := s.enter(modern())
	source := newSource(t)
	n := newNested(t, 0)
	var tree *Tree
	check(t, n.do(func() error {
		if err := unix.Mount(source, source, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		if err := unix.Mount("", source, "", unix.MS_SHARED, ""); err != nil {
			return err
		}
		root, err := OpenRoot(source)
		if err != nil {
			return err
		}
		defer root.Close()
		tree, err = Clone(root)
		return err
	}))
	placed := attach(t, ns, tree, "/vol")
	list, err := ns.Mounts()
	check(t, err)
	for _, m := range list {
		if m.MountPoint == placed.Target && m.Shared {
			t.Error("the clone is in the peer group of its source")
		}
	}
}

func TestCloneOfAnotherNamespaceIsRefused(t *testing.T) {
	s := newSandbox(t)
	dir, err := os.Open(s.path("/tmp"))
	check(t, err)
	defer dir.Close()
	if _, err := Clone(dir); reason(err) != ReasonInvalidSource {
		t.Error(err)
	}
}

func TestBlockFilesystem(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		mkfs := testenv.NeedBinary(t, "mkfs.ext4")
		s := newSandbox(t)
		image := filepath.Join(t.TempDir(), "image")
		f, err := os.OpenFile(image, os.O_CREATE|os.O_RDWR, 0o600)
		check(t, err)
		defer f.Close()
		check(t, f.Truncate(16<<20))
		if out, err := exec.Command(mkfs, "-q", "-m0", "-E", "root_owner=0:0", image).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		device := loop(t, f)
		tree, err := NewFilesystem(Filesystem{Type: "ext4", Source: device, Options: []Option{{Key: "errors", Value: "remount-ro"}, {Key: "nouid32"}}})
		check(t, err)
		defer tree.Close()
		usage, err := tree.Statfs()
		if err != nil || usage.TotalBytes < 8<<20 || usage.TotalBytes > 16<<20 || usage.FreeBytes > usage.TotalBytes || usage.TotalInodes == 0 {
			t.Errorf("%+v %v", usage, err)
		}
		// A further user opens the device again: same superblock, own attributes.
		second, err := NewFilesystem(Filesystem{Type: "ext4", Source: device})
		check(t, err)
		defer second.Close()
		check(t, second.SetAttributes(Attributes{ReadOnly: true}))
		ns := s.enter(modern)
		rw, ro := attach(t, ns, tree, "/rw"), attach(t, ns, second, "/ro")
		if rw.Identity.Device != ro.Identity.Device || rw.ReadOnly || !ro.ReadOnly || rw.Identity.Root != "/" {
			t.Errorf("%+v %+v", rw, ro)
		}
		if s.do("write", "/rw/f") != "ok" || s.do("open", "/ro/f") != "ok" || s.do("write", "/ro/f") != "EROFS" {
			t.Error("the two mounts do not show the same filesystem")
		}
		if got := hostMounts(t, device+" "); got != "" {
			t.Error("on the host:", got)
		}
		info, _, err := ns.Find(rw.Identity)
		if err != nil || info.FSType != "ext4" {
			t.Errorf("%+v %v", info, err)
		}
		_, err = ns.Detach(context.Background(), "/rw", rw.Identity, DetachOptions{})
		check(t, err)
	})
}

// loop sets a loop device up that goes away with its last user.
func loop(t *testing.T, backing *os.File) string {
	t.Helper()
	control, err := os.Open("/dev/loop-control")
	check(t, err)
	defer control.Close()
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		check(t, err)
		name := "/dev/loop" + itoa(n)
		dev, err := os.OpenFile(name, os.O_RDWR, 0)
		check(t, err)
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &unix.LoopConfig{Fd: uint32(backing.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}})
		if err == unix.EBUSY {
			dev.Close()
			continue
		}
		check(t, err)
		t.Cleanup(func() { dev.Close() })
		return name
	}
}

func TestFilesystemRefusalHasTheKernelsWords(t *testing.T) {
	testenv.NeedRoot(t)
	_, err := NewFilesystem(Filesystem{Type: "tmpfs", Options: []Option{{Key: "size", Value: "many"}}})
	if reason(err) != ReasonFilesystem || !strings.Contains(err.Error(), "size") || !strings.Contains(err.Error(), "Bad value") {
		t.Error(err)
	}
	_, err = NewFilesystem(Filesystem{Type: "nosuchfs"})
	if reason(err) != ReasonFilesystem || !errdefs.IsNotFound(err) {
		t.Error(err)
	}
}

func TestIDMap(t *testing.T) {
	testenv.NeedRoot(t)
	cmd := exec.Command("cat")
	cmd.SysProcAttr = withUserNamespace
	in, err := cmd.StdinPipe()
	check(t, err)
	if err := cmd.Start(); err != nil {
		testenv.Missing(t, "user namespaces: %v", err)
	}
	defer func() { in.Close(); _ = cmd.Wait() }()
	p, err := OpenProcess(cmd.Process.Pid)
	check(t, err)
	defer p.Close()
	userns, err := p.UserNamespace()
	check(t, err)
	defer userns.Close()
	s := newSandbox(t)
	ns := s.enter(modern())
	tree := clone(t, newSource(t))
	check(t, tree.SetAttributes(Attributes{IDMap: userns}))
	attach(t, ns, tree, "/vol")
	var st unix.Stat_t
	check(t, unix.Stat(s.path("/vol/file"), &st))
	if st.Uid != 100000 {
		t.Errorf("owner %d", st.Uid)
	}
	proc, err := NewFilesystem(Filesystem{Type: "proc"})
	check(t, err)
	defer proc.Close()
	if err := proc.SetAttributes(Attributes{IDMap: userns}); reason(err) != ReasonIDMapUnsupported {
		t.Error(err)
	}
}

func TestMountsAgreesWithMountinfo(t *testing.T) {
	s := newSandbox(t)
	attach(t, s.enter(modern()), clone(t, newSource(t)), "/a dir")
	listed, err := s.enter(true).Mounts()
	check(t, err)
	parsed, err := s.enter(false).Mounts()
	check(t, err)
	for i := range listed {
		if modern() && listed[i].UniqueID == 0 {
			t.Errorf("%+v has no unique id", listed[i])
		}
		listed[i].UniqueID, listed[i].ParentUniqueID = 0, 0
	}
	order := func(a, b Info) int { return a.MountID - b.MountID }
	slices.SortFunc(listed, order)
	slices.SortFunc(parsed, order)
	if !slices.Equal(listed, parsed) {
		t.Errorf("\n%+v\n%+v", listed, parsed)
	}
}
