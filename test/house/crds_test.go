package house

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

// schema is what is looked at of a custom resource's schema.
type schema struct {
	Description string
	Properties  map[string]*schema
	Items       *schema
}

// "kubectl explain" is the manual that everybody has: a field without a description is not in it. What is Kubernetes' own
// (metadata; templates, whose descriptions hack/crds takes out) is explained there.
func TestEveryFieldIsExplained(t *testing.T) {
	kubernetes := []string{".metadata", ".spec.template", ".spec.volumeClaimTemplates"}
	for _, o := range manifests.Objects(t, "config/crd/*_*.yaml") {
		data, err := json.Marshal(o.Object)
		if err != nil {
			t.Fatal(err)
		}
		var crd struct {
			Spec struct {
				Versions []struct {
					Schema struct{ OpenAPIV3Schema *schema }
				}
			}
		}
		if err := json.Unmarshal(data, &crd); err != nil {
			t.Fatal(err)
		}
		t.Run(o.GetName(), func(t *testing.T) {
			fields := 0
			var look func(s *schema, at string)
			look = func(s *schema, at string) {
				if fields++; s.Description == "" && at != ".metadata" {
					t.Errorf("%q has no description: say in its comment what it is, in which unit, and what holds when it is left out", at)
				}
				if slices.Contains(kubernetes, at) {
					return
				}
				of := s
				if s.Items != nil {
					of = s.Items
				}
				for _, name := range slices.Sorted(maps.Keys(of.Properties)) {
					look(of.Properties[name], at+"."+name)
				}
			}
			for _, v := range crd.Spec.Versions {
				look(v.Schema.OpenAPIV3Schema, "")
			}
			if fields < 10 {
				t.Errorf("%d fields were found", fields)
			}
		})
	}
}
