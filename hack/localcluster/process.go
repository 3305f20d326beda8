package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// mark is in the environment of each process that the cluster starts and of what those start themselves, the shims
// among them; its value is the component's name. Containers do not inherit it. A process is found by it, not by a
// number that was written down: numbers are given again, and a crash comes between a start and a note of it.
const mark = "FLUX_LOCALCLUSTER"

// process is a running process with the mark.
type process struct {
	pid       int
	component string   // the mark's value
	args      []string // never empty
}

// program is the name that it was started by.
func (p process) program() string { return filepath.Base(p.args[0]) }

// marked lists the processes with the mark.
func marked(proc string) []process {
	var all []process
	entries, _ := os.ReadDir(proc)
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if p, ok := look(proc, pid); ok {
				all = append(all, p)
			}
		}
	}
	return all
}

// look reads one process; false: it has no mark, or it has ended.
func look(proc string, pid int) (process, bool) {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	environment, err := os.ReadFile(filepath.Join(dir, "environ"))
	if err != nil {
		return process{}, false
	}
	p := process{pid: pid}
	for v := range bytes.SplitSeq(environment, []byte{0}) {
		if name, value, _ := bytes.Cut(v, []byte("=")); string(name) == mark {
			p.component = string(value)
		}
	}
	cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil || p.component == "" {
		return process{}, false
	}
	p.args = strings.Split(strings.TrimSuffix(string(cmdline), "\x00"), "\x00")
	return p, p.args[0] != "" // a zombie has no arguments
}

// running are the processes of a component itself, without what it started.
func running(component string) []process {
	return slices.DeleteFunc(marked("/proc"), func(p process) bool { return p.component != component || p.program() != component })
}

// launch starts a component detached from this process, with its output at the end of a file. The channel is closed when it
// ends, if this process is there to see it.
func launch(component, log string, environment []string, path string, args ...string) (<-chan struct{}, error) {
	if err := os.MkdirAll(filepath.Dir(log), 0o700); err != nil {
		return nil, err
	}
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(path)
	cmd.Args = append([]string{component}, args...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = slices.Concat([]string{"PATH=" + os.Getenv("PATH"), "HOME=/root", mark + "=" + component}, environment)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", component, err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // if it ends while this process runs, it must not stay a zombie
		close(ended)
	}()
	return ended, nil
}

// send sends a signal to a process, unless its number is another one's by now.
func send(p process, signal syscall.Signal) {
	handle, err := os.FindProcess(p.pid) // holds on to this one
	if err != nil {
		return
	}
	defer handle.Release()
	if now, ok := look("/proc", p.pid); ok && now.component == p.component {
		_ = handle.Signal(signal) // it may have ended: what was wanted
	}
}

// grace is how long a component has to end by itself.
const grace = 10 * time.Second

// end ends the processes that list returns: SIGTERM, and after a while SIGKILL.
func end(list func() []process) error {
	for _, how := range []struct {
		signal syscall.Signal
		wait   time.Duration
	}{{syscall.SIGTERM, grace}, {syscall.SIGKILL, grace}} {
		for _, p := range list() {
			send(p, how.signal)
		}
		ctx, cancel := context.WithTimeout(context.Background(), how.wait)
		err := until(ctx, func() error {
			if left := list(); len(left) > 0 {
				return fmt.Errorf("still running: %v", left)
			}
			return nil
		})
		cancel()
		if err == nil {
			return nil
		}
	}
	return fmt.Errorf("some processes do not end, not even by SIGKILL: %v", list())
}

// until calls a function until it succeeds. When the context ends, it returns the function's last error.
func until(ctx context.Context, try func() error) error {
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return err
		}
	}
}

// tail is the end of a log.
func tail(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	const last = 3000
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(0, size-last), io.SeekStart)
	}
	said, _ := io.ReadAll(f)
	return string(said)
}

// run runs a command and returns its output; an error has what it said.
func run(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).Output()
	if failed, ok := errors.AsType[*exec.ExitError](err); ok {
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(failed.Stderr))
	}
	if err != nil {
		err = fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return string(out), err
}
