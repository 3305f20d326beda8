package capacity

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func TestConcurrentAttachesShareOneDevice(t *testing.T) {
	p := pool(t)
	image := create(t, p, "v", Spec{Size: 16 << 20})
	var mu sync.Mutex // guards numbers and devices
	numbers, devices := map[uint64]bool{}, []*Device{}
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			own, err := OpenImage(p.Dir, "v")
			if err != nil {
				t.Error(err)
				return
			}
			defer own.Close()
			d, err := Loops{}.Attach(withTimeout(t), own)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			numbers[d.Number] = true
			devices = append(devices, d)
		})
	}
	wg.Wait()
	if len(numbers) != 1 || len(loopsBelow(p.Dir.Name())) != 1 {
		t.Errorf("devices %v, %v", numbers, loopsBelow(p.Dir.Name()))
	}
	for _, d := range devices {
		d.Close()
	}
	if err := (Loops{}).WaitGone(withTimeout(t), image); err != nil {
		t.Error(err)
	}
}

func TestManyImagesAtOnce(t *testing.T) {
	p := pool(t)
	const count = 24
	var wg sync.WaitGroup
	var mu sync.Mutex // guards paths
	paths := map[string]bool{}
	for i := range count {
		wg.Go(func() {
			name := string(rune('a' + i))
			image, _, err := p.Create(withTimeout(t), p.Dir, name, Spec{Size: 16 << 20})
			if err != nil {
				t.Error(err)
				return
			}
			defer image.Close()
			d, err := Loops{}.Attach(withTimeout(t), image)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			paths[d.Path] = true
			mu.Unlock()
			t.Cleanup(func() {
				d.Close()
				again, err := OpenImage(p.Dir, name)
				if err != nil {
					t.Error(err)
					return
				}
				defer again.Close()
				if err := (Loops{}).WaitGone(withTimeout(t), again); err != nil {
					t.Error(err)
				}
			})
		})
	}
	wg.Wait()
	if len(paths) != count {
		t.Errorf("%d devices for %d images", len(paths), count)
	}
}

func TestDeviceGoesWithTheLastMount(t *testing.T) {
	p := pool(t)
	image := create(t, p, "v", Spec{Size: 16 << 20})
	first := mountImage(t, image, Ext4)
	second := mountImage(t, image, Ext4)
	// One superblock: what is written through one mount is read through the other.
	if err := os.WriteFile(first.path+"/f", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(second.path + "/f"); err != nil {
		t.Error(err)
	}
	first.root.Close()
	if used, err := (Loops{}).InUse(image); err != nil || !used {
		t.Errorf("in use %v, %v while it is mounted", used, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	err := Loops{}.WaitGone(ctx, image)
	wantReason(t, err, ReasonBusy)
	if !errors.Is(err, context.DeadlineExceeded) || !errdefs.IsUnavailable(err) {
		t.Errorf("error %v", err)
	}
	second.close(t, image)
	if used, err := (Loops{}).InUse(image); err != nil || used {
		t.Errorf("in use %v, %v after the last unmount", used, err)
	}
	if d, err := (Loops{}).Lookup(image); err != nil || d != nil {
		t.Errorf("found %v, %v", d, err)
	}
}

func TestDeviceIsFoundByItsInode(t *testing.T) {
	p := pool(t)
	image := create(t, p, "v", Spec{Size: 16 << 20})
	d, err := Loops{}.Attach(withTimeout(t), image)
	if err != nil {
		t.Fatal(err)
	}
	dir := p.Dir.Name()
	if err := os.Rename(dir+"/v.img", dir+"/w.img"); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(dir+"/w.img", dir+"/x.img"); err != nil {
		t.Fatal(err)
	}
	same := func(f *os.File) {
		t.Helper()
		found, err := Loops{}.Attach(withTimeout(t), f)
		if err != nil {
			t.Fatal(err)
		}
		defer found.Close()
		if found.Number != d.Number {
			t.Errorf("a second device %s beside %s", found.Path, d.Path)
		}
	}
	linked, err := OpenImage(p.Dir, "x")
	if err != nil {
		t.Fatal(err)
	}
	defer linked.Close()
	same(linked)
	if err := errors.Join(os.Remove(dir+"/w.img"), os.Remove(dir+"/x.img")); err != nil {
		t.Fatal(err)
	}
	same(image)
	// A new image of the old name is another inode and gets a device of its own.
	fresh := create(t, p, "v", Spec{Size: 16 << 20})
	other, err := Loops{}.Attach(withTimeout(t), fresh)
	if err != nil {
		t.Fatal(err)
	}
	if other.Number == d.Number {
		t.Error("two images share a device")
	}
	other.Close()
	d.Close()
	for _, f := range []*os.File{image, fresh} {
		if err := (Loops{}).WaitGone(withTimeout(t), f); err != nil {
			t.Error(err)
		}
	}
}

func TestForeignDeviceIsUsedNotDoubled(t *testing.T) {
	p := pool(t)
	image := create(t, p, "v", Spec{Size: 16 << 20})
	out, err := exec.Command("losetup", "--find", "--show", image.Name()).Output()
	if err != nil {
		t.Fatal(err)
	}
	path := strings.TrimSpace(string(out))
	d, err := Loops{}.Attach(withTimeout(t), image)
	if err != nil {
		t.Fatal(err)
	}
	if d.Path != path {
		t.Errorf("made %s beside %s", d.Path, path)
	}
	d.Close()
	gone := make(chan error, 1)
	go func() { gone <- Loops{}.WaitGone(withTimeout(t), image) }()
	if out, err := exec.Command("losetup", "--detach", path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := <-gone; err != nil {
		t.Error(err)
	}
}

func TestAttachWaitsForTheLockAndHonoursTheContext(t *testing.T) {
	p := pool(t)
	image := create(t, p, "v", Spec{Size: 16 << 20})
	turn, err := lockByte(withTimeout(t), image, byteAttach)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := (Loops{}).Attach(ctx, image); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("error %v, want the deadline", err)
	}
	got := make(chan *Device)
	go func() {
		d, err := Loops{}.Attach(withTimeout(t), image)
		if err != nil {
			t.Error(err)
		}
		got <- d
	}()
	turn.Close()
	if d := <-got; d != nil {
		d.Close()
	}
	if err := (Loops{}).WaitGone(withTimeout(t), image); err != nil {
		t.Error(err)
	}
}

func TestAttachWaitsForADeviceThatIsGoing(t *testing.T) {
	p := pool(t)
	image := create(t, p, "v", Spec{Size: 16 << 20})
	// What a device in its last moments looks like: unbound already, its backing file (and lock) still held.
	going, err := lockDevice(withTimeout(t), image)
	if err != nil {
		t.Fatal(err)
	}
	if used, err := (Loops{}).InUse(image); err != nil || !used {
		t.Errorf("in use %v, %v", used, err)
	}
	got := make(chan *Device)
	started := make(chan struct{})
	go func() {
		d, err := Loops{Observe: func(step string, done bool) {
			if step == StepConfigure && !done {
				close(started)
			}
		}}.Attach(withTimeout(t), image)
		if err != nil {
			t.Error(err)
		}
		got <- d
	}()
	<-started
	if n := len(loopsBelow(p.Dir.Name())); n != 0 {
		t.Errorf("%d devices while the old one lives", n)
	}
	going.Close()
	if d := <-got; d != nil {
		if !d.DirectIO {
			t.Error("no direct I/O on the disk")
		}
		d.Close()
	}
	if err := (Loops{}).WaitGone(withTimeout(t), image); err != nil {
		t.Error(err)
	}
}

func TestAttachMountCloseInALoop(t *testing.T) {
	p := pool(t)
	image := create(t, p, "v", Spec{Size: 16 << 20})
	for range 50 {
		m := mountImage(t, image, Ext4)
		if err := os.WriteFile(m.path+"/f", []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		// Not waited for: the next attach meets the device in whatever state it is.
		if err := m.root.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := (Loops{}).WaitGone(withTimeout(t), image); err != nil {
		t.Error(err)
	}
}

func TestAttachStepsAreAllObserved(t *testing.T) {
	p := pool(t)
	image := create(t, p, "v", Spec{Size: 16 << 20})
	var seen []string
	d, err := Loops{Observe: func(step string, done bool) {
		if done {
			seen = append(seen, step)
		}
	}}.Attach(withTimeout(t), image)
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	if got, want := strings.Join(seen, " "), strings.Join(AttachSteps, " "); got != want {
		t.Errorf("steps %q, want %q", got, want)
	}
	if err := (Loops{}).WaitGone(withTimeout(t), image); err != nil {
		t.Error(err)
	}
}

func TestOnlyRegularFilesGetADevice(t *testing.T) {
	p := pool(t)
	_, err := Loops{}.Attach(withTimeout(t), p.Dir)
	wantReason(t, err, ReasonInvalidImage)
}
