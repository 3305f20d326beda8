package scheduler

import (
	"context"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// place gives the sandbox a node. The node is in the store before anything is made there: a crash at any
// moment does not make two.
func (p *pass) place(ctx context.Context) error {
	p.mu.Lock()
	p.unplaced[p.a.key] = struct{}{}
	ready := p.isReady()
	p.mu.Unlock()
	if !ready {
		return nil
	}
	if p.runtime == nil {
		p.notPlaced(fault.New(errdefs.ErrNotFound, fault.GroupNotFound,
			"the sandbox group %s/%s has no sub-group %q, or does not exist: create it", p.key.Namespace, p.key.Group, p.key.SubGroup))
		return nil
	}
	if err := p.protect(ctx); err != nil {
		return err
	}
	q := &PlacementRequest{UID: p.a.uid, Requests: p.workload.requests(), Image: p.workload.image, Exclude: p.a.refused}
	node := p.registry.nodeOf(p.a.uid)
	if node != "" {
		// An agent has it already, though the store lost its node: it is not made twice.
		p.registry.place(p.a.uid, placement{node: node, subGroup: p.key, requests: q.Requests, image: q.Image})
	} else {
		if err := p.locate(q); err != nil {
			p.notPlaced(err)
			p.a.placing.failed(p.now)
			p.lookAt(p.a.placing.due)
			p.lookAt(p.now.Add(unplacedRetry))
			return nil
		}
		decision, err := p.set.engine.Place(q)
		if err != nil {
			p.notPlaced(err)
			p.lookAt(p.now.Add(unplacedRetry))
			return nil
		}
		node = decision.Node
	}
	if err := p.settle(ctx, node); err != nil {
		p.set.undo(p)
		return err
	}
	p.mu.Lock()
	delete(p.unplaced, p.a.key)
	p.mu.Unlock()
	return nil
}

// settle writes the sandbox's node, before anything is made there.
func (p *pass) settle(ctx context.Context, node string) error {
	st := &p.a.status
	old, before := *st.DeepCopy(), p.a.written.Node
	st.Node, st.Phase, st.Reason, st.Message = node, v1alpha1.SandboxPending, "", ""
	p.condition(v1alpha1.ConditionScheduled, true, "Placed", "the sandbox has a node")
	p.stage = stageAbsent
	p.volumes.plan(p)
	p.compose()
	if err := p.writeStatus(ctx, func(o *v1alpha1.Sandbox) error {
		if have := o.Status.Node; have != before && have != node {
			return fault.New(errdefs.ErrConflict, fault.Conflict, "sandbox %s is on node %q already", p.a.key, have)
		}
		return nil
	}); err != nil {
		p.a.status = old
		return err
	}
	p.a.moveTo, p.a.placing = "", retry{}
	p.log("placed", "node", node)
	p.event(p.sb, EventNormal, "Scheduled", "placed on node "+node)
	return nil
}

// undo gives back what was reserved for the sandbox.
func (s settings) undo(p *pass) {
	if s.engine != nil {
		s.engine.Undo(p.a.uid)
	}
}

// locate adds what is known of where the sandbox's volumes are. An error is a volume that has no place yet and is waited
// for. One that cannot be attached whatever the place says so when it is tried.
func (p *pass) locate(q *PlacementRequest) error {
	if p.Resolver == nil {
		return nil
	}
	closed := p.volumes.gate(p) != nil
	for _, e := range p.entries {
		if e.invalid != nil || e.Detach != nil || e.VolumeType == v1alpha1.VolumeTypeLocal || e.VolumeType == v1alpha1.VolumeTypeSnapshot {
			continue
		}
		at, err := p.Resolver.Locate(wish(p.sb, e, p.set.topology))
		switch {
		case err == nil:
		case isPermanent(err), p.a.volumes[e.Target].removable(e), closed && e.kind == v1alpha1.VolumeKindDynamic:
			continue
		default:
			return err
		}
		q.VolumeDomains = append(q.VolumeDomains, at.Domains...)
		if at.VolumeKey != "" {
			q.VolumeKeys = append(q.VolumeKeys, at.VolumeKey)
		}
		if at.Reach != nil {
			q.Reach = append(q.Reach, at.Reach)
		}
	}
	return nil
}

func (p *pass) notPlaced(err error) {
	st := &p.a.status
	if st.Reason != string(fault.ReasonOf(err)) {
		p.event(p.sb, EventWarning, string(fault.ReasonOf(err)), err.Error())
	}
	st.Phase, st.Reason, st.Message = v1alpha1.SandboxPending, string(fault.ReasonOf(err)), err.Error()
	p.condition(v1alpha1.ConditionScheduled, false, st.Reason, st.Message)
}

// The writes that begin and end our part in a sandbox have a step before and after them.
var finalizerSteps = failpoint.Steps("finalizer", []string{"protect", "release"})

// protect puts our finalizer on the sandbox, so that it cannot go while a node has something of it.
func (p *pass) protect(ctx context.Context) error {
	if slices.Contains(p.sb.Finalizers, v1alpha1.FinalizerVolumes) {
		return nil
	}
	return failpoint.Step(finalizerSteps, "protect", func() error {
		return p.updateSpec(ctx, func(o *v1alpha1.Sandbox) error {
			if !slices.Contains(o.Finalizers, v1alpha1.FinalizerVolumes) {
				o.Finalizers = append(o.Finalizers, v1alpha1.FinalizerVolumes)
			}
			return nil
		})
	})
}

// replace moves a sandbox off a node that refused it before it made anything. It stays where it is when there
// is no other.
func (p *pass) replace(node string) {
	a := p.a
	a.refused = append(a.refused, node)
	q := &PlacementRequest{UID: a.uid, Requests: p.workload.requests(), Image: p.workload.image, Exclude: a.refused}
	err := p.locate(q)
	var decision Placement
	if err == nil {
		p.set.engine.Undo(a.uid)
		decision, err = p.set.engine.Place(q)
	}
	if err != nil {
		a.refused = nil // each has refused: all are tried again
		p.registry.place(a.uid, placement{node: node, subGroup: p.key, requests: q.Requests, image: q.Image})
		return
	}
	a.moveTo, a.lifeErr, a.lifeRetry = decision.Node, nil, retry{}
}
