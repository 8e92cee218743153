// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/namespaces"

	"thaw.dev/thaw/snapshotter/publish/dump"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// thaw runs the thaw command as an administrator of the node would, and returns what it printed to standard output.
func thaw(ctx context.Context, s *stack.Stack, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(s.Bin, "thaw"), args...)
	cmd.Env = append(cmd.Environ(), "CONTAINERD_ADDRESS="+stack.ContainerdSocket)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("thaw %s: %w: %s", args[0], err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// freeze freezes a container into an image of the stack's registry and returns the image's reference.
func freeze(ctx context.Context, t *testing.T, s *stack.Stack, c *stack.Container, flags ...string) string {
	t.Helper()
	ref := s.Registry.Ref("checkpoints/" + strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(t.Name())) + ":" + c.ID[:8])
	args := append([]string{"checkpoint", c.ID, "--push", ref}, flags...)
	if _, err := thaw(ctx, s, args...); err != nil {
		t.Fatal(err)
	}
	return ref
}

// restore runs a checkpoint image in a new pod of the handler thaw.
func restore(ctx context.Context, t *testing.T, s *stack.Stack, ref string, o stack.ContainerOptions) (*stack.Pod, *stack.Container) {
	t.Helper()
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "restored", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	o.Image = ref
	c, err := pod.Run(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	return pod, c
}

// TestCheckpointAgain: two checkpoints in which the root filesystem is the same share that content in containerd, and the end of
// the first one does not take it from the second.
func TestCheckpointAgain(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "again", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Synthetic), Env: synthetic})
	if err != nil {
		t.Fatal(err)
	}
	client, err := containerd.New(stack.ContainerdSocket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	var dumps []*dump.Dump
	for range 3 { // the first one leaves traces in the root filesystem
		found, err := dump.Find(ctx, client, "", c.ID)
		if err != nil {
			t.Fatal(err)
		}
		d, err := dump.Take(ctx, client, found, dump.Options{LeaveRunning: true})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Done(ctx, false)
		dumps = append(dumps, d)
	}
	if err := errors.Join(dumps[0].Done(ctx, true), dumps[1].Done(ctx, true)); err != nil {
		t.Fatal(err)
	}
	inK8s := namespaces.WithNamespace(ctx, "k8s.io")
	lease, err := client.LeasesService().Create(inK8s, leases.WithRandomID())
	if err != nil {
		t.Fatal(err)
	}
	if err := client.LeasesService().Delete(inK8s, lease, leases.SynchronousDelete); err != nil { // which collects garbage
		t.Fatal(err)
	}
	r, err := dumps[2].Source.Rootfs(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Close(), dumps[2].Done(ctx, true), pod.Remove(ctx)); err != nil {
		t.Error(err)
	}
}
