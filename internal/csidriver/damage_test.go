package csidriver

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func (w world) pool(name string) string { return filepath.Join(w.dir, "pool", name) }

// file makes a volume's two files, without a filesystem in the image: enough for what is decided before a mount.
func (w world) file(t *testing.T, name string) {
	t.Helper()
	must(t, os.MkdirAll(w.pool(""), 0o700))
	must(t, os.WriteFile(w.pool(name+".img"), nil, 0o600))
	must(t, os.Truncate(w.pool(name+".img"), size))
	must(t, os.WriteFile(w.pool(name+".json"), fmt.Appendf(nil, `{"name":%q,"size":%d,"filesystem":"ext4"}`, name, size), 0o600))
}

// What is wrong with one volume is said when that is asked for; a driver that starts serves all others, and keeps its files.
func TestADamagedVolumeIsAloneInIt(t *testing.T) {
	damages := map[string]func(t *testing.T, w world){
		"image cut off":     func(t *testing.T, w world) { must(t, os.Truncate(w.pool("v.img"), size/2)) },
		"image empty":       func(t *testing.T, w world) { must(t, os.Truncate(w.pool("v.img"), 0)) },
		"image longer":      func(t *testing.T, w world) { must(t, os.Truncate(w.pool("v.img"), size*2)) },
		"image gone":        func(t *testing.T, w world) { must(t, os.Remove(w.pool("v.img"))) },
		"image is a link":   func(t *testing.T, w world) { replace(t, w, func(p string) error { return os.Symlink("other.img", p) }) },
		"image is a folder": func(t *testing.T, w world) { replace(t, w, func(p string) error { return os.Mkdir(p, 0o700) }) },
		"image is a pipe":   func(t *testing.T, w world) { replace(t, w, func(p string) error { return unix.Mkfifo(p, 0o600) }) },
		"record empty":      func(t *testing.T, w world) { must(t, os.Truncate(w.pool("v.json"), 0)) },
		"record of another": func(t *testing.T, w world) { must(t, copyFile(w.pool("other.json"), w.pool("v.json"))) },
		"record without filesystem": func(t *testing.T, w world) {
			must(t, os.WriteFile(w.pool("v.json"), []byte(`{"name":"v","size":33554432}`), 0o600))
		},
	}
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.file(t, "v")
			w.file(t, "other")
			damage(t, w)
			must(t, os.WriteFile(w.pool(LockFile), nil, 0o600))
			// What is not the driver's, though it looks so.
			must(t, os.Mkdir(w.pool("folder.img"), 0o700))
			must(t, os.Symlink("/etc/passwd", w.pool("link.img")))
			before := w.files(t)

			d, ctx, target := w.driver(t), within(t), w.target("a")
			if after := w.files(t); !slices.Equal(before, after) {
				t.Errorf("the driver's start made of %v: %v", before, after)
			}
			want(t, publish(ctx, d, "v", target, false), errdefs.ErrDataLoss, fault.VolumeGone)
			if _, err := os.Lstat(target); !os.IsNotExist(err) {
				t.Errorf("a target was made (%v)", err)
			}
			if other, err := d.Volume("other"); err != nil || other.Size != size {
				t.Errorf("the other volume: %+v, %v", other, err)
			}
			must(t, create(ctx, d, "other", size))
			list, err := d.Volumes()
			if err != nil || len(list) != 2 {
				t.Errorf("the list has %v (%v), want both", list, err)
			}
		})
	}
}

func replace(t *testing.T, w world, with func(path string) error) {
	t.Helper()
	must(t, os.Remove(w.pool("v.img")))
	must(t, with(w.pool("v.img")))
}

func copyFile(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o600)
}

// A driver works with the folder that it opened, images and records alike: another folder at that path is not its pool, and no
// reason to take its volumes for gone, and their images for torn ones.
func TestPoolIsMoved(t *testing.T) {
	w := newWorld(t)
	must(t, os.Mkdir(w.pool(""), 0o700))
	d, ctx := w.driver(t), within(t)
	w.file(t, "v")
	w.file(t, "w")
	must(t, os.Rename(w.pool(""), w.target("moved")))
	must(t, os.Mkdir(w.pool(""), 0o700))
	must(t, create(ctx, d, "v", size)) // it is there: nothing is to be made
	if ids, err := d.IDs(); err != nil || !slices.Equal(ids, []string{"v", "w"}) {
		t.Errorf("volumes %v (%v)", ids, err)
	}
	must(t, d.forget("w"))
	must(t, d.save("v", record{Name: "v", Size: size, Filesystem: "ext4", TenantID: "acme"}))
	if v, err := d.Volume("v"); err != nil || v.TenantID != "acme" {
		t.Errorf("%+v, %v", v, err)
	}
	if left := w.files(t); len(left) > 0 {
		t.Errorf("in the folder at the pool's path: %v", left)
	}
	for name, there := range map[string]bool{"v.img": true, "v.json": true, "w.json": false} {
		if _, err := os.Stat(w.target("moved/" + name)); os.IsNotExist(err) == there {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A folder with somebody else's disk images is not made a pool: they would be taken for torn creates.
func TestAFolderOfOthersIsNoPool(t *testing.T) {
	testenv.NeedRoot(t)
	w := newWorld(t)
	must(t, os.Mkdir(w.pool(""), 0o700))
	must(t, os.WriteFile(w.pool("machine.img"), []byte("precious"), 0o600))
	for range 2 {
		_, err := New(within(t), Config{Pool: w.pool(""), Node: "node-1"})
		want(t, err, errdefs.ErrFailedPrecondition, fault.InvalidRequest)
	}
	if got, err := os.ReadFile(w.pool("machine.img")); string(got) != "precious" {
		t.Errorf("the image has %q (%v)", got, err)
	}
	must(t, os.Remove(w.pool("machine.img")))
	w.driver(t)
}
