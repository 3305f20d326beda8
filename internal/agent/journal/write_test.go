package journal

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// brokenFile is a file whose calls fail when they are told to. A write that fails has written half.
type brokenFile struct {
	file
	write, truncate error
}

func (f *brokenFile) WriteAt(p []byte, at int64) (int, error) {
	if f.write == nil {
		return f.file.WriteAt(p, at)
	}
	n, _ := f.file.WriteAt(p[:len(p)/2], at)
	return n, f.write
}

func (f *brokenFile) Truncate(size int64) error {
	if f.truncate != nil {
		return f.truncate
	}
	return f.file.Truncate(size)
}

func TestAWriteThatFailsChangesNothing(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir, "boot")
	write(t, j, Change{PutVolumes: []Volume{volumeRecord("u", "a", "/a", "k")}})
	before := contents(j)
	broken := &brokenFile{file: j.log.file, write: unix.ENOSPC}
	j.log.file = broken
	both := Change{PutVolumes: []Volume{volumeRecord("u", "b", "/b", "k"), volumeRecord("u", "c", "/c", "k")}}
	if err := j.Write(both); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("error %v", err)
	}
	if now := contents(j); !reflect.DeepEqual(before, now) {
		t.Errorf("half of it is there: %+v", now)
	}
	broken.write = nil
	write(t, j, both)

	// The beginning that was written cannot be removed either: nothing is written behind it.
	broken.write, broken.truncate = unix.EIO, unix.EROFS
	third := Change{PutVolumes: []Volume{volumeRecord("u", "d", "/d", "k")}}
	if err := j.Write(third); !errors.Is(err, unix.EIO) || !errors.Is(err, unix.EROFS) {
		t.Fatalf("error %v", err)
	}
	broken.write = nil
	if err := j.Write(third); !errors.Is(err, unix.EROFS) || !strings.Contains(err.Error(), "nothing can be recorded") {
		t.Fatalf("error %v", err)
	}
	if _, there := j.VolumeAt("u", "/d"); there {
		t.Error("what was refused is there")
	}
	if other, err := os.ReadFile(j.path); err != nil {
		t.Error(err)
	} else if read, err := replayed(other); err != nil || len(read.Volumes("u")) != 3 {
		t.Errorf("a process that is killed now leaves %v, %v", read.Volumes("u"), err)
	}
	broken.truncate = nil
	write(t, j, third)
	want := contents(j)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if j = openIn(t, dir, "boot"); !reflect.DeepEqual(contents(j), want) {
		t.Errorf("opened again: %+v\nwant %+v", contents(j), want)
	}
}

func TestAFullFilesystem(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	j := openIn(t, dir, "boot")
	var err error
	var before any
	n := 0
	for ; err == nil; n++ {
		before = contents(j)
		err = j.Write(Change{PutVolumes: []Volume{volumeRecord("u", fmt.Sprint(n), fmt.Sprint("/", n), "k")}})
	}
	if !errors.Is(err, unix.ENOSPC) || n < 10 {
		t.Fatalf("after %d writes: %v", n, err)
	}
	if now := contents(j); !reflect.DeepEqual(before, now) {
		t.Error("a write that failed is there")
	}
	// Where a large record finds no space, small ones may.
	for err = nil; err == nil; {
		before = contents(j)
		err = j.Write(Change{PutEpochs: map[string]int64{"lease": j.Epoch("lease") + 1}})
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT, "size=1m"); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = openIn(t, dir, "boot")
	if now := contents(j); !reflect.DeepEqual(before, now) {
		t.Error("opened again, it is not as before")
	}
	write(t, j, Change{PutVolumes: []Volume{volumeRecord("u", "more", "/more", "k")}})
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
}

// size is that of a journal's file.
func size(t *testing.T, j *Journal) int64 {
	t.Helper()
	info, err := os.Stat(j.path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

func TestTheFileStaysSmall(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir, "boot")
	j.log.deadBase = 8 << 10
	j.log.postpone()
	for i := range 3000 {
		v := volumeRecord("u", fmt.Sprint(i), "/a", "k")
		write(t, j, Change{PutVolumes: []Volume{v}, PutGenerations: []Generation{{"u", "/a", int64(i)}}})
		if i >= 5 {
			v.ID = fmt.Sprint(i - 5)
			write(t, j, Change{DeleteVolumes: []Volume{v}})
		}
		if s := size(t, j); s > 16<<10 {
			t.Fatalf("after %d changes it has %d bytes", i, s)
		}
	}
	before := contents(j)
	if len(j.Volumes("u")) != 5 {
		t.Errorf("volumes %v", j.Volumes("u"))
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if j = openIn(t, dir, "boot"); !reflect.DeepEqual(contents(j), before) || j.Generation("u", "/a") != 2999 {
		t.Errorf("opened again: %+v\nwant %+v", contents(j), before)
	}
}

func TestALogThatCannotBeWrittenAnewGoesOn(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir, "boot")
	// The new file's name is taken by a directory.
	if err := os.Mkdir(j.path+newSuffix, 0o700); err != nil {
		t.Fatal(err)
	}
	j.log.deadBase, j.log.limit = 1<<10, 0
	for i := range 100 {
		write(t, j, Change{PutVolumes: []Volume{volumeRecord("u", fmt.Sprint(i%3), "/a", "k")}})
	}
	before, large := contents(j), size(t, j)
	if err := os.Remove(j.path + newSuffix); err != nil {
		t.Fatal(err)
	}
	for size(t, j) >= large {
		write(t, j, Change{PutVolumes: []Volume{volumeRecord("u", "0", "/a", "k")}})
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if j = openIn(t, dir, "boot"); !reflect.DeepEqual(contents(j), before) {
		t.Errorf("opened again: %+v\nwant %+v", contents(j), before)
	}
}

func TestAnUnfinishedNewLogIsNoHindrance(t *testing.T) {
	file, _, states := written(t, someChanges())
	dir := t.TempDir()
	for size := range len(file) {
		for name, data := range map[string][]byte{logName: file, logName + newSuffix: file[:size]} {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		j := openIn(t, dir, "boot")
		if got := contents(j); !reflect.DeepEqual(got, states[len(states)-1]) {
			t.Fatalf("%d bytes: %+v", size, got)
		}
		if _, err := os.Stat(j.path + newSuffix); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("%d bytes: it is still there: %v", size, err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// childDir tells this test binary that it is the process that is killed.
const childDir = "FLUX_JOURNAL_CHILD"

// kills is how often a process is killed at an instant that nobody chose.
const kills = 15

func TestKilledAtAnyInstant(t *testing.T) {
	if dir := os.Getenv(childDir); dir != "" {
		writeUntilKilled(t, dir)
	}
	dir := t.TempDir()
	acknowledged := int64(0)
	for i := range kills {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilledAtAnyInstant$")
		cmd.Env = append(os.Environ(), childDir+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan(); n++ {
			if acknowledged, err = strconv.ParseInt(lines.Text(), 10, 64); err != nil {
				t.Fatalf("the child says %q", lines.Text())
			}
			if n == 50+7*i {
				_ = cmd.Process.Kill()
			}
		}
		_ = cmd.Wait()
		j := openIn(t, dir, "boot")
		// Written in one change: either all of it is there, or nothing. The last one may not have been acknowledged any more.
		n := j.Epoch("n")
		if n < acknowledged || n > acknowledged+1 {
			t.Fatalf("change %d was acknowledged, and %d is there", acknowledged, n)
		}
		v, ok := j.VolumeAt("u", "/a")
		if !ok || v.ID != fmt.Sprint(n) || len(j.Volumes("u")) != 1 || j.Generation("u", "/a") != n {
			t.Fatalf("change %d, and the volumes %v, generation %d", n, j.Volumes("u"), j.Generation("u", "/a"))
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// writeUntilKilled makes one change after another, and writes the log anew after every few.
func writeUntilKilled(t *testing.T, dir string) {
	j := openIn(t, dir, "boot")
	j.log.deadBase = 2 << 10
	j.log.postpone()
	for n := j.Epoch("n") + 1; ; n++ {
		old := j.Volumes("u")
		write(t, j, Change{DeleteVolumes: old, PutVolumes: []Volume{volumeRecord("u", fmt.Sprint(n), "/a", "k")},
			PutGenerations: []Generation{{"u", "/a", n}}, PutEpochs: map[string]int64{"n": n}})
		fmt.Println(n)
	}
}

func BenchmarkWrite(b *testing.B) {
	j, err := Open(b.TempDir(), "boot")
	if err != nil {
		b.Fatal(err)
	}
	defer j.Close()
	v := volumeRecord("0b6f6a6e-1d43-4d0b-9d0c-0a4f5d5b7c2e", "operation", "/data", "local-0123456789abcdef0123456789abcdef")
	for b.Loop() {
		if err := j.Write(Change{PutVolumes: []Volume{v}}); err != nil {
			b.Fatal(err)
		}
	}
}
