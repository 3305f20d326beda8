//go:build failpoint

package failpoint

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// child is a test binary whose TestChild hits a point three times.
func child(t *testing.T, arm string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], "-test.run=^TestChild$", "-test.v")
	cmd.Env = append(os.Environ(), Env+"="+arm, "FLUX_FAILPOINT_CHILD=1")
	return cmd
}

func TestChild(t *testing.T) {
	if os.Getenv("FLUX_FAILPOINT_CHILD") == "" {
		return // it is only run by the tests below
	}
	p := Declare("child")
	for i := range 3 {
		t.Log("hit", i, p.Hit())
	}
}

func TestKill(t *testing.T) {
	out, err := child(t, "child=2*kill").CombinedOutput()
	exit, ok := err.(*exec.ExitError)
	if !ok || !exit.Sys().(syscall.WaitStatus).Signaled() || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("ended with %v: %s", err, out)
	}
}

func TestErrorOnce(t *testing.T) {
	out, err := child(t, "other=kill; child=error(no luck)").CombinedOutput()
	if err != nil || strings.Count(string(out), "no luck") != 1 {
		t.Fatalf("%v: %s", err, out)
	}
}

func TestPauseGoesOnWhenItsFileIsRemoved(t *testing.T) {
	file := filepath.Join(t.TempDir(), "paused")
	cmd := child(t, "child=pause("+file+")")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	for tick := time.NewTicker(time.Millisecond); ; {
		if _, err := os.Stat(file); err == nil {
			tick.Stop()
			break
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatal("it never paused")
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestAWrongActionIsNotIgnored(t *testing.T) {
	if out, err := child(t, "child=explode").CombinedOutput(); err == nil {
		t.Fatalf("accepted: %s", out)
	}
}
