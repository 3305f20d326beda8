package standalone

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// A process that gives itself a name which is no text, and commands for the terminal of who reads it, is named all the
// same, and spoils neither the answer nor the terminal.
func TestHolderWithAHostileName(t *testing.T) {
	m := machine.New(t, false)
	ok(t, m, "run", "--name", "a", "--tenant", "t1", "--image", machine.Image, "--", "sh", "-c",
		`until cd /data 2>/dev/null && [ -e here ]; do sleep 0.05; done; printf '\377\033[31mX' > /proc/self/comm; touch ready; while :; do sleep 1; done`)
	source := m.TenantDir(t, "t1", "data")
	must(t, exec.Command("touch", filepath.Join(source, "here")).Run())
	ok(t, m, "volume", "add", "a", "--source", source, "--target", "/data")
	testenv.Eventually(t, time.Minute, "the process has its name", func() bool {
		return exec.Command("test", "-e", filepath.Join(source, "ready")).Run() == nil
	})
	out, succeeded := fluxctl(t, m, "volume", "rm", "a", "/data")
	if succeeded || !strings.Contains(out, "["+string(fault.Busy)+"]") || !strings.Contains(out, "[31mX") {
		t.Errorf("the holder is not named: %q", out)
	}
	for _, text := range []string{out, ok(t, m, "volume", "ls", "a"), ok(t, m, "ps")} {
		if i := strings.IndexFunc(text, func(r rune) bool { return unicode.IsControl(r) && r != '\n' }); i >= 0 {
			t.Errorf("printed to a terminal: %q", text)
		}
	}
	ok(t, m, "volume", "rm", "a", "/data", "--force")
	ok(t, m, "rm", "a")
}

// Names that are no text can be sent to nobody: that is said before anything is.
func TestArgumentsThatAreNoText(t *testing.T) {
	m := machine.New(t, false)
	cmd := exec.Command(filepath.Join(m.Bin, "fluxctl"), "volume", "rm", "a", "/data\xff")
	out, code := run(t, cmd)
	if code != 2 || !bytes.Contains([]byte(out), []byte("UTF-8")) {
		t.Errorf("exit code %d, %s", code, out)
	}
}
