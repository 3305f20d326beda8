// Package testenv is how a test says what it needs of the machine: root, a program, a kernel feature.
//
// On a developer's machine a test that lacks something is skipped. In CI (environment CI=true) it fails:
// there everything is installed, and a test that skips itself there proves nothing and hides that it
// does not. This package is the one place of the project that skips a test; the house rules
// (test/house) fail when another one does.
//
// It is a leaf: test code of every package may import it, internal/mount and internal/capacity too.
package testenv

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// ContainerdEnv names the environment variable with the path of the containerd binary that integration
// tests run; PATH must find its shim first (hack/test.sh sees to it). Unset: the one in PATH.
const ContainerdEnv = "FLUX_TEST_CONTAINERD"

// SoakEnv names the environment variable that, set to "1", asks for the long form of the tests that
// have one (make soak).
const SoakEnv = "FLUX_SOAK"

// CI says whether the tests run in CI, where nothing may be missing.
func CI() bool { return os.Getenv("CI") == "true" }

// Long is short in a normal run and long in a soak run: a number of rounds, of sandboxes, of clients.
func Long(short, long int) int {
	if os.Getenv(SoakEnv) == "1" {
		return long
	}
	return short
}

// Missing ends the test, as the machine lacks what it needs: skipped, or failed in CI. The arguments are
// those of fmt.Sprintf and complete the sentence "this test needs …".
func Missing(t testing.TB, format string, args ...any) {
	t.Helper()
	if CI() {
		t.Fatalf("this test needs "+format+"; with CI=true that is a failure", args...)
	}
	t.Skipf("this test needs "+format, args...)
}

// NeedRoot ends the test as Missing does, unless it runs as root.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Missing(t, "root")
	}
}

// NeedBinary ends the test as Missing does, unless every one of the programs is in PATH. It returns the
// path of the first.
func NeedBinary(t testing.TB, names ...string) string {
	t.Helper()
	var first string
	var missing []string
	for _, name := range names {
		path, err := exec.LookPath(name)
		switch {
		case err != nil:
			missing = append(missing, name)
		case first == "":
			first = path
		}
	}
	if len(missing) > 0 {
		Missing(t, "%s in PATH (hack/setup.sh installs it)", strings.Join(missing, ", "))
	}
	return first
}

// NeedContainerd ends the test as Missing does, unless it runs as root and there are a containerd and a
// runc to run. It returns the path of the containerd binary: ContainerdEnv, or the one in PATH.
func NeedContainerd(t testing.TB) string {
	t.Helper()
	NeedRoot(t)
	NeedBinary(t, "runc")
	path := os.Getenv(ContainerdEnv)
	if path == "" {
		return NeedBinary(t, "containerd")
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%s: %v", ContainerdEnv, err)
	}
	return path
}
