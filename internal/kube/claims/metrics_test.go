package claims_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// samples are what a scrape shows of the pools and claims, "name label…: value"; of a histogram how many it has, and their sum.
func (w *world) samples() (all []string) {
	w.Helper()
	for _, family := range must(w.metrics.Gather()) {
		for _, m := range family.GetMetric() {
			line := family.GetName()
			for _, l := range m.GetLabel() {
				if l.GetName() != "namespace" || l.GetValue() != w.namespace {
					line += " " + l.GetValue()
				}
			}
			switch {
			case m.GetHistogram() != nil:
				line += fmt.Sprintf(": %d, %.0f min", m.GetHistogram().GetSampleCount(), m.GetHistogram().GetSampleSum()/60)
			case m.GetCounter() != nil:
				line += fmt.Sprintf(": %.0f", m.GetCounter().GetValue())
			default:
				line += fmt.Sprintf(": %.0f", m.GetGauge().GetValue())
			}
			all = append(all, line)
		}
	}
	// Sets of other tests are there as well.
	return slices.DeleteFunc(all, func(line string) bool { return strings.Contains(line, " pools-") })
}

// An operator sees how full the pools are, what became of claims and why, and how long they took.
func TestWhatAnOperatorSees(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 2, nil)
	w.ready(set)
	w.claim("mine", "pool", nil)
	w.phase("mine", agentsv1alpha1.ClaimCompleted)
	w.ready(set)
	w.claim("nowhere", "nothing", nil)
	w.phase("nowhere", agentsv1alpha1.ClaimFailed)
	w.hold(func(sb *v1alpha1.Sandbox) bool { return sb.Status.Phase != v1alpha1.SandboxRunning })
	w.claim("some", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) { s.Replicas = ptr.To(int32(3)) })
	w.eventually("two are claimed", func() bool { return w.claimStatus("some").ClaimedReplicas == 2 })
	w.clock.Step(61 * time.Second)
	w.phase("some", agentsv1alpha1.ClaimCompleted)
	want := []string{
		"sandbox_claim_seconds Completed: 1, 0 min",
		"sandbox_claim_seconds Failed: 1, 0 min",
		"sandbox_claim_seconds PartiallyClaimed: 1, 1 min",
		"sandbox_claims_total Claimed Completed: 1",
		"sandbox_claims_total SET_NOT_FOUND Failed: 1",
		"sandbox_claims_total StartingSandbox PartiallyClaimed: 1",
		"sandbox_set_available_replicas pool: 0",
		"sandbox_set_desired_replicas pool: 2",
		"sandbox_set_replicas pool: 2",
	}
	if !testenv.Poll(time.Minute, func() bool { return slices.Equal(w.samples(), want) }) {
		t.Errorf("the metrics are\n%s", strings.Join(w.samples(), "\n"))
	}
	for claim, words := range map[string]string{
		"mine":    "level=INFO msg=\"a claim is over\" claim=%s/mine set=pool phase=Completed",
		"nowhere": "level=WARN msg=\"a claim is over\" claim=%s/nowhere set=nothing phase=Failed sandboxes=[] reason=SET_NOT_FOUND",
		"some":    "level=WARN msg=\"a claim is over\" claim=%s/some set=pool phase=Completed",
	} {
		w.eventually("the log tells of "+claim, func() bool { return w.logged.Has(fmt.Sprintf(words, w.namespace)) })
	}
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = 0 })
	w.eventually("the set is empty", func() bool { return slices.Contains(w.samples(), "sandbox_set_replicas pool: 0") })
}
