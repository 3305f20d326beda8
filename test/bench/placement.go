package main

import (
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// placementBudget is the limit for one decision of the scheduler.
const placementBudget = 5 * time.Microsecond

// benchPlacement runs the scheduler's own Go benchmark, which has its 10,000 agents in 100 domains.
func benchPlacement(p *program, r *report, _ sizes) {
	out, err := exec.CommandContext(p.Context(), "go", "test", "-run", "^$", "-bench", "^BenchmarkPlacement$", "-benchmem", "-count", "5", "./internal/scheduler").CombinedOutput()
	if err != nil {
		p.Fatalf("%v: %s", err, out)
	}
	var s samples
	var allocated string
	for line := range strings.Lines(string(out)) {
		words := strings.Fields(line)
		if len(words) < 8 || !strings.HasPrefix(words[0], "BenchmarkPlacement") {
			continue
		}
		ns, err := strconv.ParseFloat(words[2], 64)
		p.must(err)
		s, allocated = append(s, time.Duration(ns)), words[4]+" B in "+words[6]+" allocations"
	}
	if len(s) == 0 {
		p.Fatalf("no figures in %s", out)
	}
	r.times("placement decision, 10,000 agents in 100 domains ("+allocated+")", s, "", nil)
	r.budget("placement decision, 10,000 agents in 100 domains", "≤ 5 µs", span(s.median()), s.median() <= placementBudget)
}
