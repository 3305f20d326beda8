package sets

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// poolMetrics tell of every set what its spec and its status say at the moment of the scrape, so that nothing has to be counted,
// or forgotten with a set.
type poolMetrics struct {
	sets                       store.Reader[*agentsv1alpha1.SandboxSet]
	wanted, present, available *prometheus.Desc
}

func newPoolMetrics(sets store.Reader[*agentsv1alpha1.SandboxSet]) *poolMetrics {
	labels := []string{"namespace", "set"}
	return &poolMetrics{sets: sets,
		wanted:    prometheus.NewDesc("sandbox_set_desired_replicas", "Sandboxes that a SandboxSet is to keep.", labels, nil),
		present:   prometheus.NewDesc("sandbox_set_replicas", "Sandboxes of a SandboxSet that nobody has claimed.", labels, nil),
		available: prometheus.NewDesc("sandbox_set_available_replicas", "Sandboxes of a SandboxSet that can be claimed at once.", labels, nil),
	}
}

// Describe implements prometheus.Collector.
func (m *poolMetrics) Describe(to chan<- *prometheus.Desc) {
	to <- m.wanted
	to <- m.present
	to <- m.available
}

// Collect implements prometheus.Collector.
func (m *poolMetrics) Collect(to chan<- prometheus.Metric) {
	page, err := m.sets.List(context.Background(), store.ListOptions{})
	if err != nil {
		to <- prometheus.NewInvalidMetric(m.wanted, err)
		return
	}
	for _, set := range page.Items {
		for desc, n := range map[*prometheus.Desc]int32{m.wanted: set.Spec.Replicas, m.present: set.Status.Replicas, m.available: set.Status.AvailableReplicas} {
			to <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(n), set.Namespace, set.Name)
		}
	}
}
