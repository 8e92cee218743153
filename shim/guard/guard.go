// SPDX-License-Identifier: Apache-2.0

// Package guard makes sure that no process sees a wrong page when the process
// that fills its memory is killed.
//
// When the last descriptor of a userfaultfd closes, the kernel hands out zeros
// where pages are missing. A guard is a child of the page handler's process that
// shares its table of descriptors (clone(2) with CLONE_FILES): what one of them
// opens, closes or is given, the other has opened, closed or been given as well. So a
// userfaultfd is in two processes from the moment in which it is in one, that of a
// forked child too, which the kernel puts into the table with the event that tells of
// the fork and before the child runs. When the page handler's process dies, however
// it dies, the table lives on in the guard, which has the container killed, waits until that is
// done, and only then ends and lets the descriptors go.
//
// A program that is started by exec gets a table of its own; so the guard goes on in
// the code and a copy of the memory of the Go program that made it, of which it drops
// what it can, without Go's scheduler and allocator. It makes system calls, and nothing
// else, waits for the death, and then starts the killer: the same program, as what
// Main is, in ordinary Go.
//
// While its parent lives the guard does nothing and owns nothing: it may be killed,
// which is how it is ended, and is then replaced if that was not asked for. It cannot
// be waited for by accident, because its end is not told by SIGCHLD. What it keeps open
// for the moment between the death and its own end is all of the table, sockets too, whose
// other ends learn of the death only when the container is dead.
package guard

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"
)

// restartPause is the time between the unasked-for end of a guard and the next one,
// so that a fault which ends guards costs no processor.
const restartPause = 100 * time.Millisecond

// Guard guards the processes of one container.
type Guard struct {
	cgroups []string
	self    int           // pidfd of this process
	stop    chan struct{} // closed by Stop
	ended   chan struct{} // closed when no process is left

	mu  sync.Mutex
	pid int // 0: there is none
}

// Start makes a guard for the processes that are, and will be, in cgroups or below
// (paths below /sys/fs/cgroup). From its return on they are killed before a
// descriptor of this process closes because this process died. It costs a copy of
// this process's page tables, and memory only where this process changes its own.
// Errors: no process could be made, or the paths are too long.
func Start(cgroups []string) (*Guard, error) {
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return nil, fmt.Errorf("guard of the container's memory: pidfd_open: %w", err)
	}
	g := &Guard{cgroups: cgroups, self: self, stop: make(chan struct{}), ended: make(chan struct{})}
	if g.pid, err = start(self, cgroups); err != nil {
		unix.Close(self)
		return nil, fmt.Errorf("guard of the container's memory: %w", err)
	}
	go g.watch()
	return g, nil
}

// Stop ends the guard. No process of the container may be left, or none may miss a
// page. It may be called more than once.
func (g *Guard) Stop() {
	g.mu.Lock()
	select {
	case <-g.stop:
	default:
		close(g.stop)
		if g.pid != 0 {
			_ = unix.Kill(g.pid, unix.SIGKILL) // it is this process's child, and not reaped
		}
	}
	g.mu.Unlock()
	<-g.ended
}

// watch waits for the guard's end, and starts another one if nobody asked for it.
func (g *Guard) watch() {
	defer close(g.ended)
	defer unix.Close(g.self)
	for {
		if g.pid != 0 {
			awaitEnd(g.pid)
		}
		if g.reaped() {
			return
		}
		select {
		case <-g.stop:
			return
		case <-time.After(restartPause):
		}
		g.restart()
	}
}

// awaitEnd waits until a child has ended, and leaves its number taken.
func awaitEnd(pid int) {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT|unix.WALL, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// reaped frees the number of a guard that has ended, and tells whether that was
// asked for.
func (g *Guard) reaped() (stopped bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	pid := g.pid
	if pid != 0 {
		_, _ = unix.Wait4(pid, nil, unix.WALL, nil) // it has ended: no wait, no error
		g.pid = 0
	}
	select {
	case <-g.stop:
		return true
	default:
	}
	if pid != 0 {
		log.L.WithField("pid", pid).Error("thaw: the guard of a container's memory was killed: another one is started")
	}
	return false
}

func (g *Guard) restart() {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.stop:
		return
	default:
	}
	pid, err := start(g.self, g.cgroups)
	if err != nil {
		log.L.WithError(err).Error("thaw: no guard of a container's memory: it is tried again")
		return
	}
	g.pid = pid
}
