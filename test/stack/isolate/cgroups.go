// SPDX-License-Identifier: Apache-2.0

//go:build linux

package isolate

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// cgroupPrefix and the PID of outer name the cgroup that holds everything inside.
const cgroupPrefix = "thaw-stack-"

// hierarchy is a mounted cgroup file system, of version 1 or 2.
type hierarchy struct {
	mountpoint string
	fstype     string // cgroup or cgroup2
	flags      uintptr
	options    string // for mount(2): the controllers of a version 1 hierarchy
	parent     string // the folder below which outer makes its cgroup
}

// hierarchies lists the cgroup file systems in the order of their mounts.
func hierarchies() ([]hierarchy, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer file.Close()
	own, err := ownCgroups()
	if err != nil {
		return nil, err
	}
	var found []hierarchy
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		// proc(5): ID parent major:minor root mountpoint options [optional...] - type source super-options
		before, after, ok := strings.Cut(lines.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 6 || len(right) < 3 {
			continue
		}
		if right[0] != "cgroup" && right[0] != "cgroup2" {
			continue
		}
		h := hierarchy{mountpoint: left[4], fstype: right[0], flags: unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC}
		if right[0] == "cgroup" {
			for _, option := range strings.Split(right[2], ",") {
				if option != "rw" && option != "ro" && !strings.HasPrefix(option, "release_agent=") {
					h.options = strings.TrimPrefix(h.options+","+option, ",")
				}
			}
		}
		h.parent = h.mountpoint
		// Below the caller's own cgroup its limits go on to hold. In version 2 a cgroup with processes can have no children.
		if path, ok := own[h.options]; ok && h.fstype == "cgroup" {
			h.parent = filepath.Join(h.mountpoint, path)
		}
		found = append(found, h)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, errors.New("no cgroup file system is mounted: mount one on /sys/fs/cgroup")
	}
	return found, nil
}

// ownCgroups gives the caller's cgroup in each version 1 hierarchy, by the hierarchy's controllers as in its mount options.
func ownCgroups() (map[string]string, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	own := make(map[string]string)
	for _, line := range strings.Split(string(text), "\n") {
		// cgroups(7): hierarchy ID:controllers:path
		if parts := strings.SplitN(line, ":", 3); len(parts) == 3 {
			own[parts[1]] = parts[2]
		}
	}
	return own, nil
}

// makeCgroups makes a cgroup in each hierarchy and returns its name.
func makeCgroups(name string) (string, error) {
	all, err := hierarchies()
	if err != nil {
		return "", err
	}
	for _, h := range all {
		dir := filepath.Join(h.parent, name)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return "", fmt.Errorf("make cgroup: %w", err)
		}
		// A version 1 cpuset starts empty and takes no process until it is filled.
		for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
			if value, err := os.ReadFile(filepath.Join(h.parent, f)); err == nil && h.fstype == "cgroup" {
				if err := os.WriteFile(filepath.Join(dir, f), value, 0o644); err != nil {
					return "", fmt.Errorf("set up cgroup: %w", err)
				}
			}
		}
		if h.fstype == "cgroup2" {
			// What the parent does not pass on no runtime can use below. Refused where the parent holds processes.
			_ = enableControllers(h.parent)
		}
	}
	return name, nil
}

// enableControllers passes all of a version 2 cgroup's controllers on to its children.
func enableControllers(dir string) error {
	controllers, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	var last error
	for _, c := range strings.Fields(string(controllers)) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0o644); err != nil {
			last = err
		}
	}
	return last
}

// enterCgroups moves the calling process into the named cgroup of each hierarchy and gives the calling thread a cgroup
// namespace in which that cgroup is the root, also of the mounted file systems.
func enterCgroups(name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, h := range all {
		// 0 is the writer itself, whose PID is another in this namespace.
		if err := os.WriteFile(filepath.Join(h.parent, name, "cgroup.procs"), []byte("0"), 0o644); err != nil {
			return fmt.Errorf("enter cgroup: %w", err)
		}
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("new cgroup namespace: %w", err)
	}
	for _, h := range all {
		if h.fstype != "cgroup2" {
			continue
		}
		// A version 2 cgroup with processes of its own cannot pass controllers on, so the root must be left empty.
		leaf := filepath.Join(h.parent, name, "init")
		if err := os.Mkdir(leaf, 0o755); err != nil {
			return fmt.Errorf("make cgroup: %w", err)
		}
		if err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte("0"), 0o644); err != nil {
			return fmt.Errorf("enter cgroup: %w", err)
		}
	}
	// Runtimes take the first mount of a hierarchy that they see, so the host's must go before the own ones come.
	for i := len(all) - 1; i >= 0; i-- {
		if err := unix.Unmount(all[i].mountpoint, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", all[i].mountpoint, err)
		}
	}
	for _, h := range all {
		if err := unix.Mount(h.fstype, h.mountpoint, h.fstype, h.flags, h.options); err != nil {
			return fmt.Errorf("mount %s (%s) in the cgroup namespace: %w", h.mountpoint, h.options, err)
		}
	}
	return nil
}

// removeCgroups removes the named cgroup and all below it from each hierarchy. All processes in it must have ended.
func removeCgroups(name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range all {
		errs = append(errs, removeTree(filepath.Join(h.parent, name)))
	}
	return errors.Join(errs...)
}

// removeTree removes a cgroup with its descendants, deepest first: their files cannot be unlinked, only the folders.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove cgroup %s: %w", dir, err)
	}
	return nil
}

// sweepCgroups removes what an outer process that was killed could not. Best effort: one that still has processes stays.
func sweepCgroups() {
	all, err := hierarchies()
	if err != nil {
		return
	}
	for _, h := range all {
		stale, _ := filepath.Glob(filepath.Join(h.parent, cgroupPrefix+"*"))
		for _, dir := range stale {
			pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), cgroupPrefix))
			if err != nil || unix.Kill(pid, 0) == nil {
				continue
			}
			_ = removeTree(dir)
		}
	}
}
