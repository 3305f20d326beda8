package integration

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	intruderEnv = "FLUX_TEST_INTRUDER" // "PID nested|same"
	nested      = "nested"             // in a copy of the sandbox's mount namespace, made at its start
	same        = "same"               // in the sandbox's own mount namespace
)

// intruder is a process with all of root's rights in a sandbox's mount namespace, or in a copy of it, as an operator's
// shell would be. The sandbox itself cannot have one.
type intruder struct {
	tb  testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func enter(tb testing.TB, pid int, where string) *intruder {
	tb.Helper()
	i := &intruder{tb: tb, cmd: exec.Command("/proc/self/exe")}
	i.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", intruderEnv, pid, where))
	i.cmd.Stderr = os.Stderr
	var err error
	i.in, err = i.cmd.StdinPipe()
	must(tb, err)
	out, err := i.cmd.StdoutPipe()
	must(tb, err)
	i.out = bufio.NewReader(out)
	must(tb, i.cmd.Start())
	tb.Cleanup(i.leave)
	i.answer("enter")
	return i
}

// do makes it run one command: rmdir PATH, mv FROM TO, shared, exists PATH, or remount PATH.
func (i *intruder) do(command ...string) string {
	i.tb.Helper()
	line := strings.Join(command, " ")
	if _, err := fmt.Fprintln(i.in, line); err != nil {
		i.tb.Fatal(err)
	}
	return i.answer(line)
}

func (i *intruder) answer(what string) string {
	i.tb.Helper()
	line, err := i.out.ReadString('\n')
	if err != nil {
		i.tb.Fatalf("intruder: %s: %v", what, err)
	}
	return strings.TrimSpace(line)
}

func (i *intruder) leave() {
	_ = i.in.Close()
	_ = i.cmd.Wait()
}

func runIntruderIfAsked() {
	asked := os.Getenv(intruderEnv)
	if asked == "" {
		return
	}
	pid, where, _ := strings.Cut(asked, " ")
	ended := make(chan error)
	go func() {
		// Not the main thread, which Go would not let go of; this one is never unlocked.
		runtime.LockOSThread()
		ended <- intrude(pid, where)
	}()
	if err := <-ended; err != nil {
		fmt.Fprintln(os.Stderr, "intruder:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func intrude(pidText, where string) error {
	pid, err := strconv.Atoi(pidText)
	if err != nil {
		return err
	}
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(ns, unix.CLONE_NEWNS)); err != nil {
		return err
	}
	if where == nested {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
	}
	fmt.Println("ok")
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		switch words[0] {
		case "rmdir":
			err = unix.Rmdir(words[1])
		case "mv":
			err = unix.Rename(words[1], words[2])
		case "shared":
			err = unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, "")
		case "exists":
			var st unix.Stat_t
			err = unix.Stat(words[1], &st)
		default:
			err = fmt.Errorf("unknown command %q", words[0])
		}
		if err != nil {
			fmt.Println(err)
		} else {
			fmt.Println("ok")
		}
	}
	return lines.Err()
}
