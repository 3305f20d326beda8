package agent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// metrics are the agent's own. What the specification names is counted by the scheduler runtime.
type metrics struct {
	operations *prometheus.CounterVec
	duration   *prometheus.HistogramVec
	stages     *prometheus.HistogramVec
}

// stageBuckets reach from a system call (10 µs) to a slow storage system (100 s).
var stageBuckets = prometheus.ExponentialBuckets(10e-6, 3, 15)

func newMetrics(a *Agent) (*metrics, error) {
	m := &metrics{
		operations: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "flux_agent_volume_operations_total",
			Help: "Volume operations by kind (attach, detach) and result (ok, busy, or the error's reason)."}, []string{"operation", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "flux_agent_volume_operation_seconds",
			Help: "Time of a whole volume operation in the agent.", Buckets: stageBuckets}, []string{"operation"}),
		stages: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "flux_agent_attach_stage_seconds",
			Help: "Time of one stage of an attach.", Buckets: stageBuckets}, []string{"stage"}),
	}
	volumes := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flux_agent_volumes_mounted",
		Help: "Volumes that are mounted in sandboxes of this node."}, func() float64 {
		n := 0
		for _, v := range a.journal.AllVolumes() {
			if v.Phase == journal.Mounted {
				n++
			}
		}
		return float64(n)
	})
	held := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flux_agent_volumes_release_pending",
		Help: "Volumes that are detached but still held by a process."}, func() float64 {
		n := 0
		for _, v := range a.journal.AllVolumes() {
			if v.Phase == journal.Lazy {
				n++
			}
		}
		return float64(n)
	})
	prepared := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flux_agent_sources_prepared",
		Help: "Sources that are prepared on this node."}, func() float64 { return float64(len(a.journal.AllPrepared())) })
	mounts := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flux_agent_host_mounts",
		Help: "Mounts in the host's mount namespace. Many make every new container slow."}, func() float64 {
		list, err := mount.Mounts()
		if err != nil {
			return -1
		}
		return float64(len(list))
	})
	abandoned := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flux_agent_helpers_abandoned",
		Help: "Helper processes that hang in the kernel on a dead file server."}, func() float64 { return float64(mount.AbandonedHelpers()) })
	for _, c := range []prometheus.Collector{m.operations, m.duration, m.stages, volumes, held, prepared, mounts, abandoned, newUsage(a)} {
		if err := a.config.Registerer.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
