package cli

import (
	"strings"

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
