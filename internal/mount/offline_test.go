package mount

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// extShutdown is EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: the filesystem ends at once, as when its device is gone. noLogFlush
// writes nothing any more.
const (
	extShutdown = 0x8004587d
	noLogFlush  = 2
)

func TestOnline(t *testing.T) {
	testenv.NeedRoot(t)
	for _, fs := range []string{"ext4", "xfs"} {
		t.Run(fs, func(t *testing.T) {
			dir := t.TempDir()
			image, at := filepath.Join(dir, "disk.img"), filepath.Join(dir, "at")
			check(t, os.WriteFile(image, nil, 0o600))
			check(t, os.Truncate(image, 320<<20))
			check(t, os.Mkdir(at, 0o755))
			if out, err := exec.Command("mkfs."+fs, "-q", image).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if out, err := exec.Command("mount", "-o", "loop", image, at).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			defer func() { check(t, unix.Unmount(at, 0)) }()
			here, there, err := At(at)
			if err != nil || !there {
				t.Fatal(there, err)
			}
			tree, err := CloneMounted(at, here.Identity(), "")
			check(t, err)
			defer tree.Close()
			check(t, tree.Online())
			check(t, OnlineInHelper(context.Background(), tree))

			root, err := os.Open(at)
			check(t, err)
			check(t, unix.IoctlSetPointerInt(int(root.Fd()), extShutdown, noLogFlush))
			root.Close()
			isOffline := func(what string, err error) {
				t.Helper()
				if reason(err) != ReasonVolumeOffline || !errdefs.IsUnavailable(err) || !errors.Is(err, unix.EIO) {
					t.Errorf("%s: %v", what, err)
				}
			}
			isOffline("a tree", tree.Online())
			isOffline("a tree, in a helper", OnlineInHelper(context.Background(), tree))
			_, err = CloneMounted(at, here.Identity(), "")
			isOffline("a new tree", err)
			_, err = CloneMountedInHelper(context.Background(), at, here.Identity(), "")
			isOffline("a new tree, in a helper", err)
		})
	}
	// What knows no extended attributes is not offline for that.
	root, err := OpenRoot(sourceTree(t))
	check(t, err)
	defer root.Close()
	tree, err := Clone(root)
	check(t, err)
	defer tree.Close()
	check(t, tree.Online())
}
