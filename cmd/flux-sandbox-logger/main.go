// Command flux-sandbox-logger writes the output of one sandbox to its log directory (package logfile).
//
// containerd's shim starts it as a logging binary ("binary://" URI of the task's stdio) and passes the read ends of
// the sandbox's stdout and stderr as descriptors 3 and 4, and as 5 a pipe on which it waits until the logger is ready.
// The arguments are pairs of a name and a value, in any order: dir, size (bytes of one file), files (their number).
//
// It ends when both streams do. A SIGTERM is ignored: the shim sends one as soon as the task is deleted, when there
// may still be output in the pipes, and kills 12 seconds later.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/containers/logfile"
)

func main() {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(20) // there is one of these per sandbox: small beats fast
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "flux-sandbox-logger:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	var dir string
	var size int64
	var files int
	for i := 0; i+1 < len(args); i += 2 {
		var err error
		switch value := args[i+1]; args[i] {
		case "dir":
			dir = value
		case "size":
			size, err = strconv.ParseInt(value, 10, 64)
		case "files":
			files, err = strconv.Atoi(value)
		}
		if err != nil {
			return fmt.Errorf("argument %s: %w", args[i], err)
		}
	}
	w, err := logfile.NewWriter(dir, size, files, time.Now)
	if err != nil {
		return err
	}
	defer w.Close()
	// The shim's working directory is the task's bundle, which is to be deleted.
	if err := os.Chdir("/"); err != nil {
		return err
	}
	ready := os.NewFile(5, "ready")
	if _, err := ready.Write([]byte{0}); err != nil {
		return fmt.Errorf("tell the shim: %w", err)
	}
	if err := ready.Close(); err != nil {
		return fmt.Errorf("tell the shim: %w", err)
	}

	var streams sync.WaitGroup
	errs := make([]error, 2)
	for i, name := range []string{logfile.Stdout, logfile.Stderr} {
		pipe := os.NewFile(uintptr(3+i), name)
		streams.Go(func() { errs[i] = w.Copy(name, pipe) })
	}
	streams.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
