package embedded

import (
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// BenchmarkFsync is the baseline: what the disk takes for one page.
func BenchmarkFsync(b *testing.B) {
	f, err := os.Create(filepath.Join(b.TempDir(), "file"))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	page := make([]byte, 4096)
	for b.Loop() {
		if _, err := f.WriteAt(page, 0); err != nil {
			b.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			b.Fatal(err)
		}
	}
}

// full is a sandbox as large as they get in practice: 8 volumes with their rows.
func full(name string) *sandbox {
	o := &sandbox{}
	o.Namespace, o.Name = "default", name
	o.Spec.Image = "docker.io/library/busybox:latest"
	o.Spec.Command = []string{"sleep", "infinity"}
	for i := range 8 {
		target := fmt.Sprint("/volumes/", i)
		o.Spec.DynamicVolumes = append(o.Spec.DynamicVolumes, v1alpha1.DynamicVolume{
			VolumeType: v1alpha1.VolumeTypeLocal, Source: "/data" + target, Target: target, TenantID: "tenant",
		})
		o.Status.Volumes = append(o.Status.Volumes, v1alpha1.VolumeStatus{Target: target, Phase: v1alpha1.VolumeMounted})
	}
	return o
}

// BenchmarkAttachPath is the store's share of an attach: the entry into the spec, its way to a follower,
// the row into the status, its way to a follower of that one sandbox.
func BenchmarkAttachPath(b *testing.B) {
	s := open(b, filepath.Join(b.TempDir(), "state.db"), Options{})
	all := s.Sandboxes()
	for i := range 100 {
		if _, err := all.Create(b.Context(), full(fmt.Sprint("s", i))); err != nil {
			b.Fatal(err)
		}
	}
	k := key("s7")
	everything, stopAll := iter.Pull(all.Follow(b.Context()))
	defer stopAll()
	one, stopOne := iter.Pull(all.Follow(b.Context(), k))
	defer stopOne()
	for e, _ := everything(); e.Type != store.Synced; e, _ = everything() {
	}
	for e, _ := one(); e.Type != store.Synced; e, _ = one() {
	}
	n := 0
	for b.Loop() {
		n++
		if _, err := all.UpdateSpec(b.Context(), k, store.Preconditions{}, func(o *sandbox) error {
			o.Spec.DynamicVolumes[3].RequestID = fmt.Sprint(n)
			return nil
		}); err != nil {
			b.Fatal(err)
		}
		everything()
		if _, err := store.UpdateStatusLate(b.Context(), all, k, store.Preconditions{}, func(o *sandbox) error {
			o.Status.Restarts++
			return nil
		}); err != nil {
			b.Fatal(err)
		}
		one()
	}
}

// BenchmarkWriters is the time per write with many writers, each with an object of its own.
func BenchmarkWriters(b *testing.B) {
	for _, writers := range []int{1, 10, 100} {
		b.Run(fmt.Sprint(writers), func(b *testing.B) {
			s := open(b, filepath.Join(b.TempDir(), "state.db"), Options{})
			for i := range writers {
				if _, err := s.Sandboxes().Create(b.Context(), full(fmt.Sprint("s", i+1))); err != nil {
					b.Fatal(err)
				}
			}
			var next atomic.Int64
			b.SetParallelism(writers) // times GOMAXPROCS; those that are too many share objects
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				k := key(fmt.Sprint("s", 1+int(next.Add(1)-1)%writers))
				for pb.Next() {
					if _, err := s.Sandboxes().UpdateStatus(b.Context(), k, store.Preconditions{}, func(o *sandbox) error {
						o.Status.Restarts++
						return nil
					}); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}
