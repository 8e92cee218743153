// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package pageserver tests that plain CRIU, with its own lazy-pages daemon, restores processes from a checkpoint image whose
// pages come from the node's daemon.
package pageserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/stack/registry"
)

func TestMain(m *testing.M) { stack.Main(m) }

const (
	memoryMiB = 96
	address   = "http://127.0.0.1:8080"
)

// node is a stack whose daemon serves pages.
type node struct {
	t   *testing.T
	ctx context.Context
	*stack.Stack
}

// criu runs CRIU to its end and shows its log after a failure.
func (n *node) criu(work string, args ...string) {
	n.t.Helper()
	out, err := exec.CommandContext(n.ctx, filepath.Join(n.Bin, "criu"), append(args, "-W", work, "-o", args[0]+".log", "-v4", "--manage-cgroups=ignore")...).CombinedOutput()
	if err != nil {
		n.t.Fatalf("criu %s: %v: %s\n%s", args[0], err, out, tail(filepath.Join(work, args[0]+".log")))
	}
}

func tail(path string) string {
	p, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(p)), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}

// work makes a folder for CRIU.
func (n *node) work() string {
	n.t.Helper()
	dir, err := os.MkdirTemp("/run", "criu-")
	if err != nil {
		n.t.Fatal(err)
	}
	return dir
}

// begin starts what is checkpointed, a shell that waits for a server, and returns the shell's PID once the server answers.
func (n *node) begin() int {
	n.t.Helper()
	// What the test itself was started with (a lock, a terminal) is no part of the program.
	if err := unix.CloseRange(3, math.MaxUint, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		n.t.Fatal(err)
	}
	cmd := exec.Command("/bin/sh", "-c", `"$0"; exit`, filepath.Join(filepath.Dir(n.Bin), "workloads", "synthetic"))
	cmd.Env = []string{fmt.Sprintf("MEMORY_MIB=%d", memoryMiB)}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	n.t.Cleanup(func() {
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		<-ended
	})
	if reply, err := stack.FirstReply(n.ctx, address+"/verify"); err != nil {
		n.t.Fatalf("%v: %s", err, reply)
	}
	return cmd.Process.Pid
}

// publish dumps a process, which ends with that, and makes a checkpoint image of it. Of the dump nothing is left.
func (n *node) publish(pid int, ref string) {
	n.t.Helper()
	dir, work := n.work(), n.work()
	defer os.RemoveAll(dir)
	n.criu(work, "dump", "-t", strconv.Itoa(pid), "-D", dir)
	images, err := image.Open(dir)
	if err != nil {
		n.t.Fatal(err)
	}
	defer images.Close()
	_, err = publish.Publish(n.ctx, &publish.Source{
		Images: images, Spec: []byte("{}"), Created: time.Now(), Host: checkpoint.Host{Architecture: runtime.GOARCH},
		Base: &publish.Base{
			Reference: n.Registry.Ref("none:1"), Digest: digest.FromString("none"),
			Config: fmt.Appendf(nil, `{"architecture":%q,"os":"linux","config":{},"rootfs":{"type":"layers","diff_ids":[]}}`, runtime.GOARCH),
		},
	}, publish.Target{Reference: ref, CertsDir: "/etc/containerd/certs.d"})
	if err != nil {
		n.t.Fatal(err)
	}
}

// served is a thaw serve that runs, and what it says.
type served struct {
	ImagesDir, Address, Port string

	n      *node
	cmd    *exec.Cmd
	stderr bytes.Buffer
	ended  bool
}

// serve has the daemon serve a checkpoint.
func (n *node) serve(ref string) *served {
	n.t.Helper()
	s := &served{n: n, cmd: exec.CommandContext(n.ctx, filepath.Join(n.Bin, "thaw"), "serve", "--json", ref)}
	s.cmd.Stderr = &s.stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	if err := json.NewDecoder(out).Decode(s); err != nil {
		_ = s.wait()
		n.t.Fatalf("thaw serve: %v: %s", err, s.stderr.String())
	}
	n.t.Cleanup(func() {
		if !s.ended {
			s.stop()
		}
	})
	return s
}

func (s *served) wait() error {
	s.ended = true
	return s.cmd.Wait()
}

// stop ends it as people do.
func (s *served) stop() {
	s.n.t.Helper()
	if err := s.cmd.Process.Signal(unix.SIGINT); err != nil {
		s.n.t.Error(err)
	}
	if err := s.wait(); err != nil {
		s.n.t.Errorf("thaw serve: %v: %s", err, s.stderr.String())
	}
}

func (s *served) dial() (net.Conn, error) {
	return net.Dial("tcp", net.JoinHostPort(s.Address, s.Port))
}

// client is CRIU's lazy-pages daemon.
type client struct {
	n    *node
	cmd  *exec.Cmd
	work string
	out  bytes.Buffer
}

// lazyPages starts CRIU's daemon and returns when it can be used.
func (n *node) lazyPages(s *served, work string) *client {
	n.t.Helper()
	ready, status, err := os.Pipe()
	if err != nil {
		n.t.Fatal(err)
	}
	defer ready.Close()
	c := &client{n: n, work: work}
	c.cmd = exec.CommandContext(n.ctx, filepath.Join(n.Bin, "criu"), "lazy-pages", "-D", s.ImagesDir, "-W", work, "-o", "lazy-pages.log", "-v4",
		"--page-server", "--address", s.Address, "--port", s.Port, "--status-fd", "3")
	c.cmd.Stdout, c.cmd.Stderr, c.cmd.ExtraFiles = &c.out, &c.out, []*os.File{status}
	if err := c.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	status.Close()
	if _, err := io.ReadFull(ready, make([]byte, 1)); err != nil {
		c.end()
		n.t.FailNow()
	}
	return c
}

// end waits until the daemon has brought everything and says so.
func (c *client) end() {
	c.n.t.Helper()
	if err := c.cmd.Wait(); err != nil {
		c.n.t.Errorf("criu lazy-pages: %v: %s\n%s", err, c.out.String(), tail(filepath.Join(c.work, "lazy-pages.log")))
	}
}

// restore restores the process, which runs when it returns.
func (n *node) restore(s *served, work string) (pid int) {
	n.t.Helper()
	file := filepath.Join(work, "pid")
	n.criu(work, "restore", "-D", s.ImagesDir, "--lazy-pages", "--restore-detached", "--pidfile", file)
	p, err := os.ReadFile(file)
	if err != nil {
		n.t.Fatal(err)
	}
	if pid, err = strconv.Atoi(strings.TrimSpace(string(p))); err != nil {
		n.t.Fatal(err)
	}
	return pid
}

// verify has the restored program check all of its memory.
func (n *node) verify() {
	n.t.Helper()
	reply, err := stack.FirstReply(n.ctx, address+"/verify")
	var r struct {
		OK    bool
		Bytes int64
	}
	if err := errors.Join(err, json.Unmarshal(reply, &r)); err != nil || !r.OK || r.Bytes != memoryMiB<<20 {
		n.t.Fatalf("%v: %s", err, reply)
	}
}

// kill ends a restored shell with its server, which are no children of the test's, and waits until they are gone.
func (n *node) kill(shell int) {
	n.t.Helper()
	children, err := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", shell))
	if err != nil {
		n.t.Fatal(err)
	}
	server, err := strconv.Atoi(strings.TrimSpace(string(children)))
	if err != nil {
		n.t.Fatal(err)
	}
	for _, pid := range []int{shell, server} {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			n.t.Fatal(err)
		}
		defer unix.Close(fd)
		if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
			n.t.Fatal(err)
		}
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err != nil {
			n.t.Fatal(err)
		}
	}
}

// pageBytes is what was fetched of page blobs.
func (n *node) pageBytes() int64 {
	// What is not memory is asked for from its beginning to its end.
	return n.Registry.Traffic(func(r registry.Request) bool { return r.Range != "" && !strings.HasPrefix(r.Range, "bytes=0-") }).Sent
}

// onDisk is what a folder takes, in bytes.
func onDisk(t *testing.T, dir string) (size int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err = errors.Join(err, unix.Lstat(path, &st)); err == nil {
			size += st.Blocks * 512
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return size
}

func TestPlainCRIU(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	s, err := stack.Start(ctx, stack.Options{Progress: os.Stderr, DaemonConfig: "[page_server]\nenable = true\n"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	n := &node{t, ctx, s}
	ref := s.Registry.Ref("checkpoints/plain:1")
	n.publish(n.begin(), ref)

	for _, c := range []struct {
		name string
		test func(n *node, ref string)
	}{
		{"restore", restoreOnce},
		{"hostile clients", restoreAmongHostile},
		{"registry fails", restoreWhileRegistryFails},
		{"end", endServing},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := s.ClearThawCache(ctx); err != nil {
				t.Fatal(err)
			}
			c.test(&node{t, ctx, s}, ref)
		})
	}
}

func restoreOnce(n *node, ref string) {
	n.Registry.Reset()
	s := n.serve(ref)
	if size := onDisk(n.t, s.ImagesDir); size > 8<<20 {
		n.t.Errorf("%d bytes of a dump with %d MiB of memory are on the disk before the restore", size, memoryMiB)
	}
	if size := n.pageBytes(); size != 0 {
		n.t.Errorf("%d bytes of memory were fetched before the restore", size)
	}
	work := n.work()
	c := n.lazyPages(s, work)
	pid := n.restore(s, work)
	n.verify()
	// CRIU brings the rest by itself, says goodbye and is content.
	c.end()
	n.verify()
	if size := n.pageBytes(); size < memoryMiB<<20 {
		n.t.Errorf("%d bytes of memory were fetched", size)
	}
	n.kill(pid)
	s.stop()
	if _, err := s.dial(); !errors.Is(err, unix.ECONNREFUSED) {
		n.t.Errorf("after the end: %v", err)
	}
}

// Clients that send rubbish, say nothing or take nothing do not hold up the one that restores.
func restoreAmongHostile(n *node, ref string) {
	s := n.serve(ref)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range 100 {
		c, err := s.dial()
		if err != nil {
			n.t.Fatal(err)
		}
		defer c.Close()
		p := make([]byte, 32*(i%5))
		for j := range p {
			p[j] = byte(random.Uint32())
		}
		// It may have been sent away already.
		_, _ = c.Write(p)
	}
	work := n.work()
	c := n.lazyPages(s, work)
	pid := n.restore(s, work)
	n.verify()
	c.end()
	n.kill(pid)
}

// A process waits for a registry that refuses, and gets the right pages when it is back.
func restoreWhileRegistryFails(n *node, ref string) {
	s := n.serve(ref)
	work := n.work()
	c := n.lazyPages(s, work)
	var asked atomic.Int32
	n.Registry.Intercept(func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if asked.Add(1) <= 3 {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	defer n.Registry.Intercept(nil)
	// CRIU itself may have to wait: some processes touch memory on their way into it.
	pid := n.restore(s, work)
	n.verify()
	if asked.Load() <= 3 {
		n.t.Error("nothing failed")
	}
	c.end()
	n.kill(pid)
}

// Page servers end with the daemon, and what cannot be served is refused in one line that says why.
func endServing(n *node, ref string) {
	s := n.serve(ref)
	idle, err := s.dial()
	if err != nil {
		n.t.Fatal(err)
	}
	defer idle.Close()
	n.refused("choose another port", "serve", "--port", s.Port, ref)
	n.refused("no checkpoint", "serve", n.Registry.Ref("pause:1"))
	if err := n.RestartDaemon(n.ctx, ""); err != nil {
		n.t.Fatal(err)
	}
	if err := s.wait(); err == nil || !strings.Contains(s.stderr.String(), "stopping") {
		n.t.Errorf("thaw serve when the daemon ends: %v: %s", err, s.stderr.String())
	}
	if _, err := idle.Read(make([]byte, 1)); err == nil {
		n.t.Error("a client outlived the page server")
	}
	n.refused("page_server.enable", "serve", ref)
}

// refused runs a thaw command that must fail.
func (n *node) refused(says string, args ...string) {
	n.t.Helper()
	out, err := exec.CommandContext(n.ctx, filepath.Join(n.Bin, "thaw"), args...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), says) || bytes.Count(out, []byte("\n")) != 1 {
		n.t.Errorf("thaw %v: %v: %s", args, err, out)
	}
}
