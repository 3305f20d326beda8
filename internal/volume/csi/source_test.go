package csi

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	csiv1 "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

func TestPublishedOnceForAll(t *testing.T) {
	w := newWorld(t)
	s := w.source(t, nil)
	p := prepare(t, s, request("v"))
	for range 3 {
		prepare(t, s, request("v", func(r *volume.Request) { r.ReadOnly, r.SubPath, r.TenantID = true, "sub", "t-2" }))
		prepare(t, w.source(t, nil), request("v"))
	}
	if n := w.Calls(nodePublish); n != 1 {
		t.Errorf("published %d times", n)
	}
	_, err := s.Prepare(ctxOf(t), request("v", func(r *volume.Request) { r.CSI.MountOptions = []string{"noexec"} }))
	if fault.ReasonOf(err) != fault.Conflict || errdefs.IsFailedPrecondition(err) {
		t.Errorf("with other mount options: %v", err)
	}
	released(t, s, p)
	if n := w.Calls(nodeUnpublish); n != 1 {
		t.Errorf("unpublished %d times", n)
	}
}

// A process that was killed after the driver's work and before the record leaves a mount without an identity.
func (w *world) cutOff(t testing.TB, s *Source) volume.Prepared {
	t.Helper()
	r := keyed(t, s, request("v"))
	d, _ := s.driver(r.CSI.Driver)
	must(t, s.sys.Save(s.dir(r.Key), s.begun(r, d)))
	must(t, s.sys.Publish(ctxOf(t), d, publishRequest(r.CSI, s.path(r.Key), abilities{multiWriter: true})))
	return s.Unfinished(r)
}

func TestAPublishThatWasCutOff(t *testing.T) {
	for name, then := range map[string]func(t *testing.T, w *world, s *Source, left volume.Prepared){
		"is taken over by the same call": func(t *testing.T, w *world, s *Source, _ volume.Prepared) {
			p := prepare(t, s, request("v"))
			if n := w.Calls(nodePublish); n != 2 {
				t.Errorf("published %d times", n)
			}
			released(t, s, p)
		},
		"is taken away for other terms": func(t *testing.T, w *world, s *Source, _ volume.Prepared) {
			p := prepare(t, s, request("v", func(r *volume.Request) { r.CSI.MountOptions = []string{"noexec"} }))
			info, there, err := mount.At(s.path(p.Key))
			if err != nil || !there || !info.NoExec || w.Calls(nodeUnpublish) != 1 {
				t.Errorf("%+v, %t, %v", info, there, err)
			}
			released(t, s, p)
		},
		"is released": func(t *testing.T, _ *world, s *Source, left volume.Prepared) { released(t, s, left) },
		"is swept":    func(t *testing.T, _ *world, s *Source, _ volume.Prepared) { must(t, s.Sweep(ctxOf(t), nil)) },
		"is left if known": func(t *testing.T, w *world, s *Source, left volume.Prepared) {
			must(t, s.Sweep(ctxOf(t), []volume.Prepared{left}))
			if n := w.Calls(nodeUnpublish); n != 0 {
				t.Errorf("unpublished %d times", n)
			}
			released(t, s, left)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := w.source(t, nil)
			left := w.cutOff(t, s)
			then(t, w, s, left)
		})
	}
}

// A start does not fail, nor wait for long, when a driver is away that would have to clean up.
func TestSweepDoesNotNeedTheDriver(t *testing.T) {
	w := newWorld(t)
	s := w.source(t, nil)
	left := w.cutOff(t, s)
	w.Stop()
	must(t, s.Sweep(ctxOf(t), nil))
	if _, there, err := mount.At(s.path(left.Key)); err != nil || !there {
		t.Errorf("%t, %v", there, err)
	}
	w.Serve(t)
	must(t, s.Sweep(ctxOf(t), nil))
}

func TestAMountThatIsGoneIsNoSource(t *testing.T) {
	w := newWorld(t)
	s := w.source(t, nil)
	p := prepare(t, s, request("v"))
	must(t, unix.Unmount(s.path(p.Key), 0))
	if tree, err := s.Tree(ctxOf(t), p, ""); fault.ReasonOf(err) != "SOURCE_NOT_MOUNTED" || fault.IsPermanent(err) {
		t.Errorf("%v, %v", tree, err)
	}
	again := prepare(t, s, request("v"))
	tree, err := s.Tree(ctxOf(t), again, "")
	must(t, err)
	must(t, tree.Close())
	if tree, err := s.Tree(ctxOf(t), p, ""); err == nil {
		tree.Close()
		t.Error("the old record was good for the new mount")
	}
	released(t, s, p)
}

// What was published by a driver that is not configured any more is unpublished by it all the same.
func TestADriverThatWasTakenOffTheList(t *testing.T) {
	w := newWorld(t)
	p := prepare(t, w.source(t, nil), request("v"))
	s, err := New(Config{Dir: w.dir})
	must(t, err)
	if _, err := s.Prepare(ctxOf(t), request("v")); fault.ReasonOf(err) != fault.SourceDenied {
		t.Errorf("prepared: %v", err)
	}
	released(t, s, p)
}

// namespace is a mount namespace of a thread, in which the node's mounts are copied with a propagation.
func namespace(t testing.TB, propagation uintptr) (end func()) {
	t.Helper()
	stop, started, ended := make(chan struct{}), make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // and never unlocked: the thread ends with this
		err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
		started <- errors.Join(err, unix.Mount("", "/", "", unix.MS_REC|propagation, ""))
		<-stop
	}()
	must(t, <-started)
	var done bool
	end = func() {
		if !done {
			done = true
			close(stop)
			<-ended
		}
	}
	t.Cleanup(end)
	return end
}

func TestReleaseWaitsForOtherNamespaces(t *testing.T) {
	w := newWorld(t)
	// Copies of what is shared go with it.
	must(t, unix.Mount("x", w.dir, "tmpfs", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(w.dir, unix.MNT_DETACH)) })
	must(t, unix.Mount("", w.dir, "", unix.MS_SHARED, ""))
	s := w.source(t, nil)
	s.config.Timeouts.Held = short
	p := prepare(t, s, request("v"))
	follower := namespace(t, unix.MS_SLAVE)
	holder := namespace(t, unix.MS_PRIVATE)
	err := s.Release(ctxOf(t), p)
	if fault.ReasonOf(err) != fault.Busy || fault.IsPermanent(err) || w.Calls(nodeUnpublish) != 0 {
		t.Errorf("held, but released with %v", err)
	}
	holder()
	for fault.ReasonOf(err) == fault.Busy { // until the kernel has ended the thread's namespace
		err = s.Release(ctxOf(t), p)
	}
	must(t, err)
	follower()
	if entries, err := os.ReadDir(w.dir); err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

func TestLimits(t *testing.T) {
	w := newWorld(t)
	s := w.source(t, nil)
	p := prepare(t, s, request("v"))
	total := p.CapacityBytes
	if p.Limit != v1alpha1.LimitNone || total <= 0 || total >= volumeSize || p.Path != v1alpha1.VolumePathDirect {
		t.Errorf("prepared %+v", p)
	}
	for _, limit := range []int64{volumeSize, total} {
		p := prepare(t, s, request("v", func(r *volume.Request) { r.SizeLimitBytes = limit }))
		if p.Limit != v1alpha1.LimitCapacity || p.CapacityBytes != total {
			t.Errorf("limit %d: %+v", limit, p)
		}
	}
	small := func(r *volume.Request) { r.SizeLimitBytes = total - 1 }
	_, err := s.Prepare(ctxOf(t), request("v", small))
	if m := fault.MetadataOf(err); fault.ReasonOf(err) != fault.LimitNotEnforced || m["requested"] == "" || m["actual"] == "" || m["requested"] == m["actual"] {
		t.Errorf("a limit below the size: %v, %v", err, m)
	}
	if p := prepare(t, s, request("v", small, func(r *volume.Request) { r.BestEffort = true })); p.Limit != v1alpha1.LimitBestEffort {
		t.Errorf("best effort: %+v", p)
	}
	released(t, s, p)
	// A volume that was published for the refused request is unpublished.
	if _, err := s.Prepare(ctxOf(t), request("v", small)); fault.ReasonOf(err) != fault.LimitNotEnforced || errors.Is(err, volume.ErrUnfinished) {
		t.Error(err)
	}
	if n, m := w.Calls(nodePublish), w.Calls(nodeUnpublish); n != m {
		t.Errorf("published %d times, unpublished %d times", n, m)
	}
}

// What somebody wrote to the place of a volume while nothing was mounted there is not removed.
func TestDataInThePlaceIsKept(t *testing.T) {
	w := newWorld(t)
	s := w.source(t, nil)
	p := prepare(t, s, request("v"))
	must(t, unix.Unmount(s.path(p.Key), 0))
	file := filepath.Join(s.path(p.Key), "f")
	must(t, os.WriteFile(file, nil, 0o600))
	if err := s.Release(ctxOf(t), p); err == nil {
		t.Error("released")
	}
	must(t, os.Remove(file))
	released(t, s, p)
}

func TestDriversAreChecked(t *testing.T) {
	ok := Driver{Name: "a.b", Socket: "/s"}
	for name, list := range map[string][]Driver{
		"no name": {{Socket: "/s"}}, "a path": {{Name: "a/b", Socket: "/s"}}, "twice": {ok, ok}, "relative": {{Name: "a", Socket: "s"}}, "not clean": {{Name: "a", Socket: "/s/../t"}},
	} {
		if err := CheckDrivers(list); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, CheckDrivers([]Driver{ok}))
}

// Some drivers publish a directory of a filesystem that has others' data, too: such a volume has no size of its own, and
// other mounts of that filesystem do not keep it.
func TestADriverThatBindsADirectory(t *testing.T) {
	w := newWorld(t)
	data := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(data, "sub"), 0o755))
	w.On(nodePublish, func(_ context.Context, r any, _ func() (any, error)) (any, error) {
		target := r.(*csiv1.NodePublishVolumeRequest).GetTargetPath()
		return &csiv1.NodePublishVolumeResponse{}, errors.Join(os.MkdirAll(target, 0o755), unix.Mount(data, target, "", unix.MS_BIND, ""))
	})
	w.On(nodeUnpublish, func(_ context.Context, r any, _ func() (any, error)) (any, error) {
		target := r.(*csiv1.NodeUnpublishVolumeRequest).GetTargetPath()
		return &csiv1.NodeUnpublishVolumeResponse{}, errors.Join(unix.Unmount(target, 0), os.Remove(target))
	})
	s := w.source(t, nil)
	_, err := s.Prepare(ctxOf(t), request("v", func(r *volume.Request) { r.SizeLimitBytes = 1 << 60 }))
	if fault.ReasonOf(err) != fault.LimitNotEnforced {
		t.Errorf("a limit on a directory: %v", err)
	}
	p := prepare(t, s, request("v"))
	if p.CapacityBytes != 0 || p.Limit != v1alpha1.LimitNone {
		t.Errorf("prepared %+v", p)
	}
	tree, err := s.Tree(ctxOf(t), p, "sub")
	must(t, err)
	must(t, tree.Close())
	// Every other namespace of the machine has the root filesystem.
	released(t, s, p)
}
