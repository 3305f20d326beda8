package anchor

import (
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"
	"strings"

	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// Where kubelet has things (kubelet's folder is an interface to drivers, and does not change).

// volumeOf is the folder of a Pod's volume.
func (s *Source) volumeOf(pod, plugin, pv string) string {
	return filepath.Join(s.config.Kubelet, "pods", pod, "volumes", strings.ReplaceAll(plugin, "/", "~"), pv)
}

// stagedOf is where the driver of a CSI volume stages it.
func (s *Source) stagedOf(v *volume.AnchorVolume) string {
	if v.Driver == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(v.Handle))
	return filepath.Join(s.config.Kubelet, "plugins/kubernetes.io/csi", v.Driver, hex.EncodeToString(sum[:]), "globalmount")
}

// place is where a volume is published.
type place struct {
	pod, path string
	at        mount.Info
}

// publishedFor is where a volume is published for a Pod.
func (s *Source) publishedFor(pod, plugin, pv string) (place, bool, error) {
	dir := s.volumeOf(pod, plugin, pv)
	// Drivers of CSI are given a folder below it, others that one.
	for _, path := range []string{filepath.Join(dir, "mount"), dir} {
		if at, there, err := s.sys.At(path); err != nil || there {
			return place{pod: pod, path: path, at: at}, there, err
		}
	}
	return place{}, false, nil
}

// recorded is where the volume of a record is published: still there, or for any other Pod. Where it is published
// read-only will not do if somebody writes.
func (s *Source) recorded(rec record, readOnly bool) (place, bool, error) {
	if rec.Path != "" && rec.Mount != nil {
		at, there, err := s.sys.At(rec.Path)
		if err != nil {
			return place{}, false, err
		}
		if there && at.Identity() == *rec.Mount {
			return place{pod: rec.Pod, path: rec.Path, at: at}, true, nil
		}
	}
	all, err := s.published(rec)
	if err != nil {
		return place{}, false, err
	}
	for _, p := range all {
		if p.at.ReadOnly && !readOnly {
			continue
		}
		// Again, for its unique id.
		if at, there, err := s.sys.At(p.path); err != nil || there {
			p.at = at
			return p, there, err
		}
	}
	return place{}, false, nil
}

// published are all places at which the volume of a record is published, for whatever Pods.
func (s *Source) published(rec record) ([]place, error) {
	all, err := s.sys.Mounts()
	if err != nil {
		return nil, err
	}
	var places []place
	pods := filepath.Join(s.config.Kubelet, "pods") + "/"
	for _, m := range all {
		rest, below := strings.CutPrefix(m.MountPoint, pods)
		if !below {
			continue
		}
		pod, _, _ := strings.Cut(rest, "/")
		if dir := s.volumeOf(pod, rec.Plugin, rec.PersistentVolume); m.MountPoint == dir || m.MountPoint == filepath.Join(dir, "mount") {
			places = append(places, place{pod: pod, path: m.MountPoint, at: m})
		}
	}
	return places, nil
}

// podsOf are the Pods for which the volume of a record is published.
func (s *Source) podsOf(rec record) ([]string, error) {
	places, err := s.published(rec)
	var pods []string
	for _, p := range places {
		pods = append(pods, p.pod)
	}
	return pods, err
}
