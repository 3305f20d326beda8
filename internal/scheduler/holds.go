package scheduler

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Keeper keeps volumes that live outside of a node from being deleted while sandboxes use them. What is held is a claim
// (pvc, with a Namespace), or a volume that no claim has (pv, without one). The state of a Keeper is what it is told and
// what it finds: it may have been another Scheduler that held a volume.
type Keeper interface {
	// Hold has the volume held, and is called before every attach. It is idempotent, and asks nobody for a volume that is
	// held. ErrNotFound says that the volume is not there, or is being deleted, and cannot be held any more.
	Hold(ctx context.Context, ref VolumeRef) error
	// LetGo ends that, if unused says so once no Hold of the volume can be under way. It is idempotent.
	LetGo(ctx context.Context, ref VolumeRef, unused func() bool) error
	// Anchor keeps what a volume needs on its nodes beside being held, which may be Pods: it is made anew on nodes that have
	// the volume ready for a sandbox, each with one of those that use it there, and stays on those for which may says so; from
	// all others it goes, in time. left says that there is something left, and the volume must not be let go yet. It is called
	// at every change, and asks nobody when all is as it has to be.
	Anchor(ctx context.Context, ref VolumeRef, nodes map[string]types.UID, may func(node string) bool) (left bool, err error)
	// IsHeld says whether the volume is held, from memory.
	IsHeld(ref VolumeRef) bool
	// Held are all volumes that are held, by whomever, from memory.
	Held() []VolumeRef
	// About says, from memory, by what other name the volume may be asked for (a claim's PersistentVolume, and the other
	// way round), and its identity on a node; empty for what is not known.
	About(ref VolumeRef) (other VolumeRef, volumeKey string)
}

// holds knows which volumes sandboxes use. It is made again from the first look of a Scheduler at each sandbox: from
// the rows of its status, and from what its node has. Nothing is let go before all were looked at.
//
// A sandbox uses a volume from before its attach until its row is gone, also while it is paused, or has to be placed
// elsewhere; not any more when the attach has failed for good, or the sandbox is over. It may use it while that cannot
// be told: an answer or the node is awaited. What may be used is not let go.
type holds struct {
	mu sync.Mutex // guards all below, and operation.hold
	// users has, for each volume, its sandboxes, and whether they are known to use it.
	users map[VolumeRef]map[types.UID]bool
	// of is what each sandbox is a user of.
	of map[types.UID]uses
	// keyed counts the sandboxes by the identities in uses.keys.
	keyed map[string]int
	// unseen are the sandboxes that are still to be looked at; nil before all are known.
	unseen map[store.Key]struct{}
	seen   bool
	// failures counts in a row.
	failures map[VolumeRef]int32
}

// uses are the volumes that a sandbox uses (true) or may use (false), and the identities of those that its node has for
// it and that nothing else tells of.
type uses struct {
	volumes map[VolumeRef]bool
	keys    map[string]struct{}
}

func newHolds() *holds {
	return &holds{users: map[VolumeRef]map[types.UID]bool{}, of: map[types.UID]uses{}, keyed: map[string]int{}, failures: map[VolumeRef]int32{}}
}

// begin notes a volume that an attach in flight is about to use.
func (h *holds) begin(uid types.UID, op *operation, ref VolumeRef) {
	h.mu.Lock()
	defer h.mu.Unlock()
	op.hold = ref
	h.add(uid, ref, false)
}

func (h *holds) add(uid types.UID, ref VolumeRef, sure bool) {
	if h.users[ref] == nil {
		h.users[ref] = map[types.UID]bool{}
	}
	h.users[ref][uid] = h.users[ref][uid] || sure
	if h.of[uid].volumes == nil {
		h.of[uid] = uses{volumes: map[VolumeRef]bool{}}
	}
	h.of[uid].volumes[ref] = h.users[ref][uid]
}

// set makes a sandbox a user of what look finds, and of nothing else. It returns the volumes for which that makes a
// difference; anyOf says that it may for any.
func (h *holds) set(uid types.UID, look func() uses) (changed []VolumeRef, anyOf bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	old, now := h.of[uid], look()
	if maps.Equal(old.volumes, now.volumes) && maps.Equal(old.keys, now.keys) {
		return nil, false
	}
	for ref, sure := range old.volumes {
		if is, ok := now.volumes[ref]; !ok || is != sure {
			changed = append(changed, ref)
		}
		if delete(h.users[ref], uid); len(h.users[ref]) == 0 {
			delete(h.users, ref)
		}
	}
	delete(h.of, uid)
	for ref, sure := range now.volumes {
		if _, ok := old.volumes[ref]; !ok {
			changed = append(changed, ref)
		}
		h.add(uid, ref, sure)
	}
	if len(now.volumes)+len(now.keys) > 0 {
		h.of[uid] = now
	}
	for key := range now.keys {
		h.keyed[key]++
	}
	for key := range old.keys {
		if h.keyed[key]--; h.keyed[key] == 0 {
			delete(h.keyed, key)
			anyOf = true
		}
	}
	return changed, anyOf
}

// user says whether a sandbox uses one of the volumes, or may, by their names or by their identity.
func (h *holds) user(volumeKey string, refs ...VolumeRef) (uses, may bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, ref := range refs {
		for _, sure := range h.users[ref] {
			uses, may = uses || sure, true
		}
	}
	return uses, may || h.keyed[volumeKey] > 0
}

// usersOf are the sandboxes that use one of the volumes, and after them those that may.
func (h *holds) usersOf(refs ...VolumeRef) []types.UID {
	h.mu.Lock()
	defer h.mu.Unlock()
	sure := map[types.UID]bool{}
	for _, ref := range refs {
		for uid, is := range h.users[ref] {
			sure[uid] = sure[uid] || is
		}
	}
	return slices.SortedFunc(maps.Keys(sure), func(a, b types.UID) int {
		if sure[a] != sure[b] {
			if sure[a] {
				return -1
			}
			return 1
		}
		return cmp.Compare(a, b)
	})
}

// await has a sandbox looked at before anything is let go.
func (h *holds) await(keys []store.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unseen = map[store.Key]struct{}{}
	for _, key := range keys {
		h.unseen[key] = struct{}{}
	}
}

// saw notes that a sandbox was looked at, and says whether it was the last that was awaited.
func (h *holds) saw(key store.Key) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.unseen == nil || h.seen {
		return false
	}
	delete(h.unseen, key)
	h.seen = len(h.unseen) == 0
	return h.seen
}

func (h *holds) allSeen() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.seen
}

// failed counts a failure, or with ok the end of them.
func (h *holds) failed(ref VolumeRef, ok bool) int32 {
	h.mu.Lock()
	defer h.mu.Unlock()
	if ok {
		delete(h.failures, ref)
		return 0
	}
	h.failures[ref]++
	return h.failures[ref]
}

// awaitUses has every sandbox looked at, now that the nodes have told what they have, before volumes are let go.
func (s *Scheduler) awaitUses() {
	if s.Keeper == nil {
		return
	}
	keys := s.cache.all()
	s.holds.await(keys)
	for _, key := range keys {
		s.queue.add(item{key: key})
	}
	s.sawUses(store.Key{}) // there may be none
}

// sawUses notes that a sandbox was looked at.
func (s *Scheduler) sawUses(key store.Key) {
	if s.Keeper != nil && s.holds.saw(key) {
		s.settleHeld()
	}
}

func (s *Scheduler) settleHeld() {
	if s.Keeper == nil || !s.holds.allSeen() {
		return
	}
	for _, ref := range s.Keeper.Held() {
		s.queue.add(item{volume: ref})
	}
}

// setUses renews what a sandbox uses, and has the volumes held or let go for which that makes a difference.
func (s *Scheduler) setUses(uid types.UID, look func() uses) {
	if s.Keeper == nil {
		return
	}
	changed, anyOf := s.holds.set(uid, look)
	for _, ref := range changed {
		s.settleSoon(ref)
	}
	if anyOf {
		s.settleHeld()
	}
}

func (s *Scheduler) settleSoon(ref VolumeRef) {
	s.queue.add(item{volume: ref})
	if other, _ := s.Keeper.About(ref); other != (VolumeRef{}) {
		s.queue.add(item{volume: other})
	}
}

// settle holds a volume that is used, and lets go one that is not. Both may be wrong with a volume at any time, by who
// led before or by somebody else's hand. Only what is not as it has to be costs a call.
func (s *Scheduler) settle(ctx context.Context, ref VolumeRef) {
	refs := []VolumeRef{ref}
	other, volumeKey := s.Keeper.About(ref)
	if ref.Type == v1alpha1.VolumeTypePVC && other != (VolumeRef{}) {
		refs = append(refs, other)
	}
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	uses, may := s.holds.user(volumeKey, refs...)
	held := s.Keeper.IsHeld(ref)
	left, err := s.anchor(ctx, ref, volumeKey, refs)
	switch {
	case err != nil:
	case uses && !held:
		if ref.Type == v1alpha1.VolumeTypePV && other != (VolumeRef{}) && s.Keeper.IsHeld(other) {
			break // its claim is what counts
		}
		if err = s.Keeper.Hold(ctx, ref); err == nil {
			s.Logger.Info("volume is held: a sandbox uses it", "volumeType", ref.Type, "namespace", ref.Namespace, "source", ref.Source)
		} else if errdefs.IsNotFound(err) {
			s.Logger.Warn("volume is used by a sandbox and cannot be held", "volumeType", ref.Type, "namespace", ref.Namespace, "source", ref.Source, "error", err)
			err = nil // it is on its way out
		}
	case !may && held && !left && s.holds.allSeen():
		if s.hasOrphan(volumeKey) || s.isPrepared(volumeKey) {
			break // a node has it for a sandbox that is gone, or for nobody any more: when that ends it is looked at again
		}
		if err = s.Keeper.LetGo(ctx, ref, func() bool {
			_, may := s.holds.user(volumeKey, refs...)
			return !may && !s.isPrepared(volumeKey)
		}); err == nil {
			s.Logger.Info("volume is let go: no sandbox uses it", "volumeType", ref.Type, "namespace", ref.Namespace, "source", ref.Source)
		}
	}
	n := s.holds.failed(ref, err == nil)
	if err != nil {
		s.Logger.Warn("cannot hold a volume, or let it go", "volumeType", ref.Type, "namespace", ref.Namespace, "source", ref.Source, "error", err)
		s.queue.addAt(item{volume: ref}, s.Clock.Now().Add(retryDelay(n)))
	}
}

// anchor keeps what a volume needs on its nodes. That a node says to have the volume ready has nothing made there: it could
// come by everybody's volumes with that. A sandbox that uses it has to be there by the store, too.
func (s *Scheduler) anchor(ctx context.Context, ref VolumeRef, volumeKey string, refs []VolumeRef) (left bool, err error) {
	if ref.Type != v1alpha1.VolumeTypePVC || !s.holds.allSeen() {
		return false, nil
	}
	var ready []string
	if volumeKey != "" {
		ready = slices.DeleteFunc(s.registry.preparedOn(volumeKey), s.Agents.Dead)
	}
	users, nodes := s.holds.usersOf(refs...), map[string]types.UID{}
	for _, node := range ready {
		if i := slices.IndexFunc(users, func(uid types.UID) bool { return s.cache.isOn(uid, node) }); i >= 0 {
			nodes[node] = users[i]
		}
	}
	return s.Keeper.Anchor(ctx, ref, nodes, func(node string) bool {
		return slices.Contains(ready, node) || slices.ContainsFunc(users, func(uid types.UID) bool { return s.registry.mayBeOn(uid, node) })
	})
}

// hasOrphan says whether a node has a volume for a sandbox that is gone.
func (s *Scheduler) hasOrphan(volumeKey string) bool {
	return volumeKey != "" && slices.ContainsFunc(s.registry.usersOf(volumeKey), func(uid types.UID) bool {
		_, known := s.cache.keyOf(uid)
		return !known
	})
}

// isPrepared says whether a node that may come back has a volume ready, or has not released it yet.
func (s *Scheduler) isPrepared(volumeKey string) bool {
	return volumeKey != "" && slices.ContainsFunc(s.registry.preparedOn(volumeKey), func(node string) bool { return !s.Agents.Dead(node) })
}

// hold has a volume held that is about to be attached.
func (s *Scheduler) hold(ctx context.Context, sb *v1alpha1.Sandbox, op *operation, r *ResolvedVolume) error {
	if s.Keeper == nil {
		return nil
	}
	ref := volumeOf(sb.Namespace, r.PVCName, r.PVName)
	if ref == (VolumeRef{}) {
		return nil
	}
	s.holds.begin(sb.UID, op, ref)
	return s.Keeper.Hold(ctx, ref)
}

// Expect has volumes held that a sandbox is about to ask for, as far as it is known what is to be held of them: so that is
// not one more step of their attach. It is called while the spec is being written; that the volumes are not held is found again by
// their attach. If the spec is not written after all, Forgo ends it.
func (s *Scheduler) Expect(ctx context.Context, sb *v1alpha1.Sandbox, entries []v1alpha1.DynamicVolume) {
	if s.Keeper == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	var refs []VolumeRef
	for i := range entries {
		if ref := s.heldFor(sb.Namespace, &entries[i]); ref != (VolumeRef{}) && s.expects(sb, ref) {
			refs = append(refs, ref)
		}
	}
	var holding sync.WaitGroup
	for _, ref := range refs {
		holding.Go(func() {
			if err := s.Keeper.Hold(ctx, ref); err != nil {
				s.Logger.Info("a volume is not held ahead of its attach", "volumeType", ref.Type, "namespace", ref.Namespace, "source", ref.Source, "error", err)
			}
		})
	}
	holding.Wait()
}

// heldFor is what is held of a volume that is asked for in a namespace; nothing for a PersistentVolume that may get a claim first.
func (s *Scheduler) heldFor(namespace string, e *v1alpha1.DynamicVolume) VolumeRef {
	ref := asked(namespace, e.VolumeType, e.Source)
	if ref.Type != v1alpha1.VolumeTypePV {
		return ref
	}
	if claim, _ := s.Keeper.About(ref); claim.Type == v1alpha1.VolumeTypePVC && claim.Namespace == namespace {
		return claim
	}
	return VolumeRef{}
}

// expects notes that a sandbox may use a volume, for a while; false for one that is not known, whose end would not be heard of.
func (s *Scheduler) expects(sb *v1alpha1.Sandbox, ref VolumeRef) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.actors[store.KeyOf(sb)]
	if a == nil || a.uid != sb.UID {
		return false
	}
	a.mu.Lock()
	if a.expected == nil {
		a.expected = map[VolumeRef]time.Time{}
	}
	a.expected[ref] = s.Clock.Now().Add(settleAfter)
	a.mu.Unlock()
	s.holds.mu.Lock()
	defer s.holds.mu.Unlock()
	s.holds.add(sb.UID, ref, false)
	return true
}

// Forgo ends Expect for a sandbox that does not get its volumes.
func (s *Scheduler) Forgo(sb *v1alpha1.Sandbox) {
	key := store.KeyOf(sb)
	s.mu.Lock()
	a := s.actors[key]
	s.mu.Unlock()
	if a == nil || a.uid != sb.UID {
		return
	}
	a.mu.Lock()
	a.expected = nil
	a.mu.Unlock()
	s.queue.add(item{key: key})
}

// stillExpected are the volumes that are expected at a time, and when to look again; zero for never.
func (a *actor) stillExpected(now time.Time) (refs []VolumeRef, again time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for ref, until := range a.expected {
		if !now.Before(until) {
			delete(a.expected, ref)
			continue
		}
		refs = append(refs, ref)
		if again.IsZero() || until.Before(again) {
			again = until
		}
	}
	return refs, again
}

// volumeOf is what is held of a volume: its claim, where it has one.
func volumeOf(namespace, claim, pv string) VolumeRef {
	switch {
	case claim != "":
		return VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: namespace, Source: claim}
	case pv != "":
		return VolumeRef{Type: v1alpha1.VolumeTypePV, Source: pv}
	}
	return VolumeRef{}
}

// asked is a volume by the name by which a sandbox asks for it; nothing for one that lives on its node.
func asked(namespace string, t v1alpha1.VolumeType, source string) VolumeRef {
	switch t {
	case v1alpha1.VolumeTypePVC:
		return volumeOf(namespace, source, "")
	case v1alpha1.VolumeTypePV:
		return volumeOf(namespace, "", source)
	}
	return VolumeRef{}
}

// renewUses makes holds know what the sandbox uses.
func (p *pass) renewUses() {
	if p.Keeper != nil {
		p.loadNode()
		p.setUses(p.a.uid, p.usesNow)
		p.sawUses(p.a.key)
	}
}

// usesNow is what the sandbox uses (see holds), from its rows, its commands in flight and its node's inventory.
func (p *pass) usesNow() uses {
	u := uses{volumes: map[VolumeRef]bool{}, keys: map[string]struct{}{}}
	note := func(ref VolumeRef, sure bool) {
		if ref != (VolumeRef{}) {
			u.volumes[ref] = u.volumes[ref] || sure
		}
	}
	byHash := map[string]VolumeRef{}
	known := func(hash string, ref VolumeRef) {
		if ref == (VolumeRef{}) {
			ref = p.a.byHash[hash]
		}
		if ref != (VolumeRef{}) {
			byHash[hash] = ref
		}
	}
	st := &p.a.status
	away := st.Node != "" && !p.agent.connected && !p.Agents.Dead(st.Node)
	for _, v := range p.a.volumes {
		if v.op != nil && v.op.verb == verbAttach {
			note(asked(p.sb.Namespace, v.op.entry.VolumeType, v.op.entry.Source), false)
			note(v.op.hold, false)
			known(v.op.entry.hash, v.op.hold)
		}
		if row := v.row; row != nil && !v.retained {
			ref := volumeOf(p.sb.Namespace, row.PVCName, row.PVName)
			known(row.EntryHash, ref)
			if ref == (VolumeRef{}) {
				ref = asked(p.sb.Namespace, row.VolumeType, row.Source)
			}
			waits := row.NextRetryTime != nil && isAnchor(fault.Reason(row.Reason)) && !isOver(st.Phase)
			if sure := isUse(row, isOver(st.Phase)); sure || away || waits {
				note(ref, sure)
			}
		}
	}
	for _, e := range p.entries {
		if v := p.a.volumes[e.Target]; away && (v == nil || v.row == nil || v.row.EntryHash != e.hash) {
			note(asked(p.sb.Namespace, e.VolumeType, e.Source), false)
		}
	}
	expected, again := p.a.stillExpected(p.now)
	for _, ref := range expected {
		note(ref, false)
	}
	if !again.IsZero() {
		p.lookAt(again)
	}
	for ref, due := range p.a.unsettled {
		switch {
		case away:
		case due.IsZero():
			p.a.unsettled[ref] = p.now.Add(settleAfter)
			p.lookAt(p.now.Add(settleAfter))
		case p.now.Before(due):
			p.lookAt(due)
		default:
			delete(p.a.unsettled, ref)
			continue
		}
		note(ref, false)
	}
	for _, r := range p.state.GetVolumes() {
		known(r.GetEntryHash(), VolumeRef{})
		if ref, ok := byHash[r.GetEntryHash()]; ok {
			note(ref, false)
		} else if key := r.GetVolumeKey(); key != "" && !p.onItsNode(r.GetEntryHash()) {
			u.keys[key] = struct{}{}
		}
	}
	p.a.byHash = byHash
	return u
}

// onItsNode says whether an entry is known to be of a volume that lives on its node.
func (p *pass) onItsNode(hash string) bool {
	return slices.ContainsFunc(p.entries, func(e *entry) bool {
		return e.hash == hash && asked(p.sb.Namespace, e.VolumeType, e.Source) == (VolumeRef{})
	})
}

// isUse says whether a row is one of a volume that its sandbox uses. A row has the names of its volume once it was mounted.
func isUse(row *v1alpha1.VolumeStatus, over bool) bool {
	mountedOnce := row.PVCName != "" || row.PVName != ""
	switch row.Phase {
	case v1alpha1.VolumeMounted, v1alpha1.VolumeAttaching, v1alpha1.VolumeDetaching:
		return true
	case v1alpha1.VolumePending:
		return mountedOnce && !over || row.Reason == ReasonWaitingForContainer
	case v1alpha1.VolumeFailed:
		return mountedOnce && !over && row.NextRetryTime != nil && !isWaiting(fault.Reason(row.Reason))
	}
	return false
}

// unsettle keeps a volume whose attach has failed as one that may be used for a while: the node may have it after all,
// as when the call was abandoned, and then tells.
func (a *actor) unsettle(ref VolumeRef) {
	if ref == (VolumeRef{}) {
		return
	}
	if a.unsettled == nil {
		a.unsettled = map[VolumeRef]time.Time{}
	}
	a.unsettled[ref] = time.Time{}
}
