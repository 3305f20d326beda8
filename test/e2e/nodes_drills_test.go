package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/agents"
)

// zone is a label of the nodes of TestNodes beside their topology domain: n1 and n2 are in one, n3 is in another.
const zone = "e2e.flux.io/zone"

// What needs more than one node, on three that all parts share, as to make nodes takes long. Each is a topology domain of
// its own.
func TestNodes(t *testing.T) {
	c := open(t)
	c.addNodes(
		map[string]string{v1alpha1.DefaultTopologyKey: "d1", zone: "a"},
		map[string]string{v1alpha1.DefaultTopologyKey: "d2", zone: "a"},
		map[string]string{v1alpha1.DefaultTopologyKey: "d3", zone: "b"})
	must(t, os.WriteFile(filepath.Join(c.dir("a"), "hello"), []byte("from a"), 0o644))
	must(t, os.WriteFile(filepath.Join(c.dir("b"), "hello"), []byte("from b"), 0o644))
	c.selected("spread", nodeLabel, c.namespace, v1alpha1.SchedulingPolicy{Strategy: "Spread"})
	for _, part := range []struct {
		name string
		run  func(*cluster)
	}{
		{"placement", (*cluster).placement},
		{"topology", (*cluster).topology},
		{"strangers at an agent", (*cluster).strangersAtAnAgent},
		{"another answers for an agent", (*cluster).impostors},
		{"tokens for certificates", (*cluster).tokensForCertificates},
		{"an old leader's commands come late", (*cluster).lateLeader},
		{"a node dies", (*cluster).nodeDies},
		{"a Node is deleted", (*cluster).nodeDeleted},
	} {
		t.Run(part.name, func(t *testing.T) { part.run(c.part(t)) })
	}
}

// on changes a sandbox to a small image and a group.
func on(group string, volumes ...v1alpha1.DynamicVolume) func(*v1alpha1.Sandbox) {
	return func(sb *v1alpha1.Sandbox) {
		sb.Spec.Image, sb.Spec.Group, sb.Spec.DynamicVolumes = "busybox:latest", v1alpha1.GroupPart(group), volumes
	}
}

// onNode fails unless a sandbox is on a node, in the API server's and the kernel's view.
func (n *node) onNode(sb *v1alpha1.Sandbox) {
	n.c.t.Helper()
	if sb.Status.Node != n.name || !slices.Contains(n.has(), string(sb.UID)) {
		n.c.t.Errorf("%s is on %q; %s has %v", sb.Name, sb.Status.Node, n.name, n.has())
	}
}

// named is the node of a name; nil where there is none.
func (c *cluster) named(name string) *node {
	if i := slices.IndexFunc(c.nodes, func(n *node) bool { return n.name == name }); i >= 0 {
		return c.nodes[i]
	}
	return nil
}

// Sandboxes are spread over the nodes, kept to a selector's, to one domain and to what nodes hold; and volumes are attached
// live on each.
func (c *cluster) placement() {
	t := c.t
	c.selected("near", nodeLabel, c.namespace, v1alpha1.SchedulingPolicy{TopologyAffinity: v1alpha1.TopologyAffinity{Enabled: true, Key: zone}})
	for i := range 6 {
		c.sandbox(fmt.Sprint("s", i), ticking, on("spread", local(c.data("a"), "/a")))
	}
	counts, processes := map[string]int{}, map[string]process{}
	for i := range 6 {
		sb := c.phase(fmt.Sprint("s", i), v1alpha1.SandboxRunning)
		processes[sb.Name] = c.process(sb)
		counts[sb.Status.Node]++
		if n := c.named(sb.Status.Node); n != nil {
			n.onNode(sb)
		}
	}
	for _, n := range c.nodes {
		if counts[n.name] != 2 {
			t.Errorf("%s has %d of 6 sandboxes: %v", n.name, counts[n.name], counts)
		}
	}
	for name := range processes {
		c.volumes(name, local(c.data("a"), "/a"), local(c.data("b"), "/b"))
	}
	for name, p := range processes {
		if row := c.row(name, "/b", v1alpha1.VolumeMounted); row.Attached != v1alpha1.AttachedLive {
			t.Errorf("%s: row %+v", name, row)
		}
		for _, v := range []string{"a", "b"} {
			if got := read(t, p.path(v, "hello")); p.mountAt(t, "/"+v) == "" || got != "from "+v {
				t.Errorf("%s: /%s has %q, mounted as %q", name, v, got, p.mountAt(t, "/"+v))
			}
		}
		uninterrupted(t, p)
	}
	c.deleteAll(t.Context())

	// One domain for a group, which has two nodes or one.
	for i := range 3 {
		c.sandbox(fmt.Sprint("near", i), "exec sleep 1000", on("near"))
	}
	zones := map[string][]string{}
	for i := range 3 {
		sb := c.phase(fmt.Sprint("near", i), v1alpha1.SandboxRunning)
		if n := c.named(sb.Status.Node); n != nil {
			zones[n.labels[zone]] = append(zones[n.labels[zone]], n.name)
		}
	}
	if len(zones) != 1 {
		t.Errorf("the sandboxes of a group with affinity are on %v", zones)
	}
	c.deleteAll(t.Context())

	// Two nodes that hold one sandbox each, and then one of them two.
	for _, n := range c.nodes[:2] {
		n.change("annotations", agents.AnnotationMaxSandboxes, "1")
		defer n.change("annotations", agents.AnnotationMaxSandboxes, nil)
	}
	c.selected("full", zone, "a", v1alpha1.SchedulingPolicy{})
	c.sandbox("first", "exec sleep 1000", on("full"))
	c.sandbox("second", "exec sleep 1000", on("full"))
	if one, two := c.phase("first", v1alpha1.SandboxRunning), c.phase("second", v1alpha1.SandboxRunning); one.Status.Node == two.Status.Node ||
		!slices.Contains([]string{c.nodes[0].name, c.nodes[1].name}, one.Status.Node) || two.Status.Node == c.nodes[2].name {
		t.Errorf("on %s and %s, which hold one sandbox each", one.Status.Node, two.Status.Node)
	}
	c.sandbox("third", "exec sleep 1000", on("full"))
	c.wait("the third sandbox says that there is no room", func() (bool, string) {
		sb := c.get("third")
		return sb.Status.Phase == v1alpha1.SandboxPending && sb.Status.Reason == string(fault.NoCapacity), fmt.Sprintf("%+v", sb.Status)
	})
	c.nodes[1].change("annotations", agents.AnnotationMaxSandboxes, "2")
	c.nodes[1].onNode(c.phase("third", v1alpha1.SandboxRunning))
}

// mortal is a label of the nodes that a part lets die, and of those that take over from them.
const mortal = "e2e.flux.io/mortal"

// A node whose agent is gone keeps its sandboxes: unreachable is not dead. Declared out of service, they are placed elsewhere
// with their volumes, but for a process that is not to be started again. The administrator was wrong, as everything runs on:
// when the node is back, of what was placed elsewhere one copy is left, and of the other nothing was lost.
func (c *cluster) nodeDies() {
	t := c.t
	dying, other := c.nodes[0], c.nodes[1]
	c.selected("mortal", mortal, "yes", v1alpha1.SchedulingPolicy{})
	dying.change("labels", mortal, "yes")
	defer dying.change("labels", mortal, nil)
	volumes := []v1alpha1.DynamicVolume{local(c.data("a"), "/a"), local(c.data("b"), "/b")}
	c.sandbox("again", ticking, on("mortal", volumes[0]))
	c.sandbox("once", ticking, func(sb *v1alpha1.Sandbox) {
		on("mortal", volumes[0])(sb)
		sb.Spec.RestartPolicy = v1alpha1.RestartNever
	})
	again, once := c.phase("again", v1alpha1.SandboxRunning), c.phase("once", v1alpha1.SandboxRunning)
	dying.onNode(again)
	dying.onNode(once)
	old, kept := c.process(again), c.process(once)
	other.change("labels", mortal, "yes")
	defer other.change("labels", mortal, nil)

	dying.kill()
	dying.beats() // kubelet is as dead
	c.volumes("again", volumes...)
	if row := c.row("again", "/b", v1alpha1.VolumeFailed); row.Reason != string(fault.AgentUnavailable) || !strings.Contains(row.Message, dying.name) {
		t.Errorf("row %+v", row)
	}
	for _, name := range []string{"again", "once"} {
		if sb := c.get(name); sb.Status.Node != dying.name || sb.Status.Phase != v1alpha1.SandboxRunning {
			t.Errorf("%s on a node that is not reached: %+v", name, sb.Status)
		}
	}

	dying.outOfService(true)
	c.movedTo(other, again, "/a", "/b")
	if sb := c.phase("once", v1alpha1.SandboxLost); sb.Status.Reason != string(fault.NodeDead) || sb.Status.Node != dying.name {
		t.Errorf("%+v", sb.Status)
	}
	if !slices.Equal(other.has(), []string{string(again.UID)}) {
		t.Errorf("%s has %v", other.name, other.has())
	}
	uninterrupted(t, old)
	uninterrupted(t, kept)

	dying.outOfService(false)
	dying.start()
	dying.renew()
	dying.ready()
	c.wait("the node that is back has what is its own only", func() (bool, string) {
		has := dying.has()
		return slices.Equal(has, []string{string(once.UID)}), fmt.Sprint("it has ", has)
	})
	if old.same(t) {
		t.Error("two processes of one sandbox run")
	}
	c.phase("once", v1alpha1.SandboxRunning)
	c.row("once", "/a", v1alpha1.VolumeMounted)
	uninterrupted(t, kept)
	if kept.mountAt(t, "/a") == "" {
		t.Error("the sandbox that was lost and is back has lost its volume")
	}
	c.movedTo(other, again, "/a", "/b")
}

// A Node is deleted, by mistake: its agent is not asked any more although it serves, and its sandboxes are placed elsewhere.
// Made anew, it is a node like any other, although nothing changed of where its agent is, and what it still has of them goes.
func (c *cluster) nodeDeleted() {
	t := c.t
	gone, other := c.nodes[1], c.nodes[2]
	c.selected("movable", mortal, "yes", v1alpha1.SchedulingPolicy{})
	gone.change("labels", mortal, "yes")
	before := c.running("moved", ticking, on("movable", local(c.data("a"), "/a")))
	gone.onNode(before)
	old := c.process(before)
	other.change("labels", mortal, "yes")
	defer other.change("labels", mortal, nil)

	must(t, c.client.CoreV1().Nodes().Delete(t.Context(), gone.name, deleteNow))
	c.movedTo(other, before, "/a")
	uninterrupted(t, old) // nobody ended it

	gone.object()
	c.wait("the Node that is back has nothing of it", func() (bool, string) {
		has := gone.has()
		return len(has) == 0, fmt.Sprint("it has ", has)
	})
	if old.same(t) {
		t.Error("two processes of one sandbox run")
	}
	c.movedTo(other, before, "/a")
	gone.onNode(c.running("there", "exec sleep 1000", on(gone.only())))
}

// movedTo waits until a sandbox runs on a node, and fails unless its volumes are there, in every view.
func (c *cluster) movedTo(n *node, sb *v1alpha1.Sandbox, targets ...string) {
	c.t.Helper()
	c.wait(sb.Name+" runs on "+n.name, func() (bool, string) {
		now := c.get(sb.Name)
		return now.UID == sb.UID && now.Status.Node == n.name && now.Status.Phase == v1alpha1.SandboxRunning, fmt.Sprintf("%+v", now.Status)
	})
	n.onNode(c.get(sb.Name))
	var p process
	c.wait("its process began", func() (bool, string) {
		pids := n.processesOf(string(sb.UID))
		if len(pids) > 1 {
			p = process{pid: pids[1], started: startOf(c.t, pids[1])}
		}
		return len(pids) > 1, fmt.Sprint(pids)
	})
	for _, target := range targets {
		if row := c.row(sb.Name, target, v1alpha1.VolumeMounted); p.mountAt(c.t, target) == "" {
			c.t.Errorf("%s of %s on %s is not mounted: %+v", target, sb.Name, n.name, row)
		}
	}
}
