package capacity_test

import (
	"errors"
	"os"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity/capacitytest"
)

func open(t *testing.T) *os.File {
	t.Helper()
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dir.Close() })
	return dir
}

func wantReason(t *testing.T, err error, reason string) {
	t.Helper()
	var e *capacity.Error
	if !errors.As(err, &e) || e.Reason() != reason {
		t.Fatalf("error %v, want reason %s", err, reason)
	}
}

func TestKernelWithoutProjectQuotaSaysSo(t *testing.T) {
	var quota capacity.ProjectQuota
	err := quota.Supported(open(t))
	if err == nil {
		t.Log("this filesystem has project quota")
		return
	}
	wantReason(t, err, capacity.ReasonQuotaUnsupported)
	if !errdefs.IsFailedPrecondition(err) {
		t.Errorf("kind of %v", err)
	}
}

func TestProjectIDBelongsToItsVolume(t *testing.T) {
	var l capacitytest.Limiter
	dir, limit := open(t), capacity.Limit{Bytes: 10 << 20, Inodes: 1000}
	id, err := capacity.Bind(&l, dir, "volume-a", limit)
	if err != nil || l.Limits()[id] != limit {
		t.Fatalf("id %d, %v, limits %v", id, err, l.Limits())
	}
	again, err := capacity.Bind(&l, dir, "volume-a", limit)
	if err != nil || again != id {
		t.Errorf("bound again: id %d, %v; want %d", again, err, id)
	}
	_, err = capacity.Bind(&l, dir, "volume-a", capacity.Limit{Bytes: 20 << 20})
	wantReason(t, err, capacity.ReasonSizeMismatch)
	var e *capacity.Error
	errors.As(err, &e)
	if e.Facts()["requested"] != "20971520" || e.Facts()["actual"] != "10485760" {
		t.Errorf("facts %v", e.Facts())
	}
	_, err = capacity.Bind(&l, dir, "volume-b", limit)
	wantReason(t, err, capacity.ReasonProjectConflict)
	wantReason(t, capacity.Unbind(&l, dir, "volume-b"), capacity.ReasonProjectConflict)
	for range 2 {
		if err := capacity.Unbind(&l, dir, "volume-a"); err != nil || len(l.Limits()) != 0 {
			t.Errorf("unbound: %v, limits %v", err, l.Limits())
		}
	}
}

func TestProjectIDOfAnotherIsPassedOver(t *testing.T) {
	var l capacitytest.Limiter
	first, err := capacity.Bind(&l, open(t), "volume", capacity.Limit{Bytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	l.Occupy(first+1, capacity.Usage{Bytes: 1})
	second, err := capacity.Bind(&l, open(t), "volume", capacity.Limit{Bytes: 1 << 20})
	if err != nil || second != first+2 {
		t.Errorf("id %d, %v; want %d, past two that are taken", second, err, first+2)
	}
}
