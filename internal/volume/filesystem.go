package volume

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// LimitOf says what holds a volume of a filesystem that somebody else made to the sizeLimit that is asked for (not zero):
// total is what the filesystem has in bytes, own whether it is the volume's alone, and recorded what is told of it where
// nothing holds and the operator allows that (BestEffort). Else the error is LIMIT_NOT_ENFORCED, with both figures.
func LimitOf(r Request, total int64, own bool, recorded int64) (v1alpha1.LimitEnforcement, int64, error) {
	switch {
	case own && total > 0 && total <= r.SizeLimitBytes:
		return v1alpha1.LimitCapacity, total, nil
	case r.BestEffort:
		return v1alpha1.LimitBestEffort, recorded, nil
	}
	is := "is larger"
	if !own {
		is = "is not the volume's own"
	}
	return "", 0, fault.New(errdefs.ErrFailedPrecondition, fault.LimitNotEnforced,
		"nothing enforces a sizeLimit of %d bytes: the volume's filesystem has %d bytes and %s; ask for at least its size, leave sizeLimit out, or let the operator allow BestEffort",
		r.SizeLimitBytes, total, is).
		With("requested", strconv.FormatInt(r.SizeLimitBytes, 10)).With("actual", strconv.FormatInt(total, 10))
}

// StillHeld is the error of a Release while mount namespaces of the node have the volume: BUSY, and who they are of.
func StillHeld(held []mount.NamespaceRef) error {
	return fault.New(errdefs.ErrUnavailable, fault.Busy,
		"%d mount namespaces of the node still have it (%s): it is tried again when they have ended or unmounted it", len(held), processesOf(held))
}

// processesOf names some of the processes in mount namespaces.
func processesOf(held []mount.NamespaceRef) string {
	const most = 8
	var pids []string
	for _, ref := range held {
		for _, pid := range ref.PIDs {
			pids = append(pids, fmt.Sprint(pid))
		}
	}
	switch slices.Sort(pids); {
	case len(pids) == 0:
		return "of no process"
	case len(pids) > most:
		pids = append(pids[:most], "…")
	}
	return "processes " + strings.Join(pids, ", ")
}
