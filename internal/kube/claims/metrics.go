package claims

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
)

// metrics tell what became of the claims of this leader.
type metrics struct {
	ended   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	m := &metrics{
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "sandbox_claims_total",
			Help: "SandboxClaims that are over, by result (Completed, PartiallyClaimed, Failed) and the reason of their condition Claimed.",
		}, []string{"result", "reason"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "sandbox_claim_seconds",
			Help:    "Time from when a SandboxClaim was first seen to its end, by result.",
			Buckets: prometheus.ExponentialBuckets(5e-3, 2, 16), // 5 ms to 164 s
		}, []string{"result"}),
	}
	if registerer != nil {
		registerer.MustRegister(m.ended, m.seconds)
	}
	return m
}

// over counts a claim that has just come to its end.
func (m *metrics) over(st *agentsv1alpha1.SandboxClaimStatus, took time.Duration) {
	result, reason := string(st.Phase), ""
	if meta.IsStatusConditionTrue(st.Conditions, agentsv1alpha1.ClaimPartially) {
		result = agentsv1alpha1.ClaimPartially
	}
	if c := meta.FindStatusCondition(st.Conditions, agentsv1alpha1.ClaimClaimed); c != nil {
		reason = c.Reason
	}
	m.ended.WithLabelValues(result, reason).Inc()
	m.seconds.WithLabelValues(result).Observe(took.Seconds())
}
