package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// tmpfsAt mounts a tmpfs with a directory of that name.
func tmpfsAt(t testing.TB, at, name string) {
	t.Helper()
	check(t, os.MkdirAll(at, 0o755))
	check(t, unix.Mount("x", at, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	check(t, os.MkdirAll(filepath.Join(at, name, "deep"), 0o755))
}

func mountedAt(t testing.TB, at string) Info {
	t.Helper()
	info, ok, err := At(at)
	if err != nil || !ok {
		t.Fatalf("at %s: %t, %v", at, ok, err)
	}
	return info
}

func TestAtIsTheMountOnTop(t *testing.T) {
	testenv.NeedRoot(t)
	at := filepath.Join(t.TempDir(), "m")
	check(t, os.Mkdir(at, 0o755))
	if info, ok, err := At(at); err != nil || ok {
		t.Errorf("nothing is mounted, but found %+v, %v", info, err)
	}
	seen := map[string]bool{}
	for _, name := range []string{"one", "two", "three"} {
		tmpfsAt(t, at, name)
		info := mountedAt(t, at)
		var st unix.Stat_t
		check(t, unix.Stat(at, &st))
		if device := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)); device != info.Device || seen[device] || info.Root != "/" {
			t.Errorf("on top is %+v, stat says %s", info, device)
		}
		seen[info.Device] = true
	}
}

func TestOnlyTheRecordedMountIsCloned(t *testing.T) {
	testenv.NeedRoot(t)
	at := filepath.Join(t.TempDir(), "m")
	tmpfsAt(t, at, "one")
	first := mountedAt(t, at).Identity()
	ways := map[string]func(id Identity, subPath string) (*Tree, error){
		"here": func(id Identity, subPath string) (*Tree, error) { return CloneMounted(at, id, subPath) },
		"in helper": func(id Identity, subPath string) (*Tree, error) {
			return CloneMountedInHelper(t.Context(), at, id, subPath)
		},
	}
	refused := func(why string) {
		for way, clone := range ways {
			tree, err := clone(first, "")
			var e *Error
			if err == nil || !errors.As(err, &e) || e.Code != ReasonSourceNotMounted || !errdefs.IsUnavailable(err) {
				t.Errorf("%s, %s: %v, %v", why, way, tree, err)
			}
		}
	}
	for way, clone := range ways {
		for subPath, has := range map[string]string{"": "one", "one": "deep"} {
			tree, err := clone(first, subPath)
			if err != nil {
				t.Fatalf("%s: %q: %v", way, subPath, err)
			}
			sub, err := tree.Sub(has)
			check(t, err)
			check(t, sub.Close())
			check(t, tree.Close())
		}
		if _, err := clone(first, "missing"); !errdefs.IsNotFound(err) {
			t.Errorf("%s: missing: %v", way, err)
		}
	}
	tmpfsAt(t, at, "two")
	refused("another mount is on top")
	check(t, unix.Unmount(at, 0))
	check(t, unix.Unmount(at, 0))
	refused("it was unmounted")
}

func TestWhoHoldsAMountElsewhere(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	check(t, unix.Mount("x", dir, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	check(t, unix.Mount("", dir, "", unix.MS_SHARED, ""))
	at, again := filepath.Join(dir, "m"), filepath.Join(dir, "again")
	tmpfsAt(t, at, "one")
	check(t, os.Mkdir(again, 0o755))
	check(t, unix.Mount(at, again, "", unix.MS_BIND, ""))
	held := func() int {
		t.Helper()
		info := mountedAt(t, at)
		refs, err := HeldElsewhere(t.Context(), Match{Device: info.Device, Root: info.Root}, info)
		check(t, err)
		return len(refs)
	}
	if n := held(); n != 0 {
		t.Errorf("our own mounts hold it: %d", n)
	}
	one, two := newNested(t, 0), newNested(t, 0)
	if n := held(); n != 2 {
		t.Errorf("two private copies: %d hold it", n)
	}
	one.close()
	two.close()
	follower := newNestedAs(t, 0, unix.MS_SLAVE)
	waitFor(t, "the private copies to go", func() bool { return held() == 0 })
	check(t, unix.Unmount(again, 0))
	check(t, unix.Unmount(at, 0))
	check(t, follower.do(func() error {
		list, err := ownMounts()
		for _, m := range list {
			if m.MountPoint == at {
				t.Errorf("the copy did not go with the mount: %+v", m)
			}
		}
		return err
	}))
}
