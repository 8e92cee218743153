// SPDX-License-Identifier: Apache-2.0

//go:build linux

package isolate

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// scratch is the folder on the private /run that holds the overlays' upper layers.
const scratch = "/run/.isolate"

// shadowed are the folders in which daemons leave state by default: they may write, and it vanishes. Nothing that itself needs
// overlayfs (such as containerd's root) may lie in them.
var shadowed = []string{"/etc", "/var/lib", "/var/log"}

// setupMounts changes the mount namespace into what the package comment promises. It must run in the new PID namespace.
func setupMounts() error {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	resolv, resolvErr := os.ReadFile("/etc/resolv.conf")
	if err := unix.Mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	for i, dir := range shadowed {
		if err := shadow(dir, filepath.Join(scratch, fmt.Sprint(i))); err != nil {
			return err
		}
	}
	// Often a link into the /run that is hidden now; CRI gives it to pods.
	if _, err := os.Stat("/etc/resolv.conf"); err != nil && resolvErr == nil {
		_ = os.Remove("/etc/resolv.conf")
		if err := os.WriteFile("/etc/resolv.conf", resolv, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// shadow lays a writable overlay over dir whose changes go to a folder in memory.
func shadow(dir, memory string) error {
	upper, work := filepath.Join(memory, "upper"), filepath.Join(memory, "work")
	for _, d := range []string{upper, work} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", dir, upper, work)
	if err := unix.Mount("overlay", dir, "overlay", 0, options); err != nil {
		return fmt.Errorf("overlay on %s: %w", dir, err)
	}
	return nil
}
