package local

import (
	"path"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// Option changes a Source that New makes.
type Option func(*Source)

// PersistentVolumes has the Source accept paths for which a PersistentVolume vouches. Use it only where nobody but a
// cluster's controller can ask: the volume's name is all the proof there is. denied are directories of this node that
// are refused all the same, beside DeniedPaths.
func PersistentVolumes(denied ...string) Option {
	return func(s *Source) {
		s.persistent = true
		s.denied = append(s.denied, DeniedPaths...)
		s.denied = append(s.denied, denied...)
		for i := range s.roots {
			// Whoever can write to an image file can write past the limits of its volume, and into it while it is mounted.
			if r := &s.roots[i]; r.Backing == BackingImage {
				s.denied = append(s.denied, "/"+path.Join(r.components[:r.static]...))
			}
		}
	}
}

// DeniedPaths are directories of a node that no PersistentVolume may be, be in or contain: who has them has the node, or
// the data of everybody on it. Kubernetes lets a hostPath volume be any of them.
var DeniedPaths = []string{
	"/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/root", "/run", "/sbin", "/sys", "/usr",
	"/var/run", "/var/lib/kubelet", "/var/lib/containerd", "/var/lib/docker", "/var/lib/containers", "/var/lib/etcd",
}

// everywhere is the root in which paths of PersistentVolumes are found.
var everywhere = root{Root: Root{Path: "/", Backing: BackingDirectory}, tenant: -1}

// vouched is the place of a source for which a PersistentVolume vouches.
func (s *Source) vouched(r *volume.Request) (*place, error) {
	if !s.persistent {
		return nil, fault.New(errdefs.ErrPermissionDenied, fault.SourceDenied,
			"source %s is that of PersistentVolume %s: this node takes sources from its own configuration only, not from PersistentVolumes", r.Source, r.PersistentVolume)
	}
	if denied := volume.Denied(r.Source, s.denied); denied != "" {
		return nil, fault.New(errdefs.ErrPermissionDenied, fault.SourceDenied,
			"PersistentVolume %s is the directory %s, which is, is in, or contains %s: no sandbox may have that; use a directory of its own, such as below /mnt",
			r.PersistentVolume, r.Source, denied)
	}
	return &place{root: &everywhere, prefix: "/", rel: r.Source[1:]}, nil
}
