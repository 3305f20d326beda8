package clustercontroller

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// termMetrics are the metrics of the present term as leader, none outside of one: what a scheduler counts is about what
// it does, and ends with it.
type termMetrics struct {
	mu      sync.Mutex // guards present
	present prometheus.Gatherer
}

// set makes a registry the present one until the function that it returns is called.
func (t *termMetrics) set(g prometheus.Gatherer) (end func()) {
	t.put(g)
	return func() { t.put(nil) }
}

func (t *termMetrics) put(g prometheus.Gatherer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.present = g
}

// Gather implements prometheus.Gatherer.
func (t *termMetrics) Gather() ([]*dto.MetricFamily, error) {
	t.mu.Lock()
	g := t.present
	t.mu.Unlock()
	if g == nil {
		return nil, nil
	}
	return g.Gather()
}
