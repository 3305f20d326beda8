package local

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity/capacitytest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/sourcetest"
)

const persistentSize = 64 << 20

func persistent(source string, size int64) volume.Request {
	return volume.Request{Type: v1alpha1.VolumeTypeLocal, Source: source, PersistentVolume: "pv-1", TenantID: "t-1", SizeLimitBytes: size}
}

// newPersistent is a source that takes paths of PersistentVolumes, with a pool of images.
func newPersistent(t testing.TB) (src *Source, scratch string) {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedBinary(t, "mkfs.ext4")
	scratch = t.TempDir()
	src, err := New([]Root{{Path: scratch + "/pool/{tenantId}", Backing: BackingImage}}, nil, PersistentVolumes(scratch+"/state"))
	if err != nil {
		t.Fatal(err)
	}
	return src, scratch
}

func TestPersistentVolumesConform(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedBinary(t, "mkfs.ext4")
	sourcetest.Run(t, func(t testing.TB) sourcetest.Harness {
		scratch, at := t.TempDir(), capacitytest.Mount(t, persistentSize)
		return sourcetest.Harness{
			New: func(faults *sourcetest.Faults) volume.Source {
				src, err := New([]Root{{Path: scratch, Shared: true}}, nil, PersistentVolumes())
				if err != nil {
					t.Fatal(err)
				}
				src.sys = faulty{system: src.sys, faults: faults}
				return src
			},
			Request:  persistent(at, persistentSize),
			Populate: func(t testing.TB, p volume.Prepared) { populate(t, p) },
			Refused: map[string]sourcetest.Refusal{
				"the node":    {Request: persistent("/", 0), Reason: fault.SourceDenied},
				"not clean":   {Request: persistent(at+"/", 0), Reason: fault.InvalidSource},
				"not vouched": {Request: volume.Request{Type: v1alpha1.VolumeTypeLocal, Source: at, TenantID: "t-1"}, Reason: fault.SourceDenied},
			},
			State: func(t testing.TB) []string { return state(t, at, &capacitytest.Limiter{}) },
		}
	})
}

func TestPathsThatNoPersistentVolumeMayHave(t *testing.T) {
	src, scratch := newPersistent(t)
	for _, denied := range []string{
		"/", "/etc", "/etc/kubernetes", "/proc", "/proc/1/root", "/sys", "/dev", "/usr/local", "/root", "/run", "/run/containerd", "/var", "/var/run",
		"/var/lib", "/var/lib/kubelet", "/var/lib/kubelet/pods/1/volumes", "/var/lib/containerd",
		scratch + "/state", scratch + "/state/sandboxes", scratch + "/pool", scratch + "/pool/t-1", scratch,
	} {
		r := persistent(denied, 0)
		_, err := src.Resolve(context.Background(), &r)
		wantReason(t, err, fault.SourceDenied)
		_, _, err = src.PromptTree(r)
		wantReason(t, err, fault.SourceDenied)
	}
	for _, allowed := range []string{"/mnt/disks/1", "/etcetera", "/var/lib/kubelet-2", scratch + "/states"} {
		r := persistent(allowed, 0)
		if key, err := src.Resolve(context.Background(), &r); err != nil || key != volume.PersistentPathKey(allowed) {
			t.Errorf("%s: %q, %v", allowed, key, err)
		}
	}
}

// A node that no controller commands takes nobody's word for a path.
func TestPersistentVolumesAreOffByDefault(t *testing.T) {
	src, scratch := newScratch(t, Root{})
	mkdir(t, scratch, "t-1/v")
	for _, source := range []string{scratch + "/t-1/v", "/mnt/disk"} {
		_, err := src.Prepare(context.Background(), persistent(source, 0))
		wantReason(t, err, fault.SourceDenied)
	}
}

func TestPersistentVolumesAreNeverMadeNorFollowed(t *testing.T) {
	src, scratch := newPersistent(t)
	mkdir(t, scratch, "real/v")
	if err := os.Symlink("real", scratch+"/link"); err != nil {
		t.Fatal(err)
	}
	_, err := src.Prepare(context.Background(), persistent(scratch+"/real/missing", 0))
	wantReason(t, err, fault.SourceNotFound)
	if _, err := os.Stat(scratch + "/real/missing"); err == nil {
		t.Error("made")
	}
	_, err = src.Prepare(context.Background(), persistent(scratch+"/link/v", 0))
	wantReason(t, err, "SOURCE_SYMLINK")
	if p, err := src.Prepare(context.Background(), persistent(scratch+"/real/v", 0)); err != nil || p.Limit != v1alpha1.LimitNone {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestLimitOfAPersistentVolume(t *testing.T) {
	src, scratch := newPersistent(t)
	at := capacitytest.Mount(t, persistentSize)
	mkdir(t, at, "inside")
	mkdir(t, scratch, "unmounted")
	mkdir(t, scratch, "bound")
	if err := unix.Mount(at+"/inside", scratch+"/bound", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(scratch+"/bound", 0) })
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		t.Fatal(err)
	}
	real := int64(st.Blocks) * st.Frsize
	if real <= 0 || real >= persistentSize {
		t.Fatalf("a filesystem of %d bytes on %d", real, persistentSize)
	}
	for _, limit := range []int64{persistentSize, real} {
		p, err := src.Prepare(context.Background(), persistent(at, limit))
		if err != nil || p.Limit != v1alpha1.LimitCapacity || p.CapacityBytes != real || p.Path != v1alpha1.VolumePathLocal {
			t.Errorf("limit %d: %+v, %v", limit, p, err)
		}
	}
	for name, r := range map[string]volume.Request{
		"larger than the limit":         persistent(at, real-1),
		"a directory of it":             persistent(at+"/inside", persistentSize),
		"a directory of it, bound":      persistent(scratch+"/bound", persistentSize),
		"the node's, as is not mounted": persistent(scratch+"/unmounted", 1<<50),
	} {
		_, err := src.Prepare(context.Background(), r)
		wantReason(t, err, fault.LimitNotEnforced)
		m := fault.MetadataOf(err)
		if m["requested"] != strconv.FormatInt(r.SizeLimitBytes, 10) || m["actual"] == "" || !strings.Contains(err.Error(), m["requested"]) || !strings.Contains(err.Error(), m["actual"]) {
			t.Errorf("%s: figures %v of %v", name, m, err)
		}
		r.BestEffort = true
		if p, err := src.Prepare(context.Background(), r); err != nil || p.Limit != v1alpha1.LimitBestEffort {
			t.Errorf("%s, best effort: %+v, %v", name, p, err)
		}
	}
	// The limit is the filesystem's, so it can be met.
	p, err := src.Prepare(context.Background(), persistent(at, persistentSize))
	if err != nil {
		t.Fatal(err)
	}
	tree, err := src.Tree(context.Background(), p, "inside")
	if err != nil {
		t.Fatal(err)
	}
	tree.Close()
	if err := src.Release(context.Background(), p); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(at, "inside")); err != nil {
		t.Error("release touched the data:", err)
	}
}
