package volume_test

import (
	"path"
	"strings"
	"testing"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/volumetest"
)

func FuzzCheckTarget(f *testing.F) {
	for _, c := range volumetest.Malformed() {
		f.Add(c.Entry.Target, "/srv")
	}
	for _, s := range []string{"/data", "/library", "/etcetera", "/run/x", "/var/lib", "/srv/x", "/a b", "/数据", "/..a"} {
		f.Add(s, "/srv/deep/er")
	}
	f.Fuzz(func(t *testing.T, target, denied string) {
		err := volume.CheckTarget(target, []string{denied})
		if err != nil {
			if r := fault.ReasonOf(err); r != fault.InvalidTarget && r != fault.TargetDenied || !fault.IsPermanent(err) {
				t.Fatalf("%q: reason %s of %v", target, r, err)
			}
			return
		}
		// An accepted target is checked by another way than the policy itself: component by component.
		if len(target) > volume.MaxTarget || !utf8.ValidString(target) || path.Clean(target) != target || target == "/" || target[0] != '/' {
			t.Fatalf("%q was accepted", target)
		}
		parts := strings.Split(target[1:], "/")
		for _, d := range append([]string{path.Clean("/" + denied)}, volume.DeniedTargets...) {
			shared := 0
			for i, part := range strings.Split(strings.TrimPrefix(d, "/"), "/") {
				if part == "" || i == len(parts) || parts[i] != part {
					break
				}
				shared++
			}
			all := len(strings.Split(d[1:], "/"))
			if d == "/" || shared == all || shared == len(parts) {
				t.Fatalf("%q was accepted beside %q", target, d)
			}
		}
		for _, part := range parts {
			if part == "" || part == "." || part == ".." || len(part) > 255 || strings.ContainsAny(part, "\x00\n\r\x7f") {
				t.Fatalf("%q was accepted with the component %q", target, part)
			}
		}
	})
}

func FuzzParseSize(f *testing.F) {
	for _, c := range volumetest.Malformed() {
		f.Add(c.Entry.SizeLimit)
	}
	for _, s := range []string{"1Mi", "1.5Gi", "1e9", "1E", "1Ei", "0.0000000001Ei", "9223372036854775807", "18446744073709551616", "1e99"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := volume.ParseSize(s)
		if err != nil {
			if fault.ReasonOf(err) != fault.InvalidSize {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		if n < volume.MinSize || n > volume.MaxSize {
			t.Fatalf("%q: %d bytes", s, n)
		}
		q := resource.MustParse(s)
		if q.CmpInt64(n) != 0 {
			t.Fatalf("%q is %s, not %d", s, q.String(), n)
		}
	})
}

func FuzzSubPath(f *testing.F) {
	for _, c := range volumetest.Malformed() {
		f.Add(c.Entry.SubPath)
	}
	f.Fuzz(func(t *testing.T, subPath string) {
		e := volumetest.Valid()
		e.SubPath = subPath
		if volume.ValidateEntry(&e, tenant) != nil || subPath == "" {
			return
		}
		if strings.HasPrefix(subPath, "/") || path.Join("/root", subPath) != "/root/"+subPath {
			t.Fatalf("%q was accepted", subPath)
		}
	})
}
