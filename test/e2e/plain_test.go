// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// TestPlainContainer does with a container that is no checkpoint what people do with one, and expects the same of the handlers
// runc and thaw.
func TestPlainContainer(t *testing.T) {
	for _, handler := range []string{"runc", "thaw"} {
		t.Run(handler, func(t *testing.T) {
			ctx, s := start(t, workloads.Threads, workloads.Debian)
			if handler == "thaw" && !s.HasShim() {
				t.Skip("containerd-shim-thaw-v1 is not built: run make build")
			}
			pod, err := s.RunPod(ctx, stack.PodOptions{Name: "plain", Handler: handler})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := pod.Run(ctx, stack.ContainerOptions{Name: "server", Image: s.Workload(workloads.Threads)}); err != nil {
				t.Fatal(err)
			}
			reply, err := stack.FirstReply(ctx, "http://"+pod.IP+":8080/state")
			if err != nil {
				t.Fatal(err)
			}
			var state struct{ OK bool }
			if err := json.Unmarshal(reply, &state); err != nil || !state.OK {
				t.Errorf("reply %s: %v", reply, err)
			}

			shell, err := pod.Run(ctx, stack.ContainerOptions{
				Name: "shell", Image: s.Workload(workloads.Debian), Env: map[string]string{"WORD": "hello"},
				Command: []string{"/bin/sh", "-c", `echo "$WORD from the log"; exec sleep 1000`},
			})
			if err != nil {
				t.Fatal(err)
			}
			out, err := shell.Exec(ctx, "/bin/sh", "-c", "cat /proc/1/cmdline | tr '\\0' ' '; hostname")
			if err != nil || !strings.HasPrefix(out, "sleep 1000") && !strings.HasPrefix(out, "/bin/sh") || !strings.Contains(out, pod.Config.Hostname) {
				t.Errorf("exec: %q, %v", out, err)
			}
			if _, err := shell.Exec(ctx, "/bin/false"); err == nil || !strings.Contains(err.Error(), "exit code 1") {
				t.Errorf("exec of false: %v", err)
			}
			if err := shell.Stop(ctx, 0); err != nil {
				t.Error(err)
			}
			status, err := shell.Status(ctx)
			if err != nil || status.GetExitCode() != 137 {
				t.Errorf("after a stop without grace: exit code %d, %v", status.GetExitCode(), err)
			}
			text, err := shell.Log()
			if err != nil || !slices.ContainsFunc(strings.Split(text, "\n"), func(l string) bool { return strings.HasSuffix(l, " stdout F hello from the log") }) {
				t.Errorf("log: %q, %v", text, err)
			}
			if pid, err := pod.ShimPID(); err != nil || pid < 2 {
				t.Errorf("shim: %d, %v", pid, err)
			}
		})
	}
}
