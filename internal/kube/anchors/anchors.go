package anchors

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1informers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Options say what anchors are made of.
type Options struct {
	Client kubernetes.Interface
	// Image is the image with flux-sandbox-init, PullSecrets are the names of the Secrets to pull it with. Those are of the
	// claim's namespace, where anchors lie: whoever needs them puts them there.
	Image       string
	PullSecrets []string
	// Grace is how long one that nobody uses is kept; DefaultGrace when zero.
	Grace time.Duration
	// Wait is how long Ensure waits for one to run, WaitInTrouble for one of which it is known that something is wrong; the
	// defaults when zero.
	Wait, WaitInTrouble time.Duration
	// Rate (in a second; DefaultRate when zero) and Burst (DefaultBurst) bound how fast they are made.
	Rate  float64
	Burst int
	// Clock is the real one when nil, Log slog's default.
	Clock clock.Clock
	Log   *slog.Logger
}

// The defaults of Options. Wait leaves the agent time within the deadline of an attach.
const (
	DefaultGrace         = time.Minute
	DefaultWait          = 90 * time.Second
	DefaultWaitInTrouble = 15 * time.Second
	DefaultRate          = 20
	DefaultBurst         = 50
)

// callTimeout bounds a call of the API server; admission webhooks may take up to 30 s.
const callTimeout = time.Minute

// Anchors makes and removes anchors. Only the leader calls Ensure and Settle.
type Anchors struct {
	Options
	bucket   *rate.Limiter
	informer cache.SharedIndexInformer

	mu sync.Mutex // guards all below
	// followers are told of a claim of whose anchors something changed.
	followers []func(namespace, claim string)
	// changed is closed, and made anew, with every change.
	changed chan struct{}
	// unused is since when nobody uses an anchor's place.
	unused map[Place]time.Time
	// asked counts who waits in Ensure for an anchor of a place: it is used, whatever Settle is told.
	asked map[Place]int
	// turns are the places at which something is made or removed.
	turns map[Place]chan struct{}
	// made are Pods that were made and of which the watch has not told.
	made map[types.UID]*facts
	// replaced are those that Replace ended, until they are gone.
	replaced map[types.UID]struct{}
}

// New makes Anchors. Start them once, with Run.
func New(o Options) (*Anchors, error) {
	if o.Client == nil || o.Image == "" {
		return nil, errors.New("anchors: a client and an image are required")
	}
	for _, d := range []struct {
		to *time.Duration
		d  time.Duration
	}{{&o.Grace, DefaultGrace}, {&o.Wait, DefaultWait}, {&o.WaitInTrouble, DefaultWaitInTrouble}} {
		if *d.to == 0 {
			*d.to = d.d
		}
	}
	if o.Rate == 0 {
		o.Rate = DefaultRate
	}
	if o.Burst == 0 {
		o.Burst = DefaultBurst
	}
	if o.Rate < 0 || o.Burst < 0 || o.Grace < 0 {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest,
			"anchor-rate %g, anchor-burst %d and anchor-grace %s: must not be negative, or no anchor would ever be made, or kept", o.Rate, o.Burst, o.Grace)
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	a := &Anchors{Options: o, bucket: rate.NewLimiter(rate.Limit(o.Rate), o.Burst), changed: make(chan struct{}),
		unused: map[Place]time.Time{}, asked: map[Place]int{}, turns: map[Place]chan struct{}{}, made: map[types.UID]*facts{},
		replaced: map[types.UID]struct{}{}}
	a.informer = corev1informers.NewFilteredPodInformer(o.Client, "", 0, cache.Indexers{byClaim: indexByClaim},
		func(l *metav1.ListOptions) { l.LabelSelector = v1alpha1.LabelAnchor })
	if err := a.informer.SetTransform(strip); err != nil {
		return nil, fmt.Errorf("follow anchors: %w", err)
	}
	_, err := a.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { a.tell(o) },
		UpdateFunc: func(_, o any) { a.tell(o) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			if f, ok := o.(*facts); ok {
				a.mu.Lock()
				delete(a.replaced, f.UID)
				a.mu.Unlock()
			}
			a.tell(o)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("follow anchors: %w", err)
	}
	return a, nil
}

const byClaim = "claim"

func indexByClaim(o any) ([]string, error) {
	f, ok := o.(*facts)
	if !ok || f.place.Claim == "" {
		return nil, nil
	}
	return []string{f.place.Namespace + "/" + f.place.Claim}, nil
}

// Run follows the anchors until ctx ends.
func (a *Anchors) Run(ctx context.Context) { a.informer.RunWithContext(ctx) }

// HasSynced says whether the anchors that existed at first are known.
func (a *Anchors) HasSynced() bool { return a.informer.HasSynced() }

// Follow has a function told of every claim of whose anchors something changed. It must not block.
func (a *Anchors) Follow(f func(namespace, claim string)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.followers = append(a.followers, f)
}

func (a *Anchors) tell(o any) {
	f, ok := o.(*facts)
	if !ok || f.place.Claim == "" {
		return
	}
	a.mu.Lock()
	delete(a.made, f.UID)
	a.mu.Unlock()
	a.wake(f.place.Namespace, f.place.Claim)
}

// wake has everybody look again who is concerned with a claim's anchors.
func (a *Anchors) wake(namespace, claim string) {
	a.mu.Lock()
	close(a.changed)
	a.changed = make(chan struct{})
	followers := slices.Clone(a.followers)
	a.mu.Unlock()
	for _, f := range followers {
		f(namespace, claim)
	}
}

// of are the anchors of a claim, by node. Where the claim is given, those of an earlier one of its name are left out: they
// have another volume, and go with their owner.
func (a *Anchors) of(namespace, claim string, now *corev1.PersistentVolumeClaim) map[string][]*facts {
	objects, err := a.informer.GetIndexer().ByIndex(byClaim, namespace+"/"+claim)
	if err != nil {
		a.Log.Error("anchors cannot be looked up", "error", err) // the index is there
	}
	all := map[string][]*facts{}
	known := map[types.UID]bool{}
	for _, o := range objects {
		if f, ok := o.(*facts); ok && (now == nil || f.claimUID == now.UID) {
			all[f.place.Node] = append(all[f.place.Node], f)
			known[f.UID] = true
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for uid, f := range a.made {
		if f.place.Namespace == namespace && f.place.Claim == claim && !known[uid] && (now == nil || f.claimUID == now.UID) {
			all[f.place.Node] = append(all[f.place.Node], f)
		}
	}
	return all
}

// Claims are the claims that have anchors, by namespace and name.
func (a *Anchors) Claims() []types.NamespacedName {
	var claims []types.NamespacedName
	for _, o := range a.informer.GetStore().List() {
		if f, ok := o.(*facts); ok && f.place.Claim != "" {
			claims = append(claims, types.NamespacedName{Namespace: f.place.Namespace, Name: f.place.Claim})
		}
	}
	return claims
}

// Want is an anchor that is needed.
type Want struct {
	Claim *corev1.PersistentVolumeClaim
	Node  string
	// ReadOnly says that the volume can be mounted read-only only.
	ReadOnly bool
	// Sandbox is the UID of the one sandbox that may use it, for a volume that is one Pod's; else empty.
	Sandbox string
}

func (w Want) place() Place {
	return Place{Namespace: w.Claim.Namespace, Claim: w.Claim.Name, Node: w.Node}
}

// Anchor is one that runs: kubelet has the volume mounted for it.
type Anchor struct {
	Name string
	UID  types.UID
}

// Ensure has a claim mounted on a node: there is an anchor that runs when it returns. Its error tells what is wrong with the
// one that does not (ANCHOR_PENDING); it is called again, and the anchor stays until Settle removes it.
func (a *Anchors) Ensure(ctx context.Context, w Want) (Anchor, error) {
	place := w.place()
	a.mu.Lock()
	a.asked[place]++
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.unused, place) // the grace time begins anew
		if a.asked[place]--; a.asked[place] == 0 {
			delete(a.asked, place)
		}
	}()
	began := a.Clock.Now()
	for {
		a.mu.Lock()
		changed := a.changed
		a.mu.Unlock()
		f, err := a.ensure(ctx, w)
		if err != nil {
			return Anchor{}, err
		}
		if f.running() {
			return Anchor{Name: f.Name, UID: f.UID}, nil
		}
		most := a.Wait
		if f.trouble != "" {
			most = a.WaitInTrouble
		}
		timer := a.Clock.NewTimer(began.Add(most).Sub(a.Clock.Now()))
		select {
		case <-changed:
		case <-timer.C():
			return Anchor{}, a.pending(w, f)
		case <-ctx.Done():
			timer.Stop()
			return Anchor{}, fmt.Errorf("%w: %w", context.Cause(ctx), a.pending(w, f))
		}
		timer.Stop()
	}
}

// Replace ends an anchor that runs and for which nothing, or something dead, is mounted. kubelet looks at the volume of a Pod
// that runs no more, so another has to be made: the next Ensure does that, when this one is gone, as kubelet has a volume
// anew only when no Pod had it in between. What fails is done again then.
func (a *Anchors) Replace(ctx context.Context, w Want, old Anchor) {
	done, err := a.turn(ctx, w.place())
	if err != nil {
		return
	}
	defer done()
	for _, f := range a.of(w.Claim.Namespace, w.Claim.Name, w.Claim)[w.Node] {
		if f.UID != old.UID {
			continue
		}
		if err := a.remove(ctx, f, "the volume is not mounted for it, or is dead"); err != nil {
			a.Log.Warn("an anchor without its volume could not be removed; it is tried again", "pod", f.Namespace+"/"+f.Name, "error", err)
			return
		}
		a.mu.Lock()
		a.replaced[f.UID] = struct{}{}
		a.mu.Unlock()
	}
}

func (a *Anchors) isReplaced(f *facts) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, is := a.replaced[f.UID]
	return is
}

// pending says what is known of why an anchor does not run.
func (a *Anchors) pending(w Want, f *facts) error {
	why := f.trouble
	if why == "" {
		why = "its status says no more; see its Events, and those of the claim, which say why there is no volume for it"
	}
	for _, other := range a.of(w.Claim.Namespace, w.Claim.Name, w.Claim)[w.Node] {
		if other.UID != f.UID && other.DeletionTimestamp != nil {
			why += "; kubelet has not unmounted it yet for Pod " + other.Name + ", which is being ended"
			break
		}
	}
	return fault.New(errdefs.ErrUnavailable, fault.AnchorPending,
		"Pod %s/%s, which has claim %s mounted on node %s, does not run yet (%s): it is tried again", f.Namespace, f.Name, f.place.Claim, f.place.Node, why)
}

// ensure is the best anchor of a place, which is made if there is none.
func (a *Anchors) ensure(ctx context.Context, w Want) (*facts, error) {
	done, err := a.turn(ctx, w.place())
	if err != nil {
		return nil, err
	}
	defer done()
	here := a.of(w.Claim.Namespace, w.Claim.Name, w.Claim)[w.Node]
	for _, f := range here {
		if w.Sandbox != "" && f.alive() && f.sandbox != w.Sandbox {
			return nil, fault.New(errdefs.ErrUnavailable, fault.Conflict,
				"claim %s/%s has access mode ReadWriteOncePod and is in use by another sandbox (UID %s): it is tried again when that has detached it",
				w.Claim.Namespace, w.Claim.Name, f.sandbox)
		}
	}
	for _, f := range here {
		if a.isReplaced(f) {
			ending := *f
			ending.phase, ending.trouble = corev1.PodPending, "the volume was not mounted for it, or is dead: it is ended, so that kubelet gets the volume anew"
			return &ending, nil
		}
	}
	if f := best(here); f != nil {
		return f, nil
	}
	return a.create(ctx, w)
}

// create makes an anchor. The caller has the place's turn.
func (a *Anchors) create(ctx context.Context, w Want) (*facts, error) {
	if err := a.bucket.Wait(ctx); err != nil {
		return nil, fault.New(errdefs.ErrUnavailable, fault.RateLimited, "waiting for a turn to make an anchor for claim %s/%s: %w", w.Claim.Namespace, w.Claim.Name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	pod, err := a.Client.CoreV1().Pods(w.Claim.Namespace).Create(ctx, podOf(w, a.Image, a.PullSecrets), metav1.CreateOptions{})
	if err != nil {
		return nil, failed(fmt.Sprintf("make an anchor for claim %s/%s on node %s", w.Claim.Namespace, w.Claim.Name, w.Node), err)
	}
	f := factsOf(pod)
	a.mu.Lock()
	if _, known, _ := a.informer.GetStore().GetByKey(f.Namespace + "/" + f.Name); !known {
		a.made[f.UID] = f
	}
	a.mu.Unlock()
	a.Log.Info("made an anchor", "claim", w.Claim.Namespace+"/"+w.Claim.Name, "node", w.Node, "pod", f.Name)
	return f, nil
}

// turn waits until nobody else makes or removes an anchor at a place.
func (a *Anchors) turn(ctx context.Context, p Place) (done func(), err error) {
	for {
		a.mu.Lock()
		busy := a.turns[p]
		if busy == nil {
			mine := make(chan struct{})
			a.turns[p] = mine
			a.mu.Unlock()
			return func() {
				a.mu.Lock()
				defer a.mu.Unlock()
				delete(a.turns, p)
				close(mine)
			}, nil
		}
		a.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, fault.New(errdefs.ErrUnavailable, fault.OperationPending, "an anchor of claim %s/%s is being made or removed: %w", p.Namespace, p.Claim, context.Cause(ctx))
		}
	}
}

// failed gives an error of the API server its kind and reason.
func failed(what string, err error) error {
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: %w", what, err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsForbidden(err), apierrors.IsNotFound(err):
		// By an admission policy, a quota, our own rights, or as the Namespace is gone. Each may change without the sandbox.
		return fault.New(errdefs.ErrUnavailable, fault.PodRefused, "%s: the API server refuses it: %w", what, err)
	}
	return fault.New(errdefs.ErrUnavailable, store.Unavailable, "%s: %w", what, err)
}

// remove ends an anchor. It is not forced, so that its end tells that its volume is unpublished.
func (a *Anchors) remove(ctx context.Context, f *facts, why string) error {
	if f.DeletionTimestamp != nil {
		return nil // it ends by itself; kubelet does not shorten a grace period that has begun
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := a.Client.CoreV1().Pods(f.Namespace).Delete(ctx, f.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(1)), Preconditions: &metav1.Preconditions{UID: &f.UID}})
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		a.Log.Info("removed an anchor", "claim", f.place.Namespace+"/"+f.place.Claim, "node", f.place.Node, "pod", f.Name, "why", why)
		return nil
	}
	return failed("delete Pod "+f.Namespace+"/"+f.Name, err)
}
