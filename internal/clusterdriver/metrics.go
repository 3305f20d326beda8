package clusterdriver

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// measure registers the process' metrics.
func (p *process) measure() { p.registry.MustRegister(p.calls, poolMetrics{p}) }

// poolMetrics looks at the pool when it is asked for, once for all of its figures.
type poolMetrics struct{ *process }

var (
	poolFree      = prometheus.NewDesc("flux_csi_pool_free_bytes", "What the filesystem of the pool has free.", nil, nil)
	poolPromised  = prometheus.NewDesc("flux_csi_pool_promised_bytes", "What volumes were promised of that and do not use yet.", nil, nil)
	poolAvailable = prometheus.NewDesc("flux_csi_pool_available_bytes", "What can be promised to new volumes, with the overcommit.", nil, nil)
	poolVolumes   = prometheus.NewDesc("flux_csi_volumes", "Volumes in the pool.", nil, nil)
	poolUnclaimed = prometheus.NewDesc("flux_csi_volumes_unclaimed", "Volumes in the pool that no PersistentVolume names.", nil, nil)
)

// Describe implements prometheus.Collector.
func (m poolMetrics) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{poolFree, poolPromised, poolAvailable, poolVolumes} {
		to <- d
	}
	if m.provisioner != nil {
		to <- poolUnclaimed
	}
}

// Collect implements prometheus.Collector.
func (m poolMetrics) Collect(to chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, n int64) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n))
	}
	free, promised, available, err := m.driver.Space()
	if err != nil {
		m.log.Warn("the pool's space cannot be read", "error", err)
	}
	gauge(poolFree, free)
	gauge(poolPromised, promised)
	gauge(poolAvailable, available)
	ids, err := m.driver.IDs()
	if err != nil {
		m.log.Warn("the pool's volumes cannot be listed", "error", err)
	}
	gauge(poolVolumes, int64(len(ids)))
	if m.provisioner != nil {
		gauge(poolUnclaimed, int64(m.provisioner.Unclaimed(ids)))
	}
}

// called counts and logs a call of kubelet's or an agent's.
func (p *process) called(method, volume string, err error) {
	result := "ok"
	if err != nil {
		result = string(fault.ReasonOf(err))
		p.log.Warn("a call failed", "method", method, "volume", volume, "reason", result, "error", err)
	} else {
		p.log.Info("called", "method", method, "volume", volume)
	}
	p.calls.WithLabelValues(method, result).Inc()
}
