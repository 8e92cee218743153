// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/uffd"
	"thaw.dev/thaw/snapshotter/keeper"
)

const (
	// deathTimeout bounds how long killed processes may take to be gone.
	deathTimeout = 30 * time.Second
	deathPoll    = 5 * time.Millisecond
)

// Main must be called first in the main function of a program that uses Start. If the
// program was started by a guard it does what it was started for, and does not return.
func Main() {
	if len(os.Args) < 2 || os.Args[0] != killerName {
		return
	}
	// Whoever reads the log must not be able to end or to stop this.
	signal.Ignore(unix.SIGPIPE)
	_ = unix.SetNonblock(int(os.Stderr.Fd()), true)
	if err := kill(context.Background(), os.Args[1:], os.Getppid()); err != nil {
		log.L.WithError(err).Error("thaw: the page handler died, and the container is not dead: its memory stays where it is")
		os.Exit(1)
	}
	log.L.WithField("cgroup", os.Args[1]).Error("thaw: the page handler died while pages may have been missing: the container was killed")
	os.Exit(0)
}

// kill kills all that is in cgroups, and returns when no address space is left of those
// whose userfaultfds the guard has.
func kill(ctx context.Context, cgroups []string, guard int) error {
	if err := keeper.Kill(ctx, cgroups); err != nil {
		return err
	}
	// Whether the cgroups were those of all processes that depend on the guard is
	// known to the descriptors themselves.
	fd, err := unix.PidfdOpen(guard, 0)
	if err != nil {
		return fmt.Errorf("guard: %w", err)
	}
	defer unix.Close(fd)
	ctx, cancel := context.WithTimeout(ctx, deathTimeout)
	defer cancel()
	tick := time.NewTicker(deathPoll)
	defer tick.Stop()
	for {
		n, err := living(guard, fd)
		if err != nil || n == 0 {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d address spaces live on, of processes that are not in %q", n, cgroups)
		}
	}
}

// living returns the number of address spaces that depend on the userfaultfds of a
// process.
func living(pid, pidfd int) (n int, err error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		number, err := strconv.Atoi(e.Name())
		if err != nil {
			return 0, err
		}
		if link, err := os.Readlink(filepath.Join(dir, e.Name())); err != nil || link != "anon_inode:[userfaultfd]" {
			continue
		}
		fd, err := unix.PidfdGetfd(pidfd, number, 0)
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
			return 0, nil // a security module or an old kernel (before 5.6) lets nobody look; the cgroups are empty
		}
		if err != nil {
			return 0, os.NewSyscallError("pidfd_getfd", err)
		}
		if uffd.FD(fd).Alive() {
			n++
		}
		unix.Close(fd)
	}
	return n, nil
}
