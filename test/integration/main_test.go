// Package integration has the tests that need the whole node: real containerd, real sandboxes, the real kernel. They
// assert what the kernel shows and what is in the sources, never what our own records say.
package integration

import (
	"os"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

func TestMain(m *testing.M) {
	mount.RunHelperIfAsked()
	runIntruderIfAsked()
	os.Exit(containerstest.Main(m))
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
