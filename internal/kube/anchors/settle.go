package anchors

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Need is who needs anchors of a claim.
type Need struct {
	Namespace, Name string
	// Claim is the claim, nil where it is not known: then no successor is made. One that is being deleted gets none either.
	Claim *corev1.PersistentVolumeClaim
	// ReadOnly and Exclusive (one sandbox's alone) are as the volume's access modes have it.
	ReadOnly, Exclusive bool
	// Nodes have the volume ready for a sandbox, whose UID is the value, so that an anchor has to be there. May says of others
	// whether one that is there stays.
	Nodes map[string]types.UID
	May   func(node string) bool
}

// Settle makes the anchors that are missing, and removes those that are in the way or that nobody has used for the grace
// time. It is called whenever something may have changed, and makes no call when all is as it should be. left says that there
// still are anchors.
func (a *Anchors) Settle(ctx context.Context, n Need) (left bool, err error) {
	all := a.of(n.Namespace, n.Name, n.Claim)
	nodes := map[string]bool{}
	for node := range all {
		nodes[node] = true
	}
	for node := range n.Nodes {
		nodes[node] = true
	}
	var errs []error
	for node := range nodes {
		there, err := a.settle(ctx, n, node)
		left = left || there
		if err != nil {
			errs = append(errs, err)
		}
	}
	return left, errors.Join(errs...)
}

// settle does the work for one node.
func (a *Anchors) settle(ctx context.Context, n Need, node string) (left bool, err error) {
	place := Place{Namespace: n.Namespace, Claim: n.Name, Node: node}
	done, err := a.turn(ctx, place)
	if err != nil {
		return true, err
	}
	defer done()
	here := a.of(n.Namespace, n.Name, n.Claim)[node]
	sandbox, needed := n.Nodes[node]
	a.mu.Lock()
	asked := a.asked[place] > 0
	a.mu.Unlock()
	if !needed && !asked && !n.May(node) {
		return len(here) > 0, a.expire(ctx, n, place, here)
	}
	a.mu.Lock()
	delete(a.unused, place)
	a.mu.Unlock()
	stay := best(here)
	if stay == nil && needed && n.Claim != nil && n.Claim.DeletionTimestamp == nil {
		w := Want{Claim: n.Claim, Node: node, ReadOnly: n.ReadOnly}
		if n.Exclusive {
			w.Sandbox = string(sandbox)
		}
		if stay, err = a.create(ctx, w); err != nil {
			return true, err
		}
	}
	var errs []error
	for _, f := range here {
		switch {
		case f.over():
			errs = append(errs, a.remove(ctx, f, "it has ended"))
		case f != stay && stay != nil && stay.running():
			errs = append(errs, a.remove(ctx, f, "another has the volume"))
		}
	}
	return stay != nil || len(here) > 0, errors.Join(errs...)
}

// expire removes the anchors of a place that nobody uses, after the grace time.
func (a *Anchors) expire(ctx context.Context, n Need, place Place, here []*facts) error {
	if len(here) == 0 {
		a.mu.Lock()
		delete(a.unused, place)
		a.mu.Unlock()
		return nil
	}
	grace := a.Grace
	if n.Exclusive || n.Claim == nil || n.Claim.DeletionTimestamp != nil {
		grace = 0 // others wait for it
	}
	now := a.Clock.Now()
	a.mu.Lock()
	since, known := a.unused[place]
	if !known {
		since = now
		a.unused[place] = now
	}
	a.mu.Unlock()
	if left := since.Add(grace).Sub(now); left > 0 {
		if !known {
			a.wakeAfter(left, place)
		}
		return nil
	}
	var errs []error
	for _, f := range here {
		errs = append(errs, a.remove(ctx, f, "nobody uses the claim here"))
	}
	return errors.Join(errs...)
}

// wakeAfter has a claim settled again after a time.
func (a *Anchors) wakeAfter(d time.Duration, p Place) {
	timer := a.Clock.NewTimer(d)
	go func() {
		<-timer.C()
		a.wake(p.Namespace, p.Claim)
	}()
}
