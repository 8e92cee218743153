// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
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
	// killAtOnce bounds the descriptors that killing takes.
	killAtOnce = 64
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
	tick := time.NewTicker(killPoll)
	defer tick.Stop()
	for {
		left, err := killAll(cgroups)
		if err != nil {
			return fmt.Errorf("kill cgroup: %w", err)
		}
		if left == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d processes are still in %s %s after SIGKILL", left, strings.Join(cgroups, ", "), killTimeout)
		}
	}
}

// killAll kills what is in cgroups now, and returns how many processes that were.
func killAll(cgroups []string) (n int, err error) {
	for _, g := range cgroups {
		// On v2 this leaves nobody; on v1 there is no such file.
		if err := set(g, "cgroup.kill", "1"); err != nil {
			return 0, err
		}
		// On v1 nobody forks, and so gets away, while they are killed one by one.
		if err := set(g, "freezer.state", "FROZEN"); err != nil {
			return 0, err
		}
	}
	for _, g := range cgroups {
		pids, gerr := processes(g)
		n += len(pids)
		for some := range slices.Chunk(pids, killAtOnce) {
			gerr = errors.Join(gerr, killIn(g, some))
		}
		err = errors.Join(err, gerr)
	}
	// The dead of a v1 cgroup die only once it is thawed, whoever froze it.
	for _, g := range cgroups {
		err = errors.Join(err, each(g, func(dir string) error { return set(dir, "freezer.state", "THAWED") }))
	}
	return n, err
}

// set writes a cgroup's file. One that is not there, or whose cgroup is being
// removed, is no error.
func set(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	if errors.Is(err, unix.ENODEV) {
		err = nil
	}
	return errors.Join(err, f.Close())
}

// killIn kills processes, each if it is still the one that is in the cgroup: a
// descriptor holds it while the cgroup is read again.
func killIn(dir string, pids []int) error {
	held := make(map[int]int, len(pids)) // pidfds
	defer func() {
		for _, fd := range held {
			unix.Close(fd)
		}
	}()
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			return fmt.Errorf("process %d: %w", pid, err)
		}
		held[pid] = fd
	}
	pids, err := processes(dir)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if fd, ok := held[pid]; ok {
			if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("process %d: %w", pid, err)
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
