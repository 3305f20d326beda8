package clusteragent

import (
	"slices"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/csi"
)

// The built-in driver is allowed, where the file says or where it is by default.
func TestBuiltInDriverIsAllowed(t *testing.T) {
	const file = "controller: a:1\ncontrollerName: c\n"
	foreign := csi.Driver{Name: "foreign.example.com", Socket: "/f.sock"}
	for name, tc := range map[string]struct {
		file string
		want []csi.Driver
	}{
		"default": {file, []csi.Driver{{Name: csidriver.Name, Socket: defaultCSISocket(""), NodeLocal: true}}},
		"elsewhere": {file + "csi: {drivers: [{name: " + csidriver.Name + ", socket: /else.sock, nodeLocal: true}]}\n",
			[]csi.Driver{{Name: csidriver.Name, Socket: "/else.sock", NodeLocal: true}}},
		"another too": {file + "csi: {drivers: [{name: foreign.example.com, socket: /f.sock}]}\n",
			[]csi.Driver{foreign, {Name: csidriver.Name, Socket: defaultCSISocket(""), NodeLocal: true}}},
	} {
		c, err := ParseConfig([]byte(tc.file), func(string) string { return "" }, func() (string, error) { return "node", nil })
		if err != nil || !slices.Equal(c.CSI.Drivers, tc.want) {
			t.Errorf("%s: %+v, %v", name, c.CSI.Drivers, err)
		}
	}
}
