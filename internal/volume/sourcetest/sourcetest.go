// Package sourcetest is the conformance suite of volume.Source: what every source must do, whatever it is made of.
package sourcetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// Harness is a place with one volume in it.
type Harness struct {
	// New makes a Source, as a process that starts would. It tells faults of every call to the machine.
	New func(faults *Faults) volume.Source
	// Request asks for the volume, read-write, without a subPath and without its key. The volume is not prepared.
	Request volume.Request
	// Populate fills the prepared volume: sub/deep/ and sub-sibling/ are directories, file is a file, link is a
	// symlink to /, up to .., inside to sub.
	Populate func(t testing.TB, p volume.Prepared)
	// Refused are requests that Resolve must refuse, with their reason.
	Refused map[string]Refusal
	// State tells everything on the machine that the Source may have left: files, devices, mounts. Data that a
	// Release must keep is a part of it. It tells the same of two harnesses in the same state.
	State func(t testing.TB) []string
}

// Refusal is a request that must be refused.
type Refusal struct {
	Request volume.Request
	Reason  fault.Reason
}

// Run runs the suite. setup makes a fresh Harness for each test and cleans up after it.
func Run(t *testing.T, setup func(t testing.TB) Harness) {
	tests := []struct {
		name string
		run  func(t *testing.T, h Harness)
	}{
		{"resolve is stable and has no side effects", testResolve},
		{"refusals are permanent and have no side effects", testRefusals},
		{"prepare is idempotent", testPrepareTwice},
		{"release of nothing is success", testReleaseTwice},
		{"release keeps the data", testReleaseKeepsData},
		{"trees are independent", testTwoTrees},
		{"trees at the same time", testConcurrentTrees},
		{"subPath", testSubPath},
		{"prompt trees are as others", testPrompt},
		{"a new process takes over", testRestart},
		{"sweep touches nothing in use", testSweep},
		{"a cancelled context leaves nothing", testCancelled},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { tt.run(t, setup(t)) })
	}
	t.Run("a fault in each call leaves nothing", func(t *testing.T) { testFaults(t, setup) })
}

// Populate fills a volume's root with what the tests look for: directories, a file, and links that lead out and stay inside.
func Populate(t testing.TB, dir string) {
	t.Helper()
	err := errors.Join(
		os.MkdirAll(dir+"/sub/deep", 0o755),
		os.MkdirAll(dir+"/sub-sibling", 0o755),
		os.WriteFile(dir+"/file", []byte("x"), 0o644),
	)
	for link, to := range map[string]string{"link": "/", "up": "..", "inside": "sub"} {
		if e := os.Symlink(to, dir+"/"+link); e != nil && !errors.Is(e, fs.ErrExist) {
			err = errors.Join(err, e)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

func background(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// resolved is the harness' request with its key.
func resolved(t testing.TB, src volume.Source, h Harness) volume.Request {
	t.Helper()
	r := h.Request
	if _, err := src.Resolve(background(t), &r); err != nil {
		t.Fatalf("resolve: %v", err)
	}
	return r
}

func prepare(t testing.TB, src volume.Source, h Harness) volume.Prepared {
	t.Helper()
	p, err := src.Prepare(background(t), resolved(t, src, h))
	if err != nil {
		t.Fatalf("prepare: %v", err)
	}
	return p
}

func tree(t testing.TB, src volume.Source, p volume.Prepared, subPath string) *mount.Tree {
	t.Helper()
	tr, err := src.Tree(background(t), p, subPath)
	if err != nil {
		t.Fatalf("tree of %q: %v", subPath, err)
	}
	t.Cleanup(func() { tr.Close() })
	return tr
}

// has checks that a tree has a directory.
func has(t testing.TB, tr *mount.Tree, dir string) {
	t.Helper()
	sub, err := tr.Sub(dir)
	if err != nil {
		t.Errorf("the tree has no %s: %v", dir, err)
		return
	}
	sub.Close()
}

func release(t testing.TB, src volume.Source, p volume.Prepared) {
	t.Helper()
	if err := releaseOrFail(t, src, p); err != nil {
		t.Errorf("release: %v", err)
	}
}

// releaseOrFail repeats a release that is BUSY, as the agent does: whatever makes a mount namespace on this machine has
// the volume for a moment.
func releaseOrFail(t testing.TB, src volume.Source, p volume.Prepared) error {
	t.Helper()
	ctx := background(t)
	for {
		err := src.Release(ctx, p)
		if fault.ReasonOf(err) != fault.Busy || ctx.Err() != nil {
			return err
		}
	}
}

func sameState(t testing.TB, h Harness, want []string, when string) {
	t.Helper()
	if got := h.State(t); !slices.Equal(got, want) {
		t.Errorf("%s, the machine has\n%q\nwant\n%q", when, got, want)
	}
}

func testResolve(t *testing.T, h Harness) {
	before := h.State(t)
	r := h.Request
	src := h.New(nil)
	key, err := src.Resolve(background(t), &r)
	if err != nil || key == "" || r.Key != key {
		t.Fatalf("key %q, in the request %q, %v", key, r.Key, err)
	}
	readOnly := h.Request
	readOnly.ReadOnly, readOnly.SubPath = true, "sub"
	for name, again := range map[string]volume.Request{"again": r, "another mode and subPath": readOnly} {
		if other, err := h.New(nil).Resolve(background(t), &again); err != nil || other != key {
			t.Errorf("%s: key %q, %v; want %q", name, other, err, key)
		}
	}
	sameState(t, h, before, "after resolve")
}

func testRefusals(t *testing.T, h Harness) {
	before := h.State(t)
	if len(h.Refused) == 0 {
		t.Error("the harness has no refusals")
	}
	for name, refusal := range h.Refused {
		src, r := h.New(nil), refusal.Request
		_, err := src.Resolve(background(t), &r)
		check := func(call string, err error) {
			if err == nil || fault.ReasonOf(err) != refusal.Reason || !fault.IsPermanent(err) {
				t.Errorf("%s: %s: error %v, reason %s; want the permanent %s", name, call, err, fault.ReasonOf(err), refusal.Reason)
			}
		}
		check("resolve", err)
		// Prepare trusts nobody to have asked Resolve.
		_, err = src.Prepare(background(t), refusal.Request)
		check("prepare", err)
	}
	sameState(t, h, before, "after refusals")
}

func testPrepareTwice(t *testing.T, h Harness) {
	src := h.New(nil)
	first := prepare(t, src, h)
	if r := resolved(t, src, h); first.Key != r.Key || first.Type != r.Type || first.Path == "" || first.Limit == "" {
		t.Errorf("prepared %+v for %+v", first, r)
	}
	state := h.State(t)
	for name, src := range map[string]volume.Source{"the same": src, "a new": h.New(nil)} {
		if again := prepare(t, src, h); !reflect.DeepEqual(again, first) {
			t.Errorf("%s process prepared\n%+v\nwant\n%+v", name, again, first)
		}
	}
	sameState(t, h, state, "prepared again")
	release(t, src, first)
}

func testReleaseTwice(t *testing.T, h Harness) {
	src := h.New(nil)
	p := prepare(t, src, h)
	release(t, src, p)
	state := h.State(t)
	release(t, src, p)
	release(t, h.New(nil), p)
	sameState(t, h, state, "released again")
}

func testReleaseKeepsData(t *testing.T, h Harness) {
	src := h.New(nil)
	p := prepare(t, src, h)
	h.Populate(t, p)
	release(t, src, p)
	again := prepare(t, src, h)
	tr := tree(t, src, again, "")
	has(t, tr, "sub/deep")
	tr.Close()
	release(t, src, again)
}

func testTwoTrees(t *testing.T, h Harness) {
	src := h.New(nil)
	p := prepare(t, src, h)
	h.Populate(t, p)
	one, two := tree(t, src, p, ""), tree(t, src, p, "")
	a, errA := one.Identity()
	b, errB := two.Identity()
	if errA != nil || errB != nil || a == b {
		t.Errorf("identities %+v (%v) and %+v (%v)", a, errA, b, errB)
	}
	if a.Device != b.Device {
		t.Errorf("two superblocks: devices %s and %s", a.Device, b.Device)
	}
	one.Close()
	has(t, two, "sub/deep")
	two.Close()
	release(t, src, p)
}

func testConcurrentTrees(t *testing.T, h Harness) {
	src := h.New(nil)
	p := prepare(t, src, h)
	h.Populate(t, p)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			tr, err := src.Tree(background(t), p, "sub")
			if err != nil {
				t.Error(err)
				return
			}
			defer tr.Close()
			has(t, tr, "deep")
		})
	}
	wg.Wait()
	release(t, src, p)
}

func testSubPath(t *testing.T, h Harness) {
	src := h.New(nil)
	p := prepare(t, src, h)
	h.Populate(t, p)
	sub := tree(t, src, p, "sub")
	has(t, sub, "deep")
	if _, err := sub.Sub("sub-sibling"); err == nil {
		t.Error("the tree of sub shows what is beside it")
	}
	deep := tree(t, src, p, "sub/deep")
	state := h.State(t)
	for _, escape := range []string{
		"..", "../..", "sub/..", "sub/../sub-sibling", "/", "/sub", "/etc", // out, or around
		"link", "link/etc", "up", "up/..", "inside", "inside/deep", // symlinks, also harmless ones
		"missing", "su", "sub-", "sub/deep/missing", // nothing there; prefixes of what is
		"file", "file/x", // no directory
	} {
		tr, err := src.Tree(background(t), p, escape)
		if err == nil {
			tr.Close()
			t.Errorf("subPath %q was accepted", escape)
		} else if !fault.IsPermanent(err) {
			t.Errorf("subPath %q: %v is not permanent", escape, err)
		}
	}
	sameState(t, h, state, "after refused subPaths")
	sub.Close()
	deep.Close()
	release(t, src, p)
}

// testPrompt is for sources that are a volume.Prompt.
func testPrompt(t *testing.T, h Harness) {
	src := h.New(nil)
	prompt, ok := src.(volume.Prompt)
	if !ok {
		return
	}
	p := prepare(t, src, h)
	h.Populate(t, p)
	before := h.State(t)
	for name, refusal := range h.Refused {
		if tr, _, err := prompt.PromptTree(refusal.Request); tr != nil || fault.ReasonOf(err) != refusal.Reason || !fault.IsPermanent(err) {
			t.Errorf("%s: tree %v, error %v; want the permanent %s", name, tr, err, refusal.Reason)
		}
	}
	for _, subPath := range []string{"", "sub", "sub/deep", "missing", "file", "link/etc", "up", "inside", "../v", "/sub"} {
		r := resolved(t, src, h)
		r.SubPath = subPath
		tr, got, err := prompt.PromptTree(r)
		if tr == nil && err == nil {
			continue // it takes the long way
		}
		want, wantErr := src.Tree(background(t), p, subPath)
		if (err == nil) != (wantErr == nil) || fault.ReasonOf(err) != fault.ReasonOf(wantErr) || fault.IsPermanent(err) != fault.IsPermanent(wantErr) {
			t.Errorf("subPath %q: error %v, and of Tree %v", subPath, err, wantErr)
		}
		if err != nil {
			continue
		}
		a, errA := tr.Identity()
		b, errB := want.Identity()
		if errA != nil || errB != nil || a == b || a.Device != b.Device {
			t.Errorf("subPath %q: identities %+v (%v) and %+v (%v)", subPath, a, errA, b, errB)
		}
		if again, err := src.Prepare(background(t), r); err != nil || !reflect.DeepEqual(got, again) {
			t.Errorf("subPath %q: prepared %+v; Prepare says %+v, %v", subPath, got, again, err)
		}
		if subPath == "" {
			has(t, tr, "sub/deep")
		}
		tr.Close()
		want.Close()
	}
	sameState(t, h, before, "after prompt trees")
	release(t, src, p)
}

func testRestart(t *testing.T, h Harness) {
	before := h.New(nil)
	p := prepare(t, before, h)
	h.Populate(t, p)
	old := tree(t, before, p, "")

	record, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	var read volume.Prepared
	if err := json.Unmarshal(record, &read); err != nil {
		t.Fatal(err)
	}
	after := h.New(nil)
	if err := after.Sweep(background(t), []volume.Prepared{read}); err != nil {
		t.Fatal(err)
	}
	fresh := tree(t, after, read, "sub")
	has(t, fresh, "deep")
	a, _ := old.Identity()
	b, _ := fresh.Identity()
	if a.Device != b.Device {
		t.Errorf("the new process has another superblock: devices %s and %s", a.Device, b.Device)
	}
	old.Close()
	fresh.Close()
	release(t, after, read)
}

func testSweep(t *testing.T, h Harness) {
	src := h.New(nil)
	p := prepare(t, src, h)
	h.Populate(t, p)
	tr := tree(t, src, p, "")
	for name, inUse := range map[string][]volume.Prepared{"in use": {p}, "unknown": nil} {
		if err := h.New(nil).Sweep(background(t), inUse); err != nil {
			t.Errorf("sweep with the volume %s: %v", name, err)
		}
		has(t, tr, "sub/deep")
	}
	tr.Close()
	release(t, src, p)
	again := tree(t, src, prepare(t, src, h), "sub")
	again.Close()
	release(t, src, p)
}

func testCancelled(t *testing.T, h Harness) {
	before := h.State(t)
	src := h.New(nil)
	r := resolved(t, src, h)
	ctx, cancel := context.WithCancel(background(t))
	cancel()
	if _, err := src.Prepare(ctx, r); err != nil {
		sameState(t, h, before, "after a cancelled prepare")
	}
	p := prepare(t, src, h)
	held := tree(t, src, p, "")
	state := h.State(t)
	if tr, err := src.Tree(ctx, p, ""); err == nil {
		tr.Close()
	}
	sameState(t, h, state, "after a cancelled tree")
	held.Close()
	release(t, src, p)
}

// testFaults lets every call fail once, in a place of its own, and then goes through the life of a volume with what is
// left there.
func testFaults(t *testing.T, setup func(t testing.TB) Harness) {
	h := setup(t)
	healthy := &Faults{}
	if err := life(t, h, h.New(healthy), nil); err != nil {
		t.Fatal(err)
	}
	end := h.State(t)
	calls := healthy.Calls()
	if len(calls) == 0 {
		t.Fatal("the harness reports no calls")
	}
	for i, call := range calls {
		t.Run(fmt.Sprintf("%02d %s", i+1, call), func(t *testing.T) {
			h := setup(t)
			err := life(t, h, h.New(&Faults{failAt: i + 1}), end)
			if err == nil {
				t.Error("the fault was lost: no operation failed")
			} else if !errors.Is(err, ErrInjected) {
				t.Errorf("error %v does not wrap the fault", err)
			}
			if err := life(t, h, h.New(nil), end); err != nil {
				t.Errorf("the retry failed: %v", err)
			}
		})
	}
}

// life takes a volume through all calls. Each that fails must leave the machine as it was. It ends with the first.
// end is the state in which a volume that was filled and released leaves it; nil for any.
func life(t testing.TB, h Harness, src volume.Source, end []string) error {
	t.Helper()
	r := h.Request
	if err := src.Sweep(background(t), nil); err != nil {
		return err
	}
	if _, err := src.Resolve(background(t), &r); err != nil {
		return err
	}
	before := h.State(t)
	p, err := src.Prepare(background(t), r)
	if err != nil {
		sameState(t, h, before, "after a failed prepare")
		return err
	}
	h.Populate(t, p)
	// Whatever fails, the next process can release, and only the volume is left.
	defer func() {
		release(t, h.New(nil), p)
		if end != nil {
			sameState(t, h, end, "at the end")
		}
	}()
	for _, subPath := range []string{"", "sub"} {
		tr, err := src.Tree(background(t), p, subPath)
		if err != nil {
			return err
		}
		tr.Close()
		if prompt, ok := src.(volume.Prompt); ok {
			r.SubPath = subPath
			tr, _, err := prompt.PromptTree(r)
			if err != nil {
				return err
			}
			if tr != nil {
				tr.Close()
			}
		}
	}
	return releaseOrFail(t, src, p)
}
