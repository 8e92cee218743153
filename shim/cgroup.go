// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// cgroupPath returns where a container's cgroup is in each hierarchy, as runc will
// have it for the spec.
//
// A container that does not say which cgroup is its own is an error: nobody could
// kill it when its memory cannot be served any more.
func cgroupPath(spec *specs.Spec, systemd bool) (string, error) {
	var asked string
	if spec.Linux != nil {
		asked = spec.Linux.CgroupsPath
	}
	path := asked
	if systemd {
		path = filepath.Join("/", systemdPath(path))
	}
	// runc takes a relative path for one below its own cgroup.
	if !filepath.IsAbs(path) || filepath.Clean(path) == "/" {
		return "", fmt.Errorf("linux.cgroupsPath in the container's spec is %.100q: a restored container needs the absolute path of a cgroup of its own: %w", asked, errdefs.ErrInvalidArgument)
	}
	return filepath.Clean(path), nil
}

// cgroupDirs returns the folders in which the kernel lists the processes of a
// container with a cgroup path. runc puts criu itself there before anything is
// restored, so that killing what these list ends a restore at any moment of it. On
// cgroup v1 each controller has its own; those that every distribution mounts are
// enough.
func cgroupDirs(path string) (dirs []string) {
	if cgroups.Mode() == cgroups.Unified {
		return []string{filepath.Join(cgroupRoot, path)}
	}
	for _, controller := range []string{"pids", "memory", "freezer"} {
		dirs = append(dirs, filepath.Join(cgroupRoot, controller, path))
	}
	return dirs
}

const (
	// A cgroup is still in use for a moment after its last process has died.
	cgroupRetry   = 10 * time.Millisecond
	cgroupRetries = 100
)

// removeCgroups removes the cgroups of a container that has no process any more. runc
// does so unless it was killed while it restored: then it does not know of them.
func removeCgroups(path string) error {
	dirs, err := filepath.Glob(filepath.Join(cgroupRoot, "*"))
	if err != nil {
		return err
	}
	if cgroups.Mode() == cgroups.Unified {
		dirs = []string{cgroupRoot}
	}
	var errs []error
	for _, dir := range dirs {
		if info, err := os.Lstat(dir); err == nil && info.IsDir() { // not co-mounted controllers again
			errs = append(errs, removeCgroup(filepath.Join(dir, path)))
		}
	}
	return errors.Join(errs...)
}

// removeCgroup removes a cgroup and all below it.
func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeCgroup(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	for range cgroupRetries {
		if err = unix.Rmdir(dir); !errors.Is(err, unix.EBUSY) {
			break
		}
		<-time.After(cgroupRetry)
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove cgroup %s: %w", dir, err)
	}
	return nil
}

// systemdPath expands runc's "slice:prefix:name" to the path of the scope below
// the cgroup root: a-b.slice lies in a.slice (systemd.slice(5)).
func systemdPath(s string) string {
	parts := strings.SplitN(s, ":", 3)
	if len(parts) != 3 {
		return s
	}
	slice, prefix, name := parts[0], parts[1], parts[2]
	if slice == "" {
		slice = "system.slice"
	}
	var path string
	stem := strings.TrimSuffix(slice, ".slice")
	if stem != "-" { // the root slice is the root
		for i, c := range stem {
			if c == '-' {
				path = filepath.Join(path, stem[:i]+".slice")
			}
		}
		path = filepath.Join(path, slice)
	}
	unit := name
	if !strings.HasSuffix(name, ".slice") {
		unit = prefix + "-" + name + ".scope"
	}
	return filepath.Join(path, unit)
}

// setOOMScores gives all processes of the first of the cgroups that exists the
// preference of being killed that the spec says; CRIU gave them that of the dump.
func setOOMScores(dirs []string, adj int) error {
	for _, dir := range dirs {
		procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for pid := range strings.FieldsSeq(string(procs)) {
			path := filepath.Join("/proc", pid, "oom_score_adj")
			had, err := os.ReadFile(path)
			if err == nil && strings.TrimSpace(string(had)) != strconv.Itoa(adj) {
				err = os.WriteFile(path, []byte(strconv.Itoa(adj)), 0)
			}
			if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("OOM score of process %s: %w", pid, err)
			}
		}
		return nil
	}
	return nil
}
