package churn

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// audit counts what was asked of the API server, by who asked, from the audit log.
type audit struct {
	path string

	mu     sync.Mutex // guards calls and broken
	calls  map[call]int
	broken error
}

// call is a kind of requests.
type call struct {
	agent, verb, resource string
	// how it ended: "" for well.
	failed string
}

func newAudit(path string) *audit { return &audit{path: path, calls: map[call]int{}} }

// follow reads the log, also after its rotation, until ctx ends.
func (a *audit) follow(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	file, err := os.Open(a.path)
	if err != nil {
		a.fail(err)
		return
	}
	defer func() { file.Close() }()
	lines, rest := bufio.NewReader(file), ""
	for {
		line, err := lines.ReadString('\n')
		rest += line
		switch {
		case err == nil:
			a.count(rest)
			rest = ""
			continue
		case !errors.Is(err, io.EOF):
			a.fail(err)
			return
		case rotated(file, a.path):
			file.Close()
			if file, err = os.Open(a.path); err != nil {
				a.fail(err)
				return
			}
			lines, rest = bufio.NewReader(file), ""
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// rotated says whether another file has the log's name by now.
func rotated(file *os.File, path string) bool {
	was, err := file.Stat()
	now, errNow := os.Stat(path)
	return err == nil && errNow == nil && !os.SameFile(was, now)
}

func (a *audit) fail(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.broken = fmt.Errorf("the audit log cannot be read: %w", err)
}

func (a *audit) count(line string) {
	var e struct {
		Stage, Verb, UserAgent string
		ObjectRef              struct{ Resource, Subresource string }
		ResponseStatus         struct{ Code int }
	}
	if err := json.Unmarshal([]byte(line), &e); err != nil {
		a.fail(err)
		return
	}
	if e.Stage != "ResponseComplete" && e.Stage != "Panic" {
		return
	}
	agent, _, _ := strings.Cut(e.UserAgent, "/")
	c := call{agent: agent, verb: e.Verb, resource: e.ObjectRef.Resource}
	if e.ObjectRef.Subresource != "" {
		c.resource += "/" + e.ObjectRef.Subresource
	}
	switch code := e.ResponseStatus.Code; {
	case code == 409:
		c.failed = "conflict"
	case code >= 400:
		c.failed = fmt.Sprint(code)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls[c]++
}

// seen are all calls until now.
func (a *audit) seen(t testing.TB) map[call]int {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.broken != nil {
		t.Fatal(a.broken)
	}
	return maps.Clone(a.calls)
}

// writes says whether a call is a write, other than that of a Lease.
func (c call) writes() bool {
	return slices.Contains([]string{"create", "update", "patch", "delete", "deletecollection"}, c.verb) && c.resource != "leases" && !strings.HasSuffix(c.resource, "reviews")
}

// since are the calls of one who asks since an earlier time; of everybody when agent is empty.
func since(now, before map[call]int, agent string) map[call]int {
	all := map[call]int{}
	for c, n := range now {
		if n -= before[c]; n > 0 && (agent == "" || c.agent == agent) {
			all[c] = n
		}
	}
	return all
}

func table(calls map[call]int) string {
	var out strings.Builder
	order := slices.SortedFunc(maps.Keys(calls), func(a, b call) int {
		return cmp.Or(strings.Compare(a.agent, b.agent), calls[b]-calls[a], strings.Compare(fmt.Sprint(a), fmt.Sprint(b)))
	})
	for _, c := range order {
		fmt.Fprintf(&out, "%8d  %s %s %s %s\n", calls[c], c.agent, c.verb, c.resource, c.failed)
	}
	return out.String()
}
