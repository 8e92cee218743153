// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/stack/registry"
	"thaw.dev/thaw/test/workloads"
)

// TestRegistries moves a checkpoint image from the embedded registry to Debian's docker-registry and back under another name with
// skopeo, and restores it from each.
func TestRegistries(t *testing.T) {
	ctx, s := start(t, workloads.Node)
	debian, err := s.StartDockerRegistry(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := debian.Kill(); err != nil {
			t.Error(err)
		}
	}()
	ref, before := frozen(ctx, t, s, workloads.Node)
	elsewhere := stack.DockerRegistryAddress + "/moved/node:1"
	back := s.Registry.Ref("moved/back:1")
	for _, step := range [][2]string{{ref, elsewhere}, {elsewhere, back}} {
		out, err := exec.CommandContext(ctx, "skopeo", "copy", "--all", "--src-tls-verify=false", "--dest-tls-verify=false",
			"docker://"+step[0], "docker://"+step[1]).CombinedOutput()
		if err != nil {
			t.Fatalf("skopeo: %v: %s", err, out)
		}
	}
	for _, ref := range []string{elsewhere, back} {
		if err := s.ClearThawCache(ctx); err != nil {
			t.Fatal(err)
		}
		pod, c := restore(ctx, t, s, ref, stack.ContainerOptions{})
		observed(ctx, t, workloads.Node, before, pod, c)
		if err := pod.Remove(ctx); err != nil {
			t.Fatal(err)
		}
	}
	// A checkpoint can be pushed to the other registry directly, too.
	pod, c := restore(ctx, t, s, ref, stack.ContainerOptions{})
	state := observed(ctx, t, workloads.Node, before, pod, c)
	direct := stack.DockerRegistryAddress + "/direct/node:1"
	if _, err := thaw(ctx, s, "checkpoint", c.ID, "--push", direct); err != nil {
		t.Fatal(err)
	}
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	pod, c = restore(ctx, t, s, direct, stack.ContainerOptions{})
	observed(ctx, t, workloads.Node, state, pod, c)
}

// TestSizes: what is uploaded is the checkpoint and nothing of the base image; the page index is small; the image runs anywhere.
func TestSizes(t *testing.T) {
	ctx, s := start(t, workloads.Node)
	s.Registry.Reset()
	ref, _ := frozen(ctx, t, s, workloads.Node)
	parsed, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	index, err := remote.Get(parsed)
	if err != nil {
		t.Fatal(err)
	}
	var x v1.Index
	decode(t, index.Manifest, &x)
	desc, err := checkpoint.Find(&x)
	if err != nil {
		t.Fatal(err)
	}
	f := takeApart(ctx, t, ref)
	var own int64 = desc.Size + f.manifest.Config.Size
	for _, l := range f.manifest.Layers {
		own += l.Size
	}
	uploaded := s.Registry.Traffic(registry.InRepository(parsed.Context().RepositoryStr())).Received
	const runnable = 1 << 20 // the layer with what the container wrote, configs and manifests
	if uploaded > own+runnable {
		t.Errorf("%d bytes were uploaded, the checkpoint has %d: base layers were uploaded again", uploaded, own)
	}
	if got, memory := f.layer(checkpoint.MediaTypePageIndex).Size, f.config.Memory.Total; got*500 > memory {
		t.Errorf("the page index has %d bytes for %d bytes of memory, more than 0.2 %%", got, memory)
	}

	// A runtime that knows nothing of checkpoints starts the application anew.
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "plain", Handler: "runc"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pod.Run(ctx, stack.ContainerOptions{Image: ref}); err != nil {
		t.Fatal(err)
	}
	reply, err := get(ctx, pod, "/ask?key=1")
	if err != nil {
		t.Fatal(err)
	}
	var answer struct{ Count int }
	if err := json.Unmarshal([]byte(reply), &answer); err != nil || answer.Count != 1 {
		t.Errorf("a cold start begins to count at 1: %s, %v", reply, err)
	}
	if out, err := thaw(ctx, s, "inspect", ref); err != nil || !strings.Contains(out, "node") {
		t.Errorf("thaw inspect: %q, %v", out, err)
	}
}
