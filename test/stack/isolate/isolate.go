// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package isolate runs the current program again in namespaces of its own, so that whatever it starts (containerd, shims,
// containers, mounts, network devices, cgroups) cannot touch the host and is gone when it ends, however it ends.
//
// Three processes take part:
//
//	outer   the program as it was called. It only forwards signals, waits, and removes the cgroups.
//	init    PID 1 of the new PID namespace. It sets up mounts and cgroups, reaps orphans, and dies with outer.
//	inside  the program once more, with Inside() true; what Enter returns to.
//
// Inside there is: a PID, a mount (nothing propagates), a network (only lo, up) and a cgroup namespace; an empty tmpfs on
// /run, as hosts have it and CRIU wants it; and /etc, /var/lib and /var/log as overlays whose changes vanish. All
// other files are the host's. Because the host's /run is hidden, daemons may use their default socket paths.
package isolate

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// stageEnv says which of the three processes this is.
	stageEnv = "THAW_ISOLATE_STAGE"
	// cgroupEnv tells init the name of the cgroup that outer made for it in each hierarchy.
	cgroupEnv = "THAW_ISOLATE_CGROUP"

	stageInit   = "init"
	stageInside = "inside"

	// PIDFileEnv may name a file in which outer writes the host's PID of init, for nsenter(1). Outer removes it at the end.
	PIDFileEnv = "THAW_ISOLATE_PIDFILE"
)

// Inside says whether the program runs in namespaces made by Enter.
func Inside() bool { return os.Getenv(stageEnv) == stageInside }

// Enter returns only inside. In the two other processes it does their work and exits with the inner program's status.
//
// It must be called at the start of main or TestMain, before goroutines or files are opened that the program run
// again would not have. It needs root.
func Enter() {
	switch os.Getenv(stageEnv) {
	case stageInside:
		return
	case stageInit:
		os.Exit(exitStatus("set up the isolated namespaces", runInit))
	default:
		os.Exit(exitStatus("isolate the test stack", runOuter))
	}
}

// exitStatus runs a process's part and turns an error into a message and status 125, as container tools do.
func exitStatus(what string, part func() (int, error)) int {
	status, err := part()
	if err != nil {
		fmt.Fprintf(os.Stderr, "cannot %s: %v\n", what, err)
		return 125
	}
	return status
}

func runOuter() (status int, err error) {
	if os.Geteuid() != 0 {
		return 0, errors.New("namespaces and mounts need root: run as root")
	}
	sweepCgroups()
	group, err := makeCgroups(cgroupPrefix + strconv.Itoa(os.Getpid()))
	if err != nil {
		return 0, err
	}
	defer func() {
		if rerr := removeCgroups(group); rerr != nil && err == nil {
			err = rerr
		}
	}()

	// The parent-death signal is tied to the thread that forks, not to the process.
	runtime.LockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), stageEnv+"="+stageInit, cgroupEnv+"="+group)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET,
		Pdeathsig:  unix.SIGKILL,
	}
	// Caught from before the start, so that no early signal ends outer before the cgroups are gone.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, forwarded...)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start in new namespaces: %w", err)
	}
	if file := os.Getenv(PIDFileEnv); file != "" {
		if err := os.WriteFile(file, []byte(strconv.Itoa(cmd.Process.Pid)+"\n"), 0o644); err != nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			return 0, fmt.Errorf("write PID file: %w", err)
		}
		defer os.Remove(file)
	}

	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			_ = cmd.Process.Signal(s)
		case err := <-ended:
			return waitStatus(err)
		}
	}
}

// forwarded are the signals by which people, make and go test end a program.
var forwarded = []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT}

func waitStatus(err error) (int, error) {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, nil
	case errors.As(err, &exit):
		return shellStatus(exit.Sys().(syscall.WaitStatus)), nil
	default:
		return 0, err
	}
}

// shellStatus gives a wait status as a shell does: signals as 128 and the number.
func shellStatus(ws syscall.WaitStatus) int {
	if ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return ws.ExitStatus()
}

// runInit is PID 1: it sets the namespaces up, starts the program inside, and reaps until that ends.
func runInit() (int, error) {
	if os.Getpid() != 1 {
		return 0, fmt.Errorf("%s=%s is set outside of a PID namespace: unset it", stageEnv, stageInit)
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, forwarded...)

	// A cgroup namespace belongs to the thread, and what this thread starts inherits it.
	runtime.LockOSThread()
	if err := enterCgroups(os.Getenv(cgroupEnv)); err != nil {
		return 0, err
	}
	if err := setupMounts(); err != nil {
		return 0, err
	}
	if err := loopbackUp(); err != nil {
		return 0, err
	}

	env := []string{stageEnv + "=" + stageInside}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, stageEnv+"=") && !strings.HasPrefix(v, cgroupEnv+"=") {
			env = append(env, v)
		}
	}
	process, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{
		Env:   env,
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
	})
	if err != nil {
		return 0, fmt.Errorf("start inside: %w", err)
	}
	go func() {
		for s := range signals {
			_ = process.Signal(s)
		}
	}()

	// Reaps whatever is orphaned inside. When the program ends, the kernel kills the rest with this PID 1.
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 0, fmt.Errorf("wait: %w", err)
		case pid == process.Pid:
			return shellStatus(ws), nil
		}
	}
}

// loopbackUp sets the only device of a new network namespace up.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	defer unix.Close(fd)
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, request); err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	request.SetUint16(request.Uint16() | unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request); err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	return nil
}
