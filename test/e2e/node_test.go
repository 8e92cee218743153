// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// TestCheck: what a node lacks is named with a remedy, and what the stack has is found.
func TestCheck(t *testing.T) {
	ctx, s := start(t)
	out, err := thaw(ctx, s, "check", "--json")
	var findings []struct {
		Name, Detail, Remedy string
		OK                   bool
	}
	if jsonErr := json.Unmarshal([]byte(out), &findings); jsonErr != nil {
		t.Fatalf("%v: %q, %v", jsonErr, out, err)
	}
	wrong := 0
	for _, f := range findings {
		if f.Name == "" || !f.OK && f.Remedy == "" {
			t.Errorf("%+v", f)
		}
		if !f.OK {
			wrong++
			// Machines for tests may lack this one, for which the stack has a stand-in.
			if !strings.Contains(f.Name+f.Detail, "CAP_SYS_RESOURCE") {
				t.Errorf("the stack is said to lack %s: %s: %s", f.Name, f.Detail, f.Remedy)
			}
		}
	}
	if len(findings) < 8 || (err == nil) != (wrong == 0) {
		t.Errorf("%d findings, %d of them wrong, exit status: %v", len(findings), wrong, err)
	}
	if err := s.StopDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	out, err = thaw(ctx, s, "check")
	if err == nil || !strings.Contains(out, "thaw-snapshotter") {
		t.Errorf("without the daemon: %q, %v", out, err)
	}
	if err := s.StartDaemon(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestCRIURefuses: when CRIU itself fails, the start's error quotes it and names the log, which outlives the container.
func TestCRIURefuses(t *testing.T) {
	ctx, s := start(t, workloads.Pipeline)
	volume := func(name string, files ...string) []*cri.Mount {
		dir := filepath.Join(s.Dir, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if err := os.WriteFile(filepath.Join(dir, f), []byte("text\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		return []*cri.Mount{{ContainerPath: "/data", HostPath: dir}}
	}
	reader := []string{"/bin/sh", "-c", `exec 3</data/book; echo "n=1 sum=1"; echo "n=2 sum=3"; while :; do sleep 1; done`}
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Pipeline), Command: reader, Mounts: volume("full", "book")})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := firstLine(ctx, c); err != nil {
		t.Fatal(err)
	}
	ref := freeze(ctx, t, s, c)
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	got := refused(ctx, t, s, ref, stack.PodOptions{}, stack.ContainerOptions{Mounts: volume("empty")})
	says(t, got, "data/book")
	if m := regexp.MustCompile(`CRIU's log: ([^)]+)\)`).FindStringSubmatch(got); m == nil {
		t.Errorf("no log is named: %s", got)
	} else if text, err := os.ReadFile(m[1]); err != nil || !strings.Contains(string(text), "Error (") {
		t.Errorf("the log %s has no error: %v", m[1], err)
	}
	if _, err := s.RunPod(ctx, stack.PodOptions{Name: "next", Handler: "thaw"}); err != nil {
		t.Error(err)
	}
}
