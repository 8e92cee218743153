// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"thaw.dev/thaw/test/hostile"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// throughCRI are the tricks that are tried on a whole node: one of each kind. Package hostile tries all of them.
var throughCRI = []string{
	"fourth-descriptor", "folder-in-place-of-a-tmpfs", "release-agent", "root-of-a-process", "masked-elsewhere", "masks-under-another-mount", "volume-by-a-host-path",
	"audit-log", "tmpfs-through-a-link", "deleted-setuid-program", "capability-too-many", "path-with-control-characters", "symbolic-link", "bomb-of-messages",
	"page-missing", "device-annotations", "options-for-criu",
}

// TestHostile: images that try to harm the node are refused through CRI as without it, and nothing is left on the node.
func TestHostile(t *testing.T) {
	ctx, s := start(t, workloads.Pipeline)
	ref, before := frozen(ctx, t, s, workloads.Pipeline)
	source, err := hostile.Pull(ctx, ref)
	if err != nil {
		t.Fatal(err)
	}
	push := func(t *testing.T, name string, change func(*hostile.Image)) string {
		t.Helper()
		i, err := source.Image()
		if err != nil {
			t.Fatal(err)
		}
		change(i)
		p, err := source.Push(ctx, i, name)
		if err != nil || len(p.Answers) > 0 {
			t.Fatalf("%v, not pushed: %d", err, len(p.Answers))
		}
		return p.Reference
	}
	tried := 0
	for _, trick := range hostile.Tricks() {
		if !slices.Contains(throughCRI, trick.Name) {
			continue
		}
		tried++
		t.Run(trick.Name, func(t *testing.T) {
			tags := imageNames(ctx, t, s)
			ref := push(t, trick.Name, trick.Make)
			says(t, refused(ctx, t, s, ref, stack.PodOptions{}, stack.ContainerOptions{}), trick.Says)
			for name := range imageNames(ctx, t, s) {
				if !tags[name] && !strings.HasPrefix(name, "sha256:") && !strings.HasPrefix(name, ref[:strings.LastIndex(ref, ":")]) {
					t.Errorf("image %s appeared", name)
				}
			}
		})
	}
	if tried != len(throughCRI) {
		t.Errorf("%d of %d tricks", tried, len(throughCRI))
	}

	t.Run("labels for the node", func(t *testing.T) {
		canary := filepath.Join(t.TempDir(), "canary")
		program := filepath.Join(t.TempDir(), "program")
		if err := os.WriteFile(program, []byte("#!/bin/sh\ntouch "+canary+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		labels := map[string]string{
			"containerd.io/restart.status": "running", "containerd.io/restart.loguri": "binary://" + program, "containerd.io/restart.logpath": canary,
			"io.cri-containerd.kind": "sandbox", "cdi.k8s.io/vendor": "vendor.com/device=all",
		}
		ref := push(t, "labels", func(i *hostile.Image) { i.Labels = maps.Clone(labels) })
		pod, c := restore(ctx, t, s, ref, stack.ContainerOptions{})
		observed(ctx, t, workloads.Pipeline, before, pod, c)
		record, err := s.Containerd().ContainerService().Get(ctx, c.ID)
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range labels {
			if record.Labels[name] == value && strings.HasPrefix(name, "containerd.io/") || name == "io.cri-containerd.kind" && record.Labels[name] != "container" {
				t.Errorf("the container has the label %s=%s", name, record.Labels[name])
			}
		}
		container, err := s.Containerd().LoadContainer(ctx, c.ID)
		if err != nil {
			t.Fatal(err)
		}
		spec, err := container.Spec(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for name := range spec.Annotations {
			if strings.HasPrefix(name, "cdi.k8s.io/") || strings.HasPrefix(name, "containerd.io/") {
				t.Errorf("the container has the annotation %s", name)
			}
		}
		if _, err := os.Stat(canary); err == nil {
			t.Error("a program ran on the node")
		}
		if err := pod.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
}

// imageNames are the names of all images on the node.
func imageNames(ctx context.Context, t *testing.T, s *stack.Stack) map[string]bool {
	t.Helper()
	list, err := s.Containerd().ImageService().List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]bool)
	for _, i := range list {
		out[i.Name] = true
	}
	return out
}
