package journal

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// replayed is a journal with the contents of a file, that of boot "boot".
func replayed(file []byte) (*Journal, error) {
	j := &Journal{path: "test", boot: "boot", volumes: map[string]map[string]Volume{}, users: map[string]map[string]Volume{},
		prepared: map[string]Prepared{}, sandboxes: map[string]Sandbox{}, generations: map[string]map[string]int64{}, epochs: map[string]int64{}}
	_, err := j.replay(file)
	return j, err
}

// someChanges are changes of every kind.
func someChanges() []Change {
	lazy := volumeRecord("u1", "a", "/a", "k1")
	lazy.Phase = Lazy
	return []Change{
		{PutSandboxes: []Sandbox{{UID: "u1", Desired: DesiredRunning}}, PutEpochs: map[string]int64{"lease": 3, "": 1}},
		{PutPrepared: []Prepared{{Key: "k1", Phase: Ready}}},
		{PutVolumes: []Volume{volumeRecord("u1", "a", "/a", "k1")}, PutGenerations: []Generation{{"u1", "/a", 2}}},
		{PutVolumes: []Volume{lazy, volumeRecord("u1", "b", "/ä\n<b>", "k1")}},
		{DeleteVolumes: []Volume{lazy}, PutPrepared: []Prepared{{Key: "k2", Phase: Preparing}}},
		{DeletePrepared: []string{"k2"}, DeleteSandboxes: []string{"u1"}},
	}
}

// written is a file with these changes, where each record ends, and what a reader sees after each. The first is the
// head.
func written(t *testing.T, changes []Change) (file []byte, ends []int, states []any) {
	t.Helper()
	dir := t.TempDir()
	j := openIn(t, dir, "boot")
	note := func() {
		ends, states = append(ends, int(j.log.size)), append(states, contents(j))
	}
	note()
	for _, c := range changes {
		write(t, j, c)
		note()
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(filepath.Join(dir, logName))
	if err != nil {
		t.Fatal(err)
	}
	if len(file) != ends[len(ends)-1] {
		t.Fatalf("the file has %d bytes, records end at %v", len(file), ends)
	}
	return file, ends, states
}

func TestAWriteThatWasCutOffAnywhereIsDropped(t *testing.T) {
	file, ends, states := written(t, someChanges())
	dir := t.TempDir()
	for size := range len(file) + 1 {
		if err := os.WriteFile(filepath.Join(dir, logName), file[:size], 0o600); err != nil {
			t.Fatal(err)
		}
		whole, _ := slices.BinarySearch(ends, size+1) // how many records are whole
		j, err := Open(dir, "boot")
		if whole == 0 {
			// No file without its head ever has that name.
			if !errors.Is(err, errdefs.ErrDataLoss) {
				t.Fatalf("%d bytes: error %v", size, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if got := contents(j); !reflect.DeepEqual(got, states[whole-1]) {
			t.Fatalf("%d bytes, %d records: %+v\nwant %+v", size, whole, got, states[whole-1])
		}
		// What comes after is not mixed with what was cut off.
		write(t, j, Change{PutEpochs: map[string]int64{"after": int64(size)}})
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		if j = openIn(t, dir, "boot"); j.Epoch("after") != int64(size) || !reflect.DeepEqual(contents(j), states[whole-1]) {
			t.Fatalf("%d bytes: opened again it has %+v", size, contents(j))
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestEveryBitFlipIsFound(t *testing.T) {
	file, ends, _ := written(t, someChanges())
	for i := range file {
		record, _ := slices.BinarySearch(ends, i+1)
		for bit := range 8 {
			flipped := slices.Clone(file)
			flipped[i] ^= 1 << bit
			if _, err := replayed(flipped); !errors.Is(err, errdefs.ErrDataLoss) || !strings.Contains(err.Error(), "record "+string(rune('0'+record))+")") {
				t.Fatalf("byte %d, bit %d, in record %d: error %v", i, bit, record, err)
			}
		}
	}
}

// In a record that was cut off nothing counts, so that a bit there does no harm, whether it is found or not.
func TestABitFlipInWhatWasCutOffIsHarmless(t *testing.T) {
	file, ends, states := written(t, someChanges())
	last := ends[len(ends)-2]
	for i := last; i < len(file)-1; i++ {
		for bit := range 8 {
			flipped := slices.Clone(file[:len(file)-1])
			flipped[i] ^= 1 << bit
			j, err := replayed(flipped)
			if err != nil && !errors.Is(err, errdefs.ErrDataLoss) || err == nil && !reflect.DeepEqual(contents(j), states[len(states)-2]) {
				t.Fatalf("byte %d, bit %d: %+v, %v", i, bit, contents(j), err)
			}
		}
	}
}

func TestDamageIsAnErrorThatNamesThePlace(t *testing.T) {
	file, ends, _ := written(t, someChanges())
	raw := func(body string) []byte {
		record := append(make([]byte, headSize), body...)
		seal(record)
		return record
	}
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"no journal":      {[]byte("this is no journal, but long enough to be read as one"), "at byte 0 (record 0)"},
		"empty":           {nil, "at byte 0 (record 0)"},
		"no head":         {file[ends[0]:], "at byte 0 (record 0)"},
		"a hole":          {slices.Concat(file[:ends[0]], file[ends[0]+1:]), "(record 1)"},
		"zeros":           {append(slices.Clone(file), make([]byte, headSize)...), "(record 7)"},
		"not JSON":        {append(slices.Clone(file), raw("{")...), "(record 7)"},
		"two values":      {append(slices.Clone(file), raw("{} {}")...), "(record 7)"},
		"another type":    {append(slices.Clone(file), raw(`{"volumes":1}`)...), "(record 7)"},
		"no length":       {append(slices.Clone(file), bytes.Repeat([]byte("z"), headSize)...), "(record 7)"},
		"head of no JSON": {raw("boot"), "at byte 0 (record 0)"},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, logName), c.file, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Open(dir, "boot")
		if !errors.Is(err, errdefs.ErrDataLoss) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %s", name, err, c.want)
		}
		if now, readErr := os.ReadFile(filepath.Join(dir, logName)); readErr != nil || !bytes.Equal(now, c.file) {
			t.Errorf("%s: the file was changed", name)
		}
	}
}
