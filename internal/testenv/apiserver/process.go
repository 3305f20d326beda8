package apiserver

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// process is a program that runs, with its output in a file.
type process struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// starter runs functions on one thread that lives as long as this process. The kernel kills a child whose
// Pdeathsig is set when the thread that made it ends, and Go's other threads come and go.
var starter = sync.OnceValue(func() chan<- func() {
	jobs := make(chan func())
	go func() {
		runtime.LockOSThread()
		for job := range jobs {
			job()
		}
	}()
	return jobs
})

// start runs a program in a directory. It dies with this process, however that ends.
func start(dir, path, name string, args ...string) (*process, error) {
	p := &process{name: name, log: dir + "/" + name + ".log", done: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p.cmd = exec.Command(path, args...)
	p.cmd.Dir = dir
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir} // no proxy, no kubeconfig of the user's
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	starter() <- func() { started <- p.cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // how it ended is in the log and the state
	}()
	return p, nil
}

// kill ends it and waits for that. What it wrote is thrown away or, on a restart, complete: the API server
// keeps nothing, and etcd's writes are in the page cache at least.
func (p *process) kill() {
	if p == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	<-p.done
}

// ended says whether it has ended by itself, and why as far as it told.
func (p *process) ended() error {
	select {
	case <-p.done:
	default:
		return nil
	}
	said, _ := os.ReadFile(p.log)
	const last = 4096
	said = said[max(0, len(said)-last):]
	return fmt.Errorf("%s ended (%s); it said last:\n%s", p.name, p.cmd.ProcessState, said)
}
