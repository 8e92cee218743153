// SPDX-License-Identifier: Apache-2.0

// Package headstart begins waits of a restore early.
//
// Twice on its way a restore waits until every processor has been through the kernel's
// scheduler (an RCU grace period: 10 ms and more on an idle machine) because it does
// something that the node has not done for a while: a process is moved to another
// cgroup, and CRIU sets a hardware breakpoint. A second one who does the same a
// moment later does not wait. So the shim does both first, to no other end, beside
// work that needs the time anyway.
//
// None of it is needed: what fails here costs time only.
package headstart

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"unsafe"

	"github.com/containerd/cgroups/v3"
	"golang.org/x/sys/unix"
)

// Breakpoints keeps the kernel ready for breakpoints until it is closed.
type Breakpoints struct {
	opened chan struct{}
	fd     int
	err    error
	close  sync.Once
}

// PrepareBreakpoints begins to make the kernel ready for breakpoints, and returns at
// once. The kernel's perf events, of which breakpoints are a kind, are switched on
// with the first one that belongs to a task and off a second after the last: the one
// that is opened here counts nothing and is never enabled.
func PrepareBreakpoints() *Breakpoints {
	b := &Breakpoints{opened: make(chan struct{})}
	go func() {
		defer close(b.opened)
		attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_DUMMY, Bits: unix.PerfBitDisabled}
		attr.Size = uint32(unsafe.Sizeof(attr))
		const thisThread, anyCPU, noGroup = 0, -1, -1
		b.fd, b.err = unix.PerfEventOpen(&attr, thisThread, anyCPU, noGroup, unix.PERF_FLAG_FD_CLOEXEC)
	}()
	return b
}

// Close lets the kernel switch perf events off. It returns why they could not be
// switched on. It may be called more than once.
func (b *Breakpoints) Close() error {
	<-b.opened
	b.close.Do(func() {
		if b.err == nil {
			unix.Close(b.fd)
		}
	})
	return os.NewSyscallError("perf_event_open", b.err)
}

// cgroupRoot is where cgroups are mounted.
const cgroupRoot = "/sys/fs/cgroup"

// MoveToCgroup returns when a move to another cgroup, which follows soon, will not
// wait: it moves this process to where it is. The lock for that is one for
// all hierarchies; the kernel keeps it ready for the next one for about as long as
// this took. (Mounted with favordynmods, it always is.)
func MoveToCgroup() error {
	groups, unified, err := cgroups.ParseCgroupFileUnified("/proc/self/cgroup")
	if err != nil {
		return err
	}
	dir := filepath.Join(cgroupRoot, unified)
	if path, ok := groups["pids"]; ok {
		dir = filepath.Join(cgroupRoot, "pids", path)
	}
	const itself = "0"
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(itself), 0); err != nil {
		return fmt.Errorf("move to the own cgroup: %w", err)
	}
	return nil
}
