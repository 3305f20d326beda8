//go:build failpoint

package crash

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// facts is the whole state of the machine, one line each, sorted. Numbers that differ from run to run (PIDs, inodes) are
// left out.
func (w *world) facts(ctx context.Context) ([]string, error) {
	loops := w.loops()
	var all []string
	for device, image := range loops {
		all = append(all, "loop device of "+image+" ("+device+")")
	}
	all = append(all, w.mounts(loops)...)
	all = append(all, w.processes()...)
	all = append(all, w.cgroups()...)
	all = append(all, w.files()...)
	all = append(all, w.openFiles()...)
	for _, look := range []func(context.Context) ([]string, error){w.inContainerd, w.inAgent, w.inAPI} {
		found, err := look(ctx)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	slices.Sort(all)
	return all, nil
}

// diff is what came (+) and went (-).
func diff(before, now []string) string {
	count := map[string]int{}
	for _, f := range now {
		count[f]++
	}
	for _, f := range before {
		count[f]--
	}
	var lines []string
	for _, f := range slices.Sorted(maps.Keys(count)) {
		switch n := count[f]; {
		case n > 0:
			lines = append(lines, "+ "+f)
		case n < 0:
			lines = append(lines, "- "+f)
		}
	}
	return strings.Join(lines, "\n")
}

// name is in the path or cgroup of everything of this machine.
func (w *world) name() string { return filepath.Base(w.Dir) }

// loops are the loop devices with an image of this machine.
func (w *world) loops() map[string]string {
	loops := testenv.LoopDevices()
	maps.DeleteFunc(loops, func(_, file string) bool { return !strings.Contains(file, w.name()) })
	return loops
}

// mounts looks in every mount namespace that a thread is in: a thread of the server may be in a sandbox's.
func (w *world) mounts(loops map[string]string) []string {
	var found []string
	seen := map[string]bool{}
	threads, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*")
	for _, thread := range threads {
		ns, err := os.Readlink(filepath.Join(thread, "ns/mnt"))
		if err != nil || seen[ns] {
			continue
		}
		seen[ns] = true
		b, _ := os.ReadFile(filepath.Join(thread, "mountinfo"))
		for line := range strings.Lines(string(b)) {
			left, right, _ := strings.Cut(strings.TrimSpace(line), " - ")
			l, r := strings.Fields(left), strings.Fields(right)
			if len(l) < 5 || len(r) < 2 {
				continue
			}
			if _, ours := loops[r[1]]; ours || strings.Contains(line, w.name()) {
				found = append(found, fmt.Sprintf("mount at %s (%s of %s, root %s)", l[4], r[0], r[1], l[3]))
			}
		}
	}
	return found
}

// processes are those that have to do with this machine. Of zombies only those count whose parent does too: others wait
// for the machine's init.
func (w *world) processes() []string {
	var found []string
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || filepath.Base(dir) == strconv.Itoa(os.Getpid()) {
			continue
		}
		cgroup, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
		args := string(bytes.ReplaceAll(bytes.TrimRight(cmdline, "\x00"), []byte{0}, []byte{' '}))
		// proc(5): pid (comm) state ppid …
		stat, _ := os.ReadFile(filepath.Join(dir, "stat"))
		_, rest, _ := strings.Cut(string(stat), ") ")
		if fields := strings.Fields(rest); len(fields) > 1 && fields[0] == "Z" {
			if parent, _ := os.ReadFile(filepath.Join("/proc", fields[1], "cmdline")); !bytes.Contains(parent, []byte(w.name())) {
				continue
			}
			args = "zombie " + string(stat)
		}
		if strings.Contains(args, w.name()) || strings.Contains(args, w.Bin) || bytes.Contains(cgroup, []byte(w.name())) {
			found = append(found, "process "+args)
		}
	}
	return found
}

// cgroups are those with the machine's name, in every hierarchy.
func (w *world) cgroups() []string {
	var found []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, w.name()) {
			found = append(found, "cgroup "+path)
		}
		return nil // one that vanishes meanwhile is none
	})
	return found
}

// files are those of the machine's folder, but for what containerd keeps for itself and the images that were made,
// which are the user's data.
func (w *world) files() []string {
	var found []string
	_ = filepath.WalkDir(w.Dir, func(path string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(w.Dir, path)
		switch {
		case err != nil:
			return nil
		case rel == "state/containerd":
			return fs.SkipDir
		case strings.HasPrefix(rel, "data/images/") && filepath.Ext(rel) == ".img" && strings.HasPrefix(d.Name(), "new-"):
			return nil
		}
		found = append(found, "file "+rel)
		return nil
	})
	return found
}

var number = regexp.MustCompile(`[0-9]+`)

// openFiles are the server's open files. Connections come and go by themselves, and so do the timers and pipes of the
// Go runtime and of programs that are run: those are left out. So is the handle of containerd, of which a server that
// started it has two.
func (w *world) openFiles() []string {
	var found []string
	dir := fmt.Sprintf("/proc/%d", w.PID())
	entries, _ := os.ReadDir(filepath.Join(dir, "fd"))
	for _, e := range entries {
		link, err := os.Readlink(filepath.Join(dir, "fd", e.Name()))
		if err != nil || strings.HasPrefix(link, "socket:") || strings.HasPrefix(link, "pipe:") {
			continue
		}
		if link == "anon_inode:[pidfd]" {
			info, _ := os.ReadFile(filepath.Join(dir, "fdinfo", e.Name()))
			_, pid, _ := strings.Cut(string(info), "\nPid:")
			pid, _, _ = strings.Cut(strings.TrimSpace(pid), "\n")
			cmdline, _ := os.ReadFile(filepath.Join("/proc", pid, "cmdline"))
			if bytes.Contains(cmdline, []byte(w.Dir+"/state/containerd/")) {
				continue
			}
		}
		if !strings.HasPrefix(link, "/") {
			link = number.ReplaceAllString(link, "")
		}
		found = append(found, "open file "+link)
	}
	return found
}

func (w *world) inContainerd(ctx context.Context) ([]string, error) {
	var found []string
	list, err := w.runtime.List(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range list {
		found = append(found, "container "+c.ID+" "+string(c.State))
	}
	left, err := w.runtime.Leftovers(ctx)
	if err != nil {
		return nil, err
	}
	for _, l := range left {
		found = append(found, fmt.Sprintf("leftover %s %s", l.Kind, l.ID))
	}
	return found, nil
}

func (w *world) inAgent(ctx context.Context) ([]string, error) {
	inventory, err := w.inventory(ctx)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, s := range inventory.GetSandboxes() {
		found = append(found, "agent's sandbox "+s.GetUid()+" "+s.GetPhase())
	}
	for _, p := range inventory.GetPrepared() {
		found = append(found, "prepared "+p.GetVolumeKey())
	}
	return found, nil
}

func (w *world) inAPI(ctx context.Context) ([]string, error) {
	list, err := w.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{})
	var found []string
	for _, s := range list.GetSandboxes() {
		found = append(found, "sandbox "+s.GetName()+" "+s.GetStatus().GetPhase())
	}
	return found, err
}
