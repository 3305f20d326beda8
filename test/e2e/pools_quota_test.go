package e2e

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// quota lets a namespace have no more of something than it has, and returns how many that are.
func (c *cluster) quota(of corev1.ResourceName) (n int64) {
	c.t.Helper()
	quotas := c.client.CoreV1().ResourceQuotas(c.namespace)
	_, err := quotas.Create(c.t.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "few"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{of: resource.MustParse("1000")}}}, metav1.CreateOptions{})
	must(c.t, err)
	c.wait("the quota counts", func() (bool, string) {
		q, err := quotas.Get(c.t.Context(), "few", metav1.GetOptions{})
		must(c.t, err)
		used, counted := q.Status.Used[of]
		n = used.Value()
		return counted && n > 0, fmt.Sprint(q.Status)
	})
	c.patchQuota(of, n)
	return n
}

func (c *cluster) patchQuota(of corev1.ResourceName, n int64) {
	c.t.Helper()
	quotas := c.client.CoreV1().ResourceQuotas(c.namespace)
	q, err := quotas.Get(c.t.Context(), "few", metav1.GetOptions{})
	must(c.t, err)
	q.Spec.Hard[of] = *resource.NewQuantity(n, resource.DecimalSI)
	_, err = quotas.Update(c.t.Context(), q, metav1.UpdateOptions{})
	must(c.t, err)
	c.wait("the quota is known", func() (bool, string) {
		q, err := quotas.Get(c.t.Context(), "few", metav1.GetOptions{})
		must(c.t, err)
		hard := q.Status.Hard[of]
		return hard.Value() == n, fmt.Sprint(q.Status)
	})
}

// saysSo waits until a condition has a reason, and a message that ends with the API server's words.
func (c *cluster) saysSo(what string, conditions func() []metav1.Condition, kind, reason, words string) string {
	c.t.Helper()
	message := ""
	c.wait(what+" tells of the quota", func() (bool, string) {
		cond := meta.FindStatusCondition(conditions(), kind)
		if cond == nil {
			return false, "no condition " + kind
		}
		message = cond.Message
		return cond.Status == metav1.ConditionFalse && cond.Reason == reason && strings.HasSuffix(message, words), fmt.Sprintf("%+v; want %s, …%s", cond, reason, words)
	})
	return message
}

func (c *cluster) set(name string) *agentsv1alpha1.SandboxSet {
	c.t.Helper()
	return get[agentsv1alpha1.SandboxSet](c, sandboxSets, name)
}

// What a quota refuses is said at once and word for word, by the sandbox, its set and the claim; and what was refused comes
// when there is room.
func TestQuotasOfPools(t *testing.T) {
	c := pools(t)
	c.pool("pool", 1, "standard", "")
	ofSet := func() []metav1.Condition { return c.set("pool").Status.Conditions }
	ofClaim := func() []metav1.Condition { return c.claimed("mine").Status.Conditions }
	words := func(of corev1.ResourceName, n int64) string {
		return fmt.Sprintf("is forbidden: exceeded quota: few, requested: %s=1, used: %s=%d, limited: %s=%d", of, of, n, of, n)
	}
	raise := func(c *cluster) {
		c.t.Helper()
		must(c.t, c.client.CoreV1().ResourceQuotas(c.namespace).Delete(c.t.Context(), "few", metav1.DeleteOptions{}))
	}

	if !t.Run("pods", func(t *testing.T) {
		c := c.in(t)
		of := corev1.ResourcePods
		refused := words(of, c.quota(of))
		c.take("mine", "pool", ", replicas: 2")
		m := c.saysSo("the claim", ofClaim, agentsv1alpha1.ClaimClaimed, "POD_REFUSED", refused)
		if !strings.HasPrefix(m, "1 of 2 sandboxes are claimed; sandbox pool-") {
			t.Error(m)
		}
		c.saysSo("the set", ofSet, agentsv1alpha1.SetReady, "POD_REFUSED", refused)
		name := c.poolOf("pool")[0]
		c.saysSo("the sandbox", func() []metav1.Condition { return c.get(name).Status.Conditions }, v1alpha1.ConditionScheduled, "POD_REFUSED", refused)
		if st := c.get(name).Status; st.Phase != v1alpha1.SandboxPending || st.Reason != "POD_REFUSED" || !strings.HasSuffix(st.Message, refused) {
			t.Errorf("%s %s: %s", st.Phase, st.Reason, st.Message)
		}
		for about, kind := range map[string]string{name: "Sandbox", "mine": "SandboxClaim"} {
			c.eventSays(kind, about, "POD_REFUSED", refused)
		}
		raise(c)
		c.over("mine", agentsv1alpha1.ClaimCompleted)
		c.whole("pool", 1)
	}) {
		return
	}
	t.Run("claims", func(t *testing.T) {
		c := c.in(t)
		of := corev1.ResourcePersistentVolumeClaims
		refused := words(of, c.quota(of))
		c.patch(sandboxSets, "pool", `{"spec":{"replicas":2}}`)
		c.saysSo("the set", ofSet, agentsv1alpha1.SetReady, "CLAIM_REFUSED", refused)
		for _, name := range c.poolOf("pool") {
			if c.get(name).Status.Phase == v1alpha1.SandboxRunning {
				continue
			}
			c.saysSo("the sandbox", func() []metav1.Condition { return c.get(name).Status.Conditions }, v1alpha1.ConditionVolumeClaimsBound, "CLAIM_REFUSED", refused)
			c.eventSays("Sandbox", name, "CLAIM_REFUSED", refused)
		}
		raise(c)
		c.whole("pool", 2)
	})
	t.Run("sandboxes", func(t *testing.T) {
		c := c.in(t)
		of := corev1.ResourceName("count/sandboxes.sandbox.flux.io")
		refused := words(of, c.quota(of))
		c.patch(sandboxSets, "pool", `{"spec":{"replicas":3}}`)
		c.saysSo("the set", ofSet, agentsv1alpha1.SetReady, "FORBIDDEN", refused)
		c.eventSays("SandboxSet", "pool", "FORBIDDEN", refused)
		c.take("more", "pool", ", replicas: 3")
		c.saysSo("the claim", func() []metav1.Condition { return c.claimed("more").Status.Conditions }, agentsv1alpha1.ClaimClaimed, "FORBIDDEN", refused)
		c.eventSays("SandboxClaim", "more", "FORBIDDEN", refused)
		raise(c)
		c.over("more", agentsv1alpha1.ClaimCompleted)
		c.whole("pool", 3)
	})
}
