package testenv

import (
	"os"
	"path/filepath"
	"strings"
)

// LoopDevices are the loop devices of the machine, "/dev/loop0", with their backing files as the kernel names them: a
// deleted one ends in " (deleted)". (drivers/block/loop.c)
func LoopDevices() map[string]string {
	found := map[string]string{}
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil { // a device that goes meanwhile has none
			found["/dev/"+filepath.Base(filepath.Dir(filepath.Dir(f)))] = strings.TrimSuffix(string(b), "\n")
		}
	}
	return found
}
