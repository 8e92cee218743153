// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"thaw.dev/thaw/test/stack"
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
