package volume

import (
	"path"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

const (
	// MaxTarget is the longest target in bytes (issue 2, part 4).
	MaxTarget = 1024
	// maxPath is the longest source or subPath in bytes, PATH_MAX of limits.h without its NUL.
	maxPath = 4095
	// maxComponent is the longest path component in bytes, NAME_MAX of limits.h.
	maxComponent = 255
)

// DeniedTargets are the directories of a sandbox that no volume may cover, be in or contain (contracts, "Denied
// targets"). See the package comment for /lib*.
var DeniedTargets = []string{
	"/etc", "/proc", "/sys", "/dev", "/bin", "/sbin", "/usr",
	"/lib", "/lib32", "/lib64", "/libx32",
	"/boot", "/run/secrets", "/var/run/secrets",
}

// ReservedTargets are denied as well: what we ourselves put into every sandbox. The one there is lies below /dev,
// which is denied anyway; it is named here so that it stays so.
var ReservedTargets = []string{"/dev/flux-sandbox-init"}

// CheckTarget says whether a volume may be mounted at the path. extraDenied are further denied directories, from
// a group's policy. Reasons: INVALID_TARGET, TARGET_DENIED.
func CheckTarget(target string, extraDenied []string) error {
	if why := checkAbsolute(target, MaxTarget); why != "" {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidTarget,
			"target %q is not valid: %s; write a clean absolute path such as /data", short(target), why)
	}
	if target == "/" {
		return fault.New(errdefs.ErrPermissionDenied, fault.TargetDenied, "no volume may be mounted at / of a sandbox: choose a directory such as /data")
	}
	for _, list := range [][]string{DeniedTargets, ReservedTargets, extraDenied} {
		if denied := Denied(target, list); denied != "" {
			return fault.New(errdefs.ErrPermissionDenied, fault.TargetDenied,
				"no volume may be mounted at %s: it is, is in, or contains %s, which is denied; choose another directory such as /data", target, denied)
		}
	}
	return nil
}

// Denied is the first of the denied directories that a clean absolute path is, is in, or contains; empty for none.
func Denied(p string, list []string) string {
	for _, denied := range list {
		// An operator may have written "/srv/"; a relative path is taken as absolute, to fail closed.
		denied = path.Clean("/" + denied)
		if within(p, denied) || within(denied, p) {
			return denied
		}
	}
	return ""
}

// ValidateTargets refuses volumes of one sandbox that lie at, in or around another. Each target is valid by
// itself. Reasons: TARGET_IN_USE for the same target twice, TARGET_NESTED.
func ValidateTargets(static []v1alpha1.VolumeMount, dynamic []v1alpha1.DynamicVolume) error {
	targets := make([]string, 0, len(static)+len(dynamic))
	add := func(target string) error {
		err := CheckConflict(targets, target)
		targets = append(targets, target)
		return err
	}
	for i := range static {
		if err := add(static[i].Target); err != nil {
			return err
		}
	}
	for i := range dynamic {
		if err := add(dynamic[i].Target); err != nil {
			return err
		}
	}
	return nil
}

// CheckConflict refuses a target that is, is in, or contains one of the taken ones. Reasons: TARGET_IN_USE,
// TARGET_NESTED.
func CheckConflict(taken []string, target string) error {
	for _, t := range taken {
		switch {
		case t == target:
			return fault.New(errdefs.ErrAlreadyExists, fault.TargetInUse,
				"the sandbox has another volume at %s: remove that one first, or choose another target", target)
		case within(target, t), within(t, target):
			return fault.New(errdefs.ErrFailedPrecondition, fault.TargetNested,
				"the targets %s and %s lie in each other, and volumes cannot be nested: choose directories apart", t, target)
		}
	}
	return nil
}

// within says whether a clean absolute path is dir or lies below it.
func within(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir) && p[len(dir)] == '/'
}

// checkAbsolute says what is wrong with an absolute path, empty for nothing.
func checkAbsolute(p string, most int) string {
	switch {
	case p == "":
		return "it is empty"
	case len(p) > most:
		return "it is too long"
	case p[0] != '/':
		return "it is not absolute"
	case path.Clean(p) != p:
		return `it has empty components, "." or "..", or ends in a slash`
	}
	return checkText(p)
}

// checkRelative says what is wrong with a relative path, empty for nothing.
func checkRelative(p string, most int) string {
	switch {
	case len(p) > most:
		return "it is too long"
	case p == "", p == ".":
		return "it names no directory"
	case p[0] == '/':
		return "it is absolute"
	case path.Clean("/"+p) != "/"+p:
		return `it has empty components, "." or "..", or ends in a slash`
	}
	return checkText(p)
}

// checkText says which characters or components of a path cannot be.
func checkText(p string) string {
	if !utf8.ValidString(p) {
		return "it is not UTF-8"
	}
	if strings.ContainsFunc(p, unicode.IsControl) {
		return "it has control characters"
	}
	for c := range strings.SplitSeq(p, "/") {
		if len(c) > maxComponent {
			return "a component is longer than 255 bytes"
		}
	}
	return ""
}
