package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// mounted says whether something is mounted at a path, by the kernel's list: what hangs is not touched.
func mounted(path string) (bool, error) {
	list, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(list)) {
		if fields := strings.Fields(line); len(fields) > 4 && fields[4] == path {
			return true, nil
		}
	}
	return false, nil
}

// mountImage mounts a disk image, on a loop device that goes with its last mount.
func mountImage(image, target string) error {
	device, err := loopDevice(image)
	if err != nil {
		return fmt.Errorf("a loop device for %s: %w", image, err)
	}
	defer device.Close()
	if err := os.MkdirAll(target, 0o750); err != nil {
		return err
	}
	if err := unix.Mount(device.Name(), target, "ext4", 0, ""); err != nil {
		return fmt.Errorf("mount %s (%s) at %s: %w", image, device.Name(), target, err)
	}
	return nil
}

func loopDevice(image string) (*os.File, error) {
	backing, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer backing.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, err
		}
		device, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		config := unix.LoopConfig{Fd: uint32(backing.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
		copy(config.Info.File_name[:len(config.Info.File_name)-1], image)
		if err = unix.IoctlLoopConfigure(int(device.Fd()), &config); err == nil {
			return device, nil
		}
		device.Close()
		if !errors.Is(err, unix.EBUSY) { // somebody else was faster
			return nil, err
		}
	}
}

// unmount unmounts what is at a path; nothing is well too.
func unmount(path string) error {
	for {
		there, err := mounted(path)
		if err != nil || !there {
			return err
		}
		if err := unix.Unmount(path, 0); err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}
