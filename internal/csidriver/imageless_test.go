package csidriver

import (
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Whatever became of a volume's image, what is mounted of it can be unmounted, by the driver that mounted it and by the next.
func TestWhatIsMountedGoesWithoutItsImage(t *testing.T) {
	losses := map[string]func(image string) error{
		"removed": os.Remove,
		"renamed": func(image string) error { return os.Rename(image, image+".away") },
		"replaced": func(image string) error {
			if err := os.Remove(image); err != nil {
				return err
			}
			return os.WriteFile(image, make([]byte, 1<<20), 0o600)
		},
		"replaced by a link": func(image string) error {
			if err := os.Rename(image, image+".away"); err != nil {
				return err
			}
			return os.Symlink(image+".away", image)
		},
	}
	for name, lose := range losses {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			d, ctx, a, b := w.driver(t), within(t), w.target("a"), w.target("b")
			must(t, create(ctx, d, "v", size))
			must(t, create(ctx, d, "other", size))
			must(t, publish(ctx, d, "v", a, false))
			must(t, publish(ctx, d, "v", b, true))
			must(t, lose(w.pool("v.img")))
			want(t, unpublish(ctx, d, "other", a), errdefs.ErrFailedPrecondition, fault.TargetInUse)
			_, err := d.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: "v", VolumePath: a})
			must(t, err)
			must(t, unpublish(ctx, d, "v", a))
			d.Close()
			d = w.driver(t)
			must(t, unpublish(ctx, d, "v", b))
			if _, err := os.Lstat(b); !os.IsNotExist(err) {
				t.Errorf("the target is left (%v)", err)
			}
		})
	}
}

// A disk that fails is read-only from then on: volumes on it must still go. The kernel refuses to turn what has files open
// for writing, as those of loop devices are: the pool is mounted anew.
func TestPoolTurnsReadOnly(t *testing.T) {
	w := newWorld(t)
	disk := t.TempDir()
	must(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "size=256m"))
	defer func() { must(t, unix.Unmount(disk, unix.MNT_DETACH)) }()
	must(t, os.Mkdir(w.pool(""), 0o700))
	d, ctx, target := (*Driver)(nil), within(t), w.target("a")
	remount := func(flags uintptr) {
		t.Helper()
		if d != nil {
			d.Close()
			must(t, unix.Unmount(w.pool(""), unix.MNT_DETACH))
		}
		must(t, unix.Mount(disk, w.pool(""), "", unix.MS_BIND, ""))
		must(t, unix.Mount("", w.pool(""), "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""))
		d = w.driver(t)
	}
	remount(0)
	defer func() {
		d.Close()
		must(t, unix.Unmount(w.pool(""), unix.MNT_DETACH))
	}()
	must(t, create(ctx, d, "v", size))
	must(t, create(ctx, d, "w", size))
	must(t, publish(ctx, d, "v", target, false))
	remount(unix.MS_RDONLY)
	err := publish(ctx, d, "w", w.target("b"), false)
	if err == nil || errdefs.IsDataLoss(err) || fault.IsPermanent(err) {
		t.Errorf("publishing another: %v; it is not damaged, and to be tried again", err)
	}
	must(t, unpublish(ctx, d, "w", w.target("b")))
	if err := create(ctx, d, "x", size); err == nil || fault.IsPermanent(err) {
		t.Errorf("creating another: %v", err)
	}
	must(t, unpublish(ctx, d, "v", target))
	remount(0)
	must(t, publish(ctx, d, "w", target, false))
	must(t, unpublish(ctx, d, "w", target))
}
