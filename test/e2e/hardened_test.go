// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// TestUnit has systemd look for mistakes in the unit, and rate how much is left to it.
func TestUnit(t *testing.T) {
	root, err := stack.Root()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, highest := range map[string]int{"": 55, "thaw-snapshotter.service.d/no-snapshots.conf": 30} {
		unit, err := os.ReadFile(filepath.Join(root, "contrib/systemd/thaw-snapshotter.service"))
		if err != nil {
			t.Fatal(err)
		}
		if name != "" {
			dropIn, err := os.ReadFile(filepath.Join(root, "contrib/systemd", name))
			if err != nil {
				t.Fatal(err)
			}
			unit = append(unit, dropIn...)
		}
		path := filepath.Join(dir, "thaw-snapshotter.service")
		if err := os.WriteFile(path, bytes.ReplaceAll(unit, []byte("/usr/local/bin/thaw-snapshotter"), []byte("/bin/true")), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, args := range [][]string{
			{"verify", "--man=no", path},
			{"security", "--no-pager", "--offline=yes", fmt.Sprint("--threshold=", highest), path}, // tenths
		} {
			out, err := exec.CommandContext(t.Context(), "systemd-analyze", args...).CombinedOutput()
			if err != nil || args[0] == "verify" && len(out) > 0 {
				t.Errorf("systemd-analyze %s: %v\n%s", args[0], err, out)
			}
		}
	}
}

// underUnit runs a test's restores with the daemon in systemd's hands, under a configuration and drop-ins.
func underUnit(ctx context.Context, t *testing.T, s *stack.Stack, config string, dropIns ...string) *stack.Unit {
	t.Helper()
	if err := s.RestartDaemon(ctx, config); err != nil {
		t.Fatal(err)
	}
	if err := s.StopDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	u, err := s.StartUnit(ctx, dropIns...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := s.RemoveAllPods(ctx); err != nil {
			t.Error(err)
		}
		if err := u.Stop(ctx); err != nil {
			t.Error(err)
		}
		if err := s.RestartDaemon(ctx, ""); err != nil {
			t.Error(err)
		}
	})
	return u
}

// status gives a line of /proc/PID/status without its name.
func status(t *testing.T, pid int, name string) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("no %s in\n%s", name, text)
	return ""
}

// TestHardened: with all that the unit and its drop-in take away, the daemon restores, looks into the volumes of other users, runs
// verifiers, comes back after a kill, and kills containers of other users that lost shim and guard.
func TestHardened(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic, workloads.Pipeline)
	ref := frozenSynthetic(ctx, t, s)
	private := filepath.Join(s.Dir, "private")
	if err := os.MkdirAll(private, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(private, "book"), []byte("text\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{private, filepath.Join(private, "book")} {
		if err := os.Chown(path, 1000, 1000); err != nil {
			t.Fatal(err)
		}
	}
	user := stack.ContainerOptions{
		Mounts:  []*cri.Mount{{ContainerPath: "/data", HostPath: private}},
		Command: []string{"/bin/sh", "-c", `exec 3</data/book; echo "n=1 sum=1"; echo "n=2 sum=3"; while :; do sleep 1; done`},
		Change:  func(c *cri.ContainerConfig) { c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1000} },
	}
	user.Image = s.Workload(workloads.Pipeline)
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, user)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := firstLine(ctx, c); err != nil {
		t.Fatal(err)
	}
	userRef := freeze(ctx, t, s, c)
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}

	u := underUnit(ctx, t, s, "[snapshotter]\nenable = false\n"+verifiers(t, "exit 0"), "thaw-snapshotter.service.d/no-snapshots.conf")
	pid, err := u.PID(ctx)
	if err != nil {
		t.Fatal(err)
	}
	const granted = 1<<unix.CAP_DAC_READ_SEARCH | 1<<unix.CAP_KILL
	for name, want := range map[string]string{"CapBnd": fmt.Sprintf("%016x", granted), "CapEff": fmt.Sprintf("%016x", granted), "NoNewPrivs": "1", "Seccomp": "2"} {
		if got := status(t, pid, name); got != want {
			t.Errorf("%s of the daemon is %s, want %s", name, got, want)
		}
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/root/usr/local/written", pid), nil, 0o600); err == nil {
		t.Error("/usr can be written to")
	}

	restored, _ := lazily(ctx, t, s, ref)
	if _, err := get(ctx, restored, "/touch"); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := verify(ctx, restored); err != nil {
		t.Error(err)
	}
	if again, err := u.PID(ctx); err != nil || again == 0 || again == pid {
		t.Errorf("the daemon was killed as %d and is %d now: %v", pid, again, err)
	}

	if err := restored.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	pod, c = restore(ctx, t, s, userRef, stack.ContainerOptions{Mounts: user.Mounts, Change: user.Change, Annotations: map[string]string{"thaw.dev/policy": "lazy"}})
	process, err := c.PID(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if got := status(t, process, "Uid"); !strings.HasPrefix(got, "1000") {
		t.Errorf("user of the container: %s", got)
	}
	shim, err := pod.ShimPID()
	if err != nil {
		t.Fatal(err)
	}
	// With shim and guard gone the daemon is left. A shim that stands still does not replace its guard.
	if err := unix.Kill(shim, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for _, b := range blows {
		if b.name == "guard" {
			if err := b.strike(ctx, s, pod, shim); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := unix.Kill(shim, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended(ctx, t, process)
	if err := pod.Remove(ctx); err != nil {
		t.Error(err)
	}
	removeDeadSockets(t)
	// containerd, which sees the shim die too, kills as well.
	log, err := os.ReadFile(filepath.Join(s.Logs(), "thaw-snapshotter.log"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(log, []byte("the container is killed")) || bytes.Contains(log, []byte("container not killed")) {
		t.Errorf("the daemon did not kill the container:\n%s", log)
	}
}
