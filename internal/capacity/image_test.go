package capacity

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func TestImageIsAnEmptyVolumeOfItsSize(t *testing.T) {
	for _, tc := range []struct {
		name string
		spec Spec
	}{
		{"smallest ext4", Spec{Size: 16 << 20, RootMode: 0o777}},
		{"ext4 of an odd size", Spec{Size: 100<<20 + 1, Filesystem: Ext4, RootMode: 0o777}},
		{"preallocated ext4", Spec{Size: 64 << 20, Filesystem: Ext4, RootMode: 0o777, Preallocate: true}},
		{"smallest xfs", Spec{Size: 300 << 20, Filesystem: XFS, RootMode: 0o777}},
		{"xfs of an odd size", Spec{Size: 400<<20 + 4097, Filesystem: XFS, RootMode: 0o777}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := pool(t)
			image := create(t, p, "v", tc.spec)
			if size, err := ImageSize(image); err != nil || size != tc.spec.Size {
				t.Fatalf("size %d, %v; want exactly %d", size, err, tc.spec.Size)
			}
			want := tc.spec.Filesystem
			if want == "" {
				want = Ext4
			}
			if fs, err := DetectFilesystem(image); err != nil || fs != want {
				t.Fatalf("filesystem %q, %v; want %s", fs, err, want)
			}
			var file unix.Stat_t
			if err := unix.Fstat(int(image.Fd()), &file); err != nil {
				t.Fatal(err)
			}
			if allocated := file.Blocks*512 >= tc.spec.Size&^4095; allocated != tc.spec.Preallocate {
				t.Errorf("the file takes %d of %d bytes, preallocated %v", file.Blocks*512, tc.spec.Size, tc.spec.Preallocate)
			}

			m := mountImage(t, image, want)
			defer m.close(t, image)
			if got := names(t, m.path); len(got) != 0 {
				t.Errorf("the new volume holds %v", got)
			}
			var root unix.Stat_t
			if err := unix.Stat(m.path, &root); err != nil {
				t.Fatal(err)
			}
			if root.Mode&0o7777 != 0o777 {
				t.Errorf("root has mode %o", root.Mode&0o7777)
			}
			st := statfs(t, m.path)
			if total := int64(st.Blocks) * st.Bsize; total > tc.spec.Size || total < tc.spec.Size*6/10 {
				t.Errorf("df shows %d bytes for an image of %d", total, tc.spec.Size)
			}
			if st.Files < uint64(tc.spec.Size/65536/2) {
				t.Errorf("only %d inodes", st.Files)
			}
		})
	}
}

func TestWritingPastTheSizeIsENOSPC(t *testing.T) {
	p := pool(t)
	image := create(t, p, "v", Spec{Size: 20 << 20})
	m := mountImage(t, image, Ext4)
	defer m.close(t, image)
	f, err := os.Create(m.path + "/fill")
	if err != nil {
		t.Fatal(err)
	}
	chunk, written := bytes.Repeat([]byte("x"), 1<<20), 0
	for err == nil {
		var n int
		n, err = f.Write(chunk)
		written += n
	}
	f.Close()
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("after %d bytes: %v, want ENOSPC", written, err)
	}
	if written > 20<<20 || written < 10<<20 {
		t.Errorf("wrote %d bytes into an image of 20 MiB", written)
	}
}

func TestDataOutlivesTheDevice(t *testing.T) {
	p := pool(t)
	image := create(t, p, "v", Spec{Size: 32 << 20})
	m := mountImage(t, image, Ext4)
	if err := os.WriteFile(m.path+"/kept", []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.close(t, image)
	again, created, err := p.Create(withTimeout(t), p.Dir, "v", Spec{Size: 32 << 20})
	if err != nil || created {
		t.Fatalf("created %v, %v; want the image that exists", created, err)
	}
	defer again.Close()
	m = mountImage(t, again, Ext4)
	defer m.close(t, again)
	if b, err := os.ReadFile(m.path + "/kept"); err != nil || string(b) != "data" {
		t.Errorf("read %q, %v", b, err)
	}
}

func TestAnotherSizeIsRefusedWithBothFigures(t *testing.T) {
	p := pool(t)
	create(t, p, "v", Spec{Size: 16 << 20})
	_, _, err := p.Create(withTimeout(t), p.Dir, "v", Spec{Size: 17 << 20})
	wantReason(t, err, ReasonSizeMismatch)
	var e *Error
	errors.As(err, &e)
	if e.Facts()["requested"] != "17825792" || e.Facts()["actual"] != "16777216" || !errdefs.IsFailedPrecondition(err) {
		t.Errorf("facts %v of %v", e.Facts(), err)
	}
	image, created, err := p.Create(withTimeout(t), p.Dir, "v", Spec{})
	if err != nil || created {
		t.Fatalf("no size asked for: created %v, %v", created, err)
	}
	image.Close()
}

func TestRefusedImages(t *testing.T) {
	p := pool(t)
	huge := int64(1) << 55
	for _, tc := range []struct {
		name, image, reason string
		spec                Spec
	}{
		{"xfs floor", "v", ReasonInvalidSize, Spec{Size: 300<<20 - 1, Filesystem: XFS}},
		{"ext4 floor", "v", ReasonInvalidSize, Spec{Size: 16<<20 - 1}},
		{"no size", "v", ReasonInvalidSize, Spec{}},
		{"unknown filesystem", "v", ReasonInvalidImage, Spec{Size: 1 << 30, Filesystem: "btrfs"}},
		{"more than is free", "v", ReasonCapacityExceeded, Spec{Size: huge}},
		{"two components", "a/b", ReasonInvalidImage, Spec{Size: 16 << 20}},
		{"dot name", ".v", ReasonInvalidImage, Spec{Size: 16 << 20}},
		{"no name", "", ReasonInvalidImage, Spec{Size: 16 << 20}},
		{"long name", string(bytes.Repeat([]byte("n"), 252)), ReasonInvalidImage, Spec{Size: 16 << 20}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, _, err := p.Create(withTimeout(t), p.Dir, tc.image, tc.spec)
			wantReason(t, err, tc.reason)
			if left := names(t, p.Dir.Name()); len(left) != 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

func TestPromisesAreCountedTogether(t *testing.T) {
	p := pool(t)
	free, promised, err := p.Space()
	if err != nil || promised != 0 {
		t.Fatalf("free %d, promised %d, %v", free, promised, err)
	}
	// Two images of which each fits and both do not. Other programs use the disk as well: leave a margin.
	size := free * 6 / 10
	create(t, p, "first", Spec{Size: size})
	_, _, err = p.Create(withTimeout(t), p.Dir, "second", Spec{Size: size})
	wantReason(t, err, ReasonCapacityExceeded)
	if !errdefs.IsResourceExhausted(err) {
		t.Errorf("kind of %v", err)
	}
	p.Overcommit = 1.5
	create(t, p, "second", Spec{Size: size})
}

func TestDiskFullLeavesNothing(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("pool", dir, "tmpfs", 0, "size=24m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
	p := poolAt(t, dir)
	p.Overcommit = 4
	_, _, err := p.Create(withTimeout(t), p.Dir, "v", Spec{Size: 64 << 20, Preallocate: true})
	wantReason(t, err, ReasonCapacityExceeded)
	if left := names(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	// tmpfs has no direct I/O on older kernels: the device falls back.
	image := create(t, p, "v", Spec{Size: 32 << 20})
	m := mountImage(t, image, Ext4)
	m.close(t, image)
	image.Close()
}

func TestConcurrentCreatesMakeOneImage(t *testing.T) {
	p := pool(t)
	var wg sync.WaitGroup
	var mu sync.Mutex // guards inodes and made
	inodes, made := map[uint64]bool{}, 0
	for range 6 {
		wg.Go(func() {
			image, created, err := p.Create(withTimeout(t), p.Dir, "v", Spec{Size: 16 << 20})
			if err != nil {
				t.Error(err)
				return
			}
			defer image.Close()
			var st unix.Stat_t
			_ = unix.Fstat(int(image.Fd()), &st)
			mu.Lock()
			defer mu.Unlock()
			inodes[st.Ino] = true
			if created {
				made++
			}
		})
	}
	wg.Wait()
	if len(inodes) != 1 || made != 1 {
		t.Errorf("%d images, made %d times", len(inodes), made)
	}
	if left := names(t, p.Dir.Name()); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
}

func TestFailedOrCancelledCreateLeavesNothing(t *testing.T) {
	for _, at := range CreateSteps {
		t.Run(at, func(t *testing.T) {
			p := pool(t)
			ctx, cancel := context.WithCancel(withTimeout(t))
			p.Observe = func(step string, done bool) {
				if step == at && !done {
					cancel()
				}
			}
			image, _, err := p.Create(ctx, p.Dir, "v", Spec{Size: 16 << 20})
			if err == nil {
				image.Close() // too late to stop it: the image is whole
				image = create(t, p, "v", Spec{Size: 16 << 20})
				m := mountImage(t, image, Ext4)
				m.close(t, image)
				return
			}
			if !errors.Is(err, context.Canceled) {
				t.Errorf("error %v", err)
			}
			if left := names(t, p.Dir.Name()); len(left) != 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// TestKilledCreateIsSwept kills a process of its own before and after every step of a create.
func TestKilledCreateIsSwept(t *testing.T) {
	if dir := os.Getenv("CAPACITY_TEST_KILL_DIR"); dir != "" {
		killedCreate(dir, os.Getenv("CAPACITY_TEST_KILL_AT"))
	}
	for _, step := range CreateSteps {
		for _, when := range []string{"before", "after"} {
			t.Run(step+"/"+when, func(t *testing.T) {
				p := pool(t)
				cmd := exec.Command(os.Args[0], "-test.run=^TestKilledCreateIsSwept$")
				cmd.Env = append(os.Environ(), "CAPACITY_TEST_KILL_DIR="+p.Dir.Name(), "CAPACITY_TEST_KILL_AT="+step+"/"+when)
				out, err := cmd.CombinedOutput()
				var exit *exec.ExitError
				if !errors.As(err, &exit) || exit.ExitCode() != -1 {
					t.Fatalf("the child was not killed: %v: %s", err, out)
				}
				whole := step == StepPublish && when == "after"
				if _, err := p.Sweep(withTimeout(t)); err != nil {
					t.Fatal(err)
				}
				want := 0
				if whole {
					want = 1
				}
				if left := names(t, p.Dir.Name()); len(left) != want {
					t.Errorf("left: %v", left)
				}
				image := create(t, p, "v", Spec{Size: 16 << 20})
				m := mountImage(t, image, Ext4)
				m.close(t, image)
			})
		}
	}
}

func killedCreate(path, at string) {
	dir, err := os.Open(path)
	if err != nil {
		panic(err)
	}
	p := &Pool{Dir: dir, Observe: func(step string, done bool) {
		if at == step+"/before" && !done || at == step+"/after" && done {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}}
	_, _, err = p.Create(context.Background(), dir, "v", Spec{Size: 16 << 20})
	panic(err)
}

func TestSweepLeavesALivingMakerAlone(t *testing.T) {
	p := pool(t)
	maker := *p
	swept := false
	maker.Observe = func(step string, done bool) {
		if step == StepFormat && !done {
			removed, err := p.Sweep(withTimeout(t))
			if err != nil || len(removed) != 0 {
				t.Errorf("removed %v, %v", removed, err)
			}
			swept = true
		}
	}
	create(t, &maker, "v", Spec{Size: 16 << 20})
	if !swept {
		t.Error("nothing was swept while the image was made")
	}
}

func TestSweepFindsFoldersOfTenants(t *testing.T) {
	p := pool(t)
	tenant := filepath.Join(p.Dir.Name(), "t1")
	if err := os.Mkdir(tenant, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{tempPrefix + "0011.img", "kept.img", "other"} {
		if err := os.WriteFile(filepath.Join(tenant, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	removed, err := p.Sweep(withTimeout(t))
	if err != nil || len(removed) != 1 || len(names(t, tenant)) != 2 {
		t.Errorf("removed %v, %v; left %v", removed, err, names(t, tenant))
	}
}

func TestWhatIsNoImage(t *testing.T) {
	p := pool(t)
	dir := p.Dir.Name()
	if err := os.Symlink("/etc/passwd", dir+"/link.img"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir+"/dir.img", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(dir+"/fifo.img", 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"link", "dir", "fifo"} {
		_, err := OpenImage(p.Dir, name)
		wantReason(t, err, ReasonInvalidImage)
	}
	_, err := OpenImage(p.Dir, "missing")
	wantReason(t, err, ReasonNotFound)
	if err := os.WriteFile(dir+"/text.img", []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	text, err := OpenImage(p.Dir, "text")
	if err != nil {
		t.Fatal(err)
	}
	defer text.Close()
	_, err = DetectFilesystem(text)
	wantReason(t, err, ReasonInvalidImage)
}
