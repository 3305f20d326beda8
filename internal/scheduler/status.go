package scheduler

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// specEdit is a change of an entry that follows from a result. It is made only if the entry is still the one
// that the result is about.
type specEdit struct {
	target, hash string
	// detach is the request that was answered.
	detach *v1alpha1.DetachRequest
	// clear takes the request out of the entry; else the entry is deleted.
	clear bool
	// failed: the entry goes as it could not be attached.
	failed bool
}

func (d *specEdit) apply(o *v1alpha1.Sandbox) {
	i := slices.IndexFunc(o.Spec.DynamicVolumes, func(v v1alpha1.DynamicVolume) bool { return v.Target == d.target })
	if i < 0 {
		return
	}
	v := &o.Spec.DynamicVolumes[i]
	if volume.EntryHash(v) != d.hash {
		return
	}
	if !d.failed && (v.Detach == nil || *v.Detach != *d.detach) {
		return
	}
	if d.clear {
		v.Detach = nil
		return
	}
	o.Spec.DynamicVolumes = slices.Delete(o.Spec.DynamicVolumes, i, i+1)
}

// editSpec makes the changes of the spec that results call for, all in one write: those that come before the
// status is written, or those after.
func (p *pass) editSpec(ctx context.Context, after bool) error {
	var edits []*specEdit
	for _, v := range p.a.volumes {
		edit := v.before
		if after {
			edit = v.after
		}
		if edit != nil {
			edits = append(edits, edit)
		}
	}
	if len(edits) == 0 {
		return nil
	}
	// What comes before the status takes out entries whose detach is asked for in the spec, and has happened: a crash
	// that takes that back has it repeated. What comes after it is an answer.
	write := p.updateSpecLate
	if after {
		write = p.updateSpec
	}
	if err := write(ctx, func(o *v1alpha1.Sandbox) error {
		for _, d := range edits {
			d.apply(o)
		}
		return nil
	}); err != nil {
		return err
	}
	for _, v := range p.a.volumes {
		switch {
		case after && v.after != nil:
			v.after, v.answered = nil, nil
		case !after && v.before != nil:
			v.before, v.row, v.retained = nil, nil, false
		}
	}
	return nil
}

// compose puts together the status from what is known.
func (p *pass) compose() {
	a := p.a
	st := &a.status
	if s := p.state; s != nil && !podBacked(p.sb) {
		st.ContainerID, st.Restarts, st.ExitCode = s.GetContainerId(), s.GetRestarts(), s.ExitCode
		if t := s.GetStartedAt(); t != nil {
			started := seconds(t.AsTime())
			st.StartTime = &started
		}
	}
	st.Volumes, st.VolumesReady = p.rows()
	p.explain()
	mounted, total := p.mountedOf()
	switch ready := st.Phase == v1alpha1.SandboxRunning && mounted == total && st.Reason == ""; {
	case ready:
		p.condition(v1alpha1.ConditionReady, true, "Ready", "the process runs and every volume is mounted")
	case st.Phase == v1alpha1.SandboxRunning && st.Reason == "":
		p.condition(v1alpha1.ConditionReady, false, "VolumesNotMounted", fmt.Sprintf("%d of %d volumes are mounted", mounted, total))
	case st.Reason != "":
		p.condition(v1alpha1.ConditionReady, false, st.Reason, st.Message)
	default:
		p.condition(v1alpha1.ConditionReady, false, string(st.Phase), "")
	}
	if !p.busy() && !p.unseen {
		st.ObservedGeneration = p.sb.Generation
	}
	p.countVolumes()
}

// explain gives a sandbox that is pending on its node the reason why.
func (p *pass) explain() {
	st := &p.a.status
	if podBacked(p.sb) || st.Phase != v1alpha1.SandboxPending || st.Node == "" || p.state.GetPhase() == stateRestarting {
		return
	}
	st.Reason, st.Message = "", ""
	if err := p.a.lifeErr; err != nil {
		st.Reason, st.Message = string(fault.ReasonOf(err)), err.Error()
		return
	}
	if row := p.blocking(); row != nil {
		st.Reason, st.Message = row.Reason, row.Target+": "+row.Message
		return
	}
	if p.unreachable {
		st.Reason, st.Message = string(fault.AgentUnavailable), "the agent of node "+st.Node+" cannot be reached"
	}
}

// blocking is the row of the first volume whose failure keeps the process from being started.
func (p *pass) blocking() *v1alpha1.VolumeStatus {
	for _, e := range p.entries {
		v := p.a.volumes[e.Target]
		if e.Detach == nil && v != nil && v.row != nil && v.row.Phase == v1alpha1.VolumeFailed && v.row.EntryHash == e.hash && !isGate(v.row.Reason) {
			return v.row
		}
	}
	return nil
}

// rows are the rows in the order of the spec, then those without an entry, and "mounted/all".
func (p *pass) rows() ([]v1alpha1.VolumeStatus, string) {
	var rows []v1alpha1.VolumeStatus
	listed := make(map[string]bool, len(p.entries))
	for _, e := range p.entries {
		listed[e.Target] = true
		if v := p.a.volumes[e.Target]; v != nil && v.row != nil {
			rows = append(rows, *v.row)
		}
	}
	var rest []v1alpha1.VolumeStatus
	for target, v := range p.a.volumes {
		if v.row != nil && !listed[target] {
			rest = append(rest, *v.row)
		}
	}
	slices.SortFunc(rest, func(x, y v1alpha1.VolumeStatus) int { return strings.Compare(x.Target, y.Target) })
	mounted, total := p.mountedOf()
	if total == 0 {
		return append(rows, rest...), ""
	}
	return append(rows, rest...), fmt.Sprintf("%d/%d", mounted, total)
}

// mountedOf counts the volumes that are mounted, and all. One whose attach has just begun does not count yet: it
// would cost a write.
func (p *pass) mountedOf() (mounted, total int) {
	for _, e := range p.entries {
		v := p.a.volumes[e.Target]
		current := v != nil && v.row != nil && v.row.EntryHash == e.hash
		if !current && v != nil && v.op != nil && v.op.verb == verbAttach {
			continue
		}
		total++
		if current && v.row.Phase == v1alpha1.VolumeMounted {
			mounted++
		}
	}
	return mounted, total
}

// busy says whether a command about the sandbox is in flight.
func (p *pass) busy() bool {
	if p.a.life != nil {
		return true
	}
	for _, v := range p.a.volumes {
		if v.op != nil {
			return true
		}
	}
	return false
}

// held says whether the status need not be written yet: the sandbox comes up, nothing has failed, nothing
// takes long, and the write that says that it runs comes soon.
func (p *pass) held() bool {
	st := &p.a.status
	if podBacked(p.sb) || st.Node == "" || p.a.written.Node != st.Node || st.Reason != "" || !p.busy() && !p.late() || p.sb.DeletionTimestamp != nil || p.sb.Spec.Paused {
		return false
	}
	if p.stage != stageBringUp && p.stage != stageAbsent || st.Phase == v1alpha1.SandboxRunning {
		return false
	}
	for _, v := range p.a.volumes {
		if v.after != nil || v.op != nil && !p.now.Before(v.op.started.Add(slowAfter)) {
			return false
		}
	}
	return true
}

// gathers says whether the status need not be written yet as more rows are about to come: attaches are in flight, which
// were mostly begun together, and nothing that it says is urgent. So volumes that are asked for together cost one write.
func (p *pass) gathers() bool {
	if !p.attaching() || p.decides() {
		return false
	}
	if p.a.behind.IsZero() {
		p.a.behind = p.now
	}
	due := p.a.behind.Add(gatherFor)
	if !p.now.Before(due) {
		return false
	}
	p.lookAt(due)
	return true
}

// attaching says whether an attach is in flight that is not slow.
func (p *pass) attaching() bool {
	for _, v := range p.a.volumes {
		if v.op != nil && v.op.verb == verbAttach && p.now.Before(v.op.started.Add(slowAfter)) {
			return true
		}
	}
	return false
}

func (p *pass) condition(kind string, is bool, reason, message string) {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	if reason == "" {
		reason = string(v1alpha1.SandboxPending) // the API server takes no condition without a reason
	}
	meta.SetStatusCondition(&p.a.status.Conditions, metav1.Condition{
		Type: kind, Status: status, Reason: reason, Message: fault.Text(message), LastTransitionTime: seconds(p.now), ObservedGeneration: 0,
	})
}

// writeStatus writes the status if it differs from what is in the store. check may refuse.
func (p *pass) writeStatus(ctx context.Context, check func(*v1alpha1.Sandbox) error) error {
	a := p.a
	a.status.Message = fault.Text(a.status.Message)
	if equality.Semantic.DeepEqual(&a.status, &a.written) {
		a.behind = time.Time{}
		return nil
	}
	if check == nil && (p.held() || p.gathers()) {
		return nil
	}
	sandboxes := p.Store.Sandboxes()
	write := sandboxes.UpdateStatus
	if !p.decides() {
		write = func(ctx context.Context, key store.Key, pre store.Preconditions, change func(*v1alpha1.Sandbox) error) (*v1alpha1.Sandbox, error) {
			return store.UpdateStatusLate(ctx, sandboxes, key, pre, change)
		}
	}
	o, err := write(ctx, a.key, store.Preconditions{UID: a.uid}, func(o *v1alpha1.Sandbox) error {
		if check != nil {
			if err := check(o); err != nil {
				return err
			}
		}
		foreign := o.Status.Conditions
		o.Status = *a.status.DeepCopy()
		for _, c := range foreign {
			if meta.FindStatusCondition(o.Status.Conditions, c.Type) == nil {
				o.Status.Conditions = append(o.Status.Conditions, c)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	a.written, a.behind = *a.status.DeepCopy(), time.Time{}
	a.stored, a.version = o.Status, o.ResourceVersion
	p.cache.renew(o)
	return nil
}

// seeForeign looks whether somebody else has written the status since we did: an old build that does not know all of its
// fields, a leader before us whose write came late, or a write of ours that had no answer. What is not as we have it is then
// written again. A node that is new to us is the sandbox's: it may be that something was made there.
func (p *pass) seeForeign() {
	a := p.a
	if n, err := resourceversion.CompareResourceVersion(p.sb.ResourceVersion, a.version); err != nil || n <= 0 {
		return
	}
	before := a.stored
	if a.version = p.sb.ResourceVersion; equality.Semantic.DeepEqual(&p.sb.Status, &before) {
		return
	}
	a.stored = p.sb.Status
	node := a.stored.Node
	if !podBacked(p.sb) && a.status.Node == "" && node != "" && node != before.Node && !isOver(a.status.Phase) && !p.Agents.Dead(node) {
		a.status.Node = node
		p.account(p.sb)
	}
	a.written = *a.stored.DeepCopy()
	a.written.Conditions = slices.DeleteFunc(a.written.Conditions, func(c metav1.Condition) bool {
		return meta.FindStatusCondition(a.status.Conditions, c.Type) == nil
	})
	p.log("status was written by somebody else")
}

// decides says whether the status has something that the inventory does not tell again, so that it must be durable
// before anybody hears of it: where the sandbox is, its phase, that a volume has failed, and answers that the spec
// follows. All else may be lost with a crash, and comes again.
func (p *pass) decides() bool {
	now, was := &p.a.status, &p.a.written
	if now.Node != was.Node || now.Phase != was.Phase {
		return true
	}
	for _, v := range p.a.volumes {
		if v.after != nil {
			return true
		}
	}
	for i := range now.Volumes {
		row := &now.Volumes[i]
		if row.Phase == v1alpha1.VolumeFailed && !slices.ContainsFunc(was.Volumes, func(old v1alpha1.VolumeStatus) bool {
			return old.Target == row.Target && old.EntryHash == row.EntryHash && old.Phase == row.Phase
		}) {
			return true
		}
	}
	return false
}

// countVolumes keeps the gauge of mounted dynamic volumes, and the usage of the topology domains.
func (p *pass) countVolumes() {
	now := tally{manager: p.volumes, key: p.key, dynamic: map[v1alpha1.VolumeType]int{}}
	if p.set.topology != nil {
		now.domain, _ = p.set.topology.Domain(p.a.status.Node)
	}
	for _, row := range p.a.status.Volumes {
		if row.Phase != v1alpha1.VolumeMounted {
			continue
		}
		now.volumes++
		now.bytes += row.CapacityBytes
		if row.Kind == v1alpha1.VolumeKindDynamic {
			now.dynamic[row.VolumeType]++
		}
	}
	if old := p.a.tally; !now.equal(old) {
		p.metrics.count(old, now)
		p.a.tally = now
		p.Logger.Debug("volumes by topology domain", "subGroup", p.key.String(), "usage", p.volumes.Usage())
	}
}
