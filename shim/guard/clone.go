// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"runtime"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// processName is what ps shows.
	processName = "thaw-guard"
	// killerName is the first argument of the killer.
	killerName = "thaw-guard-kill"
	// maxArguments bounds what is passed to the killer, in bytes.
	maxArguments = 16 << 10
	// maxCgroups bounds how many cgroups are.
	maxCgroups = 16
	// retry is the pause after a killer that failed, in seconds.
	retry = 1

	sigsetSize = 8 // of the kernel
)

// process is what a guard uses apart from its code.
type process struct {
	parent int32 // pidfd
	name   [len(processName) + 1]byte
	title  []byte // the first argument of this program, which ps shows as well
	exe    [len("/proc/self/exe") + 1]byte
	text   [maxArguments]byte // arguments, one after another
	argv   [maxCgroups + 2]*byte
	envv   [1]*byte
	useless
}

// next is the process that is being made. It is no variable of a function, because
// those are in memory that the guard drops.
var next struct {
	sync.Mutex
	process
}

// title is the memory of this program's first argument, as the kernel made it.
var title = func() []byte {
	if len(os.Args) == 0 {
		return nil
	}
	return unsafe.Slice(unsafe.StringData(os.Args[0]), len(os.Args[0]))
}()

// start makes a guard and returns its PID.
func start(parent int, cgroups []string) (int, error) {
	if len(cgroups) == 0 || len(cgroups) > maxCgroups {
		return 0, unix.E2BIG
	}
	next.Lock()
	defer next.Unlock()
	p := &next.process
	p.parent, p.title = int32(parent), title
	copy(p.name[:], processName)
	copy(p.exe[:], "/proc/self/exe")
	clear(p.argv[:])
	rest := p.text[:]
	for i, arg := range append([]string{killerName}, cgroups...) {
		if len(arg) >= len(rest) {
			return 0, unix.E2BIG
		}
		n := copy(rest, arg)
		rest[n] = 0
		p.argv[i], rest = &rest[0], rest[n+1:]
	}
	p.useless = uselessMemory()
	pid, errno := clone(p)
	if errno != 0 {
		return 0, os.NewSyscallError("clone", errno)
	}
	return int(pid), nil
}

// useless is memory that a guard does without, apart from what is near its stack.
type useless struct{ from, to uintptr }

// stackKept is how much is kept around the stack.
const stackKept = 64 << 10

// What follows runs in the guard, or may: it must not allocate, grow the stack, block in
// Go's sense or use anything that another thread may have held at the clone. So all of it is
// nosplit, as what package syscall does between fork and exec.

// clone makes the guard's process. In the parent it returns.
//
//go:noinline
//go:nosplit
//go:norace
func clone(p *process) (pid uintptr, errno syscall.Errno) {
	// With all signals blocked: the guard must not run Go's handlers, nor must a
	// signal be taken for both between the clone and the guard's own first call.
	var all, before uint64 = ^uint64(0), 0
	syscall.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&all)), uintptr(unsafe.Pointer(&before)), sigsetSize, 0, 0)
	// No signal tells of the end: so only who asks for such children waits for it.
	flags, stack := uintptr(unix.CLONE_FILES), uintptr(0)
	if runtime.GOARCH == "s390x" {
		flags, stack = stack, flags
	}
	pid, _, errno = syscall.RawSyscall6(unix.SYS_CLONE, flags, stack, 0, 0, 0, 0)
	if errno == 0 && pid == 0 {
		p.guard()
	}
	syscall.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&before)), 0, sigsetSize, 0, 0)
	return pid, errno
}

// guard is the guard's life. It does not return.
//
//go:noinline
//go:nosplit
//go:norace
//go:nocheckptr
func (p *process) guard() {
	p.settle()
	var poll struct {
		fd              int32
		events, revents int16
	}
	poll.fd, poll.events = p.parent, unix.POLLIN
	n, _, errno := syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&poll)), 1, 0, 0, 0, 0)
	if errno != 0 || n != 1 || poll.revents&unix.POLLIN == 0 {
		exit(1) // the parent lives: it starts another
	}
	for {
		if p.kill() {
			exit(0)
		}
		pause := unix.Timespec{Sec: retry}
		syscall.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&pause)), 0, 0)
	}
}

// settle makes the guard known by its name, safe from signals to its parent's group,
// and small.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (p *process) settle() {
	syscall.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&p.name)), 0)
	syscall.RawSyscall(unix.SYS_SETSID, 0, 0, 0)
	for i := range p.title {
		if i < len(processName) {
			p.title[i] = p.name[i]
		} else {
			p.title[i] = 0
		}
	}
	if p.to == 0 {
		return
	}
	var here byte
	stack := uintptr(unsafe.Pointer(&here))
	if stack-stackKept > p.from && stack+stackKept < p.to {
		mask := ^uintptr(stackKept - 1)
		low, high := (stack-stackKept)&mask, (stack+2*stackKept)&mask
		syscall.RawSyscall(unix.SYS_MUNMAP, p.from, low-p.from, 0)
		syscall.RawSyscall(unix.SYS_MUNMAP, high, p.to-high, 0)
	}
}

// kill runs the killer, and tells whether the container is dead.
//
//go:noinline
//go:nosplit
//go:norace
func (p *process) kill() bool {
	var none uint64
	var status uint32
	flags, stack := uintptr(unix.SIGCHLD), uintptr(0)
	if runtime.GOARCH == "s390x" {
		flags, stack = stack, flags
	}
	pid, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, flags, stack, 0, 0, 0, 0)
	if errno != 0 {
		return false
	}
	if pid == 0 {
		syscall.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&none)), 0, sigsetSize, 0, 0)
		syscall.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(&p.exe)), uintptr(unsafe.Pointer(&p.argv)), uintptr(unsafe.Pointer(&p.envv)))
		exit(127)
	}
	pid, _, errno = syscall.RawSyscall6(unix.SYS_WAIT4, pid, uintptr(unsafe.Pointer(&status)), unix.WALL, 0, 0, 0)
	return errno == 0 && pid != 0 && status == 0
}

//go:nosplit
//go:norace
func exit(status uintptr) {
	for {
		syscall.RawSyscall(unix.SYS_EXIT_GROUP, status, 0, 0)
	}
}
