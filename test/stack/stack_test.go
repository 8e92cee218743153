// SPDX-License-Identifier: Apache-2.0

//go:build linux

package stack

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/workloads"
)

func TestMain(m *testing.M) { Main(m) }

func start(t *testing.T) (context.Context, *Stack) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	s, err := Start(ctx, Options{NoDaemon: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return ctx, s
}

// TestPodsOutliveContainerd kills containerd under a running pod and starts it again, then lets the pod's shim crash.
func TestPodsOutliveContainerd(t *testing.T) {
	ctx, s := start(t)
	before, err := s.State(ctx)
	if err != nil {
		t.Fatal(err)
	}
	pod, err := s.RunPod(ctx, PodOptions{Name: "survivor"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, ContainerOptions{Image: s.Workload(workloads.Pause)})
	if err != nil {
		t.Fatal(err)
	}
	pid, err := c.PID(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.ContainerdProcess().Kill(); err != nil {
		t.Fatal(err)
	}
	if err := s.StartContainerd(ctx); err != nil {
		t.Fatal(err)
	}
	if again, err := c.PID(ctx); err != nil || again != pid {
		t.Errorf("process is %d after containerd's restart, it was %d: %v", again, pid, err)
	}

	shim, err := pod.ShimPID()
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(shim, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	// containerd itself leaves the socket of a shim that was killed.
	sockets, err := filepath.Glob("/run/containerd/s/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, socket := range sockets {
		before["file "+socket] = true
	}
	if err := s.AwaitClean(ctx, before); err != nil {
		t.Error(err)
	}
}

// TestLeaksAreSeen leaves one thing of each kind behind.
func TestLeaksAreSeen(t *testing.T) {
	ctx, s := start(t)
	before, err := s.State(ctx)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join("/run", "leaked")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo("/run/leaked-fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	cgroups, err := filepath.Glob("/sys/fs/cgroup/*/k8s.io")
	if err != nil || len(cgroups) == 0 {
		cgroups = []string{"/sys/fs/cgroup/k8s.io"}
	}
	cgroup := filepath.Join(cgroups[0], "leaked")
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	sleep := exec.Command("sleep", "1000")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	pod, err := s.RunPod(ctx, PodOptions{Name: "leaked"})
	if err != nil {
		t.Fatal(err)
	}
	now, err := s.State(ctx)
	if err != nil {
		t.Fatal(err)
	}
	leaked := now.Leaked(before)
	for _, want := range []string{
		"mount /run/leaked", "file /run/leaked-fifo", "cgroup " + cgroup, "process ", "container " + pod.ID,
		"snapshot overlayfs " + pod.ID, "network device veth", "file /run/netns/",
	} {
		if !slices.ContainsFunc(leaked, func(l string) bool { return strings.HasPrefix(l, want) }) {
			t.Errorf("%q was not seen in\n%s", want, strings.Join(leaked, "\n"))
		}
	}
	if err := sleep.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = sleep.Wait()
	if err := unix.Unmount(dir, 0); err != nil {
		t.Error(err)
	}
}

func TestDockerRegistry(t *testing.T) {
	ctx, s := start(t)
	p, err := s.StartDockerRegistry(ctx)
	if err != nil {
		t.Fatal(err)
	}
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	if err := workloads.Push(ctx, root, DockerRegistryAddress, workloads.Pause); err != nil {
		t.Error(err)
	}
	if _, err := s.Pull(ctx, DockerRegistryAddress+"/pause:1", nil); err != nil {
		t.Error(err)
	}
	if err := p.Kill(); err != nil {
		t.Error(err)
	}
}
