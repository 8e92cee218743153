// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	cgroupRoot = "/sys/fs/cgroup"

	// killTimeout bounds how long killed processes may take to be gone.
	killTimeout = 30 * time.Second
	// killPoll is how often a cgroup is looked at again: v1 tells nobody when it
	// becomes empty.
	killPoll = 5 * time.Millisecond
)

// Kill kills all processes that are in the cgroups or below, and returns when
// they are gone. Cgroups that do not exist have none. The root cgroup, which has
// everybody, is an error.
func Kill(ctx context.Context, cgroups []string) error {
	for _, g := range cgroups {
		if !cgroupPath(g) {
			return fmt.Errorf("kill cgroup: %.100q is no cgroup of a container", g)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	var errs []error
	for _, g := range cgroups {
		if err := killCgroup(ctx, g); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// killCgroup kills what is in a cgroup and below, until nothing is left.
func killCgroup(ctx context.Context, dir string) error {
	err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("kill cgroup: %w", err)
	}
	tick := time.NewTicker(killPoll)
	defer tick.Stop()
	for {
		pids, err := processes(dir)
		if err != nil {
			return fmt.Errorf("kill cgroup: %w", err)
		}
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			if err := killIn(dir, pid); err != nil {
				return fmt.Errorf("kill process %d: %w", pid, err)
			}
		}
		// On v1, frozen processes die only once thawed.
		if err := thaw(dir); err != nil {
			return fmt.Errorf("thaw cgroup: %w", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d processes are still in %s %s after SIGKILL", len(pids), dir, killTimeout)
		}
	}
}

// killIn kills a process if it is still the one that is in the cgroup: the
// descriptor holds it while the cgroup is read again.
func killIn(dir string, pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	pids, err := processes(dir)
	if err != nil {
		return err
	}
	for _, p := range pids {
		if p == pid {
			if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
	}
	return nil
}

// processes returns the PIDs in a cgroup and all below it. A cgroup that does
// not exist has none.
func processes(dir string) ([]int, error) {
	var out []int
	err := each(dir, func(path string) error {
		p, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if errors.Is(err, unix.EOPNOTSUPP) {
			return nil // threads only: their processes are listed further up
		}
		if err != nil {
			return err
		}
		for f := range strings.FieldsSeq(string(p)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 0 {
				out = append(out, pid)
			}
		}
		return nil
	})
	return out, err
}

// thaw thaws a cgroup of the v1 freezer and all below it; others have no such
// file.
func thaw(dir string) error {
	return each(dir, func(path string) error {
		f, err := os.OpenFile(filepath.Join(path, "freezer.state"), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString("THAWED")
		return errors.Join(err, f.Close())
	})
}

// each calls f for a cgroup and all below it. What is removed meanwhile, or is
// not there, is passed over.
func each(dir string, f func(path string) error) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = f(path)
		}
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			return nil
		}
		return err
	})
}
