package containers_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"

	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/testimage"
)

func procFile(t *testing.T, pid int, name string) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestConfinement(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "sleep 1000")
	c := run(t, r, spec)

	t.Run("the process and an exec have no privileges", func(t *testing.T) {
		for _, text := range []string{procFile(t, c.PID, "status"), sh(t, r, spec.UID, "cat /proc/self/status")} {
			for field, want := range map[string]string{"NoNewPrivs": "1", "Seccomp": "2", "CapInh": "0000000000000000", "CapAmb": "0000000000000000"} {
				if got := statusField(text, field); got != want {
					t.Errorf("%s is %s, want %s", field, got, want)
				}
			}
			for _, set := range []string{"CapPrm", "CapEff", "CapBnd"} {
				bits, err := strconv.ParseUint(statusField(text, set), 16, 64)
				if err != nil {
					t.Fatal(err)
				}
				// capability.h: 21 CAP_SYS_ADMIN, 27 CAP_MKNOD, 12 CAP_NET_ADMIN, 19 CAP_SYS_PTRACE.
				for _, denied := range []int{21, 27, 12, 19} {
					if bits&(1<<denied) != 0 {
						t.Errorf("%s has capability %d", set, denied)
					}
				}
				if bits&1 == 0 { // CAP_CHOWN: what root in a container is used to
					t.Errorf("%s lacks the default capabilities: %x", set, bits)
				}
			}
		}
	})
	t.Run("it cannot mount, make namespaces or devices", func(t *testing.T) {
		for _, script := range []string{
			"mount -t tmpfs x /mnt", "mount -o remount,rw /proc/sys", "umount /etc/hosts", "unshare -m true", "unshare -U true",
			"mknod /tmp/disk b 254 0", "echo 1 > /proc/sys/kernel/panic", "echo x >> /etc/hosts", "echo x > " + containers.InitTarget,
		} {
			if out := sh(t, r, spec.UID, "if ("+script+") 2>/dev/null; then echo done; fi"); out != "" {
				t.Errorf("%s succeeded", script)
			}
		}
	})
	t.Run("its network is a loopback interface that is up", func(t *testing.T) {
		if got := sh(t, r, spec.UID, "ls /sys/class/net"); got != "lo" {
			t.Errorf("interfaces: %q", got)
		}
		sh(t, r, spec.UID, "ping -c 1 -W 5 127.0.0.1 >/dev/null")
	})
	t.Run("it has a name", func(t *testing.T) {
		if got := sh(t, r, spec.UID, "hostname; cat /etc/hostname"); got != spec.Name+"\n"+spec.Name {
			t.Errorf("host name %q", got)
		}
		sh(t, r, spec.UID, "ping -c 1 -W 5 "+spec.Name+" >/dev/null && ping -c 1 -W 5 localhost >/dev/null && test -f /etc/resolv.conf")
	})
	t.Run("no mount of it propagates", func(t *testing.T) {
		f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", c.PID))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		mounts, err := mountinfo.GetMountsFromReader(f, nil)
		if err != nil || len(mounts) == 0 {
			t.Fatal(err)
		}
		for _, m := range mounts {
			if m.Optional != "" {
				t.Errorf("%s is %s", m.Mountpoint, m.Optional)
			}
		}
	})
	t.Run("its PID 1 is ours and holds nothing", func(t *testing.T) {
		if got := sh(t, r, spec.UID, "tr '\\0' ' ' < /proc/1/cmdline; readlink /proc/1/cwd"); got != containers.InitTarget+" / -- sh -c sleep 1000 /" {
			t.Errorf("PID 1: %q", got)
		}
	})
}

// statusField is a field of the text of /proc/PID/status.
func statusField(status, field string) string {
	for line := range strings.Lines(status) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

func TestLimits(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "sleep 1000")
	spec.Resources = containers.Resources{CPUMilli: 500, MemoryBytes: 32 << 20, PidsLimit: 40}
	c := run(t, r, spec)

	t.Run("are in the kernel", func(t *testing.T) {
		want := map[string]string{ // v2 name: value
			"cpu.max": "50000 100000", "memory.max": "33554432", "memory.swap.max": "0", "pids.max": "40",
		}
		if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
			want = map[string]string{
				"cpu/CG/cpu.cfs_quota_us": "50000", "cpu/CG/cpu.cfs_period_us": "100000", "cpu/CG/cpu.shares": "512",
				"memory/CG/memory.limit_in_bytes": "33554432", "memory/CG/memory.memsw.limit_in_bytes": "33554432",
				"pids/CG/pids.max": "40",
			}
		}
		for name, value := range want {
			path := filepath.Join("/sys/fs/cgroup", c.CgroupPath, name)
			if strings.Contains(name, "CG") {
				path = filepath.Join("/sys/fs/cgroup", strings.Replace(name, "CG", c.CgroupPath, 1))
			}
			data, err := os.ReadFile(path)
			if err != nil || strings.TrimSpace(string(data)) != value {
				t.Errorf("%s: %q, %v, want %s", path, data, err, value)
			}
		}
	})
	t.Run("processes", func(t *testing.T) {
		limited := newSpec(t, r, "for i in $(seq 60); do sleep 1000 & done; echo all started")
		limited.Resources = spec.Resources
		run(t, r, limited)
		awaitLog(t, r, limited.UID, "can't fork")
	})
	t.Run("memory", func(t *testing.T) {
		code, err := r.Exec(t.Context(), spec.UID, containers.ExecSpec{
			Command: []string{"sh", "-c", "head -c 64m /dev/zero | tail >/dev/null"},
		}, containers.ExecIO{})
		if err != nil || code != 137 {
			t.Errorf("64 MiB under a limit of 32: exit code %d, %v", code, err)
		}
	})
}

func TestOOMKilledIsTheReason(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "exec tail /dev/zero")
	spec.Resources.MemoryBytes = 32 << 20
	run(t, r, spec)
	c := awaitState(t, r, spec.UID, containers.Stopped)
	if c.Exit.Code != 137 || c.Exit.Reason != containers.ReasonOOMKilled {
		t.Errorf("exit %+v", c.Exit)
	}
	if exit, err := r.DeleteTask(t.Context(), spec.UID); err != nil || exit.Reason != containers.ReasonOOMKilled {
		t.Errorf("the record of the exit: %+v, %v", exit, err)
	}
}

func TestZombiesAreReaped(t *testing.T) {
	r := open(t)
	spec := newSpec(t, r, "sleep 1000")
	spec.Resources.PidsLimit = 40
	run(t, r, spec)
	// Each subshell leaves a child to PID 1. Without reaping the 100 zombies exceed the limit.
	sh(t, r, spec.UID, "for i in $(seq 100); do (sleep 0 &) || exit 1; done")
	out := sh(t, r, spec.UID, `n=1; for i in $(seq 200); do n=$(cat /proc/[0-9]*/stat 2>/dev/null | awk '$3=="Z"' | wc -l); [ $n = 0 ] && break; usleep 10000; done; echo $n`)
	if out != "0" {
		t.Errorf("%s zombies", out)
	}
}

func TestEnvironmentAndUser(t *testing.T) {
	env := containerstest.Shared(t)
	r := env.Open(t, nil)
	var archive bytes.Buffer
	if err := testimage.Write(&archive, testimage.Options{
		Name: "example.test/user:1", User: "user", WorkingDir: "/home", Env: []string{"PATH=/bin", "A=image", "B=image"},
		Entrypoint: []string{"echo", "entrypoint"}, Cmd: []string{"cmd"},
	}); err != nil {
		t.Fatal(err)
	}
	images, err := r.ImportImage(t.Context(), &archive, containers.ImportOptions{})
	if err != nil || len(images) != 1 || images[0].Name != "example.test/user:1" {
		t.Fatalf("import: %v, %v", images, err)
	}
	if list, err := r.ListImages(t.Context()); err != nil || !slices.ContainsFunc(list, func(i containers.Image) bool { return i.Name == images[0].Name }) {
		t.Errorf("images: %v, %v", list, err)
	}

	t.Run("the image's command", func(t *testing.T) {
		for _, test := range []struct {
			command, args []string
			want          string
		}{
			{nil, nil, "entrypoint cmd"},
			{nil, []string{"args"}, "entrypoint args"},
			{[]string{"echo", "command"}, nil, "command"},
			{[]string{"echo", "command"}, []string{"args"}, "command args"},
		} {
			spec := newSpec(t, r, "")
			spec.Image, spec.Command, spec.Args = images[0].Name, test.command, test.args
			run(t, r, spec)
			awaitState(t, r, spec.UID, containers.Stopped)
			if _, err := r.DeleteTask(t.Context(), spec.UID); err != nil {
				t.Fatal(err)
			}
			var got []string
			if err := r.Logs(t.Context(), spec.UID, containers.LogOptions{}, func(e containers.LogEntry) error {
				got = append(got, e.Text)
				return nil
			}); err != nil || len(got) != 1 || got[0] != test.want {
				t.Errorf("command %v, args %v: output %q, %v, want %q", test.command, test.args, got, err, test.want)
			}
		}
	})
	t.Run("environment, user and working directory", func(t *testing.T) {
		spec := newSpec(t, r, "sleep 1000")
		spec.Image = images[0].Name
		spec.Env = []containers.EnvVar{{Name: "B", Value: "sandbox"}, {Name: "C", Value: "a b=c"}}
		run(t, r, spec)
		want := "image sandbox a b=c 1000 1000 /home"
		if got := sh(t, r, spec.UID, `echo "$A $B $C $(id -u) $(id -g) $PWD"`); got != want {
			t.Errorf("exec: %q, want %q", got, want)
		}
		script := newSpec(t, r, `echo "$A $B $C $(id -u) $(id -g) $PWD"; sleep 1000`)
		script.Image, script.Env, script.WorkingDir = spec.Image, spec.Env, "/made/for/it"
		run(t, r, script)
		awaitLog(t, r, script.UID, "image sandbox a b=c 1000 1000 /made/for/it")
	})
	t.Run("a user that is not there", func(t *testing.T) {
		var archive bytes.Buffer
		if err := testimage.Write(&archive, testimage.Options{Name: "example.test/nobody:1", User: "nosuch"}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.ImportImage(t.Context(), &archive, containers.ImportOptions{}); err != nil {
			t.Fatal(err)
		}
		spec := newSpec(t, r, "true")
		spec.Image = "example.test/nobody:1"
		if _, err := r.Create(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "nosuch") {
			t.Errorf("got %v", err)
		}
	})
}
