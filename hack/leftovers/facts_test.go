package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// machine makes a folder with the files of a made-up machine. A value "-> x" makes a symlink to x.
func machine(t *testing.T, files map[string]string) host {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if to, ok := strings.CutPrefix(content, "-> "); ok {
			err = os.Symlink(to, path)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return host{root: root, self: 42}
}

func TestFacts(t *testing.T) {
	for _, tc := range []struct {
		name  string
		files map[string]string
		want  []string // with the machine's root cut off
	}{
		{
			name: "mounts in the own and in other namespaces, each namespace once",
			files: map[string]string{
				"proc/self/ns/mnt": "-> mnt:[1]", "proc/10/ns/mnt": "-> mnt:[1]", "proc/11/ns/mnt": "-> mnt:[2]", "proc/12/ns/mnt": "-> mnt:[2]",
				"proc/self/mountinfo": "21 1 0:5 / /proc rw - proc proc rw\n30 1 254:0 /var/lib/flux-sandbox/x /mnt/x rw shared:1 - ext4 /dev/vda rw\n",
				"proc/11/mountinfo":   "40 1 7:0 / /data rw - ext4 /dev/loop0 rw\n41 1 0:9 / /tmp/flux.a rw - tmpfs tmpfs rw\n",
				"proc/12/mountinfo":   "41 1 0:9 / /tmp/flux.a rw - tmpfs tmpfs rw\n",
			},
			want: []string{
				"mount in another namespace: /tmp/flux.a (tmpfs of tmpfs, root /)",
				"mount: /mnt/x (ext4 of /dev/vda, root /var/lib/flux-sandbox/x)",
			},
		},
		{
			name: "loop devices by their image, a deleted one too",
			files: map[string]string{
				"sys/block/loop0/loop/backing_file": "/var/tmp/flux.a/v.img (deleted)\n",
				"sys/block/loop1/loop/backing_file": "/snap/core.snap\n",
			},
			want: []string{"loop device: loop0 of /var/tmp/flux.a/v.img (deleted)"},
		},
		{
			name: "processes: our programs, runtimes that work for us, and what runs in our cgroups",
			files: map[string]string{
				"proc/10/cmdline": "/usr/bin/containerd\x00--address\x00/run/flux/containerd.sock\x00",
				"proc/11/cmdline": "/usr/bin/containerd\x00",
				"proc/12/cmdline": "sleep\x0060\x00", "proc/12/cgroup": "1:cpu:/flux-sandbox/uid\n",
				"proc/13/cmdline": "./fluxctl\x00ps\x00",
				"proc/14/cmdline": "vi\x00/home/me/flux-sandbox/README\x00", "proc/14/cgroup": "1:cpu:/\n",
				"proc/15/cmdline": "agent.test\x00", "proc/15/exe": "-> /var/tmp/flux.a/b1/agent.test",
				"proc/42/cmdline": "fluxctl\x00", // this process itself
			},
			want: []string{
				"process: 10 /usr/bin/containerd --address /run/flux/containerd.sock",
				"process: 12 sleep 60", "process: 13 ./fluxctl ps", "process: 15 agent.test",
			},
		},
		{
			name: "cgroups at any depth, files, interfaces",
			files: map[string]string{
				"sys/fs/cgroup/cpu/a/flux-1/tasks": "", "sys/fs/cgroup/cpu/other/tasks": "",
				"run/flux-sandbox/agent.sock": "", "run/netns/flux-1": "", "var/tmp/flux.a/x": "", "tmp/other": "",
				"sys/class/net/flux0": "", "sys/class/net/lo": "",
			},
			want: []string{
				"cgroup: /sys/fs/cgroup/cpu/a/flux-1", "file: /run/flux-sandbox", "file: /run/netns/flux-1", "file: /var/tmp/flux.a",
				"network interface: /sys/class/net/flux0",
			},
		},
		{
			name: "sockets of shims that nobody listens on",
			files: map[string]string{
				"run/containerd/s/aaaa": "", "run/containerd/s/bbbb": "",
				"proc/net/unix": "0000: 2 0 10000 1 1 5 /run/containerd/s/bbbb\n",
			},
			want: []string{"stale socket: /run/containerd/s/aaaa"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := machine(t, tc.files)
			got := h.facts()
			for i := range got {
				got[i] = strings.ReplaceAll(got[i], h.root, "")
			}
			slices.Sort(tc.want)
			if !slices.Equal(got, tc.want) {
				t.Errorf("got\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(tc.want, "\n\t"))
			}
		})
	}
}

func TestAddedIsWhatWasNotThereBefore(t *testing.T) {
	if got := added([]string{"a", "b"}, []string{"b", "c"}); !slices.Equal(got, []string{"c"}) {
		t.Errorf("added = %v", got)
	}
}

func TestSettleWaitsForWhatGoesByItself(t *testing.T) {
	looks := 0
	left := settle(func() []string {
		if looks++; looks < 3 {
			return []string{"process: 1 ending"}
		}
		return nil
	}, time.Minute)
	if left != nil || looks != 3 {
		t.Errorf("left %v after %d looks", left, looks)
	}
	if left := settle(func() []string { return []string{"stays"} }, time.Millisecond); len(left) != 1 {
		t.Errorf("left %v", left)
	}
}
