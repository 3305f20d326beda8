package churn

import (
	"fmt"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// What kubelet does with volumes is played here: it mounts the claim of an anchor that runs, but for some of which it has
// mounted nothing, as it looks once at what a driver answers. What an agent has once it keeps (the guard).

// place is a claim on a node.
type place struct {
	node  string
	claim types.NamespacedName
}

// anchorOf is the claim of which a Pod is an anchor; none when it is not.
func anchorOf(pod *corev1.Pod) (claim types.NamespacedName, is bool) {
	if pod.Labels[v1alpha1.LabelAnchor] == "" || len(pod.Spec.Volumes) != 1 || pod.Spec.Volumes[0].PersistentVolumeClaim == nil {
		return claim, false
	}
	return types.NamespacedName{Namespace: pod.Namespace, Name: pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName}, true
}

// publish has kubelet mount what an anchor has, once. The lock is held.
func (f *fleet) publish(pod *corev1.Pod) {
	if _, is := anchorOf(pod); !is || !running(pod) {
		return
	}
	if _, looked := f.published[pod.UID]; !looked {
		f.published[pod.UID] = !f.faulty.Load() || f.dice.IntN(8) > 0
	}
}

// fromAnchor finds what kubelet mounted for an anchor: the one that is named, or another of its claim. The lock is held.
func (a *agent) fromAnchor(of *agentv1.AnchorSource) error {
	f, claim := a.fleet, types.NamespacedName{Namespace: of.GetPodNamespace(), Name: of.GetClaim()}
	if pod := f.pods[types.UID(of.GetPodUid())]; pod != nil {
		if has, _ := anchorOf(pod); has != claim || pod.Spec.NodeName != "" && pod.Spec.NodeName != a.node {
			f.fail("node %s: a volume is to be taken of Pod %s on node %s, which is an anchor of %s, and not of %s", a.node, pod.Name, pod.Spec.NodeName, has, claim)
		}
	}
	if a.anchored[claim] > 0 {
		return nil
	}
	for _, pod := range f.pods {
		if has, is := anchorOf(pod); is && has == claim && pod.Spec.NodeName == a.node && f.published[pod.UID] {
			return nil
		}
	}
	return fault.New(errdefs.ErrUnavailable, fault.AnchorLost, "nothing is published on node %s of claim %s", a.node, claim)
}

// entitled holds that a sandbox gets what is for its tenant and Namespace. The lock is held.
func (f *fleet) entitled(in *agentv1.AttachRequest, pod *corev1.Pod) {
	if tenant := tenantOf(pod.Namespace); in.GetTenantId() != tenant {
		f.fail("sandbox %s/%s is to get a volume as tenant %q, and is tenant %q's", pod.Namespace, pod.Name, in.GetTenantId(), tenant)
	}
	name, handle := in.GetCsi().GetPersistentVolume(), in.GetCsi().GetVolumeHandle()
	if of := in.GetAnchor(); of != nil {
		name, handle = of.GetPvName(), of.GetVolumeHandle()
		if of.GetPodNamespace() != pod.Namespace {
			f.fail("sandbox %s/%s is to get claim %s/%s", pod.Namespace, pod.Name, of.GetPodNamespace(), of.GetClaim())
		}
	}
	d, known := drives[name]
	switch {
	case name == "" || handle != name:
		f.fail("sandbox %s/%s is to get volume %q of PersistentVolume %q", pod.Namespace, pod.Name, handle, name)
	case known && !d.serves(pod.Namespace, in.GetMode() == string(v1alpha1.VolumeModeReadOnly)):
		f.fail("sandbox %s/%s is to get %s (%s), which is tenant %q's (shared: %v)", pod.Namespace, pod.Name, name, in.GetMode(), d.tenant, d.shared)
	case d.tenant == "" && !d.shared:
		if first, had := f.first[name]; had && first != pod.Namespace {
			f.fail("sandbox %s/%s is to get %s, which sandboxes in Namespace %s have", pod.Namespace, pod.Name, name, first)
		}
		f.first[name] = pod.Namespace
	}
}

// anchoredAt are the places at which agents have a volume that an anchor keeps.
func (f *fleet) anchoredAt() map[place]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := map[place]bool{}
	for _, a := range f.agents {
		for claim := range a.anchored {
			all[place{a.node, claim}] = true
		}
	}
	return all
}

// unanchored is what is wrong with the anchors: where one is needed there is one that runs, and elsewhere none.
func (w *world) unanchored(pods []*corev1.Pod, say func(format string, args ...any)) {
	needed, runs := w.fleet.anchoredAt(), map[place]int{}
	for _, p := range pods {
		claim, is := anchorOf(p)
		at := place{p.Spec.NodeName, claim}
		switch {
		case !is:
		case !needed[at]:
			say("Pod %s anchors claim %s on node %s, where no sandbox has it", p.Name, claim, at.node)
		case p.DeletionTimestamp != nil || !running(p):
			say("Pod %s, which anchors claim %s on node %s, does not run, or ends", p.Name, claim, at.node)
		default:
			runs[at]++
		}
	}
	for at := range needed {
		if runs[at] != 1 {
			say("claim %s has %d anchors that run on node %s", at.claim, runs[at], at.node)
		}
	}
}

// workClaims are claims of each Namespace that its sandboxes share, by the same names in all.
const workClaims = 2

func workClaim(i int) string { return fmt.Sprint("work-", i) }

// countAnchored counts the mounts that a node has of a claim which is anchored there. The lock is held.
func (a *agent) countAnchored(claim types.NamespacedName, n int) {
	if a.anchored[claim] += n; a.anchored[claim] <= 0 {
		delete(a.anchored, claim)
	}
}
