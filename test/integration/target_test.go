package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// mountsOf is the number of mounts in a sandbox, to see that nothing was added anywhere.
func mountsOf(t *testing.T, sb *agenttest.Sandbox) int { return len(sb.Mounts(t)) }

func TestRefusedTargets(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	source := n.Dir(t, "t1", "data")
	sb.Shell(t, `mkdir -p /real /full /taken/inner && ln -s /real /link && ln -s / /rootlink && touch /full/x /file`)
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "taken"), Target: "/taken/volume"})
	before := mountsOf(t, sb)
	for name, c := range map[string]struct {
		target string
		reason string
	}{
		"the target is a symlink":           {"/link", "TARGET_SYMLINK"},
		"a parent is a symlink":             {"/link/below", "TARGET_SYMLINK"},
		"a parent is a symlink to the root": {"/rootlink/real", "TARGET_SYMLINK"},
		"a symlink to a denied place":       {"/rootlink/etc", "TARGET_SYMLINK"},
		"the target has files":              {"/full", "TARGET_NOT_EMPTY"},
		"the target is a file":              {"/file", "TARGET_NOT_DIRECTORY"},
		"a parent is a file":                {"/file/below", "TARGET_NOT_DIRECTORY"},
		"inside another volume":             {"/taken/volume/below", "TARGET_NESTED"},
		"around another volume":             {"/taken", "TARGET_NESTED"},
		"denied: the root":                  {"/", "TARGET_DENIED"},
		"denied: below /etc":                {"/etc/passwd.d", "TARGET_DENIED"},
		"denied: contains /var/run/secrets": {"/var", "TARGET_DENIED"},
		"not clean":                         {"/a/../b", "INVALID_TARGET"},
		"relative":                          {"data", "INVALID_TARGET"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: source, Target: c.target})
			if err == nil {
				t.Fatal("it was attached")
			}
			if got := string(fault.ReasonOf(err)); got != c.reason {
				t.Errorf("reason %s, want %s: %v", got, c.reason, err)
			}
			if got := mountsOf(t, sb); got != before {
				t.Errorf("%d mounts, had %d", got, before)
			}
		})
	}
	if entries, err := os.ReadDir(source); err != nil || len(entries) != 0 {
		t.Errorf("the source has %v, %v", entries, err)
	}
}

func TestMissingDirectoriesAreMade(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/new/deep/place"})
	sb.Shell(t, "touch /new/deep/place/x")
	if got := sb.Shell(t, "stat -c %a /new/deep"); strings.TrimSpace(got) != "755" {
		t.Errorf("mode %s", got)
	}
	// A directory is never made inside somebody's volume.
	sb.Detach(t, "/new/deep/place", false)
}

func TestTargetBelowATmpfsOfTheSandbox(t *testing.T) {
	n := agenttest.New(t, nil)
	source := n.Dir(t, "t1", "data")
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	if m, ok := sb.Mounts(t)["/run"]; !ok || m.FSType != "tmpfs" {
		t.Fatalf("/run is %+v, the test needs a tmpfs", m)
	}
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/run/volume"})
	sb.Shell(t, "echo x > /run/volume/file")
	if _, err := os.Stat(filepath.Join(source, "file")); err != nil {
		t.Error(err)
	}
}

func TestFailedAttachTakesItsDirectoriesBack(t *testing.T) {
	n := agenttest.New(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	intruder := enter(t, sb.PID(t), same)
	if got := intruder.do("shared"); got != "ok" {
		t.Fatal(got)
	}
	_, err := sb.TryAttach(t.Context(), agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/made/for/it"})
	if string(fault.ReasonOf(err)) != "TARGET_SHARED" || !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("a target whose parent mount is shared: %v", err)
	}
	if got := sb.Exec(t, "ls", "/made"); got.Code == 0 {
		t.Errorf("the directories are still there: %s", got.Stdout)
	}
}

func TestTargetRemovedFromANestedNamespace(t *testing.T) {
	n := agenttest.New(t, nil)
	source := n.Dir(t, "t1", "data")
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	sb.Shell(t, "mkdir /target")
	intruder := enter(t, sb.PID(t), nested) // made before the attach: it does not see the volume
	must(t, os.WriteFile(filepath.Join(source, "precious"), nil, 0o644))
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/target"})
	if got := intruder.do("rmdir", "/target"); got != "ok" {
		t.Fatal("rmdir:", got)
	}
	if _, ok := sb.Mounts(t)["/target"]; ok {
		t.Fatal("the mount is still there: the test shows nothing")
	}
	// Gone is a state: the detach says so, and the volume can be attached again.
	if r := sb.Detach(t, "/target", false); r.GetResult() != agentv1.DetachResponse_ABSENT && r.GetResult() != agentv1.DetachResponse_DETACHED {
		t.Errorf("detach of a mount that is gone: %v", r)
	}
	sb.Attach(t, agenttest.Volume{Source: source, Target: "/target"})
	sb.Shell(t, "test -e /target/precious")
}

// The mount goes with its directory, be that a parent, moved inside, or the target itself, moved where it is no mount point.
func TestTargetMovedWhileMounted(t *testing.T) {
	n := agenttest.New(t, nil)
	source := n.Dir(t, "t1", "data")
	must(t, os.WriteFile(filepath.Join(source, "precious"), nil, 0o644))
	for name, tc := range map[string]struct {
		move func(*agenttest.Sandbox, *intruder) string
		to   string
	}{
		"a parent, inside": {func(sb *agenttest.Sandbox, _ *intruder) string {
			sb.Shell(t, "mv /parent /elsewhere/parent")
			return "ok"
		}, "/elsewhere/parent/target"},
		"the target, from a nested namespace": {func(_ *agenttest.Sandbox, i *intruder) string {
			return i.do("mv", "/parent/target", "/elsewhere/target")
		}, "/elsewhere/target"},
	} {
		t.Run(name, func(t *testing.T) {
			sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
			sb.Shell(t, "mkdir /parent /parent/target /elsewhere")
			intruder := enter(t, sb.PID(t), nested) // made before the attach: it does not see the volume
			sb.Attach(t, agenttest.Volume{Source: source, Target: "/parent/target"})
			if got := tc.move(sb, intruder); got != "ok" {
				t.Fatal("move:", got)
			}
			if _, ok := sb.Mounts(t)[tc.to]; !ok {
				t.Fatal("the mount did not move: the test shows nothing")
			}
			if r := sb.Detach(t, "/parent/target", false); r.GetResult() != agentv1.DetachResponse_DETACHED {
				t.Errorf("detach of a mount that was moved: %v", r)
			}
			for at, m := range sb.Mounts(t) {
				if strings.HasSuffix(at, "/target") {
					t.Errorf("still mounted: %+v", m)
				}
			}
			sb.Attach(t, agenttest.Volume{Source: source, Target: "/parent/target"})
			sb.Shell(t, "test -e /parent/target/precious")
		})
	}
}
