// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestKillCgroup kills a process tree below a real cgroup, frozen where there is
// a freezer.
func TestKillCgroup(t *testing.T) {
	dir := testCgroup(t)
	child := filepath.Join(dir, "child")
	if err := os.Mkdir(child, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Rmdir(child); err != nil {
			t.Error(err)
		}
	})
	cmd := exec.Command("sh", "-c", `echo $$ > "$1/cgroup.procs"; sleep 1000 & echo ready; wait`, "sh", child)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%q %v", line, err)
	}
	if pids, err := processes(dir); err != nil || len(pids) != 2 {
		t.Fatalf("before: %v %v", pids, err)
	}
	if err := os.WriteFile(filepath.Join(child, "freezer.state"), []byte("FROZEN"), 0); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
		t.Fatal(err)
	}
	reaped := make(chan error, 1)
	go func() { reaped <- cmd.Wait() }()
	if err := Kill(t.Context(), []string{dir, filepath.Join(dir, "gone")}); err != nil {
		t.Fatal(err)
	}
	killedBySignal(t, <-reaped)
	if pids, err := processes(dir); err != nil || len(pids) != 0 {
		t.Fatalf("after: %v %v", pids, err)
	}
}

// TestKillFrozenInSeveral: a paused container is in several cgroups on v1, of which one keeps its processes from dying.
func TestKillFrozenInSeveral(t *testing.T) {
	dirs := []string{cgroupRoot + "/pids", cgroupRoot + "/freezer"}
	for i, parent := range dirs {
		dir, err := os.MkdirTemp(parent, "thaw-keeper-test-")
		if err != nil {
			t.Skipf("no cgroup v1: %v", err)
		}
		t.Cleanup(func() {
			if err := unix.Rmdir(dir); err != nil {
				t.Error(err)
			}
		})
		dirs[i] = dir
	}
	cmd := exec.Command("sh", "-c", `for i in "$@"; do echo $$ > "$i/cgroup.procs"; done; echo ready; exec sleep 1000`, "sh", dirs[0], dirs[1])
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%q %v", line, err)
	}
	if err := os.WriteFile(filepath.Join(dirs[1], "freezer.state"), []byte("FROZEN"), 0); err != nil {
		t.Fatal(err)
	}
	reaped := make(chan error, 1)
	go func() { reaped <- cmd.Wait() }()
	if err := Kill(t.Context(), dirs); err != nil {
		t.Fatal(err)
	}
	killedBySignal(t, <-reaped)
}

// TestKillHoppers kills a program that forks and exits without pause, so that no list of its processes is right for long.
func TestKillHoppers(t *testing.T) {
	dir := testCgroup(t)
	const hop = `echo $$ > "$1/cgroup.procs"; hop() { hop & exit; }; for i in 1 2 3 4; do hop & done; echo ready`
	cmd := exec.Command("sh", "-c", hop, "sh", dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%q %v", line, err)
	}
	if err := Kill(t.Context(), []string{dir}); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if pids, err := processes(dir); err != nil || len(pids) != 0 {
		t.Fatalf("after: %v %v", pids, err)
	}
}

func killedBySignal(t *testing.T, err error) {
	t.Helper()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		t.Fatalf("not killed: %v", err)
	}
	if ws, ok := exit.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
		t.Fatalf("not killed: %v", err)
	}
}

// testCgroup makes a cgroup where this machine lets us.
func testCgroup(t *testing.T) string {
	t.Helper()
	for _, parent := range []string{cgroupRoot + "/freezer", cgroupRoot + "/unified", cgroupRoot} {
		if _, err := os.Stat(filepath.Join(parent, "cgroup.procs")); err != nil {
			continue
		}
		dir, err := os.MkdirTemp(parent, "thaw-keeper-test-")
		if err != nil {
			continue
		}
		t.Cleanup(func() {
			if err := unix.Rmdir(dir); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	t.Skip("no cgroup can be made here: root is needed")
	return ""
}
