package local

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity/capacitytest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// newScratch makes a scratch folder with the root <scratch>/{tenantId} of a backing.
func newScratch(t *testing.T, root Root) (src *Source, scratch string) {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedBinary(t, "mkfs.ext4", "mkfs.xfs")
	scratch = t.TempDir()
	root.Path = scratch + "/{tenantId}"
	src, err := New([]Root{root}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, l := range loops(scratch) {
			t.Errorf("loop device left: %s", l)
		}
	})
	return src, scratch
}

func localRequest(source string, size int64) volume.Request {
	return volume.Request{Type: v1alpha1.VolumeTypeLocal, Source: source, TenantID: "t-1", SizeLimitBytes: size}
}

func wantReason(t *testing.T, err error, reason fault.Reason) {
	t.Helper()
	if fault.ReasonOf(err) != reason || !fault.IsPermanent(err) {
		t.Errorf("error %v (reason %s), want the permanent %s", err, fault.ReasonOf(err), reason)
	}
}

func TestDirectoriesAreNeverMade(t *testing.T) {
	src, scratch := newScratch(t, Root{})
	mkdir(t, scratch, "t-1")
	_, err := src.Prepare(context.Background(), localRequest(scratch+"/t-1/missing", 0))
	wantReason(t, err, fault.SourceNotFound)
	if entries, _ := os.ReadDir(scratch + "/t-1"); len(entries) != 0 {
		t.Errorf("made %v", entries)
	}
}

func TestWhatIsPrompt(t *testing.T) {
	src, scratch := newScratch(t, Root{})
	mkdir(t, scratch, "t-1/v/sub")
	fsType := "ext4"
	src.sys = typed{system: src.sys, of: func(path string) string {
		if path == scratch+"/t-1/v/sub" {
			return "tmpfs"
		}
		return fsType
	}}
	plain, limited := localRequest(scratch+"/t-1/v", 0), localRequest(scratch+"/t-1/v", 1<<20)
	below := plain
	below.SubPath = "sub"
	for _, c := range []struct {
		name, fsType string
		r            volume.Request
		prompt       bool
	}{
		{"a directory", "ext4", plain, true},
		{"a directory of it", "ext4", below, true},
		{"one with a limit, which Prepare holds it to", "ext4", limited, false},
		{"on a file server", "nfs4", plain, false},
		{"local, but on the way is a file server", "fuse.sshfs", below, false},
	} {
		fsType = c.fsType
		tree, _, err := src.PromptTree(c.r)
		if err != nil || (tree != nil) != c.prompt {
			t.Errorf("%s: tree %v, %v", c.name, tree, err)
		}
		if tree != nil {
			tree.Close()
		}
	}
	fsType = "ext4"
	_, _, err := src.PromptTree(localRequest(scratch+"/t-1/gone", 0))
	wantReason(t, err, fault.SourceNotFound)
}

// typed is a system whose filesystems have other types.
type typed struct {
	system
	of func(path string) string
}

func (s typed) FilesystemType(path string) (string, error) { return s.of(path), nil }

func TestSourcesThroughSymlinksAreRefused(t *testing.T) {
	src, scratch := newScratch(t, Root{})
	mkdir(t, scratch, "t-1/real")
	mkdir(t, scratch, "t-2/secret")
	for link, to := range map[string]string{"t-1/out": "../t-2/secret", "t-1/abs": "/etc", "t-1/in": "real", "t-3": "t-2"} {
		if err := os.Symlink(to, filepath.Join(scratch, link)); err != nil {
			t.Fatal(err)
		}
	}
	for _, source := range []string{"/t-1/out", "/t-1/abs", "/t-1/abs/ssl", "/t-1/in"} {
		if _, err := src.Prepare(context.Background(), localRequest(scratch+source, 0)); !fault.IsPermanent(err) {
			t.Errorf("%s: %v", source, err)
		}
	}
	r := localRequest(scratch+"/t-3/secret", 0)
	r.TenantID = "t-3"
	if _, err := src.Prepare(context.Background(), r); !fault.IsPermanent(err) {
		t.Errorf("a tenant's folder that is a symlink: %v", err)
	}
}

func TestLimitOfADirectory(t *testing.T) {
	src, scratch := newScratch(t, Root{})
	mkdir(t, scratch, "t-1/plain")
	mkdir(t, scratch, "t-1/small")
	if err := unix.Mount("small", scratch+"/t-1/small", "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(scratch+"/t-1/small", 0) })

	plain := localRequest(scratch+"/t-1/plain", 1<<20)
	if src.sys.(*kernel).limiter.Supported(open(t, scratch+"/t-1/plain")) != nil {
		_, err := src.Prepare(context.Background(), plain)
		wantReason(t, err, fault.LimitNotEnforced)
		plain.BestEffort = true
		p, err := src.Prepare(context.Background(), plain)
		if err != nil || p.Limit != v1alpha1.LimitBestEffort {
			t.Errorf("best effort: %+v, %v", p, err)
		}
	}
	p, err := src.Prepare(context.Background(), localRequest(scratch+"/t-1/small", 1<<20))
	if err != nil || p.Limit != v1alpha1.LimitCapacity || p.CapacityBytes != 1<<20 {
		t.Errorf("a filesystem of that size: %+v, %v", p, err)
	}
	_, err = src.Prepare(context.Background(), localRequest(scratch+"/t-1/small", 1<<20-1))
	wantReason(t, err, fault.LimitNotEnforced)

	src.sys.(*kernel).limiter = &capacitytest.Limiter{}
	p, err = src.Prepare(context.Background(), localRequest(scratch+"/t-1/plain", 1<<20))
	if err != nil || p.Limit != v1alpha1.LimitQuota {
		t.Errorf("quota: %+v, %v", p, err)
	}
	_, err = src.Prepare(context.Background(), localRequest(scratch+"/t-1/plain", 2<<20))
	wantReason(t, err, fault.SizeMismatch)
	if m := fault.MetadataOf(err); m["requested"] != "2097152" || m["actual"] != "1048576" {
		t.Errorf("figures %v", m)
	}
	if err := src.Release(context.Background(), p); err != nil {
		t.Fatal(err)
	}
	if _, err := src.Prepare(context.Background(), localRequest(scratch+"/t-1/plain", 2<<20)); err != nil {
		t.Errorf("another limit once nobody uses the volume: %v", err)
	}
}

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestFirstUseMakesTheImage(t *testing.T) {
	src, scratch := newScratch(t, Root{Backing: BackingImage, Shared: true})
	ctx, source := context.Background(), scratch+"/t-1/v"

	_, err := src.Prepare(ctx, localRequest(source, 0))
	wantReason(t, err, fault.SizeRequired)
	readOnly := localRequest(source, 32<<20)
	readOnly.ReadOnly = true
	_, err = src.Prepare(ctx, readOnly)
	wantReason(t, err, fault.SourceNotFound)
	_, err = src.Prepare(ctx, localRequest(source, 1<<20))
	wantReason(t, err, fault.InvalidSize)
	_, err = src.Prepare(ctx, localRequest(source, 1<<55))
	if fault.ReasonOf(err) != fault.CapacityExceeded {
		t.Errorf("more than is free: %v", err)
	}

	p, err := src.Prepare(ctx, localRequest(source, 32<<20))
	if err != nil || p.Limit != v1alpha1.LimitImage || p.CapacityBytes != 32<<20 {
		t.Fatalf("%+v, %v", p, err)
	}
	if st, err := os.Stat(scratch + "/t-1"); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("the tenant's folder: %v, %v", st.Mode(), err)
	}
	if st, err := os.Stat(source + ".img"); err != nil || st.Mode().Perm() != 0o600 || st.Size() != 32<<20 {
		t.Errorf("the image: %v, %v", st, err)
	}
	inside(t, p, func(dir string) {
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 0 {
			t.Errorf("a new volume holds %v, %v", entries, err)
		}
		if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o777 {
			t.Errorf("its root: %v, %v", st.Mode(), err)
		}
	})

	_, err = src.Prepare(ctx, localRequest(source, 33<<20))
	wantReason(t, err, fault.SizeMismatch)
	if m := fault.MetadataOf(err); m["requested"] != "34603008" || m["actual"] != "33554432" {
		t.Errorf("figures %v", m)
	}
	for _, r := range []volume.Request{localRequest(source, 0), readOnly, {Type: "local", Source: source, TenantID: "t-2", ReadOnly: true}} {
		if again, err := src.Prepare(ctx, r); err != nil || again.CapacityBytes != 32<<20 || again.Key != p.Key {
			t.Errorf("%+v: %+v, %v", r, again, err)
		}
	}
}

func TestMountsOfAnImageShareOneFilesystem(t *testing.T) {
	src, scratch := newScratch(t, Root{Backing: BackingImage})
	ctx := context.Background()
	p, err := src.Prepare(ctx, localRequest(scratch+"/t-1/v", 32<<20))
	if err != nil {
		t.Fatal(err)
	}
	const users = 20
	devices := map[string]bool{}
	var trees []*mount.Tree
	for range users {
		tree, err := src.Tree(ctx, p, "")
		if err != nil {
			t.Fatal(err)
		}
		trees = append(trees, tree)
		id, err := tree.Identity()
		if err != nil {
			t.Fatal(err)
		}
		devices[id.Device] = true
	}
	usage, err := trees[0].Statfs()
	if err != nil || usage.TotalBytes > 32<<20 || usage.TotalBytes < 20<<20 {
		t.Errorf("df shows %+v, %v", usage, err)
	}
	if len(devices) != 1 || len(loops(scratch)) != 1 {
		t.Errorf("%d users have the devices %v, %v", users, devices, loops(scratch))
	}
	for _, tree := range trees {
		tree.Close()
	}
	if err := src.Release(ctx, p); err != nil {
		t.Error(err)
	}
}

func TestReleaseOfWhatIsHeldIsTriedAgain(t *testing.T) {
	src, scratch := newScratch(t, Root{Backing: BackingImage})
	p, err := src.Prepare(context.Background(), localRequest(scratch+"/t-1/v", 32<<20))
	if err != nil {
		t.Fatal(err)
	}
	tree, err := src.Tree(context.Background(), p, "")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err = src.Release(ctx, p)
	if fault.ReasonOf(err) != fault.Busy || fault.IsPermanent(err) {
		t.Errorf("error %v, want a transient BUSY", err)
	}
	tree.Close()
	if err := src.Release(context.Background(), p); err != nil {
		t.Error(err)
	}
}

func TestDamagedRecordsAreRefused(t *testing.T) {
	src, _ := newScratch(t, Root{})
	for _, record := range []string{`{`, `{}`, `[]`, `null`} {
		p := volume.Prepared{Key: "k", Type: "local", Details: []byte(record)}
		if _, err := src.Tree(context.Background(), p, ""); fault.ReasonOf(err) != fault.Internal {
			t.Errorf("%s: tree: %v", record, err)
		}
		if err := src.Release(context.Background(), p); fault.ReasonOf(err) != fault.Internal {
			t.Errorf("%s: release: %v", record, err)
		}
	}
}

// remote is a system on which everything lies on a network filesystem.
type remote struct{ system }

func (remote) FilesystemType(string) (string, error) { return "nfs4", nil }

func (r remote) OpenDir(prefix, rel string) (*os.File, error) {
	panic("a directory that may hang was opened in the agent's own process: " + prefix + "/" + rel)
}

func TestWhatMayHangIsTouchedByTheHelper(t *testing.T) {
	src, scratch := newScratch(t, Root{})
	mkdir(t, scratch, "t-1/v/sub/deep")
	src.sys = remote{src.sys}
	ctx := context.Background()
	p, err := src.Prepare(ctx, localRequest(scratch+"/t-1/v", 0))
	if err != nil {
		t.Fatal(err)
	}
	tree, err := src.Tree(ctx, p, "sub")
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Close()
	deep, err := tree.Sub("deep")
	if err != nil {
		t.Fatal(err)
	}
	deep.Close()
	for _, escape := range []string{"..", "sub/../..", "missing"} {
		if tr, err := src.Tree(ctx, p, escape); err == nil {
			tr.Close()
			t.Errorf("subPath %q was accepted", escape)
		}
	}
	_, err = src.Prepare(ctx, localRequest(scratch+"/t-1/v", 1<<20))
	wantReason(t, err, fault.LimitNotEnforced)
	_, err = src.Prepare(ctx, localRequest(scratch+"/t-1/missing", 0))
	wantReason(t, err, fault.SourceNotFound)
	if err := src.Release(ctx, p); err != nil {
		t.Error(err)
	}

	images, scratch := newScratch(t, Root{Backing: BackingImage})
	images.sys = remote{images.sys}
	_, err = images.Prepare(ctx, localRequest(scratch+"/t-1/v", 32<<20))
	wantReason(t, err, fault.InvalidSource)
}

func TestFilesystemTypesFollowTheMountTable(t *testing.T) {
	testenv.NeedRoot(t)
	var types mountTypes
	dir := t.TempDir()
	before, err := types.lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("x", dir, "ramfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	if got, err := types.lookup(dir); err != nil || got != "ramfs" {
		t.Errorf("after the mount: %s, %v", got, err)
	}
	if err := unix.Unmount(dir, 0); err != nil {
		t.Fatal(err)
	}
	if got, err := types.lookup(dir); err != nil || got != before {
		t.Errorf("after the unmount: %s, %v; want %s", got, err, before)
	}
}
