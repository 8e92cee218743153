// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// filterOf returns the seccomp filter of a process, nil if it has none. Two are an
// error. The process is stopped meanwhile.
func filterOf(pid int) ([]byte, error) {
	runtime.LockOSThread() // a tracer is a thread
	defer runtime.UnlockOSThread()
	if err := unix.PtraceSeize(pid); err != nil {
		return nil, fmt.Errorf("ptrace %d: %w", pid, err)
	}
	defer func() { _ = unix.PtraceDetach(pid) }()
	if err := unix.PtraceInterrupt(pid); err != nil {
		return nil, fmt.Errorf("stop process %d: %w", pid, err)
	}
	var status unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &status, unix.WALL, nil)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return nil, os.NewSyscallError("wait4", err)
		}
	}
	if !status.Stopped() {
		return nil, fmt.Errorf("the container's process ended (status %#x): the profile refuses what runc needs", uint32(status))
	}
	program, err := filterAt(pid, 0)
	if err != nil || program == nil {
		return nil, err
	}
	if more, err := filterAt(pid, 1); err != nil || more != nil {
		return nil, errors.Join(errors.New("the container's process is under more than one filter"), err)
	}
	return program, nil
}

// filterAt returns a stopped process's filter by its place in the order of their
// installation, nil if there are not so many.
func filterAt(pid int, place uintptr) ([]byte, error) {
	get := func(to unsafe.Pointer) (int, error) {
		n, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SECCOMP_GET_FILTER, uintptr(pid), place, uintptr(to), 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.ENOENT, unix.EINVAL: // fewer; none at all
			return 0, nil
		case unix.EACCES, unix.EPERM:
			return 0, errors.New("the kernel does not show filters to this process: containerd must run without a seccomp filter of its own, and with CAP_SYS_ADMIN")
		}
		return 0, fmt.Errorf("read the filter of process %d: %w", pid, errno)
	}
	n, err := get(nil)
	if err != nil || n == 0 {
		return nil, err
	}
	if n > maxProgram/instructionSize {
		return nil, fmt.Errorf("the filter of process %d has %d instructions", pid, n)
	}
	program := make([]byte, n*instructionSize)
	if _, err := get(unsafe.Pointer(&program[0])); err != nil {
		return nil, err
	}
	return program, nil
}
