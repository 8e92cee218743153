// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// synthetic is how much memory the server has in these tests.
var synthetic = map[string]string{"MEMORY_MIB": "64"}

// frozenSynthetic makes a checkpoint of the synthetic server, of which the node then has nothing.
func frozenSynthetic(ctx context.Context, t *testing.T, s *stack.Stack) string {
	t.Helper()
	return frozenServer(ctx, t, s, synthetic)
}

// frozenServer does so with an environment.
func frozenServer(ctx context.Context, t *testing.T, s *stack.Stack, env map[string]string) string {
	t.Helper()
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Synthetic), Env: env})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := get(ctx, pod, "/touch"); err != nil {
		t.Fatal(err)
	}
	ref := freeze(ctx, t, s, c)
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.EnsureImage(ctx, ref, nil); err != nil { // the runnable image: no memory
		t.Fatal(err)
	}
	if err := s.ClearThawCache(ctx); err != nil {
		t.Fatal(err)
	}
	return ref
}

// lazily restores a checkpoint of the synthetic server so that no page comes but those that are touched.
func lazily(ctx context.Context, t *testing.T, s *stack.Stack, ref string) (*stack.Pod, *stack.Container) {
	t.Helper()
	return restore(ctx, t, s, ref, stack.ContainerOptions{Env: synthetic, Annotations: map[string]string{"thaw.dev/policy": "lazy"}})
}

// verify asks the server to check all of its memory, which it does page by page.
func verify(ctx context.Context, pod *stack.Pod) error {
	b, err := get(ctx, pod, "/verify")
	if err == nil && !strings.Contains(b, `"ok":true`) {
		err = errors.New(b)
	}
	return err
}

// ended waits until a process is gone.
func ended(ctx context.Context, t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	deadline, _ := ctx.Deadline()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(min(time.Until(deadline), 30*time.Second)/time.Millisecond))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n != 1 || err != nil {
			t.Fatalf("process %d still runs: %v", pid, err)
		}
		return
	}
}

// TestShimKilled: with its page handler gone a process must be dead before it can see a wrong page; another restore works.
func TestShimKilled(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	pod, c := lazily(ctx, t, s, ref)
	if _, err := get(ctx, pod, "/touch"); err != nil {
		t.Fatal(err)
	}
	pid, err := c.PID(ctx)
	if err != nil {
		t.Fatal(err)
	}
	shim, err := pod.ShimPID()
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(shim, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended(ctx, t, pid)
	if err := pod.Remove(ctx); err != nil { // once containerd has noticed
		t.Fatal(err)
	}
	removeDeadSockets(t)
	pod2, _ := lazily(ctx, t, s, ref)
	if err := verify(ctx, pod2); err != nil {
		t.Error(err)
	}
}

// removeDeadSockets removes the sockets of shims that were killed: containerd leaves them, those of runc's shim as well.
func removeDeadSockets(t *testing.T) {
	t.Helper()
	sockets, err := filepath.Glob("/run/containerd/s/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range sockets {
		conn, err := net.Dial("unix", path)
		if err == nil {
			conn.Close()
		} else if errors.Is(err, unix.ECONNREFUSED) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestDaemonKilled: containers wait for pages while the daemon is away, and go on with the right ones.
func TestDaemonKilled(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	pod, _ := lazily(ctx, t, s, ref)
	if err := s.Daemon().Kill(); err != nil {
		t.Fatal(err)
	}
	verified := make(chan error, 1)
	go func() { verified <- verify(ctx, pod) }()
	if err := s.StartDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-verified; err != nil {
		t.Error(err)
	}
	// The new daemon holds the descriptors and still guards the container.
	out, err := thaw(ctx, s, "ps")
	if err != nil || !strings.Contains(out, ref) {
		t.Errorf("thaw ps after the restart: %q, %v", out, err)
	}
}

// TestRegistryGone: a page that cannot be had ends the container with the reason; it never sees a wrong page.
func TestRegistryGone(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	if err := s.RestartDaemon(ctx, "[registry]\ntimeout = \"2s\"\n"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.RestartDaemon(context.WithoutCancel(ctx), ""); err != nil {
			t.Error(err)
		}
	}()
	pod, c := lazily(ctx, t, s, ref)
	s.Registry.Intercept(func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	})
	defer s.Registry.Intercept(nil)
	task, err := c.Task(ctx)
	if err != nil {
		t.Fatal(err)
	}
	exit, err := task.Wait(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ask, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { _, _ = get(ask, pod, "/verify") }()
	if e := <-exit; e.ExitCode() != 137 {
		t.Errorf("exit code %d: %v", e.ExitCode(), e.Error())
	}
}

// TestDamagedChunk: bytes that are not what the page index promises never reach a process.
func TestDamagedChunk(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	pod, c := lazily(ctx, t, s, ref)
	pid, err := c.PID(ctx)
	if err != nil {
		t.Fatal(err)
	}
	s.Registry.Intercept(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { next.ServeHTTP(&flipper{ResponseWriter: w}, r) })
	})
	defer s.Registry.Intercept(nil)
	ask, cancel := context.WithCancel(ctx)
	defer cancel()
	replies := make(chan error, 1)
	go func() { replies <- verify(ask, pod) }()
	ended(ctx, t, pid)
	cancel()
	if err := <-replies; err == nil {
		t.Error("the server replied that its memory is right, although no chunk of it was")
	}
}

// flipper changes a bit in each body.
type flipper struct {
	http.ResponseWriter
	done bool
}

func (f *flipper) Write(p []byte) (int, error) {
	if !f.done && len(p) > 20 {
		f.done = true
		p = append([]byte(nil), p...)
		p[20] ^= 1
	}
	return f.ResponseWriter.Write(p)
}
