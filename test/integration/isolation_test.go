package integration

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

func TestSubPathStaysInTheVolume(t *testing.T) {
	n := agenttest.New(t, nil)
	volume := n.Dir(t, "t1", "data")
	n.Dir(t, "t1", "data-sibling")
	must(t, os.MkdirAll(filepath.Join(volume, "ok/deep"), 0o755))
	must(t, os.WriteFile(filepath.Join(volume, "ok/deep/file"), []byte("right"), 0o644))
	must(t, os.WriteFile(filepath.Join(volume, "plain"), nil, 0o644))
	must(t, os.Symlink("/", filepath.Join(volume, "root")))
	must(t, os.Symlink("ok", filepath.Join(volume, "inside")))
	must(t, os.Symlink("..", filepath.Join(volume, "up")))
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, agenttest.Volume{Source: volume, SubPath: "ok/deep", Target: "/good"})
	if got := sb.Shell(t, "cat /good/file"); got != "right" {
		t.Errorf("got %q", got)
	}
	before := len(sb.Mounts(t))
	for subPath, reason := range map[string]string{
		"../data-sibling": "INVALID_SUB_PATH",
		"ok/../..":        "INVALID_SUB_PATH",
		"/ok":             "INVALID_SUB_PATH",
		"root":            "SUBPATH_SYMLINK",
		"root/etc":        "SUBPATH_SYMLINK",
		"inside":          "SUBPATH_SYMLINK",
		"up/data-sibling": "SUBPATH_SYMLINK",
		"-sibling":        "SUBPATH_NOT_FOUND",
		"missing":         "SUBPATH_NOT_FOUND",
		"plain":           "SUBPATH_NOT_DIRECTORY",
	} {
		_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: volume, SubPath: subPath, Target: "/bad"})
		if err == nil || string(fault.ReasonOf(err)) != reason {
			t.Errorf("subPath %q: %v (reason %s), want %s", subPath, err, fault.ReasonOf(err), reason)
		}
	}
	if got := len(sb.Mounts(t)); got != before {
		t.Errorf("%d mounts, had %d", got, before)
	}
	if _, err := os.Stat(filepath.Join(volume, "missing")); !errors.Is(err, os.ErrNotExist) {
		t.Error("a missing subPath was made")
	}
}

// A process inside writes all the time while a read-only volume comes and goes: there must be no moment in which one of
// its writes reaches the source.
func TestReadOnlyHasNoWritableMoment(t *testing.T) {
	n := agenttest.New(t, nil)
	source := n.Shared(t, "model")
	must(t, os.WriteFile(filepath.Join(source, "weights"), []byte("original"), 0o666))
	must(t, os.Chmod(source, 0o777))
	// None of these makes a file, so that the target stays empty while nothing is mounted there.
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1", Command: []string{"sh", "-c",
		"while :; do truncate -c -s 0 /model/weights; rm -f /model/weights; chmod 777 /model/weights; done 2>/dev/null"}})
	sb.Shell(t, "mkdir -p /model")
	for range 500 {
		sb.Attach(t, agenttest.Volume{Source: source, Target: "/model", ReadOnly: true})
		sb.Detach(t, "/model", true)
	}
	got, err := os.ReadFile(filepath.Join(source, "weights"))
	entries, _ := os.ReadDir(source)
	if err != nil || string(got) != "original" || len(entries) != 1 {
		t.Errorf("the source changed: %q, %v, %v", got, entries, err)
	}
}

func TestRootInsideCannotUndoTheMount(t *testing.T) {
	n := agenttest.New(t, nil)
	source := n.Shared(t, "model")
	must(t, os.WriteFile(filepath.Join(source, "weights"), []byte("original"), 0o666))
	must(t, unix.Mknod(filepath.Join(source, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/model", ReadOnly: true})
	if got := sb.Exec(t, "sh", "-c", "echo x > /model/weights"); got.Code == 0 || !strings.Contains(got.Stderr, "Read-only file system") {
		t.Errorf("write: %+v", got)
	}
	if got := strings.TrimSpace(sb.Shell(t, "id -u")); got != "0" {
		t.Fatalf("the test is not root inside: %s", got)
	}
	for _, command := range []string{
		"mount -o remount,rw /model", "mount -o remount,rw,bind /model", "umount /model", "umount -l /model",
		"mkdir -p /x && mount --bind /model /x", "mount --move /model /mnt", "unshare -m true", "unshare -U -r -m true",
	} {
		if got := sb.Exec(t, "sh", "-c", command); got.Code == 0 {
			t.Errorf("%q succeeded inside", command)
		}
	}
	if got := sb.Exec(t, "sh", "-c", "cat /model/null"); got.Code == 0 {
		t.Error("a device node on a volume works")
	}
	options := sb.Shell(t, "grep ' /model ' /proc/self/mountinfo")
	for _, want := range []string{"ro", "nosuid", "nodev"} {
		if !strings.Contains(","+strings.Fields(options)[5]+",", ","+want+",") {
			t.Errorf("mount options %q lack %s", options, want)
		}
	}
	if got, err := os.ReadFile(filepath.Join(source, "weights")); err != nil || string(got) != "original" {
		t.Errorf("the source changed: %q, %v", got, err)
	}
}

func TestMountsAreTheSandboxsOwn(t *testing.T) {
	n := agenttest.New(t, nil)
	one, two := n.Run(t, agenttest.Sandbox{Tenant: "t1"}), n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	hostBefore, err := mount.Mounts()
	must(t, err)
	others := len(two.Mounts(t))
	one.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"})
	one.Attach(t, agenttest.Volume{Source: n.Image("t1", "img"), Target: "/img", Size: 16 << 20})
	if got := len(two.Mounts(t)); got != others {
		t.Errorf("the other sandbox has %d mounts, had %d", got, others)
	}
	hostAfter, err := mount.Mounts()
	must(t, err)
	if len(hostAfter) != len(hostBefore) {
		t.Errorf("the host has %d mounts, had %d", len(hostAfter), len(hostBefore))
	}
	if got := two.Exec(t, "ls", "/data"); got.Code == 0 {
		t.Error("the other sandbox sees the target")
	}
}

func TestTenantsAreApart(t *testing.T) {
	n := agenttest.New(t, nil)
	theirs := n.Dir(t, "t2", "secret")
	must(t, os.WriteFile(filepath.Join(theirs, "key"), []byte("secret"), 0o644))
	// What a tenant puts into its own directory does not lead out of it.
	must(t, os.Symlink(theirs, filepath.Join(filepath.Dir(n.Dir(t, "t1", "own")), "stolen")))
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	before := len(sb.Mounts(t))
	for _, source := range []string{theirs, filepath.Dir(theirs), filepath.Join(n.Data, "tenants"), n.Data, "/", "/etc",
		filepath.Join(n.Data, "tenants", "t1", "stolen"), filepath.Join(n.Data, "images", "t2", "img"), filepath.Join(n.Data, "tenants-other")} {
		_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: source, Target: "/data"})
		if err == nil {
			t.Errorf("%s was attached", source)
			sb.Detach(t, "/data", true)
		}
	}
	// Shared is read-only for tenants.
	_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: n.Shared(t, "model"), Target: "/data"})
	if !errdefs.IsPermissionDenied(err) {
		t.Errorf("a shared source read-write: %v", err)
	}
	if got := len(sb.Mounts(t)); got != before {
		t.Errorf("%d mounts, had %d", got, before)
	}
}
