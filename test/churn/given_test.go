package churn

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// gets: a sandbox that a claim has taken has all that the claim gives, from the write that takes it.
func (l *ledger) gets(before, sb *v1alpha1.Sandbox, c *agentsv1alpha1.SandboxClaim) {
	lacks := func(what string, have, want map[string]string) {
		for k, v := range want {
			if have[k] != v {
				l.fail("sandbox %s (version %s) was given to claim %s without its %s %s=%s", sb.Name, sb.ResourceVersion, c.Name, what, k, v)
			}
		}
	}
	lacks("label", sb.Labels, c.Spec.Labels)
	lacks("annotation", sb.Annotations, c.Spec.Annotations)
	if sb.Spec.Template == nil {
		return
	}
	main := sb.Spec.Template.Spec.Containers[0]
	env := map[string]string{}
	for _, e := range main.Env {
		env[e.Name] = e.Value
	}
	lacks("variable", env, c.Spec.EnvVars)
	if len(c.Spec.EnvVars) > 0 && before != nil {
		l.fail("sandbox %s (version %s) was there before it was given to claim %s, which has envVars", sb.Name, sb.ResourceVersion, c.Name)
	}
	if u := c.Spec.InplaceUpdate; u != nil {
		want := main.DeepCopy()
		if u.Image != "" {
			want.Image = u.Image
		}
		if u.Resources != nil {
			maps.Copy(want.Resources.Requests, u.Resources.Requests)
		}
		if form(want) != form(&main) {
			l.fail("sandbox %s (version %s) was given to claim %s as %s: inplaceUpdate makes it %s", sb.Name, sb.ResourceVersion, c.Name, form(&main), form(want))
		}
	}
}

// form is what of a container can be changed in place.
func form(c *corev1.Container) string {
	return fmt.Sprint(c.Image, " cpu ", c.Resources.Requests.Cpu(), " memory ", c.Resources.Requests.Memory())
}

// formOf is what a Pod's container runs as by what kubelet says; empty while it does not, or kubelet has not seen all of it.
func formOf(pod *corev1.Pod) string {
	if !running(pod) || pod.Status.ObservedGeneration != pod.Generation || pod.Status.ContainerStatuses[0].Resources == nil {
		return ""
	}
	s := pod.Status.ContainerStatuses[0]
	return form(&corev1.Container{Image: s.Image, Resources: *s.Resources})
}

// ran takes note of what a sandbox's Pod runs as, and of what is changed of it in place.
func (l *ledger) ran(before, pod *corev1.Pod, sandbox types.UID) {
	if before != nil {
		was, is := before.Spec.Containers[0], pod.Spec.Containers[0]
		if was.Image != is.Image {
			l.images++
		}
		if is.Image = was.Image; form(&was) != form(&is) {
			l.resizes++
		}
	}
	if now := formOf(pod); now != "" && !slices.Contains(l.forms[sandbox], now) {
		l.forms[sandbox] = append(l.forms[sandbox], now)
	}
}

// completed: what a claim was given ran as the claim asked for.
func (l *ledger) completed(c *agentsv1alpha1.SandboxClaim) {
	for _, sb := range l.owned(c.UID) {
		if sb.Spec.Template == nil || !slices.Contains(c.Status.SandboxNames, sb.Name) {
			continue
		}
		if want := form(&sb.Spec.Template.Spec.Containers[0]); !slices.Contains(l.forms[sb.UID], want) {
			l.fail("claim %s (version %s) is Completed with sandbox %s, which never ran as %s, only as %v", c.Name, c.ResourceVersion, sb.Name, want, l.forms[sb.UID])
		}
	}
}
