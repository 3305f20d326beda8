package main

import (
	"slices"
	"strings"
	"testing"
)

// events makes a go test -json stream: "action test" or "action test: output", of package p.
func events(lines ...string) string {
	var b strings.Builder
	for _, l := range lines {
		action, rest, _ := strings.Cut(l, " ")
		test, output, _ := strings.Cut(rest, ": ")
		b.WriteString(`{"Package":"p","Action":"` + action + `"`)
		if test != "" {
			b.WriteString(`,"Test":"` + test + `"`)
		}
		if output != "" {
			b.WriteString(`,"Output":"` + output + `\n"`)
		}
		b.WriteString("}\n")
	}
	return b.String()
}

func TestSummary(t *testing.T) {
	for _, tc := range []struct {
		name   string
		in     string
		strict bool
		want   Counts
		prints []string
		hides  []string
		says   []string
	}{
		{
			name:  "passed tests are a line per package",
			in:    events("run A", "output A: chatter", "pass A", "run B", "pass B", "pass"),
			want:  Counts{Passed: 2},
			hides: []string{"chatter"}, prints: []string{"ok    p"},
		},
		{
			name:   "a failed test's output is shown, a passed one's is not",
			in:     events("run A", "output A: noise", "pass A", "run B", "output B: cause", "fail B", "fail"),
			want:   Counts{Passed: 1, Failed: 1},
			prints: []string{"cause", "FAIL  p"}, hides: []string{"noise"},
		},
		{
			name: "what a failed test complained of is told once more, and nothing of others",
			in: events("run A", "output A:     a_test.go:1: fine", "pass A", "run B", "output B:     b_test.go:12: cause", "output B: a log's line",
				"output B: --- FAIL: B (0.00s)", "fail B", "fail"),
			want: Counts{Passed: 1, Failed: 1},
			says: []string{"B: b_test.go:12: cause"},
		},
		{
			name: "a parent is not counted beside its subtests",
			in:   events("run A", "run A/x", "run A/y", "pass A/x", "fail A/y", "fail A", "fail"),
			want: Counts{Passed: 1, Failed: 1},
		},
		{
			name: "a parent that fails by itself is",
			in:   events("run A", "run A/x", "pass A/x", "fail A", "fail"),
			want: Counts{Passed: 1, Failed: 1},
		},
		{
			name:   "a test without an end is one that failed: the panic is shown",
			in:     events("run A", "pass A", "run B", "output B: panic!", "fail"),
			want:   Counts{Passed: 1, Failed: 1},
			prints: []string{"panic!"},
		},
		{
			name:   "a package that does not build is one failure",
			in:     `{"ImportPath":"p","Action":"build-output","Output":"syntax error\n"}` + "\n" + `{"Package":"p","Action":"fail","FailedBuild":"p"}` + "\n",
			want:   Counts{Failed: 1},
			prints: []string{"syntax error", "FAIL  p"},
		},
		{
			name:   "a skipped test is named with its reason",
			in:     events("run A", "output A: needs root", "skip A", "run B", "pass B", "pass"),
			want:   Counts{Passed: 1, Skipped: 1},
			prints: []string{"SKIP  p A: needs root", "ok    p"},
		},
		{
			name:   "and is a failure in CI",
			in:     events("run A", "output A: needs root", "skip A", "pass"),
			strict: true,
			want:   Counts{Failed: 1},
			prints: []string{"FAIL  p"},
		},
		{
			name:   "a run that was cut off failed",
			in:     events("run A", "pass A", "run B"),
			want:   Counts{Passed: 1, Failed: 1},
			prints: []string{"cut off"},
		},
		{
			name:   "what is no event is shown as it is; nothing tested is a failure",
			in:     "go: cannot find module\n",
			want:   Counts{Failed: 1},
			prints: []string{"go: cannot find module"},
		},
		{
			name:  "a package without tests is not worth a line",
			in:    events("output : ?   p [no test files]", "skip"),
			hides: []string{"p"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var out strings.Builder
			if got := Summarise(strings.NewReader(tc.in), &out, tc.strict); got.Counts != tc.want || !slices.Equal(got.Complaints, tc.says) {
				t.Errorf("%+v, want %+v, %q\n%s", got, tc.want, tc.says, out.String())
			}
			for _, s := range tc.prints {
				if !strings.Contains(out.String(), s) {
					t.Errorf("does not print %q:\n%s", s, out.String())
				}
			}
			for _, s := range tc.hides {
				if strings.Contains(out.String(), s) {
					t.Errorf("prints %q:\n%s", s, out.String())
				}
			}
		})
	}
}

func TestClosingLine(t *testing.T) {
	for want, c := range map[string]Counts{
		"7 passed, 0 failed":            {Passed: 7},
		"7 passed, 1 failed, 2 skipped": {Passed: 7, Failed: 1, Skipped: 2},
	} {
		if got := c.String(); got != want {
			t.Errorf("%+v: %q, want %q", c, got, want)
		}
	}
}
