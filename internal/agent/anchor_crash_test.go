//go:build failpoint

package agent_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
)

// The agent is killed at every step of taking a volume over from kubelet, of going to the next anchor, and of giving it
// back. The next agent has it as it was before or after, the same request succeeds, and in the end nothing is left.
func TestVolumeOfAnAnchorThatIsCutOffAnywhere(t *testing.T) {
	points := slices.DeleteFunc(failpoint.Names(), func(p string) bool { return !strings.HasPrefix(p, "anchor-") })
	if len(points) == 0 {
		t.Fatal("there are no steps")
	}
	// The next anchor is recorded at the second time.
	for _, p := range slices.Clone(points) {
		if strings.HasPrefix(p, "anchor-prepare/recorded/") {
			points = append(points, "2*"+p)
		}
	}
	k := newKubelet(t)
	n := agenttest.New(t, func(c *agent.Config) {
		var err error
		c.Sources[v1alpha1.VolumeTypePVC], err = anchorsIn(c.RunDir, k.dir)
		must(t, err)
	})
	for _, p := range points {
		t.Run(strings.ReplaceAll(p, "/", "-"), func(t *testing.T) { anchorIsCutOffAt(t, n, k, p) })
	}
}

func anchorIsCutOffAt(t *testing.T, n *agenttest.Node, k *kubelet, point string) {
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	k.publish(t, "uid-1")
	k.publish(t, "uid-2")
	n.Stop(t)
	cmd, ready := childOf(t, n, child{Kubelet: k.dir})
	hits, name, counted := strings.Cut(point, "*")
	action := "kill"
	if counted {
		action = hits + "*kill"
	} else {
		name = point
	}
	cmd.Env = append(cmd.Env, failpoint.Env+"="+name+"="+action)
	awaitChild(t, cmd, ready)
	died := make(chan error, 1)
	go func() { died <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	steps := []func() error{
		func() error { _, err := sb.TryAttach(t.Context(), anchored("uid-1", "/a")); return err },
		func() error { _, err := sb.TryAttach(t.Context(), anchored("uid-2", "/c")); return err },
		func() error { _, err := sb.TryDetach(t.Context(), "/a", false); return err },
		func() error { _, err := sb.TryDetach(t.Context(), "/c", false); return err },
	}
	rest := steps
	var err error
	for len(rest) > 0 && err == nil {
		if err = rest[0](); err == nil {
			rest = rest[1:]
		}
	}
	// Giving back goes on after the last answer.
	if err := <-died; err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("the agent ended with %v", err)
	}
	n.Start(t)
	recorded := map[string]uint64{}
	for _, v := range sb.State(t).GetVolumes() {
		if v.GetPhase() == "Mounted" {
			recorded[v.GetTarget()] = v.GetMountId()
		}
	}
	for _, target := range []string{"/a", "/c"} {
		m, there := sb.Mounts(t)[target]
		if id, said := recorded[target]; said != there || there && id != m.UniqueID {
			t.Errorf("%s: the agent says %v (%d), the kernel %v (%d)", target, said, id, there, m.UniqueID)
		}
	}
	for _, step := range rest {
		must(t, step())
	}
	agenttest.Eventually(t, "the volume is given back", func() bool { return guards(t, n) == 0 && len(n.Inventory(t).GetPrepared()) == 0 })
	left := sb.Mounts(t)
	for _, target := range []string{"/a", "/c"} {
		if m, there := left[target]; there {
			t.Errorf("%s is still there: %+v", target, m)
		}
	}
	sb.Delete(t)
}
