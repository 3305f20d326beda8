package journal

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"

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
	return []any{j.AllVolumes(), j.AllPrepared(), j.Sandboxes(), j.Epoch("lease"), j.Epoch("")}
}

func TestWhatIsWrittenIsThereAfterReopening(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir, "boot")
	code := int32(3)
	write(t, j, Change{
		PutVolumes:   []Volume{volumeRecord("u1", "a", "/a", "k1"), volumeRecord("u1", "b", "/b", "k2"), volumeRecord("u2", "c", "/a", "k1")},
		PutPrepared:  []Prepared{{Key: "k1", Phase: Ready, Mounts: []mount.Match{{Device: "8:1", Root: "/s"}}}},
		PutSandboxes: []Sandbox{{UID: "u1", Desired: DesiredRunning, Generations: map[string]int64{"": 2, "/a": 5}, ExitCode: &code}},
		PutEpochs:    map[string]int64{"lease": 9, "": 4},
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
	write(t, j, Change{
		PutSandboxes: []Sandbox{{UID: "u", Generations: map[string]int64{"/a": 1}}},
		PutPrepared:  []Prepared{{Key: "k", Mounts: []mount.Match{{Device: "8:1"}}}},
	})
	s, _ := j.Sandbox("u")
	s.Generations["/a"] = 99
	p, _ := j.Prepared("k")
	p.Mounts[0].Device = "9:9"
	s, _ = j.Sandbox("u")
	p, _ = j.Prepared("k")
	if s.Generations["/a"] != 1 || p.Mounts[0].Device != "8:1" {
		t.Error("a reader changed the journal:", s, p)
	}
}

func TestAChangeHoldsAsAWholeOrNotAtAll(t *testing.T) {
	j := openIn(t, t.TempDir(), "boot")
	before := contents(j)
	// bbolt refuses a key that is too long, after the first write of the change was made.
	err := j.Write(Change{PutVolumes: []Volume{volumeRecord("u", "a", "/a", "k"), volumeRecord(strings.Repeat("u", 1<<16), "b", "/b", "k")}})
	if err == nil {
		t.Fatal("no error")
	}
	if after := contents(j); !reflect.DeepEqual(before, after) {
		t.Errorf("half of it is there: %+v", after)
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
	if _, err := os.Stat(filepath.Join(dir, "journal.db.previous-boot")); err != nil {
		t.Error(err)
	}
}

func TestOneOwnerAtATime(t *testing.T) {
	dir := t.TempDir()
	openIn(t, dir, "boot")
	if _, err := open(filepath.Join(dir, "journal.db"), "boot"); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "another process") {
		t.Errorf("error %v, want Unavailable that names the cause", err)
	}
}

func TestNewerFormatIsRefused(t *testing.T) {
	dir := t.TempDir()
	j := openIn(t, dir, "boot")
	if err := j.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucketMeta).Put(keyFormat, []byte("2")) }); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, "boot"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("error %v", err)
	}
}

func TestDamageIsAnErrorThatNamesTheRecord(t *testing.T) {
	for name, bucket := range map[string][]byte{"volumes": bucketVolumes, "prepared": bucketPrepared, "sandboxes": bucketSandboxes, "epochs": bucketEpochs} {
		dir := t.TempDir()
		j := openIn(t, dir, "boot")
		if err := j.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucket).Put([]byte("broken"), []byte("{")) }); err != nil {
			t.Fatal(err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		_, err := Open(dir, "boot")
		if !errors.Is(err, errdefs.ErrDataLoss) || !strings.Contains(err.Error(), name+"/broken") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "journal.db"), []byte("this is no database, but long enough to be read as one"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, "boot"); !errors.Is(err, errdefs.ErrDataLoss) {
		t.Errorf("a file that is no journal: %v", err)
	}
}

func TestUnknownFieldsOfANewerBuildAreIgnored(t *testing.T) {
	v, err := decode[Volume]("volumes", "k", []byte(`{"sandboxUID":"u","id":"a","target":"/a","phase":"Mounted","fromTheFuture":{"x":1}}`))
	if err != nil || v.Target != "/a" {
		t.Errorf("%v, %v", v, err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{}`, `{"sandboxUID":"u","id":"a"}`, `{"phase":1}`, `null`, `[]`, ``, `{} {}`, `{"mount":{"UniqueID":-1}}`,
		`{"key":"k","prepared":{"details":{"a":[1,2]}}}`, `{"generations":{"/a":9223372036854775807}}`, "\x00\xff"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		fuzzOne[Volume](t, data)
		fuzzOne[Prepared](t, data)
		fuzzOne[Sandbox](t, data)
	})
}

// fuzzOne: what decodes can be written and decodes to the same; what does not is ErrDataLoss.
func fuzzOne[T any](t *testing.T, data []byte) {
	v, err := decode[T]("bucket", "key", data)
	if err != nil {
		if !errors.Is(err, errdefs.ErrDataLoss) {
			t.Errorf("error %v is of another kind", err)
		}
		return
	}
	again, err := encode(v)
	if err != nil {
		t.Fatalf("%+v cannot be written: %v", v, err)
	}
	w, err := decode[T]("bucket", "key", again)
	if err != nil {
		t.Fatalf("%s is written as %s, which does not decode: %v", data, again, err)
	}
	// Compared as written: an empty map and none are the same.
	if third, err := encode(w); err != nil || !bytes.Equal(again, third) {
		t.Errorf("%s is written as %s, then as %s, %v", data, again, third, err)
	}
}
