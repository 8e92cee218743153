// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// ctr runs containerd's own command line in the namespace default.
func ctr(ctx context.Context, s *stack.Stack, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, filepath.Join(s.Bin, "ctr"), args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("ctr %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// TestCtr checkpoints and restores a container that no CRI knows: the image is the one in the container's record.
func TestCtr(t *testing.T) {
	ctx, s := start(t, workloads.Threads)
	server := &stack.Pod{IP: "127.0.0.1"} // of the host's network
	run := func(id, ref string) {
		t.Helper()
		if _, err := ctr(ctx, s, "image", "pull", "--hosts-dir", "/etc/containerd/certs.d", ref); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := ctr(context.WithoutCancel(ctx), s, "image", "rm", "--sync", ref); err != nil {
				t.Error(err)
			}
		})
		if _, err := ctr(ctx, s, "run", "-d", "--net-host", "--runtime", "io.containerd.thaw.v1", ref, id); err != nil {
			t.Fatal(err)
		}
	}
	remove := func(id string) {
		t.Helper()
		for _, args := range [][]string{{"task", "rm", "-f", id}, {"container", "rm", id}} {
			if _, err := ctr(context.WithoutCancel(ctx), s, args...); err != nil {
				t.Error(err)
			}
		}
	}
	run("first", s.Workload(workloads.Threads))
	before, err := get(ctx, server, "/state")
	if err != nil {
		t.Fatal(err)
	}
	ref := s.Registry.Ref("checkpoints/ctr:1")
	if _, err := thaw(ctx, s, "checkpoint", "first", "--push", ref); err != nil {
		t.Fatal(err)
	}
	remove("first")
	run("second", ref)
	defer remove("second")
	after, err := get(ctx, server, "/state")
	if err != nil {
		t.Fatal(err)
	}
	if err := all[workloads.Threads].proves(before, after); err != nil {
		t.Error(err)
	}
	out, err := thaw(ctx, s, "ps")
	if err != nil || !strings.Contains(out, "second") {
		t.Errorf("thaw ps: %q, %v", out, err)
	}
}
