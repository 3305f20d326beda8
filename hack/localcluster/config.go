package main

import (
	"bytes"
	"embed"
	"fmt"
	"os"
	"strconv"
	"strings"
	"text/template"
)

//go:embed config
var configs embed.FS

// files are the configurations, by where they go below the folder of configurations.
var files = map[string]string{
	"containerd.toml":                 "containerd.toml",
	"kubelet.yaml":                    "kubelet.yaml",
	"kube-proxy.yaml":                 "kube-proxy.yaml",
	"audit-policy.yaml":               "audit-policy.yaml",
	"cni/10-flux.conflist":            "cni.conflist",
	"registries/docker.io/hosts.toml": "hosts.toml", // it has a server of its own, built in
	"registries/_default/hosts.toml":  "hosts.toml",
	"rules.nft":                       "rules.nft",
}

// writeConfigs writes them all.
func (l layout) writeConfigs() error {
	for to, from := range files {
		content, err := l.render(from, sysResource())
		if err != nil {
			return err
		}
		if err := writeFile(l.config(to), content); err != nil {
			return err
		}
	}
	return nil
}

// render fills one in.
func (l layout) render(name string, sysResource bool) ([]byte, error) {
	t, err := template.New(name).Option("missingkey=error").ParseFS(configs, "config/"+name)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = t.Execute(&out, map[string]any{
		"Dir": l.dir, "Run": l.run, "Containerd": l.containerd(), "CNIPlugins": cniPlugin, "SysResource": sysResource,
		"Node": nodeName, "NodeIP": nodeIP, "PodCIDR": podCIDR, "PodGateway": podGateway, "Block": block, "Registry": registry,
		"Cgroup": cgroup, "Table": nftTable, "CNINetwork": cniNetwork,
	})
	if err != nil {
		return nil, fmt.Errorf("configuration %s: %w", name, err)
	}
	return out.Bytes(), nil
}

// sysResource says whether this process, and so what it starts, has CAP_SYS_RESOURCE.
func sysResource() bool {
	const bit = 24
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		if hex, ok := strings.CutPrefix(line, "CapEff:"); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
			return err == nil && set&(1<<bit) != 0
		}
	}
	return false
}
