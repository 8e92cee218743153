// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

var lazyContainers = flag.Int("lazy", 50, "containers of TestDaemonRestartWithMany")

// TestStateRemoved: when its folder on /run is gone, the daemon ends, and the next one goes on with the containers.
func TestStateRemoved(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	pod, _ := touched(ctx, t, s, ref)
	if err := os.RemoveAll(stack.ThawStateDir); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.Daemon().Done(): // the service manager's turn
	case <-ctx.Done():
		t.Fatal("nobody can reach the daemon, and it runs on")
	}
	verified := make(chan error, 1)
	go func() { verified <- verifyOnce(ctx, t, pod) }()
	if err := s.StartDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-verified; err != nil {
		t.Error(err)
	}
	next, _ := lazily(ctx, t, s, ref)
	if err := verifyOnce(ctx, t, next); err != nil {
		t.Error(err)
	}
}

// limitFiles leaves a process so many more file descriptors than it has, and gives what it had before.
func limitFiles(t *testing.T, pid, more int) (before unix.Rlimit) {
	t.Helper()
	u, err := use(pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &before); err != nil {
		t.Fatal(err)
	}
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(u.Descriptors + more), Max: before.Max}, nil); err != nil {
		t.Fatal(err)
	}
	return before
}

// TestOutOfDescriptors: what has no descriptors waits for them or is refused by name; nobody who runs is harmed.
func TestOutOfDescriptors(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	t.Run("daemon", func(t *testing.T) {
		pod, _ := touched(ctx, t, s, ref)
		before := limitFiles(t, s.Daemon().PID(), 0)
		var g errgroup.Group
		g.Go(func() error { return verifyOnce(ctx, t, pod) })
		next, err := s.RunPod(ctx, stack.PodOptions{Name: "next", Handler: "thaw"})
		if err != nil {
			t.Fatal(err)
		}
		trying, stop := context.WithTimeout(ctx, 2*time.Second)
		_, err = next.Run(trying, stack.ContainerOptions{Image: ref, Env: synthetic})
		stop()
		if err == nil {
			t.Error("restored without a descriptor")
		}
		if err := unix.Prlimit(s.Daemon().PID(), unix.RLIMIT_NOFILE, &before, nil); err != nil {
			t.Fatal(err)
		}
		if err := g.Wait(); err != nil {
			t.Error(err)
		}
		last, _ := lazily(ctx, t, s, ref)
		if err := verifyOnce(ctx, t, last); err != nil {
			t.Error(err)
		}
	})
	t.Run("shim", func(t *testing.T) {
		pod, err := s.RunPod(ctx, stack.PodOptions{Name: "scarce", Handler: "thaw"})
		if err != nil {
			t.Fatal(err)
		}
		shim, err := pod.ShimPID()
		if err != nil {
			t.Fatal(err)
		}
		// In the shim, and in CRIU, which has the shim's limit. Between the two, runc cannot be started, not even to delete a task
		// that was created, which containerd then waits for.
		for _, more := range []int{0, 3, 6, 30, 40} {
			limit := limitFiles(t, shim, more)
			_, err := pod.Run(ctx, stack.ContainerOptions{Image: ref, Env: synthetic, Attempt: uint32(more)})
			if perr := unix.Prlimit(shim, unix.RLIMIT_NOFILE, &limit, nil); perr != nil {
				t.Fatal(perr)
			}
			if err == nil || strings.Contains(err.Error(), "\n") {
				t.Errorf("with %d descriptors more: %v", more, err)
			}
		}
		if _, err := pod.Run(ctx, stack.ContainerOptions{Image: ref, Env: synthetic, Attempt: 99}); err != nil {
			t.Fatal(err)
		}
		if err := verifyOnce(ctx, t, pod); err != nil {
			t.Error(err)
		}
	})
}

// TestDaemonOutOfMemory: the kernel kills the daemon in its memory cgroup, and the next one goes on.
func TestDaemonOutOfMemory(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	pod, _ := touched(ctx, t, s, ref)
	group, limit := "/sys/fs/cgroup/memory/daemon", "memory.limit_in_bytes"
	if _, err := os.Stat("/sys/fs/cgroup/memory"); err != nil {
		group, limit = "/sys/fs/cgroup/daemon", "memory.max"
	}
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := os.Remove(group); err != nil {
			t.Error(err)
		}
	}()
	for _, w := range [][2]string{{limit, "65536"}, {"cgroup.procs", strconv.Itoa(s.Daemon().PID())}} {
		if err := os.WriteFile(filepath.Join(group, w[0]), []byte(w[1]), 0); err != nil {
			t.Fatal(err)
		}
	}
	verified := make(chan error, 1)
	go func() { verified <- verifyOnce(ctx, t, pod) }()
	select {
	case <-s.Daemon().Done():
	case err := <-verified:
		t.Fatalf("the daemon was not killed: %v", err)
	case <-ctx.Done():
		t.Fatal("the daemon was not killed")
	}
	if err := s.StartDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-verified; err != nil {
		t.Error(err)
	}
}

// TestDaemonRestartWithMany: a daemon that is killed and started again has all containers as before, and all get their pages.
func TestDaemonRestartWithMany(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	small := map[string]string{"MEMORY_MIB": "4"}
	ref := frozenServer(ctx, t, s, small)
	begin := time.Now()
	pods := make([]*stack.Pod, *lazyContainers)
	var g errgroup.Group
	g.SetLimit(4)
	for i := range pods {
		g.Go(func() (err error) {
			if pods[i], err = s.RunPod(ctx, stack.PodOptions{Name: "many", Handler: "thaw"}); err != nil {
				return err
			}
			_, err = pods[i].Run(ctx, stack.ContainerOptions{Image: ref, Env: small, Annotations: map[string]string{"thaw.dev/policy": "lazy"}})
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d containers after %v", len(pods), time.Since(begin))
	if err := s.Daemon().Kill(); err != nil {
		t.Fatal(err)
	}
	if err := s.StartDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	out, err := thaw(ctx, s, "ps")
	if n := strings.Count(out, ref); err != nil || n != len(pods) {
		t.Errorf("thaw ps has %d of %d restores, %v", n, len(pods), err)
	}
	for _, pod := range pods {
		g.Go(func() error { return verifyOnce(ctx, t, pod) })
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	for _, pod := range pods {
		g.Go(func() error { return pod.Remove(ctx) })
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	t.Logf("all done after %v", time.Since(begin))
}
