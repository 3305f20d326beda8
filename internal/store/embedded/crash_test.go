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
	crashEnv     = "FLUX_TEST_CRASH_FILE" // makes the test binary the child of a test
	crashLateEnv = "FLUX_TEST_CRASH_LATE" // when set, status waits for a write of spec
	crashWriters = 4
)

func TestMain(m *testing.M) {
	if path := os.Getenv(crashEnv); path != "" {
		var options Options
		if os.Getenv(crashLateEnv) != "" {
			options.flushAfter = never
		}
		fmt.Fprintln(os.Stderr, writeForEver(path, options))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// writeForEver counts up, in one object per writer, in its spec and its status alternately, and says on
// stdout what was acknowledged. It returns only an error.
func writeForEver(path string, options Options) error {
	s, err := Open(path, options)
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
					say("%s spec %s %s\n", k.Name, o.ResourceVersion, o.Spec.WorkingDir)
					o, err = store.UpdateStatusLate(ctx, s.Sandboxes(), k, store.Preconditions{}, func(o *sandbox) error {
						o.Status.Restarts++
						return nil
					})
				}
				if err != nil {
					failed <- err
					return
				}
				say("%s status %s %d\n", k.Name, o.ResourceVersion, o.Status.Restarts)
			}
		}()
	}
	return <-failed
}

// A process that is killed at any moment leaves a file that opens and has each object as it was before or after the
// write that was under way. No spec that was acknowledged is lost, and a status only if it was the object's last write.
func TestKilledWhileWriting(t *testing.T) {
	testKilled(t)
}

// The same when every kill comes between the acknowledgement of the last status and its flush.
func TestKilledBeforeTheFlush(t *testing.T) {
	if lost := testKilled(t, crashLateEnv+"=1"); lost == 0 {
		t.Error("no acknowledged status was lost: nothing was killed before its flush")
	}
}

// testKilled returns how many statuses were lost that had been acknowledged.
func testKilled(t *testing.T, env ...string) (lost int) {
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
		specs, statuses, highest := killAfter(t, path, 1+round*round, env)
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
			if status < statuses[name] {
				lost++
			}
			if spec < specs[name] || status < statuses[name]-1 || (spec != status && spec != status+1) {
				t.Errorf("round %d: %s has spec %d, status %d; acknowledged were %d, %d", round, name, spec, status, specs[name], statuses[name])
			}
			if spec > specs[name]+1 || status > statuses[name]+1 {
				if specs[name] > 0 && statuses[name] > 0 { // else the child was killed before it said anything of it
					t.Errorf("round %d: %s has spec %d, status %d, more than one write after %d, %d", round, name, spec, status, specs[name], statuses[name])
				}
			}
		}
		// Versions that were shown are not used again, though what they named may be lost.
		o, err := s.Sandboxes().UpdateSpec(t.Context(), key("w0"), store.Preconditions{}, func(o *sandbox) error {
			o.Spec.Image += "x"
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if v := version(t, o); v <= highest {
			t.Errorf("round %d: version %d is given out, and %d was shown before the kill", round, v, highest)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return lost
}

// killAfter runs the child, kills it after that many lines, and returns the last values that it
// acknowledged, also in what it had written by then, and the highest version that it showed.
func killAfter(t *testing.T, path string, lines int, env []string) (specs, statuses map[string]int, highest uint64) {
	t.Helper()
	child := exec.Command(os.Args[0])
	child.Env = append(append(os.Environ(), crashEnv+"="+path), env...)
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
		if len(fields) != 4 || err != nil {
			t.Errorf("the child said %q", in.Text())
			continue
		}
		version, err := strconv.ParseUint(fields[2], 10, 64)
		if err != nil {
			t.Errorf("the child said %q", in.Text())
		}
		highest = max(highest, version)
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
	return specs, statuses, highest
}
