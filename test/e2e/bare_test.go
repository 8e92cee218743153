// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// TestNoLazyPage: CRIU hands over processes that have no page for the page handler, and they run all the same.
func TestNoLazyPage(t *testing.T) {
	ctx, s := start(t, workloads.Bare)
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Bare)})
	if err != nil {
		t.Fatal(err)
	}
	ref := freeze(ctx, t, s, c)
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	_, c = restore(ctx, t, s, ref, stack.ContainerOptions{Annotations: map[string]string{"thaw.dev/restore": "required"}})
	task, err := c.Task(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if pids, err := task.Pids(ctx); err != nil || len(pids) != 2 {
		t.Errorf("%d processes, %v", len(pids), err)
	}
	if status, err := c.Status(ctx); err != nil || status.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("%v, %v", status, err)
	}
}
