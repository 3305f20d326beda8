package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// nestedNamespaces are the mount namespaces, by inode number, of a sandbox's processes that are not its init's, which is
// own. The default seccomp profile lets a sandbox make none; a shell that the operator opened in it may.
func nestedNamespaces(own uint64, init int, pids []int) (map[uint64]bool, error) {
	var nested map[uint64]bool
	for _, pid := range pids {
		if pid == init {
			continue
		}
		id, err := mountNamespace(pid)
		if err != nil {
			return nil, err
		}
		if id == 0 || id == own {
			continue
		}
		if nested == nil {
			nested = map[uint64]bool{}
		}
		nested[id] = true
	}
	return nested, nil
}

// mountNamespace is the inode number of a process' mount namespace; 0 when the process is gone.
func mountNamespace(pid int) (uint64, error) {
	link, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "ns/mnt"))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	// The link reads "mnt:[4026531841]" (namespaces(7)).
	return strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(link, "mnt:["), "]"), 10, 64)
}
