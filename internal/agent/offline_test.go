package agent_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/csidriver/csidrivertest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// shutDown ends a filesystem as when its device is gone (EXT4_IOC_SHUTDOWN, without a write of its log).
func shutDown(t *testing.T, dir string) {
	t.Helper()
	d, err := os.Open(dir)
	must(t, err)
	defer d.Close()
	const shutdown, noLogFlush = 0x8004587d, 2
	must(t, unix.IoctlSetPointerInt(int(d.Fd()), shutdown, noLogFlush))
}

// A volume whose filesystem is shut down is said to be offline for all its users, others are not, and it can be detached and
// attached again.
func TestOfflineVolume(t *testing.T) {
	d := csidrivertest.New(t)
	d.Create(t, "v", csiSize)
	n := agenttest.New(t, func(c *agent.Config) {
		callsDriver(t, d)(c)
		c.Heartbeat = 50 * time.Millisecond
	})
	one, two := n.Run(t, agenttest.Sandbox{Tenant: "t1"}), n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	for _, sb := range []*agenttest.Sandbox{one, two} {
		sb.Attach(t, csiVolume("v", "/v"))
		sb.Attach(t, agenttest.Volume{Source: n.Image("t1", "img"), Target: "/img", Size: csiSize})
		sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "dir"), Target: "/dir"})
	}
	one.Shell(t, "echo kept > /v/f && sync")
	shutDown(t, fmt.Sprintf("/proc/%d/root/v", one.PID(t)))
	records := func(sb *agenttest.Sandbox) map[string]*agentv1.MountRecord {
		all := map[string]*agentv1.MountRecord{}
		for _, m := range sb.State(t).GetVolumes() {
			all[m.GetTarget()] = m
		}
		return all
	}
	for _, sb := range []*agenttest.Sandbox{one, two} {
		agenttest.Eventually(t, "the inventory says so", func() bool { return records(sb)["/v"].GetReason() == string(fault.VolumeOffline) })
		all := records(sb)
		if all["/v"].GetPhase() != "Mounted" || !strings.Contains(all["/v"].GetMessage(), "shut down") {
			t.Errorf("record %v", all["/v"])
		}
		for _, target := range []string{"/img", "/dir"} {
			if all[target].GetReason() != "" {
				t.Errorf("record %v", all[target])
			}
			sb.Shell(t, "echo on > "+target+"/f")
		}
	}
	for _, sb := range []*agenttest.Sandbox{one, two} {
		sb.Detach(t, "/v", true)
	}
	agenttest.Eventually(t, "it is unpublished", func() bool { return published(t, n) == 0 })
	one.Attach(t, csiVolume("v", "/v"))
	if got := one.Shell(t, "cat /v/f"); got != "kept\n" {
		t.Errorf("it has %q", got)
	}
	if m := records(one)["/v"]; m.GetReason() != "" {
		t.Errorf("its record says of the former: %v", m)
	}
}
