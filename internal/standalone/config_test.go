package standalone

import (
	"os"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

func TestShippedConfigurationIsTheDefault(t *testing.T) {
	data, err := os.ReadFile("../../config/standalone/flux-sandbox.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c, err := ParseConfig(data)
	if err != nil {
		t.Fatal(err)
	}
	c, err = c.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	d, err := (Config{}).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	if c.StateDir != d.StateDir || c.RunDir != d.RunDir || c.Listen != d.Listen || len(c.Groups) != 1 || c.Groups[0].Name != d.Groups[0].Name ||
		c.Groups[0].Spec.FeatureGates != d.Groups[0].Spec.FeatureGates {
		t.Errorf("the shipped file gives %+v, the defaults are %+v", c, d)
	}
	if !d.Groups[0].Spec.FeatureGates.DynamicVolumeMount || d.Groups[0].Name != v1alpha1.DefaultGroup {
		t.Errorf("the quick start's group is %+v", d.Groups[0])
	}
}

func TestWrongConfigurationIsRefusedWithTheReason(t *testing.T) {
	for text, want := range map[string]string{
		"nodde: x":                                      `unknown field "nodde"`,
		"volumes: {local: [{pth: /a}]}":                 `unknown field "pth"`,
		"node: Not A Name":                              "node",
		"stateDir: relative":                            "stateDir",
		"runDir: /":                                     "runDir",
		"runDir: /a/../b":                               "runDir",
		"log: {level: loud}":                            "log.level",
		"log: {format: xml}":                            "log.format",
		"volumes: {local: [{path: a}]}":                 "absolute",
		"volumes: {local: [{path: /}]}":                 "local",
		"volumes: {local: [{path: /a, backing: tape}]}": "backing",
		"volumes: {pool: /a/b, local: [{path: /a}]}":    "one contains the other",
		"volumes: {pool: /a/b, local: [{path: '/a/{tenantId}'}]}":    "one contains the other",
		"volumes: {pool: /a, local: [{path: /a/b, backing: image}]}": "one contains the other",
		"stateDir: /s\nvolumes: {local: [{path: /s/volumes}]}":       "one contains the other",
		"volumes: {prepareRate: -1}":                                 "prepareRate",
		"volumes: {prepareBurst: -1}":                                "prepareBurst",
		"groups: [{name: A}]":                                        "groups[0].name",
		"groups: [{name: a, namespace: B.c}]":                        "groups[0].namespace",
		"groups: [{name: a}, {name: a}]":                             "twice",
		"listen: unix:///" + strings.Repeat("a", 120):                "at most",
		"listen: tcp://x":                                            "unix socket",
	} {
		c, err := ParseConfig([]byte(text))
		if err == nil {
			_, err = c.withDefaults()
		}
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want InvalidArgument with %q", text, err, want)
		}
	}
}
