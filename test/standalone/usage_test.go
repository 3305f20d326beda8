package standalone

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/testimage"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// run runs one of our programs and returns what it prints and its exit code.
func run(t *testing.T, cmd *exec.Cmd) (string, int) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// Whatever a newcomer gets wrong is answered with one line that says what to do, and with an exit code that tells a
// mistake in the command line from a failure.
func TestMistakesAreExplained(t *testing.T) {
	m := machine.New(t, false)
	server := filepath.Join(m.Bin, "flux-sandbox")
	// Another user, who may read the programs and nothing else.
	public := t.TempDir()
	must(t, exec.Command("cp", server, filepath.Join(m.Bin, "fluxctl"), public).Run())
	for dir := public; dir != "/"; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		must(t, err)
		if info.Mode().Perm()&0o001 == 0 && strings.HasPrefix(dir, os.TempDir()) {
			must(t, os.Chmod(dir, 0o711))
		}
	}
	nobody := func(name string, args ...string) *exec.Cmd {
		cmd := exec.Command(filepath.Join(public, name), args...)
		cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		return cmd
	}
	address := "unix://" + filepath.Join(m.Dir, "run/flux-sandbox.sock")
	for name, tc := range map[string]struct {
		cmd  *exec.Cmd
		code int
		want string
	}{
		"a second server":           {exec.Command(server, "serve", "--config", m.Config), 1, "another flux-sandbox runs"},
		"reset while it runs":       {exec.Command(server, "reset", "--yes", "--config", m.Config), 1, "another flux-sandbox runs"},
		"reset without a word":      {exec.Command(server, "reset", "--config", m.Config), 2, "--yes"},
		"an unknown command":        {exec.Command(server, "server"), 2, "--help"},
		"an unknown flag":           {exec.Command(server, "serve", "--conf", "x"), 2, "--help"},
		"no such configuration":     {exec.Command(server, "serve", "--config", "/no/such/file"), 1, "/no/such/file"},
		"a server of another user":  {nobody("flux-sandbox", "serve"), 1, "as root"},
		"a client of another user":  {nobody("fluxctl", "--address", address, "ps"), 1, "listenGroup"},
		"a client without a server": {exec.Command(filepath.Join(public, "fluxctl"), "--address", "unix:///no/such.sock", "ps"), 1, "flux-sandbox serve"},
	} {
		out, code := run(t, tc.cmd)
		if code != tc.code || !strings.Contains(out, tc.want) || strings.Count(out, "\n") != 1 {
			t.Errorf("%s: exit code %d, %q; want %d, one line with %q", name, code, out, tc.code, tc.want)
		}
	}
}

// What is no image archive, or the first half of one, is the caller's mistake.
func TestBrokenImageArchivesAreRefused(t *testing.T) {
	m := machine.New(t, false)
	address := "unix://" + filepath.Join(m.Dir, "run/flux-sandbox.sock")
	archive := filepath.Join(t.TempDir(), "image.tar")
	f, err := os.Create(archive)
	must(t, err)
	must(t, testimage.Write(f, testimage.Options{Name: machine.Image}))
	info, err := f.Stat()
	must(t, err)
	for name, size := range map[string]int64{"half of one": info.Size() / 2, "no tar": 0} {
		var in io.Reader = io.NewSectionReader(f, 0, size)
		if size == 0 {
			in = strings.NewReader("hello")
		}
		cmd := exec.Command(filepath.Join(m.Bin, "fluxctl"), "--address", address, "image", "import", "-")
		cmd.Stdin = in
		if out, code := run(t, cmd); code != 1 || !strings.Contains(out, string(fault.InvalidImage)) {
			t.Errorf("%s: exit code %d, %s", name, code, out)
		}
	}
	must(t, f.Close())
}
