package node

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/volume/csi"
)

func TestConfigIsChecked(t *testing.T) {
	host := func() (string, error) { return "node", nil }
	for name, tc := range map[string]struct {
		config Config
		want   string
	}{
		"off":             {Config{}, ""},
		"on":              {Config{Pods: PodsConfig{Enabled: true}, Containerd: ContainerdConfig{Address: "/run/c.sock"}}, ""},
		"no containerd":   {Config{Pods: PodsConfig{Enabled: true}}, "containerd.address"},
		"driver":          {Config{CSI: CSIConfig{Drivers: []csi.Driver{{Name: "a.b", Socket: "/a.sock"}}}}, ""},
		"driver's socket": {Config{CSI: CSIConfig{Drivers: []csi.Driver{{Name: "a.b", Socket: "a.sock"}}}}, "csi.drivers"},
		"relative socket": {Config{Pods: PodsConfig{NRISocket: "nri.sock"}}, "pods.nriSocket"},
	} {
		_, err := tc.config.WithDefaults(host)
		if tc.want == "" && err != nil || tc.want != "" && (!errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
}
