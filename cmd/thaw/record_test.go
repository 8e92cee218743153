// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestRecordConfigure(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	r := &recording{image: "r/x:1"}
	if err := r.configure("", ""); err != nil {
		t.Fatal(err)
	}
	c := r.container.GetLinux().GetSecurityContext()
	if len(c.GetMaskedPaths()) == 0 || c.GetNamespaceOptions().GetPid() != cri.NamespaceMode_CONTAINER || r.pod.GetMetadata().GetUid() == "" {
		t.Errorf("%v, %v", r.pod, r.container)
	}
	// The files are crictl's, but name, image and that a restore is required are the trial's.
	pod := file("pod.json", `{"metadata":{"name":"mine"},"annotations":{"thaw.dev/policy":"lazy"},"hostname":"h"}`)
	container := file("container.json", `{"image":{"image":"other"},"mounts":[{"host_path":"/a","container_path":"/b"}],
		"linux":{"security_context":{"capabilities":{"add_capabilities":["SYS_PTRACE"]}}}}`)
	r = &recording{image: "r/x:1"}
	if err := r.configure(pod, container); err != nil {
		t.Fatal(err)
	}
	c = r.container.GetLinux().GetSecurityContext()
	if r.pod.Hostname != "h" || r.pod.Metadata.Name == "mine" || r.pod.Annotations["thaw.dev/policy"] != "lazy" || r.pod.Annotations["thaw.dev/restore"] != "required" ||
		r.container.Image.Image != "r/x:1" || len(r.container.Mounts) != 1 || r.container.Mounts[0].ContainerPath != "/b" ||
		len(c.GetCapabilities().GetAddCapabilities()) != 1 || len(c.GetMaskedPaths()) == 0 {
		t.Errorf("%v, %v", r.pod, r.container)
	}
	for _, bad := range []string{file("bad.json", "{"), file("large.json", strings.Repeat(" ", maxConfigFile+1))} {
		if err := r.configure(bad, ""); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestProbe(t *testing.T) {
	var asked atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer srv.Close()
	if err := probe(t.Context(), srv.URL); err != nil || asked.Load() != 2 {
		t.Errorf("after %d requests: %v", asked.Load(), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	srv.Close()
	if err := probe(ctx, srv.URL); err == nil || !strings.Contains(err.Error(), "no success") {
		t.Errorf("nobody answers: %v", err)
	}
}
