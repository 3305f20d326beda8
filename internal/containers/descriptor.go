package containers

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"regexp"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/pkg/identifiers"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// DescriptorLabel is the one containerd label of a sandbox's container: its Descriptor as JSON.
const DescriptorLabel = "sandbox.flux.io/descriptor"

// DescriptorVersion is the version that this build writes. A reader accepts any version and ignores what it does not
// know.
const DescriptorVersion = 1

// maxLabel is containerd's limit on the length of a label's key and value together (its labels package).
const maxLabel = 4096

// Descriptor is a sandbox's identity, enough to rebuild the registry after a loss of everything but containerd.
type Descriptor struct {
	Version int `json:"version"`
	// UID names the sandbox in containerd and in every file and cgroup: 1 to 76 letters and digits, separated by single
	// '.', '_' or '-'.
	UID       string `json:"uid"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	TenantID  string `json:"tenantID,omitempty"`
	Group     string `json:"group,omitempty"`
	SubGroup  string `json:"subGroup,omitempty"`
	// RestartPolicy is kept for the caller, who applies it.
	RestartPolicy string `json:"restartPolicy,omitempty"`
	// SpecHash tells one specification from another: Create with the same UID and another hash is refused. Empty in a
	// Spec: computed from it.
	SpecHash string `json:"specHash"`
	// CreatedAt is set by Create when zero.
	CreatedAt time.Time         `json:"createdAt"`
	Labels    map[string]string `json:"labels,omitempty"`
}

// EnvVar is a variable of the environment.
type EnvVar struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Resources are a sandbox's limits; zero is none, for PidsLimit the configuration's default.
type Resources struct {
	// CPUMilli is CPU time in thousandths of one CPU.
	CPUMilli int64 `json:"cpuMilli,omitempty"`
	// MemoryBytes limits memory, swap excluded; at least MinMemory.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	// PidsLimit limits processes and threads, those of the sandbox's PID 1 (about five) included.
	PidsLimit int64 `json:"pidsLimit,omitempty"`
}

// MinMemory and MinPids are what the runtime and the sandbox's PID 1 need themselves.
const (
	MinMemory = v1alpha1.MinMemoryBytes
	MinPids   = 16
)

// Spec says what to run.
type Spec struct {
	Descriptor
	// Image is a reference; "busybox" means docker.io/library/busybox:latest.
	Image string
	// Command replaces the image's entrypoint (and discards its command), Args the image's command.
	Command, Args []string
	// Env is added to the image's environment.
	Env []EnvVar
	// WorkingDir is absolute; it replaces the image's. It may lie on a volume.
	WorkingDir string
	Resources  Resources
	// Hostname defaults to Name.
	Hostname string
}

// hostnamePattern is RFC 1123's: labels joined by dots. sethostname(2) takes at most 64 bytes.
var hostnamePattern = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*$`)

// complete validates the spec and fills in what has a default.
func (s Spec) complete(now time.Time) (Spec, error) {
	if err := validateUID(s.UID); err != nil {
		return s, err
	}
	if s.Image == "" {
		return s, invalid("sandbox %s: no image given", s.UID)
	}
	setDefault(&s.Hostname, s.Name)
	setDefault(&s.Hostname, s.UID)
	if len(s.Hostname) > 64 {
		s.Hostname = strings.TrimRight(s.Hostname[:64], "-.")
	}
	if !hostnamePattern.MatchString(s.Hostname) {
		return s, invalid("sandbox %s: host name %q: must be letters, digits, '-' and '.'", s.UID, s.Hostname)
	}
	if s.WorkingDir != "" && (!path.IsAbs(s.WorkingDir) || strings.Contains(s.WorkingDir, "\x00")) {
		return s, invalid("sandbox %s: working directory %q: must be an absolute path", s.UID, s.WorkingDir)
	}
	if err := validateEnv(s.Env); err != nil {
		return s, errorf(err, "sandbox %s", s.UID)
	}
	for _, a := range append(append([]string(nil), s.Command...), s.Args...) {
		if strings.Contains(a, "\x00") {
			return s, invalid("sandbox %s: an argument of the command contains a NUL byte", s.UID)
		}
	}
	if m := s.Resources.MemoryBytes; m < 0 || (m > 0 && m < MinMemory) {
		return s, invalid("sandbox %s: memory limit of %d bytes: must be at least %d", s.UID, m, MinMemory)
	}
	// The kernel's smallest CPU quota is 1 ms of a period of 100 ms.
	if c := s.Resources.CPUMilli; c < 0 || (c > 0 && c < 10) {
		return s, invalid("sandbox %s: CPU limit of %dm: must be at least 10m", s.UID, c)
	}
	if p := s.Resources.PidsLimit; p < 0 || (p > 0 && p < MinPids) {
		return s, invalid("sandbox %s: limit of %d processes: must be at least %d", s.UID, p, MinPids)
	}
	if s.SpecHash == "" {
		s.SpecHash = s.hash()
	}
	setDefault(&s.Version, DescriptorVersion)
	if s.CreatedAt.IsZero() {
		s.CreatedAt = now.UTC()
	}
	return s, nil
}

// hash covers everything that the container is made of.
func (s Spec) hash() string {
	s.CreatedAt = time.Time{}
	data, err := json.Marshal(s)
	if err != nil {
		panic(fmt.Sprintf("encode a sandbox's spec: %v", err)) // only strings, numbers and maps of strings
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:16])
}

func validateEnv(env []EnvVar) error {
	for _, e := range env {
		if e.Name == "" || strings.ContainsAny(e.Name, "=\x00") || strings.Contains(e.Value, "\x00") {
			return invalid("environment variable %q: the name must not be empty or contain '=', and neither it nor the value a NUL", e.Name)
		}
	}
	return nil
}

func validateUID(uid string) error {
	if err := identifiers.Validate(uid); err != nil {
		return invalid("sandbox UID %q: %v", uid, err)
	}
	return nil
}

func (d Descriptor) label() (string, error) {
	data, err := json.Marshal(d)
	if err != nil {
		return "", fmt.Errorf("encode the descriptor of sandbox %s: %w", d.UID, err)
	}
	if len(DescriptorLabel)+len(data) > maxLabel {
		return "", invalid("sandbox %s: name, tenant, group and labels take %d bytes: containerd keeps at most %d",
			d.UID, len(data), maxLabel-len(DescriptorLabel))
	}
	return string(data), nil
}

// parseDescriptor reads the label of a container; ok is false for one that is not a sandbox of ours.
func parseDescriptor(id string, labels map[string]string) (d Descriptor, ok bool) {
	if json.Unmarshal([]byte(labels[DescriptorLabel]), &d) != nil || d.UID != id {
		return Descriptor{}, false
	}
	return d, true
}
