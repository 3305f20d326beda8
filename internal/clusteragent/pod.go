package clusteragent

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/node"
)

// Paths are where the agent finds its files: in its Pod, or on the host where it is an ordinary process.
type Paths struct {
	// Config is the configuration file, Token the file with the ServiceAccount token, Trust that with the CAs of the
	// controller. Each may be replaced at any time as kubelet does it, by a link in their directory.
	Config, Token, Trust string
	// Init, Logger and Hook are flux-sandbox-init, flux-sandbox-logger and flux-sandbox-hook.
	Init, Logger, Hook string
	// Containerd is the socket of the host's containerd, whose process is in the host's mount namespace. It is asked for
	// that where process 1 does not let its own be seen.
	Containerd string
}

// Files are the open files of a Pod.
type Files struct {
	paths Paths
	kept  map[string]*os.File
}

// EnterHost goes to the host's mount namespace, where it is not there already, with the Pod's files open. It executes the
// program again and then returns in the new one: call it early in main.
func EnterHost(paths Paths) (*Files, error) {
	keep := map[string]*os.File{}
	if !mount.Reexecuted() {
		for name, path := range map[string]string{
			"config": filepath.Dir(paths.Config), "token": filepath.Dir(paths.Token), "trust": filepath.Dir(paths.Trust),
			"init": paths.Init, "logger": paths.Logger, "hook": paths.Hook,
		} {
			f, err := os.Open(path)
			if err != nil {
				return nil, fmt.Errorf("the agent's own files: %w", err)
			}
			keep[name] = f
		}
	}
	kept, err := mount.ReexecInHostNamespace(keep, func() (int, error) { return mount.SocketPeer(paths.Containerd) })
	if err != nil {
		return nil, err
	}
	return &Files{paths: paths, kept: kept}, nil
}

// Config, Token and Trust read the files as they are now.
func (f *Files) Config() ([]byte, error) { return f.read("config", f.paths.Config) }

// Trust is the PEM of the CAs.
func (f *Files) Trust() ([]byte, error) { return f.read("trust", f.paths.Trust) }

// Token is the ServiceAccount token.
func (f *Files) Token() (string, error) {
	data, err := f.read("token", f.paths.Token)
	return strings.TrimSpace(string(data)), err
}

// maxFile bounds what is read: these are small files.
const maxFile = 1 << 20

func (f *Files) read(dir, path string) ([]byte, error) {
	fd, err := unix.Openat(int(f.kept[dir].Fd()), filepath.Base(path), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, maxFile))
}

// InstallPrograms puts the programs of sandboxes below a directory of the host, each under a name that its content
// decides: a container goes on with the program that it was made with, and a new build changes none.
func (f *Files) InstallPrograms(dir string) (node.Programs, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return node.Programs{}, fmt.Errorf("install programs: %w", err)
	}
	var p node.Programs
	var err error
	if p.Init, err = install(f.kept["init"], dir, "flux-sandbox-init"); err != nil {
		return p, err
	}
	if p.Logger, err = install(f.kept["logger"], dir, "flux-sandbox-logger"); err != nil {
		return p, err
	}
	p.Hook, err = install(f.kept["hook"], dir, "flux-sandbox-hook")
	return p, err
}

func install(from *os.File, dir, name string) (string, error) {
	sum := sha256.New()
	size, err := io.Copy(sum, io.NewSectionReader(from, 0, 1<<40))
	if err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	path := filepath.Join(dir, name+"-"+hex.EncodeToString(sum.Sum(nil))[:12])
	if info, err := os.Stat(path); err == nil && info.Size() == size {
		return path, nil
	}
	to, err := os.CreateTemp(dir, name+"-*.tmp")
	if err != nil {
		return "", fmt.Errorf("install %s: %w", name, err)
	}
	defer os.Remove(to.Name())
	_, err = io.Copy(to, io.NewSectionReader(from, 0, size))
	err = errors.Join(err, to.Chmod(0o755), to.Sync(), to.Close())
	if err == nil {
		err = os.Rename(to.Name(), path)
	}
	if err != nil {
		return "", fmt.Errorf("install %s: %w", name, err)
	}
	return path, nil
}
