package agent

import (
	"context"
	"sync"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// offline is which volumes are mounted and of no use any more: their filesystem was shut down, or has lost its device or its
// server. Each is looked at once for all its users, with every offlineEvery-th heartbeat, by a tree of its own that no sandbox
// sees. One that does not answer is not asked again before it has, and is not taken for offline: it may only be slow. The
// records of the inventory say so; nothing is detached, as it may come back. Plain directories are the node's own disk, and
// not looked at.
type offline struct {
	agent *Agent

	mu sync.Mutex // guards the fields below
	// found is why a volume is offline, by key.
	found map[string]string
	// asked are the looks under way, by key.
	asked map[string]*inquiry
}

// inquiry is one look at a volume; it is told apart from another by its address.
type inquiry struct{ cancel context.CancelFunc }

// offlineEvery is with which heartbeat it is looked: a volume of kubelet's or of a file server costs a process.
const offlineEvery = 3

func newOffline(a *Agent) *offline {
	return &offline{agent: a, found: map[string]string{}, asked: map[string]*inquiry{}}
}

// look asks all mounted volumes, and waits for none.
func (o *offline) look() {
	mounted := map[string]journal.Volume{}
	for _, v := range o.agent.journal.AllVolumes() {
		if v.Phase == journal.Mounted && (v.Request.Type != v1alpha1.VolumeTypeLocal || v.Limit == v1alpha1.LimitImage) {
			mounted[v.Request.Key] = v
		}
	}
	types := map[string]string{}
	if len(mounted) > 0 {
		types = hostTypes()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for key := range o.found {
		if _, ok := mounted[key]; !ok {
			delete(o.found, key)
		}
	}
	for key, i := range o.asked {
		if _, ok := mounted[key]; !ok {
			i.cancel()
		}
	}
	for key, v := range mounted {
		if o.asked[key] != nil {
			continue
		}
		ctx, cancel := context.WithCancel(o.agent.stopping)
		i := &inquiry{cancel}
		o.asked[key] = i
		go func() {
			defer cancel()
			err := o.agent.prepared.online(ctx, v.Request, hangs(v, types))
			o.answered(i, v, err)
		}()
	}
}

// anew forgets what was found of a volume that is prepared anew, or was released: what a look under way finds is of another mount.
func (o *offline) anew(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.found, key)
	if i := o.asked[key]; i != nil {
		i.cancel()
		delete(o.asked, key)
	}
}

// answered notes what a volume answered, and has the inventory tell of a change.
func (o *offline) answered(i *inquiry, v journal.Volume, err error) {
	key := v.Request.Key
	o.mu.Lock()
	if o.asked[key] != i {
		o.mu.Unlock()
		return
	}
	delete(o.asked, key)
	_, was := o.found[key]
	is := fault.ReasonOf(err) == fault.VolumeOffline
	switch {
	case is:
		o.found[key] = err.Error()
	case err == nil:
		delete(o.found, key)
	default:
		is = was // nothing is known
	}
	o.mu.Unlock()
	if is == was {
		return
	}
	if is {
		o.agent.log.Warn("a mounted volume is offline", append(about(v), "reason", fault.VolumeOffline, "error", err)...)
	} else {
		o.agent.log.Info("a volume that was offline is back", about(v)...)
	}
	for _, user := range o.agent.journal.Users(key) {
		o.agent.inventory.changed(user.SandboxUID)
	}
}

// mark makes the record of a mount say that its volume is offline.
func (o *offline) mark(v journal.Volume, m *agentv1.MountRecord) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if why, ok := o.found[v.Request.Key]; ok && v.Phase == journal.Mounted {
		m.Reason, m.Message = string(fault.VolumeOffline), why
	}
}

// hangs says whether a volume's filesystem may wait for a server, by the filesystem types of the node's devices.
func hangs(v journal.Volume, types map[string]string) bool {
	fsType, onHost := types[v.Mount.Device]
	return mount.MayHang(fsType) || !onHost && v.Limit != v1alpha1.LimitImage
}
