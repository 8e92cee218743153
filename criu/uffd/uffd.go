// SPDX-License-Identifier: Apache-2.0

// Package uffd is a typed, allocation-free wrapper of Linux userfaultfd as a
// monitor of other processes uses it: the ioctls that fill memory, the events
// that the monitored process causes, and a probe of what this kernel can do.
//
// Facts are from Documentation/admin-guide/mm/userfaultfd.rst, ioctl_userfaultfd(2),
// fs/userfaultfd.c and mm/userfaultfd.c. Three of them decide how a monitor must
// be written:
//
//   - While a process changes its mappings (fork, mremap, munmap, madvise), from
//     before the change until a little after its event was read, filling fails
//     with EAGAIN and nothing is filled. The monitor must then read events, decide
//     anew where the page belongs and try again.
//   - read returns waiting faults before waiting events.
//   - Nothing tells that a process has exited or called exec. Filling then fails
//     with ESRCH, and [FD.Alive] reports false.
package uffd

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Features of a userfaultfd (UFFD_FEATURE_ in linux/userfaultfd.h).
const (
	FeatureEventFork   = 1 << 1
	FeatureEventRemap  = 1 << 2
	FeatureEventRemove = 1 << 3
	FeatureEventUnmap  = 1 << 6

	// FeatureEvents are the events without which a process cannot be followed
	// that changes its own memory: the ones CRIU turns on for a lazy restore.
	FeatureEvents = FeatureEventFork | FeatureEventRemap | FeatureEventRemove | FeatureEventUnmap
)

// Numbers of linux/userfaultfd.h. They are the same on every architecture of
// the asm-generic ioctl encoding (amd64, arm64, riscv64, s390x).
const (
	apiVersion = 0xaa

	ioctlAPI        = 0xc018aa3f
	ioctlRegister   = 0xc020aa00
	ioctlUnregister = 0x8010aa01
	ioctlWake       = 0x8010aa02
	ioctlCopy       = 0xc028aa03
	ioctlZeropage   = 0xc020aa04
	ioctlContinue   = 0xc020aa07
	ioctlPoison     = 0xc020aa08

	registerMissing = 1 << 0
)

// FD is an open userfaultfd. Every method returns the kernel's error as a
// [unix.Errno], unwrapped, because callers decide by its value.
type FD int

// Open makes a userfaultfd of the calling process with the features given
// (close-on-exec, non-blocking) and turns it on. It needs CAP_SYS_PTRACE or
// vm.unprivileged_userfaultfd=1, and the former for FeatureEventFork: EPERM.
// EINVAL: a feature is unknown to the kernel; ENOSYS: built without it.
func Open(features uint64) (FD, error) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		return -1, errno
	}
	f := FD(fd)
	if _, err := f.api(features); err != nil {
		f.Close()
		return -1, err
	}
	return f, nil
}

// api does the handshake and returns all the features that the kernel knows.
func (f FD) api(features uint64) (uint64, error) {
	a := struct{ api, features, ioctls uint64 }{api: apiVersion, features: features}
	err := f.ioctl(ioctlAPI, unsafe.Pointer(&a))
	return a.features, err
}

// Probe tells which features the kernel knows and whether this process may use
// a userfaultfd with FeatureEvents. The descriptors that it makes are closed
// again. Errors are those of [Open]; features may be set although err is not nil.
func Probe() (features uint64, err error) {
	// The handshake can be done once on a descriptor, so asking takes one and
	// trying another.
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	f := FD(fd)
	features, err = f.api(0)
	f.Close()
	if err != nil {
		return 0, err
	}
	if features&FeatureEvents != FeatureEvents {
		return features, unix.EINVAL
	}
	if f, err = Open(FeatureEvents); err != nil {
		return features, err
	}
	return features, f.Close()
}

// Close closes the descriptor. If it is the last one of its kind, missing pages
// of the process read as zeros from then on and waiting threads go on.
func (f FD) Close() error { return unix.Close(int(f)) }

func (f FD) ioctl(request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(f), request, uintptr(arg))
	if errno != 0 {
		return errno
	}
	return nil
}

// done turns the kernel's answer to a filling ioctl into bytes and an error.
// result is the number of bytes filled, or a negative errno; the system call
// itself fails with EAGAIN whenever not all was filled.
func done(result int64, err error) (int, error) {
	if err == nil || result > 0 {
		return int(result), nil
	}
	return 0, err
}

// Copy fills n bytes of missing pages at dst with the memory at src and wakes
// the threads that wait for them. It returns how many bytes were filled; fewer
// than n without an error means that the next page cannot be filled, and another
// call tells why:
//
//	EAGAIN  mappings are changing: read events, decide anew
//	EEXIST  the page is there (nobody was woken)
//	ENOENT  no registered mapping, or the range leaves it: it must lie in one
//	ESRCH   the process has exited or called exec (ENOSPC before Linux 4.16)
//	ENOMEM  no memory, or over the limit of the process's memory cgroup
//	EFAULT  src cannot be read
func (f FD) Copy(dst uint64, src unsafe.Pointer, n uint64) (int, error) {
	a := struct {
		dst, src, len, mode uint64
		copied              int64
	}{dst: dst, src: uint64(uintptr(src)), len: n}
	err := f.ioctl(ioctlCopy, unsafe.Pointer(&a))
	return done(a.copied, err)
}

// Zero maps the zero page at the missing pages of a range and wakes the threads
// that wait for them. Results are as with [FD.Copy].
func (f FD) Zero(start, n uint64) (int, error) {
	a := struct {
		start, len, mode uint64
		filled           int64
	}{start: start, len: n}
	err := f.ioctl(ioctlZeropage, unsafe.Pointer(&a))
	return done(a.filled, err)
}

// Poison makes an access to the missing pages of a range raise SIGBUS. EINVAL:
// the kernel is older than 6.6. Results are else as with [FD.Copy].
func (f FD) Poison(start, n uint64) (int, error) {
	a := struct {
		start, len, mode uint64
		updated          int64
	}{start: start, len: n}
	err := f.ioctl(ioctlPoison, unsafe.Pointer(&a))
	return done(a.updated, err)
}

// Wake makes the threads that wait for pages of a range try again. Those that
// still miss their page cause a new fault event. It works while mappings change
// and on ranges where nothing is mapped.
func (f FD) Wake(start, n uint64) error {
	a := [2]uint64{start, n}
	return f.ioctl(ioctlWake, unsafe.Pointer(&a))
}

// Register makes missing pages of a range of the process that opened the
// descriptor cause events.
func (f FD) Register(start, n uint64) error {
	a := struct{ start, len, mode, ioctls uint64 }{start: start, len: n, mode: registerMissing}
	return f.ioctl(ioctlRegister, unsafe.Pointer(&a))
}

// Unregister undoes Register and wakes waiting threads. ENOMEM: the process is
// gone. Mind that a mapping that is unregistered in part is split, which the
// process sees when it calls mremap over both parts.
func (f FD) Unregister(start, n uint64) error {
	a := [2]uint64{start, n}
	return f.ioctl(ioctlUnregister, unsafe.Pointer(&a))
}

// Alive tells whether the address space still exists. After an exec, what the
// descriptor belongs to is gone as well.
func (f FD) Alive() bool {
	_, err := f.attempt(0, uint64(unix.Getpagesize()))
	return err != unix.ESRCH
}

// Registered tells whether n bytes from a page-aligned address on lie in one mapping of private anonymous
// memory that is registered with f. EAGAIN: mappings are changing. ESRCH: the process is gone.
func (f FD) Registered(start, n uint64) (bool, error) {
	_, err := f.attempt(start, n)
	switch err {
	case unix.EINVAL: // it was found, but is of the wrong kind for this ioctl
		return true, nil
	case unix.ENOENT:
		if f.Changing() { // perhaps since the kernel looked at that and not at the mappings yet
			return false, unix.EAGAIN
		}
		return false, nil
	}
	return false, err
}

// attempt asks for page cache pages to be mapped at an address, which is never
// possible for anonymous memory. The checks that come before that answer
// questions about the address space without changing it.
func (f FD) attempt(start, n uint64) (int, error) {
	a := struct {
		start, len, mode uint64
		mapped           int64
	}{start: start, len: n}
	err := f.ioctl(ioctlContinue, unsafe.Pointer(&a))
	return done(a.mapped, err)
}

// Changing tells whether a change of mappings is under way: some of its events
// have not been read yet, or the thread that makes it has not gone on since.
func (f FD) Changing() bool {
	// The kernel looks at that first, then refuses the empty range.
	_, err := f.Copy(0, nil, 0)
	return err == unix.EAGAIN
}
