package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

func openIn(t *testing.T, dir, boot string) *Journal {
	t.Helper()
	j, err := Open(dir, boot)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j
}

func write(t *testing.T, j *Journal, c Change) {
	t.Helper()
	if err := j.Write(c); err != nil {
		t.Fatal(err)
	}
}

func volumeRecord(uid, id, target, key string) Volume {
	return Volume{SandboxUID: uid, ID: id, Target: target, EntryHash: "h" + id, Kind: v1alpha1.VolumeKindDynamic, Phase: Mounted,
		Request: volume.Request{Key: key, Type: v1alpha1.VolumeTypeLocal, Source: "/s", TenantID: "t"},
		Mount:   mount.Identity{UniqueID: 7, MountID: 8, Device: "8:1", Root: "/s"}}
}

// contents is everything that a reader can see.
func contents(j *Journal) any {
	volumes := j.AllVolumes()
	slices.SortFunc(volumes, func(a, b Volume) int { return strings.Compare(a.key(), b.key()) })
	return []any{volumes, j.AllPrepared(), j.Sandboxes(), j.Epoch("lease"), j.Epoch(""), j.Generation("u1", ""), j.Generation("u1", "/a")}
}

func TestWhatIsWrittenIsThereAfterReopening(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir, "boot")
	code := int32(3)
	write(t, j, Change{
		PutVolumes:     []Volume{volumeRecord("u1", "a", "/a", "k1"), volumeRecord("u1", "b", "/b", "k2"), volumeRecord("u2", "c", "/a", "k1")},
		PutPrepared:    []Prepared{{Key: "k1", Phase: Ready, Mounts: []mount.Match{{Device: "8:1", Root: "/s"}}}},
		PutSandboxes:   []Sandbox{{UID: "u1", Desired: DesiredRunning, ExitCode: &code}},
		PutGenerations: []Generation{{"u1", "", 2}, {"u1", "/a", 5}},
		PutEpochs:      map[string]int64{"lease": 9, "": 4},
	})
	before := contents(j)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = openIn(t, dir, "boot")
	if after := contents(j); !reflect.DeepEqual(before, after) {
		t.Errorf("reopened:\n%+v\nwritten:\n%+v", after, before)
	}
	if users := j.Users("k1"); len(users) != 2 {
		t.Errorf("users of k1: %v", users)
	}
	if v, ok := j.VolumeAt("u1", "/a"); !ok || v.ID != "a" {
		t.Errorf("the volume at /a: %v %v", v, ok)
	}
	if j.Epoch("lease") != 9 || j.Epoch("") != 4 || j.Epoch("other") != 0 {
		t.Error("epochs", j.Epoch("lease"), j.Epoch(""), j.Epoch("other"))
	}
}

func TestUsersFollowTheRecords(t *testing.T) {
	j := openIn(t, t.TempDir(), "boot")
	v := volumeRecord("u", "a", "/a", "old")
	write(t, j, Change{PutVolumes: []Volume{v}})
	moved := v
	moved.Request.Key = "new"
	write(t, j, Change{PutVolumes: []Volume{moved}})
	if len(j.Users("old")) != 0 || len(j.Users("new")) != 1 {
		t.Errorf("old %v, new %v", j.Users("old"), j.Users("new"))
	}
	write(t, j, Change{DeleteVolumes: []Volume{v}}) // by identity, whatever its fields say
	if len(j.Users("new")) != 0 || len(j.Volumes("u")) != 0 {
		t.Errorf("left: %v %v", j.Users("new"), j.Volumes("u"))
	}
}

func TestALazilyDetachedVolumeHoldsItsTargetNoMore(t *testing.T) {
	j := openIn(t, t.TempDir(), "boot")
	lazy := volumeRecord("u", "a", "/a", "k")
	lazy.Phase = Lazy
	write(t, j, Change{PutVolumes: []Volume{lazy}})
	if _, ok := j.VolumeAt("u", "/a"); ok {
		t.Error("it holds its target")
	}
	if len(j.Users("k")) != 1 {
		t.Error("it is no user of its source any more")
	}
}

func TestReadersGetTheirOwnCopies(t *testing.T) {
	j := openIn(t, t.TempDir(), "boot")
	write(t, j, Change{PutPrepared: []Prepared{{Key: "k", Mounts: []mount.Match{{Device: "8:1"}}}}})
	p, _ := j.Prepared("k")
	p.Mounts[0].Device = "9:9"
	if p, _ = j.Prepared("k"); p.Mounts[0].Device != "8:1" {
		t.Error("a reader changed the journal:", p)
	}
}

func TestTheHighestGenerationAndEpochStay(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir, "boot")
	write(t, j, Change{PutGenerations: []Generation{{"u", "/a", 5}, {"u", "/b", 1}}, PutEpochs: map[string]int64{"l": 7}})
	write(t, j, Change{PutGenerations: []Generation{{"u", "/a", 4}}, PutEpochs: map[string]int64{"l": 6}})
	for range 2 {
		if j.Generation("u", "/a") != 5 || j.Generation("u", "/b") != 1 || j.Epoch("l") != 7 {
			t.Error(j.Generation("u", "/a"), j.Generation("u", "/b"), j.Epoch("l"))
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		j = openIn(t, dir, "boot")
	}
	write(t, j, Change{DeleteSandboxes: []string{"u"}})
	if j.Generation("u", "/a") != 0 {
		t.Error("a sandbox that was forgotten has generations")
	}
}

func TestJournalOfAnotherBootIsSetAside(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir, "boot 1")
	write(t, j, Change{PutVolumes: []Volume{volumeRecord("u", "a", "/a", "k")}})
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = openIn(t, dir, "boot 2")
	if got := j.AllVolumes(); len(got) != 0 {
		t.Errorf("mounts of the last boot are remembered: %v", got)
	}
	if _, err := os.Stat(filepath.Join(dir, logName+bootSuffix)); err != nil {
		t.Error(err)
	}
}

func TestOneOwnerAtATime(t *testing.T) {
	t.Parallel() // it waits for lockWait
	dir := t.TempDir()
	j := openIn(t, dir, "boot")
	if _, err := lockFile(filepath.Join(dir, lockName), 0); !errors.Is(err, errLocked) {
		t.Errorf("error %v while another has it", err)
	}
	if _, err := Open(dir, "boot"); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "another process") {
		t.Errorf("error %v, want Unavailable that names the cause", err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	openIn(t, dir, "boot")
}

func TestOtherFormatsAreRefused(t *testing.T) {
	dir := t.TempDir()
	newer, err := appendFrame(nil, head{Format: formatVersion + 1, Boot: "boot"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, logName), newer, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, "boot"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "format 3") {
		t.Errorf("a newer one: %v", err)
	}
	dir = t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, oldName), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, "boot"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), oldName) {
		t.Errorf("that of an earlier build: %v", err)
	}
}

func TestUnknownFieldsOfANewerBuildAreIgnored(t *testing.T) {
	e, err := decode[entry]([]byte(`{"volumes":[{"sandboxUID":"u","id":"a","target":"/a","phase":"Mounted","fromTheFuture":{"x":1}}],"alsoNew":[1]}`))
	if err != nil || len(e.Volumes) != 1 || e.Volumes[0].Target != "/a" {
		t.Errorf("%v, %v", e, err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{}`, `{"sandboxUID":"u","id":"a"}`, `{"phase":1}`, `null`, `[]`, ``, `{} {}`, `{"mount":{"UniqueID":-1}}`,
		`{"key":"k","prepared":{"details":{"a":[1,2]}}}`, `{"generations":[{"generation":9223372036854775807}]}`, "\x00\xff",
		`{"volumes":[{"sandboxUID":"u","id":"a"},{"sandboxUID":"u","id":"a"}],"epochs":{"":-1}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		fuzzOne[Volume](t, data)
		fuzzOne[Prepared](t, data)
		fuzzOne[Sandbox](t, data)
		fuzzOne[entry](t, data)
		fuzzFile(t, data)
	})
}

// fuzzOne: what decodes can be written and decodes to the same.
func fuzzOne[T any](t *testing.T, data []byte) {
	v, err := decode[T](data)
	if err != nil {
		return
	}
	again, err := json.Marshal(v)
	if err != nil {
		t.Fatalf("%+v cannot be written: %v", v, err)
	}
	w, err := decode[T](again)
	if err != nil {
		t.Fatalf("%s is written as %s, which does not decode: %v", data, again, err)
	}
	// Compared as written: an empty map and none are the same.
	if third, err := json.Marshal(w); err != nil || !bytes.Equal(again, third) {
		t.Errorf("%s is written as %s, then as %s, %v", data, again, third, err)
	}
}

// fuzzFile: a file that ends with the data, as a record or as it is, is read, or is ErrDataLoss.
func fuzzFile(t *testing.T, data []byte) {
	file, err := appendFrame(nil, head{Format: formatVersion, Boot: "boot"})
	if err != nil {
		t.Fatal(err)
	}
	record := append(make([]byte, headSize), data...)
	seal(record)
	for _, end := range [][]byte{record, data} {
		if _, err := replayed(append(slices.Clone(file), end...)); err != nil && !errors.Is(err, errdefs.ErrDataLoss) {
			t.Errorf("error %v is of another kind", err)
		}
	}
}
