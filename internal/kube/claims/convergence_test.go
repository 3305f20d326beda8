package claims_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// faulty makes some writes fail before they are sent, and some lose their answer, while on is set.
type faulty struct {
	next http.RoundTripper
	on   *atomic.Bool
	mu   *sync.Mutex
	rand *rand.Rand
}

func (f faulty) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet || !f.on.Load() {
		return f.next.RoundTrip(r)
	}
	f.mu.Lock()
	dice := f.rand.IntN(20)
	f.mu.Unlock()
	switch dice {
	case 0:
		return nil, errors.New("injected: it was not sent")
	case 1:
		response, err := f.next.RoundTrip(r)
		if err == nil {
			response.Body.Close()
		}
		return nil, errors.New("injected: the answer was lost")
	}
	return f.next.RoundTrip(r)
}

// watcher holds the invariants against every state that is seen.
type watcher struct {
	mu sync.Mutex // guards all below
	// owners has the claim that a sandbox was given to, sets the set that it came from; names are for messages.
	owners map[types.UID]types.UID
	wrong  []string
}

func (c *watcher) fail(format string, args ...any) {
	c.wrong = append(c.wrong, fmt.Sprintf(format, args...))
}

func (c *watcher) see(sb *v1alpha1.Sandbox) {
	c.mu.Lock()
	defer c.mu.Unlock()
	owner := metav1.GetControllerOf(sb)
	if owner == nil {
		return
	}
	given, was := c.owners[sb.UID]
	switch {
	case owner.Kind == "SandboxClaim" && was && given != owner.UID:
		c.fail("sandbox %s went from one claim to another", sb.Name)
	case owner.Kind == "SandboxSet" && was:
		c.fail("sandbox %s went back to its set", sb.Name)
	case owner.Kind == "SandboxClaim":
		c.owners[sb.UID] = owner.UID
	}
}

// TestConvergence has claims, deletions, new templates, lost answers and new leaders at random, and holds that no sandbox
// is given twice, that neither a set nor a claim ever has more than it asked for, and that all is as wished in the end.
func TestConvergence(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("FLUX_TEST_SEED"); s != "" {
		seed = must(strconv.ParseUint(s, 10, 64))
	}
	t.Logf("FLUX_TEST_SEED=%d", seed)
	dice := rand.New(rand.NewPCG(seed, 1))
	w := newWorld(t)
	var on atomic.Bool
	on.Store(true)
	faults := &sync.Mutex{}
	faultDice := rand.New(rand.NewPCG(seed, 2))
	way := func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper { return faulty{next, &on, faults, faultDice} })
	}
	stop := w.start(way)

	ctx, cancel := context.WithCancel(t.Context())
	seen := &watcher{owners: map[types.UID]types.UID{}}
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() {
		for e := range w.theirs.Sandboxes().Follow(ctx) {
			if e.Type == store.Changed && e.Object.Namespace == w.namespace {
				seen.see(e.Object)
			}
		}
	})
	running.Go(func() { // time goes on
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				w.clock.Step(200 * time.Millisecond)
			case <-ctx.Done():
				return
			}
		}
	})

	const most = 6
	pv := w.pv("shared", nil)
	pools := []*agentsv1alpha1.SandboxSet{w.set("a", 4, nil), w.set("b", 2, nil)}
	var claims []*agentsv1alpha1.SandboxClaim
	check := func() {
		t.Helper()
		alive := map[types.UID]int{}
		for _, sb := range w.sandboxes() {
			if owner := metav1.GetControllerOf(sb); owner != nil && sb.DeletionTimestamp == nil {
				alive[owner.UID]++
			}
		}
		for _, set := range pools {
			if alive[set.UID] > most {
				t.Errorf("set %s has %d sandboxes that nobody claimed", set.Name, alive[set.UID])
			}
		}
		for _, c := range claims {
			if n := alive[c.UID]; n > int(*c.Spec.Replicas) {
				t.Errorf("claim %s has %d sandboxes of %d", c.Name, n, *c.Spec.Replicas)
			}
		}
		seen.mu.Lock()
		defer seen.mu.Unlock()
		for _, wrong := range seen.wrong {
			t.Error(wrong)
		}
		seen.wrong = nil
	}
	deleted := map[types.UID]bool{}
	// collect is the garbage collector.
	collect := func() {
		for _, sb := range w.sandboxes() {
			if owner := metav1.GetControllerOf(sb); owner != nil && deleted[owner.UID] {
				w.delete(sb.Name)
			}
		}
	}
	for step := range testenv.Long(80, 3000) {
		set := pools[dice.IntN(len(pools))]
		switch dice.IntN(12) {
		case 0, 1, 2, 3, 4:
			claims = append(claims, w.claim(fmt.Sprint("c", step), set.Name, func(s *agentsv1alpha1.SandboxClaimSpec) {
				s.Replicas = ptr.To(int32(1 + dice.IntN(3)))
				s.CreateOnNoStock = ptr.To(dice.IntN(3) > 0)
				s.ClaimTimeout = &metav1.Duration{Duration: time.Duration(1+dice.IntN(30)) * time.Minute}
				if dice.IntN(2) == 0 {
					s.DynamicVolumesMount = []agentsv1alpha1.DynamicVolumeMount{{PVName: pv, MountPath: "/data"}}
				}
			}))
		case 5:
			w.change(set.Name, func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = int32(dice.IntN(most + 1)) })
		case 6:
			w.change(set.Name, func(s *agentsv1alpha1.SandboxSetSpec) {
				s.Template.Spec.Containers[0].Image = fmt.Sprint("image-", step)
			})
		case 7, 8:
			if all := w.sandboxes(); len(all) > 0 {
				if err := w.theirs.Sandboxes().Delete(t.Context(), store.KeyOf(all[dice.IntN(len(all))]), store.Preconditions{}); err != nil && !errdefs.IsNotFound(err) {
					t.Fatal(err)
				}
			}
		case 9:
			if len(claims) > 0 {
				c := claims[dice.IntN(len(claims))]
				deleted[c.UID] = true
				if err := w.pools.Claims().Delete(t.Context(), store.KeyOf(c), store.Preconditions{UID: c.UID}); err != nil && !errdefs.IsNotFound(err) {
					t.Fatal(err)
				}
			}
		case 10:
			if dice.IntN(3) == 0 { // another leader
				stop()
				stop = w.start(way)
			}
		case 11: // everybody else's writes: those of play are in between all the time
			w.replay()
		}
		collect()
		check()
		if t.Failed() {
			t.Fatalf("after step %d", step)
		}
	}
	on.Store(false)
	w.replay()
	for _, c := range claims {
		if !deleted[c.UID] && *c.Spec.CreateOnNoStock {
			w.eventually("claim "+c.Name+" is over", func() bool {
				collect()
				phase := w.claimStatus(c.Name).Phase
				return phase == agentsv1alpha1.ClaimCompleted || phase == agentsv1alpha1.ClaimFailed
			})
		}
	}
	for _, set := range pools {
		w.change(set.Name, func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = most })
	}
	for _, c := range claims {
		if !deleted[c.UID] {
			w.eventually("claim "+c.Name+" is over, as the pool has some", func() bool {
				collect()
				phase := w.claimStatus(c.Name).Phase
				return phase == agentsv1alpha1.ClaimCompleted || phase == agentsv1alpha1.ClaimFailed
			})
		}
	}
	for _, set := range pools {
		w.ready(set)
	}
	w.eventually("nobody has what it was not given", func() bool {
		collect()
		for _, sb := range w.sandboxes() {
			owner := metav1.GetControllerOf(sb)
			if owner.Kind != "SandboxClaim" || sb.DeletionTimestamp != nil {
				continue
			}
			given := false
			for _, name := range w.claimStatus(owner.Name).SandboxNames {
				given = given || name == sb.Name
			}
			if !given {
				return false
			}
		}
		return true
	})
	check()
	t.Logf("%d claims, %d sandboxes were given", len(claims), len(seen.owners))
}
