package anchor

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

func (w *world) prepare(r volume.Request) volume.Prepared {
	w.t.Helper()
	p, err := w.source(nil).Prepare(w.t.Context(), r)
	w.check(err)
	return p
}

// refused checks that a Prepare fails with a reason.
func (w *world) refused(r volume.Request, reason fault.Reason, permanent bool) {
	w.t.Helper()
	_, err := w.source(nil).Prepare(w.t.Context(), r)
	if fault.ReasonOf(err) != reason || fault.IsPermanent(err) != permanent {
		w.t.Errorf("error %v, reason %s; want %s, permanent %t", err, fault.ReasonOf(err), reason, permanent)
	}
}

func (w *world) release(p volume.Prepared) {
	w.t.Helper()
	w.check(w.source(nil).Release(w.t.Context(), p))
}

// reads checks what a tree of a volume has.
func (w *world) reads(p volume.Prepared, file string) {
	w.t.Helper()
	tree, err := w.source(nil).Tree(w.t.Context(), p, "")
	w.check(err)
	defer tree.Close()
	sub, err := tree.Sub(file)
	w.check(err)
	sub.Close()
}

// guardInfo is what is mounted as the guard.
func (w *world) guardInfo(p volume.Prepared) (mount.Info, bool) {
	w.t.Helper()
	at, there, err := mount.At(filepath.Join(w.dir, p.Key, guardDir))
	w.check(err)
	return at, there
}

func successor() volume.Request {
	return request(func(r *volume.Request) { r.Anchor.PodUID, r.Anchor.Pod = "uid-2", "ns/anchor-2" })
}

func TestNotPublishedYet(t *testing.T) {
	w := newWorld(t)
	w.stage("h")
	w.refused(request(), fault.AnchorPending, false)
	w.check(os.MkdirAll(filepath.Dir(w.published("uid-1")), 0o750))
	w.refused(request(), fault.AnchorPending, false)
	// The folder is there and nothing is mounted: it is never taken for the volume.
	w.check(os.MkdirAll(w.published("uid-1"), 0o750))
	w.refused(request(), fault.DriverFailed, false)
	// What another Pod has is no answer: the anchor's claim on the volume would be missing.
	w.publish("h", "other")
	w.refused(request(), fault.DriverFailed, false)
}

func TestGuardAndSuccessor(t *testing.T) {
	w := newWorld(t)
	w.stage("h")
	w.publish("h", "uid-1")
	p := w.prepare(request())
	if p.Path != v1alpha1.VolumePathAnchor || p.CapacityBytes != volumeSize || p.Type != v1alpha1.VolumeTypePVC || p.Key != volume.CSIKey(driver, "h") {
		t.Errorf("prepared %+v", p)
	}
	w.check(os.Mkdir(w.published("uid-1")+"/data", 0o755))
	at, _, err := mount.At(w.staged("h"))
	w.check(err)
	if guard, there := w.guardInfo(p); !there || guard.Device != at.Device || guard.Root != at.Root {
		t.Errorf("guard %+v, %t; staged %+v", guard, there, at)
	}
	// Make before break: the successor is published while the first still is.
	w.publish("h", "uid-2")
	p2 := w.prepare(successor())
	if p2.Key != p.Key {
		t.Errorf("key %s, want %s", p2.Key, p.Key)
	}
	w.unmount(w.published("uid-1"))
	for _, prepared := range []volume.Prepared{p, p2} {
		w.reads(prepared, "data")
	}
	// A sandbox that restarts asks with the anchor that it knew.
	w.reads(w.prepare(request()), "data")
	w.release(p)
	if _, there := w.guardInfo(p); there {
		t.Error("the guard is left")
	}
}

// Between a forced deletion and the successor the guard alone has the volume.
func TestForcedDeletion(t *testing.T) {
	w := newWorld(t)
	w.stage("h")
	w.publish("h", "uid-1")
	p := w.prepare(request())
	w.check(os.Mkdir(w.published("uid-1")+"/data", 0o755))
	w.unmount(w.published("uid-1"))
	w.refused(successor(), fault.AnchorLost, false)
	if _, err := w.source(nil).Tree(t.Context(), p, ""); fault.ReasonOf(err) != fault.AnchorLost {
		t.Errorf("a tree of nothing: %v", err)
	}
	w.check(w.source(nil).Sweep(t.Context(), []volume.Prepared{p}))
	if _, there := w.guardInfo(p); !there {
		t.Fatal("the guard is gone")
	}
	w.publish("h", "uid-2")
	w.reads(w.prepare(successor()), "data")
	w.check(w.source(nil).Sweep(t.Context(), nil)) // nobody records it
	if _, there := w.guardInfo(p); there {
		t.Error("the guard is left")
	}
}

// A volume that was lost and is back is another filesystem to the kernel, which the guard then guards.
func TestLostAndBack(t *testing.T) {
	w := newWorld(t)
	w.stage("h")
	w.publish("h", "uid-1")
	p := w.prepare(request())
	w.unmount(w.published("uid-1"))
	w.unmount(w.staged("h"))
	w.refused(request(), fault.AnchorLost, false)
	w.stage("h")
	w.publish("h", "uid-2")
	w.check(os.Mkdir(w.published("uid-2")+"/anew", 0o755))
	w.prepare(successor())
	w.reads(p, "anew")
	at, _, err := mount.At(w.staged("h"))
	w.check(err)
	if guard, there := w.guardInfo(p); !there || guard.Device != at.Device {
		t.Errorf("guard %+v, %t; staged %+v", guard, there, at)
	}
	w.release(p)
}

func TestDriverWithoutStaging(t *testing.T) {
	w := newWorld(t)
	w.check(os.MkdirAll(w.published("uid-1"), 0o750))
	w.check(unix.Mount("volume", w.published("uid-1"), "tmpfs", 0, ""))
	p := w.prepare(request())
	if _, there := w.guardInfo(p); there {
		t.Error("a guard of nothing")
	}
	w.release(p)
}

// A driver that stages and mounts nothing there: the folder is what kubelet looks at.
func TestDriverThatMountsNothingAtStaging(t *testing.T) {
	w := newWorld(t)
	w.check(os.MkdirAll(w.staged("h"), 0o750))
	w.check(os.MkdirAll(w.published("uid-1"), 0o750))
	w.check(unix.Mount("volume", w.published("uid-1"), "tmpfs", 0, ""))
	p := w.prepare(request())
	if _, there := w.guardInfo(p); !there {
		t.Error("no guard")
	}
	if again := w.prepare(request()); string(again.Details) != string(p.Details) {
		t.Errorf("%s, want %s", again.Details, p.Details)
	}
	w.release(p)
}

// What is no CSI volume has no folder mount, and no staging.
func TestOtherPlugin(t *testing.T) {
	w := newWorld(t)
	dir := filepath.Join(w.kubelet, "pods/uid-1/volumes/kubernetes.io~nfs/pv-1")
	w.check(os.MkdirAll(dir, 0o750))
	w.check(unix.Mount("volume", dir, "tmpfs", 0, ""))
	r := request(func(r *volume.Request) {
		r.Anchor.Plugin, r.Anchor.Driver, r.Anchor.Handle = "kubernetes.io/nfs", "", ""
	})
	p := w.prepare(r)
	w.check(os.Mkdir(dir+"/data", 0o755))
	w.reads(p, "data")
	if p.Key != volume.AnchorKey("pv-1") {
		t.Errorf("key %s", p.Key)
	}
	w.release(p)
}

func TestReadOnlyAndLimits(t *testing.T) {
	w := newWorld(t)
	w.stage("h")
	w.publish("h", "uid-1")
	w.refused(request(func(r *volume.Request) { r.SizeLimitBytes = volumeSize / 2 }), fault.LimitNotEnforced, true)
	p := w.prepare(request(func(r *volume.Request) { r.SizeLimitBytes, r.BestEffort = volumeSize/2, true }))
	if p.Limit != v1alpha1.LimitBestEffort {
		t.Errorf("limit %s", p.Limit)
	}
	w.release(p)
	w.check(unix.Mount("", w.published("uid-1"), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	w.refused(request(), fault.ModeDenied, true)
	w.release(w.prepare(request(func(r *volume.Request) { r.ReadOnly = true })))
}

// The journal's record of a preparation that was cut off has no details.
func TestUnfinished(t *testing.T) {
	w := newWorld(t)
	w.stage("h")
	w.publish("h", "uid-1")
	s := w.source(nil)
	r := request()
	_, err := s.Resolve(t.Context(), &r)
	w.check(err)
	p := w.prepare(r)
	w.release(s.Unfinished(r))
	if _, there := w.guardInfo(p); there {
		t.Error("the guard is left")
	}
	data, err := json.Marshal(r)
	w.check(err)
	var read volume.Request
	w.check(json.Unmarshal(data, &read))
	if !read.Equal(r) {
		t.Errorf("request %+v, want %+v", read, r)
	}
}

// What kubelet has may be dead: it is given to nobody, and the next gets it once kubelet has it anew.
func TestDeadFilesystem(t *testing.T) {
	w := newWorld(t)
	image := filepath.Join(t.TempDir(), "disk.img")
	w.check(os.WriteFile(image, nil, 0o600))
	w.check(os.Truncate(image, volumeSize))
	run := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(testenv.NeedBinary(t, name), args...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", name, err, out)
		}
	}
	run("mkfs.ext4", "-q", image)
	w.check(os.MkdirAll(w.staged("h"), 0o750))
	run("mount", "-o", "loop", image, w.staged("h"))
	w.publish("h", "uid-1")
	p := w.prepare(request())
	staged, err := os.Open(w.staged("h"))
	w.check(err)
	const shutdown, noLogFlush = 0x8004587d, 2 // EXT4_IOC_SHUTDOWN
	w.check(unix.IoctlSetPointerInt(int(staged.Fd()), shutdown, noLogFlush))
	w.check(staged.Close())
	if _, err := w.source(nil).Tree(t.Context(), p, ""); fault.ReasonOf(err) != fault.VolumeOffline || fault.IsPermanent(err) {
		t.Errorf("a tree: %v", err)
	}
	// Nor for a successor of the anchor, with the dead filesystem.
	w.publish("h", "uid-2")
	w.refused(successor(), fault.VolumeOffline, false)
	w.release(p)
	w.refused(request(), fault.VolumeOffline, false)
	for _, at := range []string{w.published("uid-1"), w.published("uid-2"), w.staged("h")} {
		w.unmount(at)
	}
	run("mount", "-o", "loop", image, w.staged("h"))
	w.publish("h", "uid-3")
	w.release(w.prepare(request(func(r *volume.Request) { r.Anchor.PodUID = "uid-3" })))
}
