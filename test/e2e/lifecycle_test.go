// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// frozen checkpoints a workload and removes its pod, and returns the checkpoint and what was observed before it.
func frozen(ctx context.Context, t *testing.T, s *stack.Stack, name string) (ref, before string) {
	t.Helper()
	w := all[name]
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, stack.ContainerOptions{Image: s.Workload(name), Env: w.env})
	if err != nil {
		t.Fatal(err)
	}
	if w.warm != nil {
		if err := w.warm(ctx, pod, c); err != nil {
			t.Fatal(err)
		}
	}
	if before, err = w.observe(ctx, pod, c); err != nil {
		t.Fatal(err)
	}
	ref = freeze(ctx, t, s, c)
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	return ref, before
}

// observed checks that a restored workload goes on where the checkpoint was made.
func observed(ctx context.Context, t *testing.T, name, before string, pod *stack.Pod, c *stack.Container) string {
	t.Helper()
	after, err := all[name].observe(ctx, pod, c)
	if err != nil {
		t.Fatal(err)
	}
	if err := all[name].proves(before, after); err != nil {
		t.Error(err)
	}
	return after
}

// crictl runs crictl for at most a second and returns what it printed: attach has no end of its own.
func crictl(ctx context.Context, s *stack.Stack, stdin string, until func(string) bool, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(s.Bin, "crictl"), args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	var all bytes.Buffer
	buf := make([]byte, 4096)
	for {
		n, err := out.Read(buf)
		all.Write(buf[:n])
		if err != nil {
			return all.String(), cmd.Wait()
		}
		if until != nil && until(all.String()) {
			cancel()
			_ = cmd.Wait() // killed by us
			return all.String(), nil
		}
	}
}

// TestRestoredContainer does with a restored container what people do with one.
func TestRestoredContainer(t *testing.T) {
	ctx, s := start(t, workloads.Pipeline, workloads.Redis)
	ref, before := frozen(ctx, t, s, workloads.Pipeline)

	started, errs := s.Containerd().Subscribe(ctx, `topic=="/tasks/start"`, `topic=="/tasks/exit"`)
	const score = 321
	pod, c := restore(ctx, t, s, ref, stack.ContainerOptions{
		Change: func(c *cri.ContainerConfig) { c.Linux.Resources.OomScoreAdj = score },
	})
	observed(ctx, t, workloads.Pipeline, before, pod, c)

	t.Run("OOM score", func(t *testing.T) {
		out, err := c.Exec(ctx, "/bin/sh", "-c", "cat /proc/[0-9]*/oom_score_adj | sort -u")
		if err != nil || strings.TrimSpace(out) != strconv.Itoa(score) {
			t.Errorf("%q, the pod says %d: %v", out, score, err)
		}
	})
	t.Run("exec", func(t *testing.T) {
		out, err := c.Exec(ctx, "/bin/sh", "-c", "readlink /proc/1/exe; cat /etc/hostname")
		if err != nil || !strings.Contains(out, pod.Config.Hostname) {
			t.Errorf("%q, %v", out, err)
		}
		if _, err := c.Exec(ctx, "/bin/sh", "-c", "exit 3"); err == nil || !strings.Contains(err.Error(), "exit code 3") {
			t.Errorf("exit code: %v", err)
		}
		out, err = crictl(ctx, s, "to standard input\n", nil, "exec", "-i", c.ID, "cat")
		if err != nil || out != "to standard input\n" {
			t.Errorf("exec -i: %q, %v", out, err)
		}
	})
	t.Run("attach", func(t *testing.T) {
		two := regexp.MustCompile(`(?s)n=\d+ sum=\d+\n.*n=\d+ sum=\d+\n`)
		out, err := crictl(ctx, s, "", two.MatchString, "attach", c.ID)
		if err != nil || !two.MatchString(out) {
			t.Errorf("%q, %v", out, err)
		}
	})
	t.Run("stats", func(t *testing.T) {
		runtime, _ := s.CRI()
		r, err := runtime.ContainerStats(ctx, &cri.ContainerStatsRequest{ContainerId: c.ID})
		if err != nil || r.GetStats().GetMemory().GetWorkingSetBytes().GetValue() == 0 || r.GetStats().GetCpu().GetUsageCoreNanoSeconds().GetValue() == 0 {
			t.Errorf("%v, %v", r, err)
		}
	})
	t.Run("update", func(t *testing.T) {
		const limit = 300 << 20
		runtime, _ := s.CRI()
		_, err := runtime.UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{
			ContainerId: c.ID, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: limit},
		})
		if err != nil {
			t.Fatal(err)
		}
		pid, err := c.PID(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if got := memoryLimit(t, pid); got != limit {
			t.Errorf("memory limit of the processes is %d, it was set to %d", got, limit)
		}
	})
	t.Run("events", func(t *testing.T) {
		pid, err := c.PID(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Stop(ctx, 0); err != nil {
			t.Fatal(err)
		}
		var start, exit bool
		for !exit {
			select {
			case e := <-started:
				v, err := typeurl.UnmarshalAny(e.Event)
				if err != nil {
					t.Fatal(err)
				}
				switch e := v.(type) {
				case *events.TaskStart:
					start = start || e.ContainerID == c.ID && int(e.Pid) == pid
				case *events.TaskExit:
					exit = e.ContainerID == c.ID && e.ID == c.ID && e.ExitStatus == 137
				}
			case err := <-errs:
				t.Fatal(err)
			}
		}
		if !start {
			t.Error("no start event with the first process")
		}
	})
	t.Run("next attempt", func(t *testing.T) {
		// As the kubelet restarts a container: a new one in the same pod.
		next, err := pod.Run(ctx, stack.ContainerOptions{Image: ref, Attempt: 1})
		if err != nil {
			t.Fatal(err)
		}
		observed(ctx, t, workloads.Pipeline, before, pod, next)
		pid, err := next.PID(ctx)
		if err != nil {
			t.Fatal(err)
		}
		task, err := next.Task(ctx)
		if err != nil {
			t.Fatal(err)
		}
		exit, err := task.Wait(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if e := <-exit; e.ExitCode() != 137 {
			t.Errorf("exit code %d after SIGKILL of the first process", e.ExitCode())
		}
		again, err := pod.Run(ctx, stack.ContainerOptions{Image: ref, Attempt: 2})
		if err != nil {
			t.Fatal(err)
		}
		observed(ctx, t, workloads.Pipeline, before, pod, again)
	})
	t.Run("grace period", func(t *testing.T) {
		ref, before := frozen(ctx, t, s, workloads.Redis)
		pod, c := restore(ctx, t, s, ref, stack.ContainerOptions{})
		observed(ctx, t, workloads.Redis, before, pod, c)
		if err := c.Stop(ctx, 30); err != nil {
			t.Fatal(err)
		}
		status, err := c.Status(ctx)
		if err != nil || status.GetExitCode() != 0 || status.GetState() != cri.ContainerState_CONTAINER_EXITED {
			t.Errorf("redis ends in order at SIGTERM, exit code is %d in state %s: %v", status.GetExitCode(), status.GetState(), err)
		}
	})
}

// memoryLimit reads the limit of the memory cgroup that a process is in.
func memoryLimit(t *testing.T, pid int) int64 {
	t.Helper()
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		file := ""
		switch {
		case f[1] == "memory":
			file = filepath.Join("/sys/fs/cgroup/memory", f[2], "memory.limit_in_bytes")
		case f[0] == "0" && !strings.Contains(string(text), ":memory:"):
			file = filepath.Join("/sys/fs/cgroup", f[2], "memory.max")
		default:
			continue
		}
		v, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(v)), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	t.Fatalf("no memory cgroup in %q", text)
	return 0
}

// TestSecondGeneration checkpoints a restored container again, with its memory still in the registry: through CRI, whose archive
// is converted, and with thaw. Both restore.
func TestSecondGeneration(t *testing.T) {
	ctx, s := start(t, workloads.Node)
	ref, before := frozen(ctx, t, s, workloads.Node)
	if err := s.ClearThawCache(ctx); err != nil {
		t.Fatal(err)
	}
	pod, c := restore(ctx, t, s, ref, stack.ContainerOptions{})

	// Before anything has touched its memory.
	archive := filepath.Join(t.TempDir(), "checkpoint.tar")
	runtime, _ := s.CRI()
	if _, err := runtime.CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: c.ID, Location: archive}); err != nil {
		t.Fatal(err)
	}
	converted := s.Registry.Ref("checkpoints/converted:1")
	if _, err := thaw(ctx, s, "convert", archive, converted); err != nil {
		t.Fatal(err)
	}
	first := observed(ctx, t, workloads.Node, before, pod, c) // it runs on
	second := freeze(ctx, t, s, c, "--leave-running")
	observed(ctx, t, workloads.Node, first, pod, c)
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.ClearThawCache(ctx); err != nil {
		t.Fatal(err)
	}
	pod, c = restore(ctx, t, s, converted, stack.ContainerOptions{})
	observed(ctx, t, workloads.Node, before, pod, c)
	pod, c = restore(ctx, t, s, second, stack.ContainerOptions{})
	observed(ctx, t, workloads.Node, first, pod, c)
}
