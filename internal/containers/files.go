package containers

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Files and directories of one sandbox in StateDir.
const (
	hostsFile    = "hosts"
	hostnameFile = "hostname"
	resolvFile   = "resolv.conf"
	exitFile     = "exit.json"
	logDir       = "log"
)

func (r *Runtime) stateDir(uid string) string { return filepath.Join(r.config.StateDir, uid) }

// LogDir is the directory of a sandbox's log (package logfile).
func (r *Runtime) LogDir(uid string) string { return filepath.Join(r.stateDir(uid), logDir) }

// execDir has a directory for each exec of a sandbox. It goes with the sandbox, not with its last exec: another may just be
// beginning.
func (r *Runtime) execDir(uid string) string { return filepath.Join(r.config.RunDir, "exec", uid) }

// runcRoot is where runc keeps its state; below it, it makes a directory per containerd namespace.
func (r *Runtime) runcRoot() string { return filepath.Join(r.config.RunDir, "runc") }

func (r *Runtime) runcState(uid string) string {
	return filepath.Join(r.runcRoot(), r.config.Namespace, uid)
}

// writeFiles makes the files that are bound into a sandbox. They are written in place, as a running sandbox has them
// bound, and only if they are not there: they never change.
func (r *Runtime) writeFiles(uid, hostname string) error {
	if err := os.MkdirAll(r.LogDir(uid), 0o700); err != nil {
		return err
	}
	for name, content := range map[string]string{
		hostnameFile: hostname + "\n",
		hostsFile: fmt.Sprintf("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t%s\n",
			hostname),
		resolvFile: "# This sandbox has no network but its own loopback, and no name server.\n",
	} {
		if err := writeNew(filepath.Join(r.stateDir(uid), name), []byte(content)); err != nil {
			return err
		}
	}
	return nil
}

// writeNew writes a file that is there completely or not at all, unless it exists.
func writeNew(name string, content []byte) error {
	if _, err := os.Lstat(name); err == nil {
		return nil
	}
	return writeFile(name, content)
}

func writeFile(name string, content []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+"-")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// recordExit keeps a task's end for the time after the task. Not synced: what a power failure takes is a detail of a
// process that it would have ended, too.
func (r *Runtime) recordExit(uid string, exit Exit) error {
	data, err := json.Marshal(exit)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(r.stateDir(uid), 0o700); err != nil {
		return err
	}
	return writeFile(filepath.Join(r.stateDir(uid), exitFile), data)
}

// recordedExit is nil if none is recorded.
func (r *Runtime) recordedExit(uid string) *Exit {
	data, err := os.ReadFile(filepath.Join(r.stateDir(uid), exitFile))
	if err != nil {
		return nil
	}
	var exit Exit
	if json.Unmarshal(data, &exit) != nil {
		return nil
	}
	exit.At = exit.At.In(time.UTC)
	return &exit
}

// forgetExit makes sure that a task's end is not taken for that of the next one.
func (r *Runtime) forgetExit(uid string) error {
	err := os.Remove(filepath.Join(r.stateDir(uid), exitFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func (r *Runtime) removeFiles(uid string) error {
	return errors.Join(
		os.RemoveAll(r.execDir(uid)),
		// runc removes its own, unless the shim was killed.
		os.RemoveAll(r.runcState(uid)),
		os.RemoveAll(r.stateDir(uid)),
	)
}
