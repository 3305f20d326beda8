// Command crds takes the descriptions of Kubernetes' Pods and claims out of the CRDs that controller-gen wrote into a
// directory (<group>_<plural>.yaml): "kubectl explain pod" has them, and with them a Sandbox's CRD is too large for
// "kubectl apply", which keeps a copy of it in an annotation of at most 256 KiB.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"
)

// foreign are the fields below spec that are of large types of Kubernetes.
var foreign = []string{"template", "volumeClaimTemplates"}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: crds DIRECTORY")
		os.Exit(2)
	}
	files, err := filepath.Glob(filepath.Join(os.Args[1], "*_*.yaml"))
	for _, f := range files {
		if err == nil {
			err = rewrite(f)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "crds:", err)
		os.Exit(1)
	}
}

func rewrite(file string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var crd map[string]any
	if err := yaml.Unmarshal(data, &crd); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	for _, version := range crd["spec"].(map[string]any)["versions"].([]any) {
		schema := version.(map[string]any)["schema"].(map[string]any)["openAPIV3Schema"].(map[string]any)
		spec := schema["properties"].(map[string]any)["spec"].(map[string]any)["properties"].(map[string]any)
		for _, name := range foreign {
			if s, ok := spec[name].(map[string]any); ok {
				strip(s, true)
			}
		}
	}
	out, err := yaml.Marshal(crd)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return os.WriteFile(file, append([]byte("---\n"), out...), 0o644)
}

// strip removes the descriptions below a schema, and keeps its own at the top.
func strip(schema map[string]any, top bool) {
	if !top {
		delete(schema, "description")
	}
	for word, value := range schema {
		switch word {
		case "properties":
			for _, property := range value.(map[string]any) {
				strip(property.(map[string]any), false)
			}
		case "items", "additionalProperties":
			if s, ok := value.(map[string]any); ok {
				strip(s, false)
			}
		}
	}
}
