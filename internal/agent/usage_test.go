package agent_test

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// usageNode is a node whose metrics can be read.
func usageNode(t *testing.T, change func(*agent.Config)) (*agenttest.Node, *prometheus.Registry) {
	t.Helper()
	registry := prometheus.NewRegistry()
	return agenttest.New(t, func(c *agent.Config) {
		c.Registerer = registry
		if change != nil {
			change(c)
		}
	}), registry
}

// scrape are the volumes' metrics by target and name, those without a target by name.
func scrape(t *testing.T, registry *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		name, ok := strings.CutPrefix(f.GetName(), "flux_agent_volume_")
		if !ok && f.GetName() != "flux_agent_volumes_usage_unknown" || strings.HasPrefix(name, "operation") {
			continue
		}
		for _, m := range f.GetMetric() {
			at := ""
			for _, l := range m.GetLabel() {
				if l.GetName() == "target" {
					at = l.GetValue() + " "
				}
			}
			values[at+name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return values
}

func TestUsageOfAVolumeWithAFilesystemOfItsOwn(t *testing.T) {
	n, registry := usageNode(t, nil)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	const size, written = 64 << 20, 8 << 20
	sb.Attach(t, agenttest.Volume{Source: n.Image("t1", "img"), Target: "/img", Size: size})
	sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "dir"), Target: "/dir"}) // has no figures of its own
	before := scrape(t, registry)
	if got := slices.Sorted(maps.Keys(before)); !slices.Equal(got, []string{"/img inodes", "/img inodes_used", "/img read_bytes_total", "/img reads_total",
		"/img size_bytes", "/img used_bytes", "/img writes_total", "/img written_bytes_total", "flux_agent_volumes_usage_unknown"}) {
		t.Fatalf("series %q", got)
	}
	if total := before["/img size_bytes"]; total < size/2 || total > size || before["/img inodes"] <= before["/img inodes_used"] {
		t.Errorf("%v", before)
	}
	sb.Shell(t, "dd if=/dev/urandom of=/img/f bs=1M count=8 && touch /img/a /img/b && sync")
	after := scrape(t, registry)
	if got := after["/img used_bytes"] - before["/img used_bytes"]; got < written || got > written+(1<<20) {
		t.Errorf("%v bytes more are used, %v were written", got, written)
	}
	if got := after["/img inodes_used"] - before["/img inodes_used"]; got != 3 {
		t.Errorf("%v inodes more are used, want 3", got)
	}
	if got := after["/img written_bytes_total"] - before["/img written_bytes_total"]; got < written {
		t.Errorf("the device was written %v bytes, want at least %v", got, written)
	}
	if after["/img writes_total"] <= before["/img writes_total"] || after["flux_agent_volumes_usage_unknown"] != 0 {
		t.Errorf("%v", after)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "flux_agent_volume_used_bytes" {
			labels := map[string]string{}
			for _, l := range f.GetMetric()[0].GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if want := map[string]string{"namespace": "default", "sandbox": sb.Name, "sandbox_uid": sb.UID, "tenant": "t1", "volume_type": "local",
				"source": n.Image("t1", "img"), "target": "/img"}; !maps.Equal(labels, want) {
				t.Errorf("labels %v, want %v", labels, want)
			}
		}
	}
	// A scrape keeps nothing busy, and nothing of the volume.
	sb.Detach(t, "/img", false)
	if got := scrape(t, registry); len(got) != 1 {
		t.Errorf("after the detach: %v", got)
	}
}

// deadSource is a Source some of whose volumes give no tree once they are dead.
type deadSource struct {
	volume.Source
	dead  atomic.Pointer[string] // the source that hangs
	asked atomic.Int64
	end   chan struct{}
}

func (d *deadSource) Tree(ctx context.Context, p volume.Prepared, subPath string) (*mount.Tree, error) {
	if s := d.dead.Load(); s != nil && strings.Contains(string(p.Details), *s) {
		d.asked.Add(1)
		<-d.end // whatever its context says
		return nil, context.Canceled
	}
	return d.Source.Tree(ctx, p, subPath)
}

func TestAVolumeThatHangsHoldsUpNoScrape(t *testing.T) {
	d := &deadSource{end: make(chan struct{})}
	n, registry := usageNode(t, func(c *agent.Config) {
		d.Source = c.Sources[v1alpha1.VolumeTypeLocal]
		c.Sources[v1alpha1.VolumeTypeLocal] = d
	})
	t.Cleanup(func() { close(d.end) })
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})
	for _, name := range []string{"alive", "dead"} {
		sb.Attach(t, agenttest.Volume{Source: n.Image("t1", name), Target: "/" + name, Size: 32 << 20})
	}
	dead := `"dead"`
	d.dead.Store(&dead)
	for range 2 {
		got := scrape(t, registry)
		if _, there := got["/dead used_bytes"]; there || got["/alive used_bytes"] == 0 || got["flux_agent_volumes_usage_unknown"] != 1 {
			t.Errorf("%v", got)
		}
		// The kernel's counters are there all the same.
		if _, there := got["/dead written_bytes_total"]; !there {
			t.Errorf("%v", got)
		}
	}
	if asked := d.asked.Load(); asked != 1 {
		t.Errorf("what hangs was asked %d times", asked)
	}
}
