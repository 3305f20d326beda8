// Command flux-sandbox-init is PID 1 of every container-backed sandbox.
//
//	flux-sandbox-init WORKDIR -- COMMAND [ARG...]
//	flux-sandbox-init -wait DURATION
//
// It starts COMMAND as its only child, forwards signals to it, reaps every process that loses its parent, and exits
// with the command's code, or with 128 plus the number of the signal that ended it. A PID 1 that does not reap counts
// its zombies against the sandbox's pids limit until nothing can be started any more.
//
// The working directory belongs to the child alone, and is entered when the child starts: the runtime enters its own
// before the volumes are attached, so it may stand below a mount; and an init that stayed in it would keep that
// volume busy for ever.
//
// With -wait it starts nothing, and waits until SIGTERM, and then for that long, as an anchor's container, whose successor
// has to have the volume before it ends. It ends by itself since kubelet shortens no grace period once it has begun.
//
// Exit codes of its own follow the shell's (POSIX, "Exit Status for Commands"): 126 when the command cannot be run,
// 127 when it does not exist.
package main

import (
	"errors"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"syscall"
)

const (
	exitUsage      = 64 // EX_USAGE of sysexits.h
	exitCannotRun  = 126
	exitNotFound   = 127
	exitSignalBase = 128
)

func main() {
	// One thread's worth of Go is enough, and every further thread counts against the sandbox's pids limit.
	runtime.GOMAXPROCS(1)
	if len(os.Args) == 3 && os.Args[1] == "-wait" {
		wait(os.Args[2])
	}
	if len(os.Args) < 4 || os.Args[2] != "--" {
		fail(exitUsage, "usage: flux-sandbox-init WORKDIR -- COMMAND [ARG...]")
	}
	// Signals are caught before the child exists, so that one that comes early is forwarded late instead of lost.
	signals := make(chan os.Signal, 64)
	signal.Notify(signals)

	child, err := start(os.Args[1], os.Args[3:])
	if err != nil {
		code := exitCannotRun
		if errors.Is(err, unix.ENOENT) {
			code = exitNotFound
		}
		fail(code, "cannot start "+os.Args[3]+" in "+os.Args[1]+": "+err.Error())
	}
	go forward(signals, child)
	os.Exit(reapUntil(child))
}

// wait waits until SIGTERM, then for a time, and exits.
func wait(after string) {
	d, err := time.ParseDuration(after)
	if err != nil {
		fail(exitUsage, err.Error())
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGTERM)
	<-signals
	<-time.After(d)
	os.Exit(0)
}

// start runs argv as a child in a process group of its own, which becomes the terminal's foreground group if there is
// a terminal.
func start(workdir string, argv []string) (pid int, err error) {
	path, err := lookPath(argv[0])
	if err != nil {
		return 0, err
	}
	attr := &syscall.ProcAttr{
		Dir:   workdir,
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	}
	if _, err := unix.IoctlGetTermios(0, unix.TCGETS); err == nil {
		attr.Sys.Foreground, attr.Sys.Ctty = true, 0
	}
	// Nothing of the sandbox's volumes may be held by this process.
	if err := unix.Chdir("/"); err != nil {
		return 0, err
	}
	return syscall.ForkExec(path, argv, attr)
}

// lookPath finds a command as execvp(3) does: a name with a slash is a path, another is searched in PATH.
func lookPath(name string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	denied := false
	for _, dir := range strings.Split(os.Getenv("PATH"), ":") {
		path := "./" + name
		if dir != "" {
			path = dir + "/" + name
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		if unix.Access(path, unix.X_OK) == nil {
			return path, nil
		}
		denied = true
	}
	if denied {
		return "", unix.EACCES
	}
	return "", unix.ENOENT
}

// forward passes signals on to the child, except those that concern this process alone.
func forward(signals <-chan os.Signal, child int) {
	for s := range signals {
		switch s {
		case unix.SIGCHLD, unix.SIGURG, unix.SIGPIPE: // reaping; Go's preemption; our own writes
		case unix.SIGTTIN, unix.SIGTTOU: // about this process's place in the terminal, not the child's
		default:
			// The child may be a zombie or gone: nobody is there to be told.
			_ = unix.Kill(child, s.(unix.Signal))
		}
	}
}

// reapUntil reaps all children until the given one ends, and answers its exit code.
func reapUntil(child int) int {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			fail(exitCannotRun, "wait: "+err.Error())
		case pid != child:
		case status.Signaled():
			return exitSignalBase + int(status.Signal())
		case status.Exited():
			return status.ExitStatus()
		}
	}
}

func fail(code int, message string) {
	os.Stderr.WriteString("flux-sandbox-init: " + message + "\n")
	os.Exit(code)
}
