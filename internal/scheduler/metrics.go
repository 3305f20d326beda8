package scheduler

import (
	"maps"

	"github.com/prometheus/client_golang/prometheus"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// metrics are the scheduler's. The first two names are the specification's.
type metrics struct {
	volumes    *prometheus.GaugeVec
	crossing   prometheus.Counter
	stages     *prometheus.HistogramVec
	operations *prometheus.CounterVec
}

func newMetrics(registerer prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		volumes: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "sandbox_dynamic_volume_count",
			Help: "Dynamic volumes that are mounted.",
		}, []string{"namespace", "group", "sub_group", "volume_type"}),
		crossing: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "sandbox_pvc_cross_topology_mount",
			Help: "Volumes of another topology domain that were attached because forceMount was set.",
		}),
		stages: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "sandbox_volume_stage_seconds",
			Help:    "Duration of each stage of an attach on the node.",
			Buckets: prometheus.ExponentialBuckets(10e-6, 4, 12), // 10 µs to 42 s
		}, []string{"stage"}),
		operations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "sandbox_operations_total",
			Help: "Commands to node agents, by how they ended: OK or the reason.",
		}, []string{"operation", "result"}),
	}
	if registerer == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.volumes, m.crossing, m.stages, m.operations} {
		if err := registerer.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) observe(stages []*agentv1.Stage) {
	for _, s := range stages {
		m.stages.WithLabelValues(s.GetName()).Observe(s.GetDuration().AsDuration().Seconds())
	}
}

// tally is what a sandbox has mounted, as the gauge and its VolumeManager were told.
type tally struct {
	manager *VolumeManager
	key     SubSandboxGroupKey
	domain  string
	// dynamic counts the dynamic volumes by type, bytes adds up the sizes of all that have one of their own.
	dynamic map[v1alpha1.VolumeType]int
	volumes int
	bytes   int64
}

func (t tally) equal(o tally) bool {
	return t.manager == o.manager && t.key == o.key && t.domain == o.domain && t.volumes == o.volumes && t.bytes == o.bytes &&
		maps.Equal(t.dynamic, o.dynamic)
}

// count corrects the gauge and the usage by the difference of two tallies.
func (m *metrics) count(old, now tally) {
	for sign, t := range map[int]tally{-1: old, 1: now} {
		for kind, n := range t.dynamic {
			m.volumes.WithLabelValues(t.key.Namespace, t.key.Group, t.key.SubGroup, string(kind)).Add(float64(sign * n))
		}
		if t.manager != nil {
			t.manager.use(t.domain, sign*t.volumes, int64(sign)*t.bytes)
		}
	}
}
