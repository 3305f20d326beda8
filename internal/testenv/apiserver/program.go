package apiserver

import (
	"path/filepath"
	"testing"
)

// Program is another program that a test runs beside the server: a controller, a scheduler. It dies with the test binary.
type Program struct {
	p *process
}

// Bin returns the path of a program that was built with the server's: "kube-scheduler". The test ends without it.
func (s *Server) Bin(name string) string { return filepath.Join(s.bin, name) }

// Run starts a program in the server's directory; name is that of its log there. It ends with the test.
func (s *Server) Run(t testing.TB, name, path string, args ...string) *Program {
	t.Helper()
	p, err := start(s.dir, path, name, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	return &Program{p}
}

// Kill ends it as a crash does, and waits for that.
func (p *Program) Kill() { p.p.kill() }

// Ended says why it has ended, with the last that it said; nil while it runs.
func (p *Program) Ended() error { return p.p.ended() }

// Log is the path of the file with its output.
func (p *Program) Log() string { return p.p.log }
