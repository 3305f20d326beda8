package e2e

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"
)

// rights are what somebody may do: "verb resource.group/name".
type rights map[string]bool

func (r rights) add(verbs, groups, resources, names []string) {
	if len(names) == 0 {
		names = []string{"*"}
	}
	for _, v := range verbs {
		for _, g := range groups {
			for _, res := range resources {
				for _, n := range names {
					r[v+" "+res+"."+g+"/"+n] = true
				}
			}
		}
	}
}

func (r rights) without(other rights) rights {
	left := rights{}
	for right := range r {
		if !other[right] {
			left[right] = true
		}
	}
	return left
}

func (r rights) String() string { return strings.Join(slices.Sorted(maps.Keys(r)), "\n") }

// granted is what the API server says a ServiceAccount of ours may do in a namespace.
func (c *cluster) granted(account, namespace string) rights {
	c.t.Helper()
	config := rest.CopyConfig(c.config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + account,
		Groups: []string{"system:serviceaccounts", "system:authenticated"}}
	client, err := kubernetes.NewForConfig(config)
	must(c.t, err)
	review, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(c.t.Context(),
		&authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace}}, metav1.CreateOptions{})
	must(c.t, err)
	r := rights{}
	for _, rule := range review.Status.ResourceRules {
		r.add(rule.Verbs, rule.APIGroups, rule.Resources, rule.ResourceNames)
	}
	return r
}

// Each component may do what its role in config/kubernetes says, where every verb has its reason, and nothing else.
func TestRightsAreThoseOfTheRoles(t *testing.T) {
	c := open(t)
	data, err := os.ReadFile("../../config/kubernetes/rbac.yaml")
	must(t, err)
	// By the role's kind and name.
	roles := map[string]rights{"ClusterRole flux-sandbox-controller": {}, "Role flux-sandbox-controller": {}, "ClusterRole flux-sandbox-csi": {}}
	for part := range strings.SplitSeq(string(data), "\n---\n") {
		var role rbacv1.ClusterRole // a Role has the same rules
		must(t, yaml.Unmarshal([]byte(part), &role))
		for _, rule := range role.Rules {
			if r := roles[role.Kind+" "+role.Name]; r != nil {
				r.add(rule.Verbs, rule.APIGroups, rule.Resources, rule.ResourceNames)
			}
		}
	}
	for name, r := range roles {
		if len(r) == 0 {
			t.Fatalf("%s is not in the file any more", name)
		}
	}
	everywhere, driver, own := roles["ClusterRole flux-sandbox-controller"], roles["ClusterRole flux-sandbox-csi"], rights{}
	maps.Copy(own, everywhere)
	maps.Copy(own, roles["Role flux-sandbox-controller"])
	anybody := c.granted(c.namespace+":nobody", c.namespace)
	for name, want := range map[string]struct {
		account, namespace string
		rights             rights
	}{
		"controller, anywhere":            {system + ":flux-sandbox-controller", c.namespace, everywhere},
		"controller, in its own":          {system + ":flux-sandbox-controller", system, own},
		"agent, anywhere":                 {system + ":flux-sandbox-agent", c.namespace, rights{}},
		"agent, in the controller's":      {system + ":flux-sandbox-agent", system, rights{}},
		"agent, in the system's":          {system + ":flux-sandbox-agent", "kube-system", rights{}},
		"driver, anywhere":                {system + ":flux-sandbox-csi", c.namespace, driver},
		"driver, in the controller's":     {system + ":flux-sandbox-csi", system, driver},
		"driver, in the system's":         {system + ":flux-sandbox-csi", "kube-system", driver},
		"the namespace's default account": {system + ":default", system, rights{}},
	} {
		got := c.granted(want.account, want.namespace).without(anybody)
		if more := got.without(want.rights); len(more) > 0 {
			t.Errorf("%s: it may do more:\n%s", name, more)
		}
		if less := want.rights.without(got).without(anybody); len(less) > 0 {
			t.Errorf("%s: it may not do what its role says:\n%s", name, less)
		}
	}
}
