// Package unixsocket makes unix sockets that root alone can connect to, from their first moment on.
package unixsocket

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
)

// Listen makes the socket with mode 0600, in place of one that a killed process left: the caller knows that no other
// process answers there. permit, if not nil, lets more in: it gets the socket's path before anybody can connect by its
// own. The socket is removed when the listener is closed; the folder is made if it is not there.
func Listen(path string, permit func(path string) error) (_ net.Listener, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("listen on %s: %w", path, err)
		}
	}()
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, err
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != fs.ModeSocket {
		return nil, errors.New("what is there is no socket, so it is not removed")
	}
	// Made under another name, so that nobody connects before it has its permissions: a change of the umask would be the
	// whole process'.
	making := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new") // hidden: kubelet takes others for plugins
	if err := os.Remove(making); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: making, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // by the name that it will not have
	err = os.Chmod(making, 0o600)
	if err == nil && permit != nil {
		err = permit(making)
	}
	if err == nil {
		err = os.Rename(making, path)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close(), os.Remove(making))
	}
	return &listener{UnixListener: l, path: path}, nil
}

// listener removes its socket when it is closed: net's own would by the name that it was made with.
type listener struct {
	*net.UnixListener
	path string
	once sync.Once // guards err
	err  error
}

func (l *listener) Close() error {
	l.once.Do(func() { l.err = errors.Join(os.Remove(l.path), l.UnixListener.Close()) })
	return l.err
}
