package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// MaxHolders bounds how many holders are looked for: an answer is read by a person.
const MaxHolders = 64

// Holder is a process that uses a mount or superblock.
type Holder struct {
	// PID is the number in our own PID namespace.
	PID     int    `json:"pid"`
	Command string `json:"command"`
	// Kind is how it holds: "cwd", "root", "exe", "fd" or "map".
	Kind string `json:"kind"`
}

// String returns a form for messages.
func (h Holder) String() string { return fmt.Sprintf("%s[%d] (%s)", h.Command, h.PID, h.Kind) }

// Users returns the processes that use the mount: one entry for each process,
// at most MaxHolders. It finds them also when the mount was detached lazily. It
// does not see descriptors in flight over a socket, nor the kernel's own use.
// It waits for no file server.
func Users(ctx context.Context, id Identity) ([]Holder, error) {
	unique := modern() && id.UniqueID != 0
	want := uint64(id.MountID)
	if unique {
		want = id.UniqueID
	}
	return scan(ctx, func(dirfd int, name string) bool {
		got, isUnique, err := mountIDAt(dirfd, name, 0, unique)
		return err == nil && got == want && isUnique == unique
	})
}

// SuperblockUsers returns the processes that use any mount of a device
// ("major:minor"), attached or not, in whatever namespace. It is for devices
// that serve one volume, like a loop device.
func SuperblockUsers(ctx context.Context, device string) ([]Holder, error) {
	return scan(ctx, func(dirfd int, name string) bool {
		var st unix.Statx_t
		return statxAt(dirfd, name, 0, unix.STATX_INO, &st) == nil && fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor) == device
	})
}

// scan looks through all processes with a test for a file that a process has.
func scan(ctx context.Context, holds func(dirfd int, name string) bool) ([]Holder, error) {
	var holders []Holder
	err := eachProcess(ctx, func(pid int, dir int) bool {
		if kind := heldBy(dir, pid, holds); kind != "" {
			holders = append(holders, Holder{PID: pid, Command: command(dir), Kind: kind})
		}
		return len(holders) < MaxHolders
	})
	return holders, err
}

// eachProcess calls f with a descriptor of /proc/PID until it returns false.
func eachProcess(ctx context.Context, f func(pid, dir int) bool) error {
	pids, err := readNumbers(unix.AT_FDCWD, "/proc")
	if err != nil {
		return failed("scan processes", "/proc", "cannot list processes", err)
	}
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return &Error{Op: "scan processes", Code: ReasonOutcomeUnknown, Kind: err, Message: "the deadline passed"}
		}
		dir, err := unix.Open("/proc/"+strconv.Itoa(pid), directoryPath, 0)
		if err != nil {
			continue // ended meanwhile
		}
		more := f(pid, dir)
		unix.Close(dir)
		if !more {
			return nil
		}
	}
	return nil
}

// heldBy returns how a process holds, or "". Threads may have a working
// directory and a descriptor table of their own.
func heldBy(dir, pid int, holds func(int, string) bool) string {
	if kind := heldByTask(dir, holds, true); kind != "" {
		return kind
	}
	if heldByMap(dir, holds) {
		return "map"
	}
	tids, err := readNumbers(dir, "task")
	if err != nil {
		return ""
	}
	for _, tid := range tids {
		if tid == pid {
			continue
		}
		task, err := unix.Openat(dir, "task/"+strconv.Itoa(tid), directoryPath, 0)
		if err != nil {
			continue
		}
		kind := heldByTask(task, holds, !sameFiles(pid, tid))
		unix.Close(task)
		if kind != "" {
			return kind
		}
	}
	return ""
}

func heldByTask(dir int, holds func(int, string) bool, files bool) string {
	for _, kind := range []string{"cwd", "root", "exe"} {
		if holds(dir, kind) {
			return kind
		}
	}
	if !files {
		return ""
	}
	fds, err := readNumbers(dir, "fd")
	if err != nil {
		return ""
	}
	for _, fd := range fds {
		if holds(dir, "fd/"+strconv.Itoa(fd)) {
			return "fd"
		}
	}
	return ""
}

// heldByMap looks at each mapped file once, by its descriptor-like link in
// map_files.
func heldByMap(dir int, holds func(int, string) bool) bool {
	fd, err := unix.Openat(dir, "maps", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	data, err := readAll(fd)
	if err != nil {
		return false
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		// start-end perms offset device inode path
		if len(fields) < 6 || fields[4] == "0" {
			continue
		}
		file := fields[3] + " " + fields[4] + " " + fields[5]
		if seen[file] {
			continue
		}
		seen[file] = true
		if holds(dir, "map_files/"+mapName(fields[0])) {
			return true
		}
	}
	return false
}

// mapName turns the padded addresses of maps into those of map_files.
func mapName(addresses string) string {
	start, end, _ := strings.Cut(addresses, "-")
	trim := func(s string) string {
		if t := strings.TrimLeft(s, "0"); t != "" {
			return t
		}
		return "0"
	}
	return trim(start) + "-" + trim(end)
}

// sameFiles tells whether two threads share their descriptor table (kcmp(2)).
// A kernel without kcmp costs a longer scan.
func sameFiles(a, b int) bool {
	const kcmpFiles = 2
	r, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(a), uintptr(b), kcmpFiles, 0, 0, 0)
	return errno == 0 && r == 0
}

func command(dir int) string {
	fd, err := unix.Openat(dir, "comm", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "?"
	}
	defer unix.Close(fd)
	data, err := readAll(fd)
	if err != nil {
		return "?"
	}
	return printable(strings.TrimSpace(string(data)))
}

// printable replaces what is no printable text. A process gives itself its name: bytes that are no UTF-8 would fit into no
// message, and control characters would be commands to the terminal of who reads it.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return utf8.RuneError
	}, s)
}

// readNumbers returns the entries of a directory that are numbers.
func readNumbers(dirfd int, name string) ([]int, error) {
	fd, err := unix.Openat(dirfd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), path.Base(name))
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil && len(names) == 0 && !errors.Is(err, unix.ESRCH) {
		return nil, err
	}
	numbers := make([]int, 0, len(names))
	for _, s := range names {
		if n, err := strconv.Atoi(s); err == nil {
			numbers = append(numbers, n)
		}
	}
	return numbers, nil
}
