// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/typeurl/v2"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// resident is how much memory a process has, in bytes, mapped files included.
func resident(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	m := regexp.MustCompile(`VmRSS:\s+(\d+) kB`).FindSubmatch(text)
	if m == nil {
		return 0, fmt.Errorf("process %d has no memory", pid)
	}
	n, err := strconv.ParseInt(string(m[1]), 10, 64)
	return n << 10, err
}

// shimMemory is the memory of a pod's shim after its server has checked all of the server's memory.
func shimMemory(ctx context.Context, t *testing.T, pod *stack.Pod) int64 {
	t.Helper()
	if err := verify(ctx, pod); err != nil {
		t.Fatal(err)
	}
	pid, err := pod.ShimPID()
	if err != nil {
		t.Fatal(err)
	}
	n, err := resident(pid)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestShimMemory: a shim through which all of a container's memory went takes little more than runc's.
func TestShimMemory(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	plain, err := s.RunPod(ctx, stack.PodOptions{Name: "plain", Handler: "runc"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := plain.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Synthetic), Env: synthetic}); err != nil {
		t.Fatal(err)
	}
	runc := shimMemory(ctx, t, plain)
	pod, _ := lazily(ctx, t, s, frozenSynthetic(ctx, t, s))
	thaw := shimMemory(ctx, t, pod)
	t.Logf("runc's shim has %.1f MiB, thaw's %.1f MiB", float64(runc)/(1<<20), float64(thaw)/(1<<20))
	if thaw > runc+25<<20 {
		t.Errorf("thaw's shim has %d bytes, runc's %d", thaw, runc)
	}
}

// TestMemoryLimit: a restored container whose memory does not fit into its limit is killed as any other, and reported so.
func TestMemoryLimit(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	ooms, errs := s.Containerd().Subscribe(ctx, `topic=="/tasks/oom"`)
	pod, c := restore(ctx, t, s, ref, stack.ContainerOptions{
		Change: func(c *cri.ContainerConfig) { c.Linux.Resources.MemoryLimitInBytes = 24 << 20 },
	})
	// The server is killed while it reads its memory.
	asking, stop := context.WithCancel(ctx)
	verified := make(chan error, 1)
	go func() { verified <- verify(asking, pod) }()
	code, err := c.Wait(ctx)
	stop()
	if err := <-verified; err == nil {
		t.Error("all of the memory was there")
	}
	if err != nil {
		t.Fatal(err)
	}
	select {
	case e := <-ooms:
		event, err := typeurl.UnmarshalAny(e.Event)
		if err != nil {
			t.Fatal(err)
		}
		if o, ok := event.(*events.TaskOOM); !ok || o.ContainerID != c.ID {
			t.Errorf("%v", event)
		}
	case err := <-errs:
		t.Fatal(err)
	case <-ctx.Done():
		t.Fatal("no event")
	}
	status, err := c.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if status.Reason != "OOMKilled" || code != 137 {
		t.Errorf("%q, exit code %d", status.Reason, code)
	}
}
