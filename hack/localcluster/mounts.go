package main

import (
	"os"
	"strings"
)

// mountsBelow lists the mounts at a folder and below it, in the order in which they were made.
func mountsBelow(dir string) ([]string, error) {
	content, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return mountPoints(string(content), func(point, _ string) bool { return within(point, dir) }), nil
}

// cgroupMounts lists where control groups are: one place, or with version 1 one for each controller.
func cgroupMounts() ([]string, error) {
	content, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return mountPoints(string(content), func(_, fstype string) bool { return fstype == "cgroup" || fstype == "cgroup2" }), nil
}

// mountPoints reads mountinfo: ID PARENT DEV ROOT POINT OPTIONS [TAGS…] - FSTYPE SOURCE OPTIONS.
func mountPoints(mountinfo string, want func(point, fstype string) bool) []string {
	var points []string
	for line := range strings.Lines(mountinfo) {
		left, right, _ := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if len(l) < 5 || len(r) < 1 {
			continue
		}
		if point := unescape.Replace(l[4]); want(point, r[0]) {
			points = append(points, point)
		}
	}
	return points
}

// unescape undoes what the kernel does to names in mountinfo.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// within says whether a path is a folder or below it.
func within(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }
