package mount

import (
	"bytes"
	"encoding/binary"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func FuzzParseStatmount(f *testing.F) {
	sample := make([]byte, statmountHeader+8)
	binary.NativeEndian.PutUint32(sample[offSize:], uint32(len(sample)))
	binary.NativeEndian.PutUint64(sample[offMask:], statmountAll)
	copy(sample[statmountHeader:], "/a\x00b\x00")
	f.Add(sample)
	f.Add(sample[:statmountHeader-1])
	f.Add([]byte{})
	if modern() {
		id, _, err := mountIDAt(unix.AT_FDCWD, "/proc", 0, true)
		if err != nil {
			f.Fatal(err)
		}
		var b statBuffer
		if _, err := b.stat(id, 0, statmountAll); err != nil {
			f.Fatal(err)
		}
		f.Add(b.buf[:binary.NativeEndian.Uint32(b.buf)])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		info, err := parseStatmount(data)
		if err == nil && strings.ContainsRune(info.Root+info.MountPoint+info.FSType+info.Source, 0) {
			t.Errorf("%+v", info)
		}
	})
}

func FuzzParseMountinfo(f *testing.F) {
	own, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(own)
	f.Add([]byte(`36 35 98:0 /mnt1 /mnt\0402 rw,noatime,nosuid shared:1 master:2 - ext3 /dev/root ro,errors=continue` + "\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _ = parseMountinfo(bytes.NewReader(data)) // must not panic
	})
}

func TestParseMountinfo(t *testing.T) {
	list, err := parseMountinfo(strings.NewReader(
		`36 35 98:0 /mnt1 /mnt\0402 rw,noatime,nosuid shared:1 master:2 - ext3 /dev/root ro,errors=continue` + "\n" +
			`37 36 0:5 / / ro,nodev,noexec master:1 - tmpfs none rw` + "\n"))
	check(t, err)
	want := []Info{
		{MountID: 36, ParentID: 35, Device: "98:0", Root: "/mnt1", MountPoint: "/mnt 2", FSType: "ext3", Source: "/dev/root", NoSUID: true, SuperblockReadOnly: true, Shared: true, PeerGroup: 1, Master: 2},
		{MountID: 37, ParentID: 36, Device: "0:5", Root: "/", MountPoint: "/", FSType: "tmpfs", Source: "none", ReadOnly: true, NoDev: true, NoExec: true, Master: 1},
	}
	if len(list) != 2 || list[0] != want[0] || list[1] != want[1] {
		t.Errorf("%+v", list)
	}
}

func TestLayouts(t *testing.T) {
	if got := unsafe.Sizeof(mntIDReq{}); got != mntIDReqV1 {
		t.Errorf("struct mnt_id_req has %d bytes", got)
	}
	if got := unsafe.Sizeof(mntNSInfo{}); got != mntNSInfoLen {
		t.Errorf("struct mnt_ns_info has %d bytes", got)
	}
}

func TestStatmountGrowsItsBuffer(t *testing.T) {
	if !modern() {
		testenv.Missing(t, "a kernel with statmount")
	}
	id, _, err := mountIDAt(unix.AT_FDCWD, "/proc", 0, true)
	check(t, err)
	small := statBuffer{buf: make([]byte, statmountHeader)}
	info, err := small.stat(id, 0, statmountAll)
	if err != nil || info.MountPoint != "/proc" || info.FSType != "proc" {
		t.Errorf("%+v %v", info, err)
	}
}

func TestWithin(t *testing.T) {
	for _, tc := range []struct {
		dir, name string
		want      bool
	}{
		{"/", "/a", true}, {"/", "/", true}, {"/a", "/a", true}, {"/a", "/a/b", true},
		{"/a", "/ab", false}, {"/a/b", "/a", false}, {"/a", "/b", false},
	} {
		if within(tc.dir, tc.name) != tc.want {
			t.Errorf("within(%q, %q)", tc.dir, tc.name)
		}
	}
}

func TestIdentityWithoutUniqueIDs(t *testing.T) {
	m := Info{UniqueID: 7, MountID: 3, Device: "1:2", Root: "/r"}
	for _, tc := range []struct {
		id   Identity
		want bool
	}{
		{Identity{UniqueID: 7}, true},
		{Identity{UniqueID: 8, MountID: 3, Device: "1:2", Root: "/r"}, false},
		{Identity{MountID: 3, Device: "1:2", Root: "/r"}, true},
		{Identity{MountID: 3, Device: "1:3", Root: "/r"}, false}, // a reused id
		{Identity{MountID: 3, Device: "1:2", Root: "/s"}, false},
		{Identity{MountID: 3, Device: "9:9"}, true}, // recorded before the attach
	} {
		if m.is(tc.id) != tc.want {
			t.Errorf("%+v", tc.id)
		}
	}
}
