package volume

import (
	"regexp"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// The bounds of a sizeLimit in bytes.
const (
	// MinSize is 1 MiB: less holds no filesystem, and is a forgotten unit.
	MinSize = 1 << 20
	// MaxSize is 1 EiB, the largest ext4 (ext4(5)). The quantities' own bound of 8 EiB − 1 cannot be used:
	// they cut off what is larger without a word.
	MaxSize = 1 << 60
)

// sizePattern are the quantities that can be a size. Signs and the suffixes below one (m, u, n) are left out,
// and exponents are short: resource.ParseQuantity multiplies 1e999999999 out.
var sizePattern = regexp.MustCompile(`^[0-9]{1,19}(\.[0-9]{1,19})?([KMGTPE]i|[kMGTPE]|[eE]\+?[0-9]{1,2})?$`)

// ParseSize reads a Kubernetes quantity such as "50Gi" or "1.5G" as a number of bytes: a whole one, of MinSize
// to MaxSize. Reason: INVALID_SIZE.
func ParseSize(s string) (int64, error) {
	refuse := func(why string) (int64, error) {
		return 0, fault.New(errdefs.ErrInvalidArgument, fault.InvalidSize,
			"size %q is not valid: %s; write a quantity such as 500Mi or 50Gi", short(s), why)
	}
	if !sizePattern.MatchString(s) {
		return refuse("it is no quantity of bytes")
	}
	q, err := resource.ParseQuantity(s)
	if err != nil {
		return refuse(err.Error())
	}
	if q.CmpInt64(MaxSize) > 0 {
		return refuse("it is more than 1Ei")
	}
	n := q.Value() // rounded up
	if q.CmpInt64(n) != 0 {
		return refuse("it is no whole number of bytes")
	}
	if n < MinSize {
		return refuse("it is less than 1Mi")
	}
	return n, nil
}

// short cuts a string that somebody sent, for a message.
func short(s string) string {
	const most = 128
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}
