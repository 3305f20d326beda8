package unixsocket_test

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/unixsocket"
)

func TestListen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "deep", "er", "a.sock")
	for range 2 { // the second in place of what a killed process left
		l, err := unixsocket.Listen(path, func(p string) error {
			info, err := os.Lstat(p)
			if err == nil && info.Mode().Perm() != 0o600 {
				err = errors.New(info.Mode().String())
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Lstat(path); err != nil || info.Mode() != fs.ModeSocket|0o600 {
			t.Errorf("%v, %v", info, err)
		}
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		defer l.Close()
	}
}

func TestCloseRemovesTheSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.sock")
	l, err := unixsocket.Listen(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(l.Close(), l.Close()); err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestWhatIsInTheWayStays(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.sock")
	if err := os.WriteFile(path, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := unixsocket.Listen(path, nil); err == nil {
		t.Error("a file was replaced")
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != "kept" {
		t.Errorf("%q, %v", data, err)
	}
	denied := errors.New("denied")
	if _, err := unixsocket.Listen(filepath.Join(dir, "b.sock"), func(string) error { return denied }); !errors.Is(err, denied) {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
}
