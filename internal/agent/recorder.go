package agent

import (
	"context"
	"encoding/json"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
)

const (
	// recordTimeout bounds one update of a container object.
	recordTimeout = 10 * time.Second
	// recordDelay is how long the recorder waits for further changes: an update costs containerd a synced commit, and
	// would delay whoever makes the next change.
	recordDelay = 100 * time.Millisecond
)

// recorder writes the volumes of a sandbox on its container object in containerd, for whoever looks there. It does so
// some time after the caller has its answer; several changes in a row are one write. Nothing is read back from it.
type recorder struct {
	a      *Agent
	signal chan struct{}

	mu    sync.Mutex // guards dirty
	dirty map[string]struct{}
}

// recordedVolume is one volume as it stands in the container's extension.
type recordedVolume struct {
	Target      string `json:"target"`
	Source      string `json:"source"`
	Type        string `json:"type"`
	Mode        string `json:"mode"`
	Kind        string `json:"kind"`
	EntryHash   string `json:"entryHash"`
	OperationID string `json:"operationId"`
}

func newRecorder(a *Agent) *recorder {
	return &recorder{a: a, signal: make(chan struct{}, 1), dirty: map[string]struct{}{}}
}

func (r *recorder) changed(uid string) {
	r.mu.Lock()
	r.dirty[uid] = struct{}{}
	r.mu.Unlock()
	select {
	case r.signal <- struct{}{}:
	default:
	}
}

func (r *recorder) run() {
	for {
		select {
		case <-r.signal:
		case <-r.a.stopping.Done():
			return
		}
		timer := r.a.config.Clock.NewTimer(recordDelay)
		select {
		case <-timer.C():
		case <-r.a.stopping.Done():
			timer.Stop()
			return
		}
		r.mu.Lock()
		dirty := r.dirty
		r.dirty = map[string]struct{}{}
		r.mu.Unlock()
		for uid := range dirty {
			if err := r.record(uid); err != nil && !errdefs.IsNotFound(err) && r.a.stopping.Err() == nil {
				r.a.log.Warn("the volumes could not be recorded on the container; the next change records them", "sandbox", uid, "error", err)
			}
		}
	}
}

func (r *recorder) record(uid string) error {
	sb := r.a.sandbox(uid)
	if _, ok := sb.seen(); !ok || sb.isPod() { // a Pod's container is not ours to write on
		return nil
	}
	volumes := []recordedVolume{}
	for _, v := range r.a.journal.Volumes(uid) {
		if v.Phase == journal.Mounted {
			volumes = append(volumes, recordedVolume{Target: v.Target, Source: v.Request.Source, Type: string(v.Request.Type),
				Mode: string(modeOf(v.Request)), Kind: string(v.Kind), EntryHash: v.EntryHash, OperationID: v.ID})
		}
	}
	data, err := json.Marshal(volumes)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.a.stopping, recordTimeout)
	defer cancel()
	return r.a.config.Containers.RecordVolumes(ctx, uid, data)
}
