// Command bench measures FluxSandbox on this machine and prints what it found as Markdown: each figure beside its
// baseline, taken in the same run, and each budget of the design (section 11) met or missed.
//
//	go run ./test/bench [-only engine,create,api,fleet,placement,cluster,pools] [-quick]
//
// Its parts, which run one after another:
//
//	engine     the bare system calls of an attach and a detach, on a thread that stays in a real sandbox's mount namespace,
//	           against the agent: inside its server, and through its socket
//	create     a bare containerd create and start, the agent's, and the server's API, in turns
//	api        attach and detach through the API of the shipped server, against a synced write to its state folder; of named
//	           volumes, against a directory
//	fleet      the same with 1, 10, 100 sandboxes; then memory, threads and goroutines with all their volumes; recovery
//	placement  the scheduler's decision, from its Go benchmark
//	cluster    attach and detach through the API server of the local cluster, if it runs ("make cluster-up deploy"), against
//	           deleting and creating a Pod; the controller's API calls, counted from the audit log
//	pools      claims of a SandboxSet's warm sandboxes there, without and with volumes, against creating a Pod with such a volume;
//	           filling a pool; the controller's API calls for a claim
//
// Figures are wall-clock times. It runs as root, takes minutes, and leaves nothing behind.
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// sizes say how much is measured.
type sizes struct {
	pairs     int // attaches and detaches of the engine
	apiPairs  int // attaches and detaches through the API
	creates   int // of each kind
	sandboxes int // of the fleet
	profile   string
}

// volumesPerSandbox is what the budget for memory speaks of.
const volumesPerSandbox = 3

var parts = []struct {
	name string
	run  func(*program, *report, sizes)
}{
	{"engine", benchEngine},
	{"create", benchCreate},
	{"api", benchAPI},
	{"fleet", benchFleet},
	{"placement", benchPlacement},
	{"cluster", benchCluster},
	{"pools", benchPools}, // last, as its Pods are a load for a while
}

func main() {
	mount.RunHelperIfAsked()
	var s sizes
	var quick bool
	only := flag.String("only", "", "parts to run, separated by commas; default all")
	flag.IntVar(&s.pairs, "pairs", 3000, "attaches and detaches of the engine and the agent")
	flag.IntVar(&s.apiPairs, "api-pairs", 500, "attaches and detaches through the API")
	flag.IntVar(&s.creates, "creates", 30, "sandboxes created of each kind")
	flag.IntVar(&s.sandboxes, "sandboxes", 100, "sandboxes of the fleet")
	flag.BoolVar(&quick, "quick", false, "a tenth of everything, to see whether it works")
	flag.StringVar(&s.profile, "cpuprofile", "", "write a CPU profile of the agent's attaches and detaches to this `file`")
	flag.Parse()
	if quick {
		s.pairs, s.apiPairs, s.creates, s.sandboxes = s.pairs/10, s.apiPairs/10, max(s.creates/10, 2), s.sandboxes/10
	}
	if err := run(s, strings.FieldsFunc(*only, func(r rune) bool { return r == ',' })); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(s sizes, only []string) error {
	for _, name := range only {
		if !slices.ContainsFunc(parts, func(p struct {
			name string
			run  func(*program, *report, sizes)
		}) bool {
			return p.name == name
		}) {
			return fmt.Errorf("there is no part %q", name)
		}
	}
	r := newReport()
	var failed []string
	for _, part := range parts {
		if len(only) > 0 && !slices.Contains(only, part.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "bench: %s (load %s)\n", part.name, load())
		if err := runPart(part.name, func(p *program) { part.run(p, r, s) }); err != nil {
			failed = append(failed, err.Error())
		}
	}
	for _, clean := range []func() error{machine.Clean, containerstest.Clean} {
		if err := clean(); err != nil {
			failed = append(failed, err.Error())
		}
	}
	r.print(os.Stdout)
	if len(failed) > 0 {
		return fmt.Errorf("%s", strings.Join(failed, "\n"))
	}
	return nil
}
