//go:build failpoint

package clustercontroller_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/clustercontroller"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// short is a claim of a warm pool and one of an empty pool, and the deletion of the first.
func short(d *drill) {
	shared := d.pv(d.namespace + "-shared")
	d.set("warm-set", 2, nil)
	d.set("empty-set", 0, nil)
	d.ready("warm-set")
	mounts := func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.DynamicVolumesMount = []agentsv1alpha1.DynamicVolumeMount{{PVName: shared, MountPath: "/shared"}}
	}
	d.claim("warm", "warm-set", 1, mounts)
	d.claim("made", "empty-set", 1, nil)
	d.completed("warm")
	d.completed("made")
	d.ready("warm-set")
	if err := d.pools.Claims().Delete(d.Context(), d.key("warm"), store.Preconditions{}); err != nil {
		d.Fatal(err)
	}
	d.scale("warm-set", 1)
	d.sandboxes(1 + 1)
}

// lateLeaders stops a leader right before a write, as a machine that is suspended does, lets another take over
// and do everything, and has the first go on: with that write, and as a leader until it finds that it is none.
func lateLeaders(t *testing.T, c *cluster) {
	calm := c.of(t)
	s := calm.supervise(nil)
	d := calm.drill("calm")
	short(d)
	want := d.settled()
	s.end()
	d.check()
	some := []string{"set/create", "claim/take", "claim/create", "volume/let-go"}
	more := []string{"set/delete", "set/status", "claim/status", "claim-template/create", "pod/create", "pod/delete", "finalizer/protect", "finalizer/release", "volume/hold"}
	for _, step := range append(some, more[:testenv.Long(0, len(more))]...) {
		t.Run(strings.ReplaceAll(step, "/", "-"), func(t *testing.T) {
			c := c.of(t)
			reached := filepath.Join(t.TempDir(), "reached")
			c.expireLease()
			old := c.controller(lateIdentity, map[string]string{step + "/before": "pause(" + reached + ")"})
			t.Cleanup(old.kill)
			took := make(chan struct{})
			var successor *supervisor
			go func() {
				defer close(took)
				if !testenv.Poll(patience, func() bool { _, err := os.Stat(reached); return err == nil }) {
					t.Errorf("the leader does not come to %s", step)
					return
				}
				_ = old.cmd.Process.Signal(syscall.SIGSTOP)
				successor = c.supervise(nil)
			}()
			d := c.drill("late")
			short(d)
			<-took
			d.eventually("another leads", func() bool {
				lease, err := c.admin.CoordinationV1().Leases(ownNamespace).Get(t.Context(), clustercontroller.DefaultLease, metav1.GetOptions{})
				return err == nil && lease.Spec.HolderIdentity != nil && strings.HasPrefix(*lease.Spec.HolderIdentity, "controller-")
			})
			// It may make the one that it was just at, beside the one that there has to be. That goes again.
			d.allow("warm-set", 1+1)
			if err := os.Remove(reached); err != nil {
				t.Fatal(err)
			}
			_ = old.cmd.Process.Signal(syscall.SIGCONT)
			d.eventually("the old leader has found that it leads no longer", func() bool {
				log, err := os.ReadFile(old.log)
				return err == nil && bytes.Contains(log, []byte("no longer leading"))
			})
			old.kill()
			var got string
			if !testenv.Poll(patience, func() bool { got = d.state(d.namespace); return got == want }) {
				t.Errorf("it did not end as with one leader:\n%s", cut(differences(want, got)))
			}
			successor.end()
			d.check()
		})
	}
}
