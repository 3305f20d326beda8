package cli

import (
	"encoding/json"
	"io"
	"os"
	"strings"

	"sigs.k8s.io/yaml"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
)

// parseVolume reads the value of --volume: key=value pairs, separated by commas. A key without a value is true.
func parseVolume(text string) (*sandboxv1.DynamicVolume, error) {
	v := &sandboxv1.DynamicVolume{VolumeType: "local"}
	seen := map[string]bool{}
	for pair := range strings.SplitSeq(text, ",") {
		key, value, hasValue := strings.Cut(pair, "=")
		if seen[key] {
			return nil, usagef("--volume %q: %s is set twice", text, key)
		}
		seen[key] = true
		set := map[string]*string{
			"type": &v.VolumeType, "source": &v.Source, "target": &v.Target, "mode": &v.Mode,
			"size": &v.SizeLimit, "sub-path": &v.SubPath, "tenant": &v.TenantId,
		}[key]
		switch {
		case set != nil && value != "":
			*set = value
		case set != nil:
			return nil, usagef("--volume %q: %s has no value", text, key)
		case hasValue && key != "":
			return nil, usagef("--volume %q: %s is not known: write type, source, target, mode, size, sub-path, tenant, ro or force-mount", text, key)
		case key == "ro":
			v.Mode = "ro"
		case key == "force-mount":
			v.ForceMount = true
		default:
			return nil, usagef("--volume %q: %q is no pair like source=/srv/data", text, pair)
		}
	}
	if v.Source == "" || v.Target == "" {
		return nil, usagef("--volume %q: source and target are required", text)
	}
	return v, nil
}

// parseClaimVolume reads the value of --volume of a claim: pairs pv=NAME, target=PATH, subPath=DIR, and the word readOnly. The
// words that run has for the last two will do as well.
func parseClaimVolume(text string) (*sandboxv1.DynamicVolumeMount, error) {
	v := &sandboxv1.DynamicVolumeMount{}
	seen := map[string]bool{}
	for pair := range strings.SplitSeq(text, ",") {
		key, value, hasValue := strings.Cut(pair, "=")
		switch key {
		case "sub-path":
			key = "subPath"
		case "ro":
			key = "readOnly"
		}
		if seen[key] {
			return nil, usagef("--volume %q: %s is set twice", text, key)
		}
		seen[key] = true
		set := map[string]*string{"pv": &v.PvName, "target": &v.MountPath, "subPath": &v.SubPath}[key]
		switch {
		case set != nil && value != "":
			*set = value
		case set != nil:
			return nil, usagef("--volume %q: %s has no value", text, key)
		case key == "readOnly" && !hasValue:
			v.ReadOnly = true
		case key == "readOnly":
			return nil, usagef("--volume %q: write %s without a value, or leave it out", text, key)
		case hasValue && key != "":
			return nil, usagef("--volume %q: %s is not known: write pv, target, subPath or readOnly", text, key)
		default:
			return nil, usagef("--volume %q: %q is no pair like pv=shared-data", text, pair)
		}
	}
	if v.PvName == "" || v.MountPath == "" {
		return nil, usagef("--volume %q: pv and target are required", text)
	}
	return v, nil
}

// parseStatic reads the value of -v: SOURCE:TARGET or SOURCE:TARGET:MODE.
func parseStatic(text string) (*sandboxv1.VolumeMount, error) {
	parts := strings.Split(text, ":")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || parts[1] == "" {
		return nil, usagef("-v %q: write SOURCE:TARGET or SOURCE:TARGET:ro", text)
	}
	m := &sandboxv1.VolumeMount{Source: parts[0], Target: parts[1]}
	if len(parts) == 3 {
		m.Mode = parts[2]
	}
	return m, nil
}

// parseEnv reads the values of --env: NAME=VALUE, or NAME for the value in fluxctl's own environment.
func (a *app) parseEnv(texts []string) ([]*sandboxv1.EnvVar, error) {
	var out []*sandboxv1.EnvVar
	for _, text := range texts {
		name, value, ok := strings.Cut(text, "=")
		if name == "" {
			return nil, usagef("--env %q: write NAME=VALUE", text)
		}
		if !ok {
			value = a.Getenv(name)
		}
		out = append(out, &sandboxv1.EnvVar{Name: name, Value: value})
	}
	return out, nil
}

// parseLabels reads the values of --label: KEY=VALUE.
func parseLabels(texts []string) (map[string]string, error) {
	var out map[string]string
	for _, text := range texts {
		key, value, ok := strings.Cut(text, "=")
		if !ok || key == "" {
			return nil, usagef("--label %q: write KEY=VALUE", text)
		}
		if out == nil {
			out = map[string]string{}
		}
		out[key] = value
	}
	return out, nil
}

// readTemplate reads the value of --template: a file, or stdin for "-", with a PodTemplateSpec or a whole Pod in YAML or JSON.
// What only a Pod has (its name, its status) is left out.
func (a *app) readTemplate(file string) (string, error) {
	var text []byte
	var err error
	if file == "-" {
		text, err = io.ReadAll(a.In)
	} else {
		text, err = os.ReadFile(file)
	}
	if err != nil {
		return "", usagef("--template: %v", err)
	}
	var template map[string]any
	if err := yaml.UnmarshalStrict(text, &template); err != nil {
		return "", usagef("--template %s: it is not the YAML of one object: %v", file, err)
	}
	if kind, ok := template["kind"]; ok && kind != "Pod" {
		return "", usagef("--template %s: it is a %v: write a Pod, or the template of one", file, kind)
	}
	for _, field := range []string{"apiVersion", "kind", "status"} {
		delete(template, field)
	}
	if meta, ok := template["metadata"].(map[string]any); ok {
		delete(meta, "name")
		delete(meta, "namespace")
	}
	out, err := json.Marshal(template)
	return string(out), err
}

// parsePod reads the value of --pod: NAME or NAME/CONTAINER.
func parsePod(text string) (*sandboxv1.PodReference, error) {
	name, container, named := strings.Cut(text, "/")
	if name == "" || named && container == "" {
		return nil, usagef("--pod %q: write NAME or NAME/CONTAINER", text)
	}
	return &sandboxv1.PodReference{Name: name, Container: container}, nil
}
