package apiserver

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// BinEnv names the environment variable with the directory that kube-apiserver and etcd are in. Unset: where
// hack/localcluster/build.sh leaves them.
const BinEnv = "FLUX_TEST_KUBE_BIN"

// binaries finds the directory of the programs, or ends the test.
func binaries(t testing.TB) string {
	t.Helper()
	dir, named := os.Getenv(BinEnv), true
	if dir == "" {
		dir, named = built(t), false
	}
	for _, name := range []string{"kube-apiserver", "etcd"} {
		_, err := exec.LookPath(filepath.Join(dir, name))
		switch {
		case err != nil && named:
			t.Fatalf("%s: %v", BinEnv, err)
		case err != nil:
			testenv.Missing(t, "a Kubernetes API server: run hack/localcluster/build.sh kube-apiserver etcd (%v)", err)
		}
	}
	return dir
}

// built asks the build script of this checkout where it puts things.
func built(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd() // of a test: its package's
	if err != nil {
		t.Fatal(err)
	}
	for {
		script := filepath.Join(dir, "hack", "localcluster", "build.sh")
		if _, err := os.Stat(script); err == nil {
			out, err := exec.Command(script, "-n").Output()
			if err != nil {
				t.Fatalf("%s -n: %v", script, err)
			}
			return strings.TrimSpace(string(out))
		}
		up := filepath.Dir(dir)
		if up == dir {
			testenv.Missing(t, "a Kubernetes API server: set %s, or run it in a checkout", BinEnv)
		}
		dir = up
	}
}
