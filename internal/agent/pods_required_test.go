package agent_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/pods/podstest"
)

// requiring is a Pod whose container main does not start without volumes at the targets.
func (p *podNode) requiring(targets string) *podstest.Pod {
	return p.env.Named(podstest.Pod{Annotations: map[string]string{
		v1alpha1.AnnotationContainer: "main", v1alpha1.AnnotationRequiredVolumes: targets}})
}

// reads is a container whose only command reads a volume.
var reads = podstest.Container{Command: []string{"sh", "-c", "cat /data/seed /models/seed && exec sleep 3600"}}

// The start waits for a volume that nobody has asked for yet, and for one whose sandbox is not known.
func TestPodThatRequiresVolumesWaitsForThem(t *testing.T) {
	n := newPodNode(t)
	pod := n.requiring("/data, /models")
	pod.Run(t)
	side := pod.Start(t, podstest.Container{Name: "side"}) // does not wait
	started := make(chan error, 1)
	main := pod.Create(t, reads)
	go func() { started <- main.Run(context.Background()) }()
	sb := n.sandboxOf(pod, "main")
	sb.Attach(t, agenttest.Volume{Source: seeded(t, n.Dir(t, "t1", "data")), Target: "/data", AtCreate: true})
	agenttest.Eventually(t, "the first volume is there", func() bool {
		st := sb.State(t)
		return len(st.GetVolumes()) == 1 && st.GetVolumes()[0].GetPhase() == "Mounted"
	})
	select {
	case err := <-started:
		t.Fatalf("it did not wait for the second: %v", err)
	default:
	}
	if st := sb.State(t); st.GetPhase() != "Created" {
		t.Errorf("state %v", st)
	}
	sb.Attach(t, agenttest.Volume{Source: seeded(t, n.Dir(t, "t1", "models")), Target: "/models", ReadOnly: true})
	must(t, <-started)
	st := sb.State(t)
	for _, v := range st.GetVolumes() {
		if m, ok := mountAt(t, main.PID(t), v.GetTarget()); !ok || m.UniqueID != v.GetMountId() {
			t.Errorf("the kernel shows %+v, the record is %v", m, v)
		}
		if v.GetAttached() != "BeforeStart" {
			t.Errorf("attached %s: %v", v.GetAttached(), v)
		}
	}
	if st.GetContainerId() != main.ID {
		t.Errorf("state %v", st)
	}
	if _, ok := mountAt(t, side.PID(t), "/data"); ok {
		t.Error("the other container has it too")
	}
	main.Exec(t, "touch /data/here && ! touch /models/here")
	agenttest.Eventually(t, "it runs", func() bool { return sb.State(t).GetPhase() == "Running" })
	// Whoever looks now and then finds it so.
	n.Restart(t)
	n.connected(t)
	if st := sb.State(t); len(st.GetVolumes()) != 2 || st.GetVolumes()[0].GetPhase() != "Mounted" || st.GetVolumes()[1].GetPhase() != "Mounted" {
		t.Errorf("after a restart of the agent: %v", st)
	}
	main.Kill(t)
	again := time.Now()
	main.Again(t)
	t.Logf("a start with required volumes took %v", time.Since(again))
	main.Exec(t, "test -e /data/here && test $(grep -c ' /data ' /proc/self/mountinfo) = 1")
	sb.Detach(t, "/data", false)
	sb.Detach(t, "/models", false)
	if out := main.Exec(t, "ls /data /models"); strings.Contains(out, "seed") {
		t.Error(out)
	}
}

// The agent is gone between the making of a container and its start: the start waits for the next agent.
func TestPodThatRequiresVolumesWaitsForTheAgent(t *testing.T) {
	n := newPodNode(t)
	pod := n.requiring("/data,/models")
	sb := n.sandboxOf(pod, "main")
	for _, name := range []string{"data", "models"} {
		sb.Attach(t, agenttest.Volume{Source: seeded(t, n.Dir(t, "t1", name)), Target: "/" + name, AtCreate: true})
	}
	pod.Run(t)
	main := pod.Create(t, reads)
	n.Stop(t)
	started := make(chan error, 1)
	go func() { started <- main.Run(context.Background()) }()
	plain := n.env.Run(t, podstest.Pod{}) // nobody else waits
	plain.Start(t, podstest.Container{})
	select {
	case err := <-started:
		t.Fatalf("it started without an agent: %v", err)
	default:
	}
	n.Start(t)
	must(t, <-started)
	if st := sb.State(t); len(st.GetVolumes()) != 2 || st.GetVolumes()[0].GetAttached() != "BeforeStart" {
		t.Errorf("state %v", st)
	}
}

// What is required and does not come is why the container does not start, word for word; and nothing of it is left.
func TestPodThatDoesNotGetWhatItRequires(t *testing.T) {
	n := newPodNode(t)
	n.patience = 2 * time.Second
	n.Restart(t)
	n.connected(t)
	pod := n.requiring("/data")
	pod.Run(t)
	c, err := pod.TryStart(t.Context(), reads)
	if err == nil || !strings.Contains(err.Error(), "no Sandbox has volumes for container main") {
		t.Fatal(err)
	}
	sb := n.sandboxOf(pod, "main")
	sb.Attach(t, agenttest.Volume{Source: seeded(t, n.Dir(t, "t1", "models")), Target: "/models", AtCreate: true})
	err = c.TryAgain(t.Context())
	if err == nil || !strings.Contains(err.Error(), "required volume /data") || !strings.Contains(err.Error(), "it has [/models]") {
		t.Fatal(err)
	}
	agenttest.Eventually(t, "the volume waits for the next start", func() bool {
		st := sb.State(t)
		return st.GetPhase() == "Stopped" && len(st.GetVolumes()) == 1 && st.GetVolumes()[0].GetPhase() == "Prepared"
	})
	sb.Attach(t, agenttest.Volume{Source: seeded(t, n.Dir(t, "t1", "data")), Target: "/data", AtCreate: true})
	c.Again(t)
	c.Exec(t, "cat /data/seed /models/seed")
}

func TestPodWithARequirementThatIsWrong(t *testing.T) {
	n := newPodNode(t)
	for _, c := range []struct{ container, targets, want string }{
		{"", "/data", "needs sandbox.flux.io/container beside it"},
		{"main", "data", "clean absolute path"},
		{"main", "", "clean absolute path"},
		{"main", "/data,/etc/x", "which is denied"},
	} {
		annotations := map[string]string{v1alpha1.AnnotationRequiredVolumes: c.targets}
		if c.container != "" {
			annotations[v1alpha1.AnnotationContainer] = c.container
		}
		pod := n.env.Run(t, podstest.Pod{Annotations: annotations})
		if _, err := pod.TryStart(t.Context(), podstest.Container{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	// A container that may have no volumes does not start either.
	pod := n.requiring("/data")
	pod.Privileged = true
	sb := n.sandboxOf(pod, "main")
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data", AtCreate: true})
	pod.Run(t)
	if _, err := pod.TryStart(t.Context(), podstest.Container{Privileged: true}); err == nil || !strings.Contains(err.Error(), "CAP_SYS_ADMIN") {
		t.Error(err)
	}
}
