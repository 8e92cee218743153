// SPDX-License-Identifier: Apache-2.0

//go:build linux

package torture

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu"
	"thaw.dev/thaw/criu/lazypages"
	"thaw.dev/thaw/shim/pager"
)

// errCRIU means that CRIU met a limit of its own: it did not dump the program, or gave
// the restore up because a thread that it was about to let go was ended by one that
// it had let go before.
var errCRIU = errors.New("a limit of criu")

// run is one run of a program, from start to end. It is the first process of a
// PID namespace, so that the dumped PIDs are free again when they are needed.
type run struct {
	criu    string
	dir     string
	program []string
	// running: the program does not wait for the dump.
	running bool
	pid     int
	result  pager.Stats
}

// firstPID is where the program's PIDs begin: above those of the run's own threads.
const firstPID = 1000

// enterPIDs sets up the PID namespace that this process is the first one of.
func enterPIDs() error {
	if os.Getpid() != 1 {
		return errors.New("not the first process of a PID namespace")
	}
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	return os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(firstPID)), 0o644)
}

func (r *run) output() string { return filepath.Join(r.dir, "output") }
func (r *run) images() string { return filepath.Join(r.dir, "images") }
func (r *run) work() string   { return filepath.Join(r.dir, "work") }

// start starts the program and waits until it is ready to be dumped.
func (r *run) start(ctx context.Context) error {
	for _, d := range []string{r.images(), r.work()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return err
		}
	}
	out, err := os.OpenFile(r.output(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	p, err := os.StartProcess(r.program[0], r.program, &os.ProcAttr{
		Dir: "/", Files: []*os.File{null, out, out}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return err
	}
	r.pid = p.Pid
	if err := p.Release(); err != nil {
		return err
	}
	return r.await(ctx, "ready")
}

// await waits until the program has written a line.
func (r *run) await(ctx context.Context, line string) error {
	for tick := time.Tick(2 * time.Millisecond); ; {
		text, err := os.ReadFile(r.output())
		if err != nil {
			return err
		}
		if bytes.Contains(text, []byte(line+"\n")) {
			return nil
		}
		if s := complaint(text); s != "" {
			return errors.New(s)
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return fmt.Errorf("the program did not come to %q: %w\n%s", line, ctx.Err(), stacks())
		}
	}
}

// complaint returns what a program said about a difference, the first one first.
func complaint(output []byte) string {
	if i := bytes.Index(output, []byte("torture: ")); i >= 0 {
		return strings.TrimSpace(string(output[i:]))
	}
	return ""
}

// dump dumps the program, which ends it. A program that goes on meanwhile may be in
// a state that CRIU cannot dump, and is then dumped a little later.
func (r *run) dump(ctx context.Context) error {
	tries := 1
	if r.running {
		tries = 8
		<-time.After(rand.N(20 * time.Millisecond))
	}
	for ; ; tries-- {
		err := r.runCRIU(ctx, "dump", "-t", strconv.Itoa(r.pid))
		if err == nil {
			break
		}
		if tries == 1 {
			return fmt.Errorf("%w: %w", errCRIU, err)
		}
		if err := os.RemoveAll(r.images()); err != nil {
			return err
		}
		if err := os.Mkdir(r.images(), 0o700); err != nil {
			return err
		}
	}
	killAll() // orphans, which were not in the tree
	reap()
	return nil
}

// reap waits for all children, which have been killed.
func reap() {
	for {
		if _, err := unix.Wait4(-1, nil, unix.WALL, nil); err != nil && err != unix.EINTR {
			return
		}
	}
}

func (r *run) runCRIU(ctx context.Context, command string, args ...string) error {
	log := filepath.Join(r.work(), command+".log")
	args = append([]string{command, "-D", r.images(), "-W", r.work(), "-o", command + ".log", "-v4", "--manage-cgroups=ignore"}, args...)
	out, err := exec.CommandContext(ctx, r.criu, args...).CombinedOutput()
	if err == nil {
		return nil
	}
	f, ferr := os.Open(log)
	if ferr != nil {
		return fmt.Errorf("criu %s: %w: %s", command, err, out)
	}
	defer f.Close()
	why, _ := criu.FirstError(f)
	return fmt.Errorf("criu %s: %w: %s (%s)", command, err, why, log)
}

// handler passes on what CRIU hands over.
type handler struct{ p *pager.Pager }

func (h handler) Task(pid uint32, fd int) error { return h.p.Add(pid, fd) }
func (h handler) Finished()                     { h.p.Restored() }

// options of a restore.
type options struct {
	policy  pager.Policy
	present float64 // share of chunks that are there from the beginning
	latency time.Duration
	failing float64
	fill    bool // all memory is asked for in the middle
	// expected is the share of chunks that are filled ahead of their touch.
	expected float64
	// resumed is called when the program runs again, before it is told to go on.
	resumed func(*pager.Pager) error
}

// restore restores the program and returns when all its processes have ended. The
// error is what the program found wrong, or what is wrong with the restore.
func (r *run) restore(ctx context.Context, c *checkpoint, o options) (err error) {
	dir, err := os.MkdirTemp(r.dir, "store-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s, err := newStore(c, dir, o.present)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	s.latency, s.failures = o.latency, o.failing

	var mu sync.Mutex
	var fatal error
	p, err := pager.New(pager.Config{Index: c.index, Stores: s.files, Fetcher: s, Policy: o.policy, OnFatal: func(err error) {
		mu.Lock()
		fatal = err
		mu.Unlock()
		killAll()
	}})
	if err != nil {
		return err
	}
	defer func() {
		killAll()
		reap()
		r.result = p.Stats()
		p.Close()
		mu.Lock()
		defer mu.Unlock()
		err = errors.Join(fatal, err)
	}()

	p.Expect(c.some(o.expected))

	l, err := lazypages.Listen(r.work())
	if err != nil {
		return err
	}
	serving, stop := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- l.Serve(serving, handler{p}) }()
	err = r.runCRIU(ctx, "restore", "--lazy-pages", "--restore-detached")
	if err != nil {
		if r.running && strings.Contains(err.Error(), "Unable to detach") {
			err = fmt.Errorf("%w: %w", errCRIU, err)
		}
		stop()
		return errors.Join(err, <-served)
	}
	err = <-served
	stop()
	if err != nil {
		return err
	}
	if o.resumed != nil {
		if err := o.resumed(p); err != nil {
			return err
		}
	}
	if err := unix.Kill(r.pid, unix.SIGUSR1); err != nil {
		return fmt.Errorf("the restored program is gone: %w", err)
	}
	filled := make(chan error, 1)
	filling, end := context.WithCancel(ctx)
	if o.fill {
		go func() { filled <- p.Fill(filling) }()
	} else {
		close(filled)
	}
	err = r.awaitEnd(ctx)
	end()
	if ferr := <-filled; ferr != nil && !errors.Is(ferr, context.Canceled) {
		err = errors.Join(err, ferr)
	}
	return err
}

// awaitEnd waits until the program's first process has ended and looks at how.
func (r *run) awaitEnd(ctx context.Context) error {
	fd, err := unix.PidfdOpen(r.pid, 0)
	if err != nil {
		return fmt.Errorf("the restored program is gone: %w", err)
	}
	defer unix.Close(fd)
	deadline, _ := ctx.Deadline()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(max(0, time.Until(deadline)).Milliseconds()))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("the restored program does not end: a thread was forgotten\n%s", stacks())
		}
		break
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(r.pid, &status, 0, nil); err != nil {
		return err
	}
	text, err := os.ReadFile(r.output())
	if err != nil {
		return err
	}
	if s := complaint(text); s != "" {
		return errors.New(s)
	}
	if status != 0 {
		return fmt.Errorf("the restored program ended with status %#x", status)
	}
	if !bytes.Contains(text, []byte("OK ")) {
		return errors.New("the restored program ended without a word")
	}
	return nil
}

// killAll kills all other processes of the PID namespace.
func killAll() { _ = unix.Kill(-1, unix.SIGKILL) }

// stacks describes what all other processes are doing.
func stacks() string {
	var b strings.Builder
	tasks, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*")
	for _, t := range tasks {
		if strings.HasPrefix(t, "/proc/1/") {
			continue
		}
		fmt.Fprintf(&b, "%s:", t)
		for _, f := range []string{"comm", "wchan", "syscall", "stack"} {
			text, _ := os.ReadFile(filepath.Join(t, f))
			fmt.Fprintf(&b, " %s", strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", " < "))
		}
		b.WriteByte('\n')
	}
	return b.String()
}
