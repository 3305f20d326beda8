package csi

import (
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Driver is a CSI driver whose volumes are published by us.
type Driver struct {
	// Name is what the driver calls itself, and what PersistentVolumes call it.
	Name string `json:"name"`
	// Socket is where its node service answers: a path on the node.
	Socket string `json:"socket"`
	// NodeLocal says that its volumes lie on disks of this node, which never keep a process waiting for a server.
	NodeLocal bool `json:"nodeLocal,omitempty"`
}

// Config is what a Source needs.
type Config struct {
	// Dir is the folder of the published volumes. It ends with the boot.
	Dir string
	// Drivers are all that may be asked for.
	Drivers []Driver
	// Log is told of what a Sweep cannot clean up; nil for nobody.
	Log *slog.Logger
	// Timeouts bound the calls; those that are zero have their default.
	Timeouts Timeouts
}

// Timeouts bound what a Source waits for.
type Timeouts struct {
	// Ask is for the driver's name and abilities, Publish and Unpublish are for these calls.
	Ask, Publish, Unpublish time.Duration
	// Look is for what is asked of a filesystem.
	Look time.Duration
	// Sweep is for all that a Sweep undoes.
	Sweep time.Duration
	// Held is for other mount namespaces to let go of a volume: one that is just being made for a container has a copy of
	// all mounts for milliseconds.
	Held time.Duration
}

// DefaultTimeouts are those of a driver that kubelet calls, where kubelet has one.
var DefaultTimeouts = Timeouts{Ask: 15 * time.Second, Publish: 2 * time.Minute, Unpublish: 2 * time.Minute, Look: 30 * time.Second, Sweep: 10 * time.Second,
	Held: 2 * time.Second}

func (t Timeouts) withDefaults() Timeouts {
	for _, f := range []struct {
		to *time.Duration
		d  time.Duration
	}{{&t.Ask, DefaultTimeouts.Ask}, {&t.Publish, DefaultTimeouts.Publish}, {&t.Unpublish, DefaultTimeouts.Unpublish},
		{&t.Look, DefaultTimeouts.Look}, {&t.Sweep, DefaultTimeouts.Sweep}, {&t.Held, DefaultTimeouts.Held}} {
		if *f.to == 0 {
			*f.to = f.d
		}
	}
	return t
}

// CheckDrivers says what is wrong with a list of drivers.
func CheckDrivers(drivers []Driver) error {
	seen := map[string]bool{}
	for _, d := range drivers {
		switch {
		case d.Name == "" || strings.ContainsAny(d.Name, "/ \x00"):
			return invalid("driver name %q: must be the name that the driver's PersistentVolumes have in spec.csi.driver", d.Name)
		case seen[d.Name]:
			return invalid("driver %s is listed twice", d.Name)
		case !filepath.IsAbs(d.Socket) || filepath.Clean(d.Socket) != d.Socket:
			return invalid("driver %s: socket %q must be an absolute, clean path", d.Name, d.Socket)
		}
		seen[d.Name] = true
	}
	return nil
}

func invalid(format string, args ...any) error {
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, format, args...)
}
