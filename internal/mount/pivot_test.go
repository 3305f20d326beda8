package mount

import (
	"context"
	"path/filepath"
	"testing"
)

// A volume that is attached before the container's runtime has pivoted is the container's afterwards, at its target, and
// is found and detached there by the same thread.
func TestAttachBeforeThePivot(t *testing.T) {
	bothKernels(t, func(t *testing.T, modern bool) {
		s := newSandbox(t, pivotEnv+"=1")
		root := ""
		for _, v := range s.cmd.Env {
			if name := rootEnv + "="; len(v) > len(name) && v[:len(name)] == name {
				root = v[len(name):]
			}
		}
		if _, err := enter(s.proc, "", modern); reason(err) != ReasonNamespaceIsHost {
			t.Errorf("entered without its root: %v", err)
		}
		for _, wrong := range []string{filepath.Dir(root), root + "/tmp", root + "/missing"} {
			if _, err := enter(s.proc, wrong, modern); reason(err) != ReasonInvalidTarget {
				t.Errorf("%s: %v", wrong, err)
			}
		}
		before := hostMounts(t, root)
		ns, err := enter(s.proc, root, modern)
		check(t, err)
		defer ns.Close()
		source := newSource(t)
		placed := attach(t, ns, clone(t, source), "/new/data")
		if _, err := ns.Attach(context.Background(), clone(t, source), "/shm", nil); reason(err) != ReasonTargetOnVolume {
			t.Errorf("on a mount of the container's: %v", err)
		}
		if after := hostMounts(t, root); after != before {
			t.Errorf("on the host there is\n%s, before it was\n%s", after, before)
		}
		if got := s.do("pivot"); got != "ready" {
			t.Fatalf("the sandbox says %q", got)
		}
		if info, ok, err := ns.Find(placed.Identity); err != nil || !ok || info.MountPoint != "/new/data" {
			t.Errorf("found %+v, %v, %v", info, ok, err)
		}
		if got := s.do("open", "/new/data/file"); got != "ok" {
			t.Errorf("inside: %s", got)
		}
		attach(t, ns, clone(t, source), "/later")
		fresh := s.enter(modern)
		if info, ok, err := fresh.Find(placed.Identity); err != nil || !ok || info.MountPoint != "/new/data" {
			t.Errorf("another thread found %+v, %v, %v", info, ok, err)
		}
		if _, err := enter(s.proc, root, modern); reason(err) != ReasonInvalidTarget {
			t.Errorf("entered by the old root: %v", err)
		}
		s2, err := ns.Detach(context.Background(), "/new/data", placed.Identity, DetachOptions{Force: true})
		if err != nil || s2.MountPoint != "/new/data" {
			t.Errorf("detach: %+v, %v", s2, err)
		}
	})
}
