// SPDX-License-Identifier: Apache-2.0

//go:build linux

package stack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Process is a server of the stack.
type Process struct {
	Name  string
	cmd   *exec.Cmd
	log   string
	ready chan struct{} // closed when it said so
	done  chan struct{} // closed when it ended
	err   error         // how it ended, valid then
}

// startProcess starts a server that reports readiness as systemd services do (sd_notify(3)), and returns when it has. Its
// output is appended to logFile.
func startProcess(ctx context.Context, logFile, name string, args ...string) (*Process, error) {
	notify, err := listenNotify(name)
	if err != nil {
		return nil, err
	}
	out, err := os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, errors.Join(err, notify.Close())
	}
	defer out.Close()

	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+notify.LocalAddr().String())
	// A group of its own: an interrupt from the terminal is for the test, which then stops the servers in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", name, err), notify.Close())
	}
	p := &Process{Name: name, cmd: cmd, log: logFile, ready: make(chan struct{}), done: make(chan struct{})}
	go p.listen(notify)
	go func() {
		p.err = cmd.Wait()
		close(p.done)
		notify.Close() // ends listen
	}()
	if err := p.awaitReady(ctx); err != nil {
		return nil, errors.Join(err, p.Kill())
	}
	return p, nil
}

// listenNotify makes the datagram socket that NOTIFY_SOCKET names.
func listenNotify(name string) (*net.UnixConn, error) {
	dir := "/run/stack"
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, filepath.Base(name)+".notify")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
}

// listen takes what the process says about itself as long as it runs, and closes p.ready when it is ready.
func (p *Process) listen(notify *net.UnixConn) {
	buf := make([]byte, 4096)
	ready := false
	for {
		n, err := notify.Read(buf)
		if err != nil {
			return
		}
		if !ready && slices.Contains(strings.Split(string(buf[:n]), "\n"), "READY=1") {
			ready = true
			close(p.ready)
		}
	}
}

func (p *Process) awaitReady(ctx context.Context) error {
	select {
	case <-p.ready:
		return nil
	case <-p.done:
		return fmt.Errorf("%s ended before it was ready (%w): %s", p.Name, p.exit(), p.lastLog())
	case <-ctx.Done():
		return fmt.Errorf("%s was not ready in time (%w): %s", p.Name, ctx.Err(), p.lastLog())
	}
}

// exit is how the process ended; never nil, so that it can be wrapped.
func (p *Process) exit() error {
	if p.err == nil {
		return errors.New("exit status 0")
	}
	return p.err
}

// lastLog is the last line of the process's log, which mostly says why.
func (p *Process) lastLog() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return fmt.Sprintf("%s (all of it in %s)", lines[len(lines)-1], p.log)
}

// PID is the process's number in the stack's namespace.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Running says whether the process has not ended yet; false for nil.
func (p *Process) Running() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Stop asks the process to end, and kills it when ctx ends first. An exit status that is not 0 is an error.
func (p *Process) Stop(ctx context.Context) error {
	if !p.Running() {
		return nil
	}
	if err := p.cmd.Process.Signal(unix.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.done:
		if p.err != nil {
			return fmt.Errorf("%s: %w: %s", p.Name, p.err, p.lastLog())
		}
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("%s did not end on SIGTERM: %w", p.Name, ctx.Err()), p.Kill())
	}
}

// Kill ends the process at once, as a crash would, and waits until it is gone.
func (p *Process) Kill() error {
	if !p.Running() {
		return nil
	}
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-p.done
	return nil
}
