// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// devices describes all that is in a container's /dev, but not what is mounted there.
func devices(t *testing.T, pid int) (out []string) {
	t.Helper()
	root := fmt.Sprintf("/proc/%d/root/dev", pid)
	var dev unix.Stat_t
	if err := unix.Stat(root, &dev); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		if err != nil {
			return err
		}
		if st.Dev != dev.Dev {
			out = append(out, "mount "+strings.TrimPrefix(path, root))
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		target, _ := os.Readlink(path)
		out = append(out, fmt.Sprintf("%s %o %d:%d %d:%d %s %d", strings.TrimPrefix(path, root), st.Mode, st.Uid, st.Gid, unix.Major(st.Rdev), unix.Minor(st.Rdev), target, st.Mtim.Sec))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// own matches what is of one pod in a line of mountinfo: numbers, and the folder of its sandbox.
var own = regexp.MustCompile(`^\d+ \d+ \d+:\d+ |[0-9a-f]{64}|upperdir=\S*|workdir=\S*|lowerdir=\S*`)

// mountinfo is what is mounted where in a container, with all options. Left out is what CRIU is given from the host in any case:
// cgroups, and /dev/null over masked files.
func mountinfo(t *testing.T, pid int) (out []string) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if line = own.ReplaceAllString(line, ""); !strings.Contains(line, " - cgroup") && !strings.HasPrefix(line, "/null ") {
			out = append(out, line)
		}
	}
	slices.Sort(out)
	return out
}

// TestMounts: a restored container has the mounts that it had, with what was in them, though the shim makes some for CRIU;
// nothing of them is left on the node.
func TestMounts(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "template", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Synthetic), Env: synthetic})
	if err != nil {
		t.Fatal(err)
	}
	if err := verify(ctx, pod); err != nil {
		t.Fatal(err)
	}
	pid, err := c.PID(ctx)
	if err != nil {
		t.Fatal(err)
	}
	// What a program makes of its own there comes back too.
	dev := fmt.Sprintf("/proc/%d/root/dev/", pid)
	if err := unix.Mkfifo(dev+"own", 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Lchown(dev+"own", 1000, 1001); err != nil {
		t.Fatal(err)
	}
	wantDevices, wantMounts := devices(t, pid), mountinfo(t, pid)
	ref := freeze(ctx, t, s, c)
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}

	pod, c = restore(ctx, t, s, ref, stack.ContainerOptions{})
	if err := verify(ctx, pod); err != nil {
		t.Fatal(err)
	}
	if pid, err = c.PID(ctx); err != nil {
		t.Fatal(err)
	}
	if got := devices(t, pid); !slices.Equal(got, wantDevices) {
		t.Errorf("/dev is\n%s\nand was\n%s", strings.Join(got, "\n"), strings.Join(wantDevices, "\n"))
	}
	if got := mountinfo(t, pid); !slices.Equal(got, wantMounts) {
		t.Errorf("mounts are\n%s\nand were\n%s", strings.Join(got, ""), strings.Join(wantMounts, ""))
	}
	// They were made by the shim, and taken away.
	plans, err := filepath.Glob("/run/thaw/images/*/premount/plan.json")
	if err != nil || len(plans) == 0 {
		t.Errorf("no plan: %v", err)
	}
	if left, err := filepath.Glob("/run/thaw/container-*/mounts"); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	text, err := os.ReadFile(filepath.Join(s.Logs(), "containerd.log"))
	if err != nil || strings.Contains(string(text), "mounts are left to CRIU") {
		t.Errorf("mounts were left to CRIU, %v", err)
	}
}
