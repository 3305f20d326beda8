package admission

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// claimTemplate is a claim template with all that it needs, and further members.
func claimTemplate(name, more string) string {
	return `{metadata: {name: "` + name + `"}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}` + more + `}}`
}

// mounting is a Pod template whose container mounts volumes.
func mounting(names ...string) string {
	mounts := ""
	for _, name := range names {
		mounts += `{name: "` + name + `", mountPath: /` + name + `}, `
	}
	return `template: {spec: {containers: [{name: main, image: busybox, volumeMounts: [` + mounts + `]}]}}`
}

func TestClaimTemplates(t *testing.T) {
	c := open(t)
	made := c.made("", `{metadata: {name: claims}, spec: {`+mounting("data", "cache")+`, persistentVolumeClaimRetentionPolicy: {},
		volumeClaimTemplates: [{metadata: {name: data, labels: {a: b}, annotations: {c: d}}, spec: {accessModes: [ReadWriteOnce], storageClassName: standard, resources: {requests: {storage: 1Gi}}}}, `+claimTemplate("cache", "")+`]}}`)
	templates, _, _ := unstructured.NestedSlice(made.Object, "spec", "volumeClaimTemplates")
	if len(templates) != 2 {
		t.Fatalf("templates %v", templates)
	}
	for path, want := range map[string]string{"metadata.labels.a": "b", "metadata.annotations.c": "d", "spec.storageClassName": "standard", "spec.resources.requests.storage": "1Gi"} {
		if got, _, _ := unstructured.NestedString(templates[0].(map[string]any), strings.Split(path, ".")...); got != want {
			t.Errorf("%s is %q", path, got)
		}
	}
	for _, field := range []string{"whenDeleted", "whenScaled"} {
		if got, _, _ := unstructured.NestedString(made.Object, "spec", "persistentVolumeClaimRetentionPolicy", field); got != "Delete" {
			t.Errorf("%s is %q by default", field, got)
		}
	}
	// A sidecar or init container may be the one that mounts it, and a block device counts too.
	for _, template := range []string{
		`template: {spec: {containers: [{name: a}], initContainers: [{name: b, volumeMounts: [{name: data, mountPath: /d}]}]}}`,
		`template: {spec: {containers: [{name: a}, {name: b, volumeDevices: [{name: data, devicePath: /dev/x}]}]}}`,
	} {
		c.verdict(c.dryRunIn("default", `spec: {`+template+`, volumeClaimTemplates: [`+claimTemplate("data", "")+`]}`), template, "")
	}
	const fixed = `volumeClaimTemplates cannot be changed, as the claims are made from them: delete the sandbox and create another`
	for _, tc := range []struct{ patch, sentence string }{
		{`spec: {volumeClaimTemplates: [` + claimTemplate("data", "") + `]}`, fixed},
		{`spec: {volumeClaimTemplates: null}`, fixed},
		{`spec: {persistentVolumeClaimRetentionPolicy: {whenDeleted: Retain}}`, ``},
		{`spec: {persistentVolumeClaimRetentionPolicy: {whenDeleted: Keep}}`, `whenDeleted "Keep" is not valid: write Delete or Retain`},
		{`spec: {persistentVolumeClaimRetentionPolicy: {whenScaled: Keep}}`, `whenScaled "Keep" is not valid: write Delete or Retain`},
		{`spec: {persistentVolumeClaimRetentionPolicy: null}`, ``},
		{`spec: {paused: true}`, ``},
	} {
		err := c.patch(made, tc.patch)
		if got := sentences(err); tc.sentence == "" && err != nil || tc.sentence != "" && !slices.Contains(got, tc.sentence) {
			t.Errorf("%s\ngot  %q\nwant %q", tc.patch, got, tc.sentence)
		}
	}
}

func TestClaimTemplatesThatAreRefused(t *testing.T) {
	c := open(t)
	long := strings.Repeat("x", 64)
	for _, tc := range []struct{ text, sentence string }{
		{`spec: {image: busybox, volumeClaimTemplates: [` + claimTemplate("data", "") + `]}`,
			`volumeClaimTemplates are of a sandbox with template, as its Pod mounts them: use volumeMounts or dynamicVolumes`},
		{`spec: {podRef: {name: web}, volumeClaimTemplates: [` + claimTemplate("data", "") + `]}`,
			`volumeClaimTemplates are of a sandbox with template, as its Pod mounts them: use volumeMounts or dynamicVolumes`},
		{`{metadata: {name: nameless}, spec: {` + mounting("data") + `, volumeClaimTemplates: [{spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}]}}`,
			`a claim template of sandbox nameless has no name: write metadata.name, by which its containers mount it`},
		{`{metadata: {name: sb}, spec: {` + mounting("my.data") + `, volumeClaimTemplates: [` + claimTemplate("my.data", "") + `]}}`,
			`the claim template "my.data" of sandbox "sb" is not valid: its name becomes part of the claim's and a volume of the Pod; write at most 63 lower-case letters, digits and -`},
		{`{metadata: {name: sb}, spec: {` + mounting(long) + `, volumeClaimTemplates: [` + claimTemplate(long, "") + `]}}`,
			`the claim template "` + long + `" of sandbox "sb" is not valid: its name becomes part of the claim's and a volume of the Pod; write at most 63 lower-case letters, digits and -`},
		{`spec: {` + mounting("data") + `, volumeClaimTemplates: [` + claimTemplate("data", "") + `, ` + claimTemplate("data", "") + `]}`,
			`there are two claim templates "data": give each a name of its own`},
		{`spec: {` + mounting("data") + `, volumeClaimTemplates: [` + claimTemplate("data", "") + `, ` + claimTemplate("cache", "") + `]}`,
			`no container mounts the claim template "cache": add it to volumeMounts of a container, or leave it out`},
		{`spec: {` + mounting("data") + `, volumeClaimTemplates: [{metadata: {name: data}, spec: {accessModes: [ReadWriteOnce]}}]}`,
			`the claim template "data" asks for no storage: write spec.accessModes and spec.resources.requests.storage`},
		{`spec: {` + mounting("data") + `, volumeClaimTemplates: [{metadata: {name: data}}]}`,
			`the claim template "data" asks for no storage: write spec.accessModes and spec.resources.requests.storage`},
		{`spec: {` + mounting("data") + `, volumeClaimTemplates: [` + claimTemplate("data", ", volumeName: theirs") + `]}`,
			`the claim template "data" names a PersistentVolume (volumeName): leave it out, or use dynamicVolumes, which check who may use it`},
	} {
		err := c.dryRunIn("default", tc.text)
		c.verdict(err, tc.text, tc.sentence)
	}
	many := ""
	for _, letter := range "abcdefghijklmnopq" {
		many += claimTemplate(string(letter), "") + `, `
	}
	if err := c.dryRunIn("default", `spec: {`+mounting("a")+`, volumeClaimTemplates: [`+many+`]}`); err == nil || !strings.Contains(err.Error(), "must have at most 16 items") {
		t.Errorf("17 templates: %v", err)
	}
	// The largest that is allowed stays within what the rules may cost.
	names, largest := []string{}, ""
	for i := range 16 {
		name := strings.Repeat(string(rune('a'+i)), 63)
		names, largest = append(names, name), largest+claimTemplate(name, "")+`, `
	}
	c.verdict(c.dryRunIn("default", `{metadata: {name: `+strings.Repeat("s", 63)+`}, spec: {`+mounting(names...)+`, volumeClaimTemplates: [`+largest+`]}}`), "the largest", "")
}
