// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"net/http"
	"strings"
	"testing"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/stack/registry"
	"thaw.dev/thaw/test/workloads"
)

// TestBaseLayersAreNotUploaded checkpoints a small program on a large root filesystem: the latter must be mounted from the base
// image's repository.
func TestBaseLayersAreNotUploaded(t *testing.T) {
	ctx, s := start(t, workloads.Sockets)
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "upload", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Sockets)})
	if err != nil {
		t.Fatal(err)
	}
	s.Registry.Reset()
	ref := freeze(ctx, t, s, c)
	repository := strings.TrimPrefix(ref[:strings.LastIndex(ref, ":")], s.Registry.Addr()+"/")
	const limit = 2 << 20 // the program's memory and CRIU's images
	if got := s.Registry.Traffic(registry.InRepository(repository)); got.Received > limit {
		t.Errorf("%d bytes were uploaded, at most %d belong to the checkpoint", got.Received, limit)
	}
	mounted := 0
	for _, r := range s.Registry.Requests() {
		if r.Repository == repository && r.Kind == registry.KindUpload && strings.Contains(r.Query, "mount=") && r.Status == http.StatusCreated {
			mounted++
		}
	}
	if mounted == 0 {
		for _, r := range s.Registry.Requests() {
			t.Log(r)
		}
		t.Error("no layer was mounted")
	}
}
