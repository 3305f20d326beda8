package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"
)

// samples are the times of one operation.
type samples []time.Duration

// add measures f.
func (s *samples) add(f func()) {
	began := time.Now()
	f()
	*s = append(*s, time.Since(began))
}

// quantile is the sample below which a share q of all lies.
func (s samples) quantile(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func (s samples) median() time.Duration { return s.quantile(0.5) }

// row is one line of the table.
type row struct{ what, p50, p99, n, baseline, ratio string }

// budget is one line of design section 11.
type budget struct {
	what, limit, figure string
	met                 bool
}

// report collects what was measured.
type report struct {
	start   string // load average at the start
	rows    []row
	budgets []budget
}

func newReport() *report { return &report{start: load()} }

// times adds a line with the quantiles of an operation beside those of its baseline, which may be nil.
func (r *report) times(what string, s samples, baseline string, b samples) {
	line := row{what: what, p50: span(s.median()), p99: span(s.quantile(0.99)), n: fmt.Sprint(len(s)), baseline: "–", ratio: "–"}
	if len(b) > 0 {
		line.baseline = fmt.Sprintf("%s: %s / %s", baseline, span(b.median()), span(b.quantile(0.99)))
		line.ratio = fmt.Sprintf("%.2f", float64(s.median())/float64(b.median()))
	}
	r.rows = append(r.rows, line)
}

// value adds a line with one figure.
func (r *report) value(what, value, baseline string) {
	r.rows = append(r.rows, row{what: what, p50: value, p99: "–", n: "1", baseline: baseline, ratio: "–"})
}

func (r *report) budget(what, limit, figure string, met bool) {
	r.budgets = append(r.budgets, budget{what, limit, figure, met})
}

func (r *report) print(w io.Writer) {
	fmt.Fprintf(w, "Machine: %d cores, Linux %s, %s, %s, %s; load average %s at the start, %s at the end.\n",
		runtime.NumCPU(), kernel(), version("containerd", "--version"), version("runc", "--version"), runtime.Version(), r.start, load())
	fmt.Fprintf(w, "Command: `bench %s`, %s.\n\n", strings.Join(os.Args[1:], " "), time.Now().UTC().Format("2006-01-02"))
	fmt.Fprintln(w, "| what | p50 | p99 | n | baseline (p50 / p99) | ratio of medians |")
	fmt.Fprintln(w, "|---|---|---|---|---|---|")
	for _, l := range r.rows {
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s |\n", l.what, l.p50, l.p99, l.n, l.baseline, l.ratio)
	}
	if len(r.budgets) == 0 {
		return
	}
	fmt.Fprintln(w, "\n| budget (design, section 11) | limit | here | |")
	fmt.Fprintln(w, "|---|---|---|---|")
	for _, b := range r.budgets {
		verdict := "met"
		if !b.met {
			verdict = "**missed**"
		}
		fmt.Fprintf(w, "| %s | %s | %s | %s |\n", b.what, b.limit, b.figure, verdict)
	}
}

// span prints a duration with three digits.
func span(d time.Duration) string {
	switch {
	case d < 10*time.Microsecond:
		return fmt.Sprintf("%.2f µs", float64(d)/1e3)
	case d < time.Millisecond:
		return fmt.Sprintf("%.0f µs", float64(d)/1e3)
	case d < 100*time.Millisecond:
		return fmt.Sprintf("%.2f ms", float64(d)/1e6)
	case d < time.Second:
		return fmt.Sprintf("%.0f ms", float64(d)/1e6)
	}
	return fmt.Sprintf("%.2f s", d.Seconds())
}

func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	first, _, _ := strings.Cut(string(b), " ")
	return first
}

func kernel() string {
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(b))
}

// version is what a program says of itself, in short.
func version(program string, flag string) string {
	out, err := exec.Command(program, flag).Output()
	if err != nil {
		return program + " of unknown version"
	}
	words := strings.Fields(string(out))
	for _, w := range words[1:] {
		if v := strings.TrimPrefix(w, "v"); v != "" && v[0] >= '0' && v[0] <= '9' {
			return program + " " + v
		}
	}
	return program
}
