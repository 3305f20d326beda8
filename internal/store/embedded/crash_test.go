package embedded

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

const (
	crashEnv     = "FLUX_TEST_CRASH_FILE" // makes the test binary the child of TestKilledWhileWriting
	crashWriters = 4
)

func TestMain(m *testing.M) {
	if path := os.Getenv(crashEnv); path != "" {
		fmt.Fprintln(os.Stderr, writeForEver(path))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// writeForEver counts up, in one object per writer, in its spec and its status alternately, and says on
// stdout what was acknowledged. It returns only an error.
func writeForEver(path string) error {
	s, err := Open(path, Options{})
	if err != nil {
		return err
	}
	failed := make(chan error)
	var out sync.Mutex // guards stdout
	say := func(format string, args ...any) {
		out.Lock()
		defer out.Unlock()
		fmt.Printf(format, args...)
	}
	for w := range crashWriters {
		go func() {
			ctx := context.Background()
			k := key(fmt.Sprint("w", w))
			for {
				o, err := s.Sandboxes().UpdateSpec(ctx, k, store.Preconditions{}, func(o *sandbox) error {
					o.Spec.WorkingDir = strconv.Itoa(int(o.Status.Restarts) + 1)
					return nil
				})
				if err == nil {
					say("%s spec %s\n", k.Name, o.Spec.WorkingDir)
					o, err = s.Sandboxes().UpdateStatus(ctx, k, store.Preconditions{}, func(o *sandbox) error {
						o.Status.Restarts++
						return nil
					})
				}
				if err != nil {
					failed <- err
					return
				}
				say("%s status %d\n", k.Name, o.Status.Restarts)
			}
		}()
	}
	return <-failed
}

// A process that is killed at any moment leaves a file that opens and has each object as it was before or
// after the write that was under way: nothing that was acknowledged is lost.
func TestKilledWhileWriting(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for w := range crashWriters {
		create(t, s, fmt.Sprint("w", w))
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for round := range 12 {
		specs, statuses := killAfter(t, path, 1+round*round)
		s, err := Open(path, Options{})
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		for w := range crashWriters {
			name := fmt.Sprint("w", w)
			o, err := s.Sandboxes().Get(t.Context(), key(name))
			if err != nil {
				t.Fatal(err)
			}
			spec, _ := strconv.Atoi(o.Spec.WorkingDir)
			status := int(o.Status.Restarts)
			if spec < specs[name] || status < statuses[name] || (spec != status && spec != status+1) {
				t.Errorf("round %d: %s has spec %d, status %d; acknowledged were %d, %d", round, name, spec, status, specs[name], statuses[name])
			}
			if spec > specs[name]+1 || status > statuses[name]+1 {
				if specs[name] > 0 && statuses[name] > 0 { // else the child was killed before it said anything of it
					t.Errorf("round %d: %s has spec %d, status %d, more than one write after %d, %d", round, name, spec, status, specs[name], statuses[name])
				}
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// killAfter runs the child, kills it after that many lines, and returns the last values that it
// acknowledged, also in what it had written by then.
func killAfter(t *testing.T, path string, lines int) (specs, statuses map[string]int) {
	t.Helper()
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), crashEnv+"="+path)
	child.Stderr = os.Stderr
	stdout, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	specs, statuses = map[string]int{}, map[string]int{}
	seen := 0
	in := bufio.NewScanner(stdout)
	for in.Scan() {
		fields := strings.Fields(in.Text())
		n, err := strconv.Atoi(fields[len(fields)-1])
		if len(fields) != 3 || err != nil {
			t.Errorf("the child said %q", in.Text())
			continue
		}
		if fields[1] == "spec" {
			specs[fields[0]] = n
		} else {
			statuses[fields[0]] = n
		}
		if seen++; seen == lines {
			if err := child.Process.Kill(); err != nil {
				t.Error(err)
			}
		}
	}
	var exit *exec.ExitError
	if err := child.Wait(); !errors.As(err, &exit) || exit.Exited() || seen < lines {
		t.Fatalf("the child ended by itself after %d lines: %v", seen, err)
	}
	return specs, statuses
}
