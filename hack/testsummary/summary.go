package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
)

// Counts are the results of tests.
type Counts struct{ Passed, Failed, Skipped int }

// Add adds the results of another run.
func (c *Counts) Add(d Counts) {
	c.Passed += d.Passed
	c.Failed += d.Failed
	c.Skipped += d.Skipped
}

// String is the closing line. Skipped tests are mentioned only if there are any.
func (c Counts) String() string {
	s := fmt.Sprintf("%d passed, %d failed", c.Passed, c.Failed)
	if c.Skipped > 0 {
		s += fmt.Sprintf(", %d skipped", c.Skipped)
	}
	return s
}

// Run is what was seen of some tests.
type Run struct {
	Counts
	// Complaints are what the failed tests complained of, in short: the closing words of a run, where what they logged has
	// long scrolled by.
	Complaints []string
}

// Add adds another run.
func (r *Run) Add(o Run) {
	r.Counts.Add(o.Counts)
	r.Complaints = append(r.Complaints, o.Complaints...)
}

// event is one line of "go test -json" (go doc test2json).
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build output
	Test        string
	Output      string
	Elapsed     float64 // seconds
	FailedBuild string
}

// pkg is what was seen of a package's tests so far.
type pkg struct {
	order  []string          // names of tests, as they started
	result map[string]string // test → "pass", "fail", "skip"; "" while it runs
	output map[string]*strings.Builder
}

// Summarise reads the output of "go test -json" from in, writes the readable form to out, and returns what
// was seen. If strict, a skipped test is a failed one.
func Summarise(in io.Reader, out io.Writer, strict bool) Run {
	var total Run
	pkgs := map[string]*pkg{}
	lines := bufio.NewReader(in)
	seen := false
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			run, ended := handle(line, out, pkgs, strict)
			total.Add(run)
			seen = seen || ended
		}
		if err != nil {
			break
		}
	}
	// A package that never ended: go test itself was killed.
	for name, p := range pkgs {
		fmt.Fprintf(out, "FAIL  %s: the run was cut off\n", name)
		c := p.count(true)
		c.Failed = max(c.Failed, 1)
		total.Add(Run{c, p.complaints(true)})
		seen = true
	}
	if !seen {
		fmt.Fprintln(out, "FAIL  no package was tested")
		total.Failed++
	}
	return total
}

// handle takes one line. When it is the last of a package it returns what was seen of the package and true.
func handle(line []byte, out io.Writer, pkgs map[string]*pkg, strict bool) (Run, bool) {
	var e event
	if json.Unmarshal(line, &e) != nil || e.Action == "" {
		out.Write(line) // not an event: go test's own complaint
		return Run{}, false
	}
	if e.Action == "build-output" {
		io.WriteString(out, e.Output)
		return Run{}, false
	}
	if e.Package == "" {
		return Run{}, false
	}
	p := pkgs[e.Package]
	if p == nil {
		p = &pkg{result: map[string]string{}, output: map[string]*strings.Builder{}}
		pkgs[e.Package] = p
	}
	switch e.Action {
	case "run":
		p.order = append(p.order, e.Test)
		p.result[e.Test] = ""
	case "output":
		if p.output[e.Test] == nil {
			p.output[e.Test] = &strings.Builder{}
		}
		p.output[e.Test].WriteString(e.Output)
	case "pass", "fail", "skip":
		if e.Test != "" {
			p.result[e.Test] = e.Action
			break
		}
		delete(pkgs, e.Package)
		return Run{p.end(e, out, strict), p.complaints(e.Action == "fail")}, true
	}
	return Run{}, false
}

// end prints the package's line and what its failed and skipped tests said.
func (p *pkg) end(e event, out io.Writer, strict bool) Counts {
	c := p.count(e.Action == "fail")
	for _, name := range p.order {
		switch {
		case p.result[name] == "skip":
			fmt.Fprintf(out, "SKIP  %s %s: %s\n", e.Package, name, p.reason(name))
		case p.failed(name, e.Action == "fail"):
			p.print(name, out)
		}
	}
	if e.Action == "fail" && c.Failed == 0 {
		c.Failed = 1
	}
	if e.Action == "fail" && e.FailedBuild == "" {
		p.print("", out)
	}
	word := "ok  "
	switch {
	case e.Action == "fail" || strict && c.Skipped > 0:
		word = "FAIL"
	case e.Action == "skip":
		return c // no test files: not worth a line
	}
	fmt.Fprintf(out, "%s  %s  %.1fs  %s\n", word, e.Package, e.Elapsed, c)
	if strict {
		c.Failed, c.Skipped = c.Failed+c.Skipped, 0
	}
	return c
}

// count counts the leaves: tests without subtests, and a test that failed while none of its subtests did.
// In a package that failed, a test without an end is one that failed.
func (p *pkg) count(packageFailed bool) Counts {
	var c Counts
	for _, name := range p.order {
		switch {
		case p.failed(name, packageFailed):
			if !p.anyChild(name, func(child string) bool { return p.failed(child, packageFailed) }) {
				c.Failed++
			}
		case p.anyChild(name, func(string) bool { return true }):
		case p.result[name] == "pass":
			c.Passed++
		case p.result[name] == "skip":
			c.Skipped++
		}
	}
	return c
}

func (p *pkg) failed(name string, packageFailed bool) bool {
	r := p.result[name]
	return r == "fail" || r == "" && packageFailed
}

func (p *pkg) anyChild(name string, match func(string) bool) bool {
	for _, other := range p.order {
		if strings.HasPrefix(other, name+"/") && match(other) {
			return true
		}
	}
	return false
}

func (p *pkg) print(name string, out io.Writer) {
	if b := p.output[name]; b != nil {
		io.WriteString(out, b.String())
	}
}

// reason is what a skipped test said.
func (p *pkg) reason(name string) string {
	if p.output[name] == nil {
		return ""
	}
	var said []string
	for line := range strings.Lines(p.output[name].String()) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "===") && !strings.HasPrefix(line, "---") {
			said = append(said, line)
		}
	}
	return strings.Join(said, " ")
}

// complaint is a line of t.Error, or of t.Log: go test does not tell them apart.
var complaint = regexp.MustCompile(`^\S+_test\.go:\d+: `)

// The most that is repeated of a failed test: as many of its first lines as of its last, and characters of each.
const (
	maxComplaints = 6
	maxComplaint  = 400
)

// complaints are what the failed tests said, with their names.
func (p *pkg) complaints(packageFailed bool) []string {
	var all []string
	for _, name := range p.order {
		if !p.failed(name, packageFailed) || p.output[name] == nil {
			continue
		}
		var said []string
		for line := range strings.Lines(p.output[name].String()) {
			if line = strings.TrimSpace(line); complaint.MatchString(line) {
				said = append(said, fmt.Sprintf("%s: %.*s", name, maxComplaint, line))
			}
		}
		if len(said) > 2*maxComplaints {
			said = append(said[:maxComplaints], said[len(said)-maxComplaints:]...)
		}
		all = append(all, said...)
	}
	return all
}
