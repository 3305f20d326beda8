//go:build failpoint

package crash

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// seedEnv repeats an earlier run of TestServerKilledAtRandom.
const seedEnv = "FLUX_CRASH_SEED"

// TestServerKilledAtRandom kills the server at any hit of any point in any scenario, and then again while it recovers
// from that or goes on, up to three times in a row.
func TestServerKilledAtRandom(t *testing.T) {
	seed := rand.Uint64()
	if s := os.Getenv(seedEnv); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		must(t, err)
	}
	t.Logf("%s=%d", seedEnv, seed)
	random := rand.New(rand.NewPCG(seed, 0))
	w := newWorld(t)
	points := w.Failpoints(t)
	arm := func() string {
		return machine.Arm(points[random.IntN(len(points))], fmt.Sprintf("%d*kill", 1+random.IntN(3)))
	}
	for round := range testenv.Long(5, 500) {
		s := scenarios[random.IntN(len(scenarios))]
		env := []string{arm()}
		for random.IntN(2) == 0 && len(env) < 3 {
			env = append(env, arm())
		}
		names := strings.ReplaceAll(strings.Join(env, " "), failpoint.Env+"=", "")
		w = eachOn(t, w, fmt.Sprintf("%d: %s in: %s", round, names, s.name), func(t *testing.T) {
			w.Kill(t)
			rest := s.steps
			for _, e := range env {
				w.Launch(t, e)
				if !w.AwaitReady(t) {
					w.AwaitEnd(t)
					continue
				}
				var died bool
				if rest, died = w.run(t, rest); !died {
					w.Kill(t)
				}
			}
			w.Start(t)
			w.checkRepaired(t)
			w.finish(t, rest)
			w.checkNothingLeft(t)
		})
	}
}
