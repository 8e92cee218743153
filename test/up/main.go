// SPDX-License-Identifier: Apache-2.0

//go:build linux

// up keeps a test stack running for poking at it by hand.
//
//	up start    starts the stack in the background and returns when it is ready
//	up stop     stops it and returns when nothing of it is left
//
// While it runs, build/stack/env sets a shell up for it: `. build/stack/env`, then crictl, ctr and thaw reach the stack. Those
// are small scripts that enter the stack's namespaces, because its sockets and networks exist only there; stack-run does the same
// for any other program (stack-run curl 10.88.0.5:8080).
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/stack/isolate"
	"thaw.dev/thaw/test/workloads"
)

// stopTimeout is more than a stop takes that has to kill everything.
const stopTimeout = 90 * time.Second

// readyLine is how serve tells start that it is ready.
const readyLine = "ready"

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: up start|stop")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "up:", err)
		os.Exit(1)
	}
}

func run(command string) error {
	root, err := stack.Root()
	if err != nil {
		return err
	}
	dir := filepath.Join(root, "build", "stack")
	switch command {
	case "start":
		return start(dir)
	case "stop":
		return stop(dir)
	case "serve":
		return serve(dir)
	default:
		return fmt.Errorf("unknown command %q: use start or stop", command)
	}
}

func pidFile(dir string) string { return filepath.Join(dir, "pid") }

// running gives the host's PID of the stack's init, if it runs.
func running(dir string) (int, bool) {
	text, err := os.ReadFile(pidFile(dir))
	if err != nil {
		return 0, false
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	return pid, err == nil && pid > 1 && unix.Kill(pid, 0) == nil
}

// start runs `up serve` in the background and shows its progress until it is ready.
func start(dir string) error {
	if pid, ok := running(dir); ok {
		return fmt.Errorf("the stack is already up (process %d): make down stops it", pid)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(dir, "up.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	serve := exec.Command("/proc/self/exe", "serve")
	serve.Env = append(os.Environ(), isolate.PIDFileEnv+"="+pidFile(dir))
	serve.Stdout, serve.Stderr = write, log
	serve.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = serve.Start()
	write.Close()
	if err != nil {
		return err
	}
	ready := false
	lines := bufio.NewScanner(read)
	for !ready && lines.Scan() {
		if ready = lines.Text() == readyLine; !ready {
			fmt.Println(lines.Text())
		}
	}
	if !ready {
		return fmt.Errorf("the stack did not start: see %s", log.Name())
	}
	fmt.Printf("The stack is up. Now:  . %s\n", filepath.Join(dir, "env"))
	return serve.Process.Release()
}

// stop ends the stack and waits until its namespaces are gone.
func stop(dir string) error {
	pid, ok := running(dir)
	if !ok {
		fmt.Println("The stack is not up.")
		return nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("stack process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0); err != nil {
		return fmt.Errorf("stack process %d: %w", pid, err)
	}
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(poll, int(stopTimeout.Milliseconds()))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && n == 0 {
			err = errors.Join(fmt.Errorf("did not end within %s, killed", stopTimeout), unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0))
		}
		if err != nil {
			return fmt.Errorf("stack process %d: %w", pid, err)
		}
		fmt.Println("The stack is down.")
		return nil
	}
}

// serve is the stack itself. It runs until it gets a signal.
func serve(dir string) (err error) {
	stack.Isolate()
	ctx, cancel := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer cancel()
	s, err := stack.Start(ctx, stack.Options{Progress: os.Stdout})
	if err != nil {
		fmt.Println(err)
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := s.PushWorkloads(ctx, workloads.All()...); err != nil {
		fmt.Println(err)
		return err
	}
	if err := writeEnv(s, dir); err != nil {
		return err
	}
	defer os.Remove(filepath.Join(dir, "env"))
	fmt.Println(readyLine)
	// The starter stops reading now. The descriptor stays taken, lest another file get its number.
	if err := unix.Dup2(int(os.Stderr.Fd()), int(os.Stdout.Fd())); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// enter runs a program in the stack's namespaces, in the folder that the caller is in.
const enter = `#!/bin/sh
# Written by make up.
exec nsenter -t "$(cat %s)" -m -n -p -C -- /bin/sh -c 'cd "$1" && shift && PATH=%s:$PATH exec "$@"' sh "$PWD" %s "$@"
`

// writeEnv writes the scripts and the env file.
func writeEnv(s *stack.Stack, dir string) error {
	bin := filepath.Join(dir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	for name, program := range map[string]string{
		"crictl":    filepath.Join(s.Bin, "crictl"),
		"ctr":       filepath.Join(s.Bin, "ctr"),
		"runc":      filepath.Join(s.Bin, "runc"),
		"thaw":      filepath.Join(s.Bin, "thaw"),
		"stack-run": "",
	} {
		script := fmt.Sprintf(enter, pidFile(dir), s.Bin, program)
		if err := os.WriteFile(filepath.Join(bin, name), []byte(script), 0o755); err != nil {
			return err
		}
	}
	env := fmt.Sprintf(`# Sets a shell up for the stack that make up started.
export CONTAINER_RUNTIME_ENDPOINT=unix://%[1]s
export IMAGE_SERVICE_ENDPOINT=unix://%[1]s
export CONTAINERD_ADDRESS=%[1]s
export REGISTRY=%[2]s
case ":$PATH:" in *:%[3]s:*) ;; *) export PATH=%[3]s:$PATH ;; esac
`, stack.ContainerdSocket, s.Registry.Addr(), bin)
	return os.WriteFile(filepath.Join(dir, "env"), []byte(env), 0o644)
}
