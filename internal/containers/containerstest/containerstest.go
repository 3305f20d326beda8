// Package containerstest gives tests and benchmarks a containerd of their own, with the busybox image in it and the
// helper programs built. It is used by every package whose tests need sandboxes.
//
//	func TestMain(m *testing.M) { os.Exit(containerstest.Main(m)) }
//
//	func TestX(t *testing.T) {
//		r := containerstest.Shared(t).Open(t, nil)
//		…
//	}
//
// The shared environment is started by the first test that asks for it and removed by Main. FLUX_TEST_CONTAINERD is the
// containerd to test with; default the one in PATH. Without root or containerd a test is skipped; where the environment
// variable CI is "true" it fails.
package containerstest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testimage"
)

// Image is the image that every environment has.
const Image = "busybox"

// Env is a containerd with an image, and directories for a runtime. Its fields are for tests that start the agent as a
// process of its own.
type Env struct {
	// Dir is the environment's directory; all else lies below it. Its path is short, for the sake of sockets.
	Dir string
	// Child is the containerd.
	Child *containers.Child
	// InitPath, LoggerPath and HookPath are the helper programs.
	InitPath, LoggerPath, HookPath string
}

// patience bounds what is waited for in set-up and clean-up; it is generous, as machines in CI are slow.
const patience = 2 * time.Minute

var (
	mu      sync.Mutex // guards the following
	shared  *Env
	helpers string // directory of the built programs
)

// Main runs the tests and removes the shared environment. It answers the exit code.
func Main(m *testing.M) int {
	code := m.Run()
	mu.Lock()
	defer mu.Unlock()
	if shared != nil {
		if err := shared.remove(); err != nil {
			fmt.Fprintln(os.Stderr, "containerstest:", err)
			code = max(code, 1)
		}
		shared = nil
	}
	if err := clean(); err != nil {
		fmt.Fprintln(os.Stderr, "containerstest:", err)
		code = max(code, 1)
	}
	return code
}

// Clean removes the helper programs that were built; for programs without Main.
func Clean() error {
	mu.Lock()
	defer mu.Unlock()
	return clean()
}

// clean is Clean for who holds mu.
func clean() error {
	err := os.RemoveAll(helpers)
	helpers = ""
	return err
}

// Shared is the environment that the tests of a package share.
func Shared(tb testing.TB) *Env {
	tb.Helper()
	require(tb)
	mu.Lock()
	defer mu.Unlock()
	if shared == nil {
		env, err := start()
		if err != nil {
			tb.Fatal(err)
		}
		shared = env
	}
	return shared
}

// New is an environment of the test's own, for tests that stop containerd. It is removed with the test.
func New(tb testing.TB) *Env {
	tb.Helper()
	require(tb)
	mu.Lock()
	defer mu.Unlock()
	env, err := start()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := env.remove(); err != nil {
			tb.Error(err)
		}
	})
	return env
}

func require(tb testing.TB) {
	tb.Helper()
	missing := ""
	if os.Geteuid() != 0 {
		missing = "root"
	} else if _, err := exec.LookPath(binary()); err != nil {
		missing = "containerd"
	} else if _, err := os.Stat(testimage.DefaultBusybox); err != nil {
		missing = "busybox-static"
	}
	if missing != "" {
		testenv.Missing(tb, "%s", missing)
	}
}

func binary() string {
	if b := os.Getenv("FLUX_TEST_CONTAINERD"); b != "" {
		return b
	}
	return "containerd"
}

// start makes an environment. The caller holds mu.
func start() (_ *Env, err error) {
	bin, err := buildHelpers()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "flux")
	if err != nil {
		return nil, err
	}
	env := &Env{
		Dir:        dir,
		InitPath:   filepath.Join(bin, "flux-sandbox-init"),
		LoggerPath: filepath.Join(bin, "flux-sandbox-logger"),
		HookPath:   filepath.Join(bin, "flux-sandbox-hook"),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, env.remove())
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if env.Child, err = containers.StartContainerd(ctx, env.ChildConfig()); err != nil {
		return env, err
	}
	r, err := containers.Open(ctx, env.Config())
	if err != nil {
		return env, err
	}
	defer r.Close()
	var archive bytes.Buffer
	if err := testimage.Write(&archive, testimage.Options{}); err != nil {
		return env, err
	}
	_, err = r.ImportImage(ctx, &archive, containers.ImportOptions{})
	return env, err
}

// ChildConfig describes the environment's containerd.
func (e *Env) ChildConfig() containers.ChildConfig {
	return containers.ChildConfig{
		Binary:  binary(),
		Root:    filepath.Join(e.Dir, "root"),
		State:   filepath.Join(e.Dir, "state"),
		Address: filepath.Join(e.Dir, "c.sock"),
	}
}

// Config is the configuration of a runtime in the environment.
func (e *Env) Config() containers.Config {
	return containers.Config{
		Address:      filepath.Join(e.Dir, "c.sock"),
		StateDir:     filepath.Join(e.Dir, "sandboxes"),
		RunDir:       filepath.Join(e.Dir, "run"),
		InitPath:     e.InitPath,
		LoggerPath:   e.LoggerPath,
		CgroupParent: "/" + filepath.Base(e.Dir),
	}
}

// Open opens a runtime in the environment, and closes it with the test. change may be nil.
func (e *Env) Open(tb testing.TB, change func(*containers.Config)) *containers.Runtime {
	tb.Helper()
	config := e.Config()
	if change != nil {
		change(&config)
	}
	r, err := containers.Open(tb.Context(), config)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { r.Close() })
	return r
}

// KillContainerd kills the daemon (not its shims and sandboxes), as a crash would, and returns when it is gone.
func (e *Env) KillContainerd(tb testing.TB) {
	tb.Helper()
	if err := e.Child.Kill(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

// RestartContainerd starts it again.
func (e *Env) RestartContainerd(tb testing.TB) {
	tb.Helper()
	child, err := containers.StartContainerd(tb.Context(), e.ChildConfig())
	if err != nil {
		tb.Fatal(err)
	}
	e.Child = child
}

// remove deletes the sandboxes, stops containerd, and reports what tests left behind; all of it is removed.
func (e *Env) remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var errs []error
	if e.Child != nil {
		errs = append(errs, e.deleteAll(ctx), e.Child.Stop(ctx))
	}
	if log, err := os.ReadFile(filepath.Join(e.Dir, "root", "containerd.log")); err == nil && strings.Contains(string(log), "panic:") {
		errs = append(errs, fmt.Errorf("containerd panicked: %s", log))
	}
	return errors.Join(append(errs, os.RemoveAll(e.Dir))...)
}

func (e *Env) deleteAll(ctx context.Context) error {
	child, err := containers.StartContainerd(ctx, e.ChildConfig()) // a test may have stopped it
	if err != nil {
		return err
	}
	e.Child = child
	r, err := containers.Open(ctx, e.Config())
	if err != nil {
		return err
	}
	defer r.Close()
	list, err := r.List(ctx)
	if err != nil {
		return err
	}
	for _, c := range list {
		if err := r.Delete(ctx, c.UID); err != nil {
			return err
		}
	}
	_, err = r.Sweep(ctx)
	return err
}

// buildHelpers builds the helper programs once. The caller holds mu.
func buildHelpers() (string, error) {
	if helpers != "" {
		return helpers, nil
	}
	dir, err := os.MkdirTemp("", "fluxbin")
	if err != nil {
		return "", err
	}
	const module = "github.com/flux-sandbox/flux-sandbox"
	build := exec.Command("go", "build", "-p", "1", "-trimpath", "-ldflags=-s -w", "-o", dir+"/",
		module+"/cmd/flux-sandbox-init", module+"/cmd/flux-sandbox-logger", module+"/cmd/flux-sandbox-hook")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		os.RemoveAll(dir)
		return "", fmt.Errorf("build the helper programs: %w\n%s", err, out)
	}
	// 0700 is the default for temporary directories; a sandbox's user must reach its init only through the bind mount,
	// which needs no rights on the path.
	helpers = dir
	return dir, nil
}
