package main

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

const (
	claimsMade = 3
	claimClass = "flux-local"
)

// claims measures volumes of the built-in driver. The baseline is what one does without us: a Pod with the claim.
func (c *clusterBench) claims(r *report, pairs int) {
	var provision, direct, anchor, podProvision, podFirst, attach, detach, recreate samples
	c.created("one", "two")
	events, others := c.watch("one"), c.watch("two")
	attached := func(claim string) func() {
		return func() {
			c.patch("one", claimed(claim, "/bench"))
			c.await(events, "mounted", mounted)
		}
	}
	released := func(claim string) {
		c.patch("one")
		c.await(events, "detached", detached)
		c.unused(claim)
	}
	for i := range claimsMade {
		mine, pods := fmt.Sprint("mine-", i), fmt.Sprint("pods-", i)
		provision.add(func() {
			c.claim(mine)
			attached(mine)()
		})
		released(mine)
		direct.add(attached(mine))
		released(mine)
		_, err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Patch(c.Context(), mine, types.MergePatchType,
			fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"anchor"}}}`, v1alpha1.AnnotationPath), metav1.PatchOptions{})
		c.must(err)
		anchor.add(attached(mine))
		c.patch("one")
		c.await(events, "detached", detached)
		source := corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: pods}}
		podProvision.add(func() {
			c.claim(pods)
			c.pod(source)
		})
		c.deletePod()
		podFirst.add(func() { c.pod(source) })
		recreate.add(func() {
			c.deletePod()
			c.pod(source)
		})
		c.deletePod()
	}
	c.claim("shared")
	c.patch("two", claimed("shared", "/keep"))
	c.await(others, "mounted", mounted)
	for range pairs {
		attach.add(attached("shared"))
		detach.add(func() {
			c.patch("one")
			c.await(events, "detached", detached)
		})
	}
	c.patch("two")
	c.await(others, "detached", detached)
	pod := "delete and re-create a Pod with the claim"
	r.times("cluster: attach a published claim, until mounted", attach, pod, recreate)
	r.times("cluster: detach a published claim, until gone", detach, "", nil)
	r.times("cluster: first attach of a bound claim, direct", direct, "create a Pod with the claim", podFirst)
	r.times("cluster: first attach of a bound claim, by an anchor", anchor, "create a Pod with the claim", podFirst)
	r.times("cluster: make a claim, have it provisioned and attached", provision, "the same with a Pod", podProvision)
	r.budget("attach of a published claim through a real API server", "p50 ≤ "+span(clusterBudget), span(attach.median()), attach.median() <= clusterBudget)
}

func claimed(claim, target string) v1alpha1.DynamicVolume {
	return v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: claim, Target: target}
}

func (c *clusterBench) claim(name string) {
	_, err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Create(c.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: ptr.To(claimClass),
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("32Mi")}}}}, metav1.CreateOptions{})
	c.must(err)
}

// unused waits until no sandbox holds a claim, and its volume is unpublished.
func (c *clusterBench) unused(claim string) {
	w, err := c.client.CoreV1().PersistentVolumeClaims(c.namespace).Watch(c.Context(), metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, claim).String()})
	c.must(err)
	defer w.Stop()
	late := time.After(5 * time.Minute)
	for {
		select {
		case e, ok := <-w.ResultChan():
			if !ok {
				c.Fatalf("the watch of claim %s ended", claim)
			}
			if o, ok := e.Object.(*corev1.PersistentVolumeClaim); ok && !slices.Contains(o.Finalizers, v1alpha1.FinalizerInUse) {
				return
			}
		case <-late:
			c.Fatalf("claim %s is still in use", claim)
		}
	}
}
