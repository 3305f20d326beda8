package clusterdriver

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// measure registers the process' metrics. What the pool has is looked at when it is asked for.
func (p *process) measure() {
	gauge := func(name, help string, value func() (int64, error)) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			n, err := value()
			if err != nil {
				p.log.Warn("a metric cannot be read", "metric", name, "error", err)
			}
			return float64(n)
		})
	}
	space := func(which func(free, promised, available int64) int64) func() (int64, error) {
		return func() (int64, error) {
			free, promised, available, err := p.driver.Space()
			return which(free, promised, available), err
		}
	}
	p.registry.MustRegister(
		gauge("flux_csi_pool_free_bytes", "What the filesystem of the pool has free.",
			space(func(free, _, _ int64) int64 { return free })),
		gauge("flux_csi_pool_promised_bytes", "What volumes were promised of that and do not use yet.",
			space(func(_, promised, _ int64) int64 { return promised })),
		gauge("flux_csi_pool_available_bytes", "What can be promised to new volumes, with the overcommit.",
			space(func(_, _, available int64) int64 { return available })),
		gauge("flux_csi_volumes", "Volumes in the pool.", func() (int64, error) {
			ids, err := p.driver.IDs()
			return int64(len(ids)), err
		}),
	)
	if p.provisioner != nil {
		p.registry.MustRegister(gauge("flux_csi_volumes_unclaimed", "Volumes in the pool that no PersistentVolume names.", func() (int64, error) {
			ids, err := p.driver.IDs()
			return int64(p.provisioner.Unclaimed(ids)), err
		}))
	}
	p.registry.MustRegister(p.calls)
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
