// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/admit"
	"thaw.dev/thaw/criu/image"
)

const containerName = "thaw-verify-test"

// TestMain is also the first process of a container: it makes itself what its argument says, says so and waits.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[0] == containerName {
		runtime.LockOSThread()
		if err := become(os.Args[1]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("ready")
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func become(what string) error {
	switch what {
	case "no_new_privs":
		return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	case "group":
		return unix.Setgroups([]int{27})
	case "ambient":
		h, d := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
		if err := unix.Capget(&h, &d[0]); err != nil {
			return err
		}
		d[0].Inheritable |= 1
		if err := unix.Capset(&h, &d[0]); err != nil {
			return err
		}
		return unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, 0, 0, 0)
	}
	return nil
}

// container starts a process in a PID namespace of its own, and a folder that lists it and this process as a cgroup does.
func container(t testing.TB, what string, flags uintptr) (cgroup string, pid int) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{containerName, what}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	if said, err := bufio.NewReader(out).ReadString('\n'); said != "ready\n" {
		t.Fatalf("the container says %q, %v", said, err)
	}
	cgroup = t.TempDir()
	list := fmt.Appendf(nil, "%d\n%d\n%d\n", os.Getpid(), cmd.Process.Pid, 1<<22-1)
	if err := os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), list, 0o600); err != nil {
		t.Fatal(err)
	}
	return cgroup, cmd.Process.Pid
}

const own = unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET

// granted is a spec that grants what the test has.
func granted(t testing.TB) *specs.Spec {
	t.Helper()
	text, err := read("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	self, err := parseStatus(text)
	if err != nil {
		t.Fatal(err)
	}
	caps := admit.CapabilityNames(self.Creds.Bounding)
	return &specs.Spec{
		Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: caps, Permitted: caps, Effective: caps}},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{
			{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.NetworkNamespace},
		}},
	}
}

func TestContainer(t *testing.T) {
	limited := func(typ string, hard uint64) func(*specs.Spec, int) {
		return func(s *specs.Spec, _ int) { s.Process.Rlimits = []specs.POSIXRlimit{{Type: typ, Hard: hard}} }
	}
	for name, tc := range map[string]struct {
		become string
		flags  uintptr
		change func(s *specs.Spec, pid int)
		says   string // "": nothing is wrong
	}{
		"all is right":     {"", own, func(*specs.Spec, int) {}, ""},
		"the pod's net":    {"", own, func(s *specs.Spec, pid int) { s.Linux.Namespaces[2].Path = fmt.Sprintf("/proc/%d/ns/net", pid) }, ""},
		"limits":           {"", own, limited("RLIMIT_NOFILE", ^uint64(0)), ""},
		"more confined":    {"no_new_privs", own, func(*specs.Spec, int) {}, ""},
		"another net":      {"", own, func(s *specs.Spec, _ int) { s.Linux.Namespaces[2].Path = "/proc/self/ns/net" }, "task 1: network namespace: the restored one has another, the pod's spec has the pod's"},
		"the node's net":   {"", unix.CLONE_NEWPID | unix.CLONE_NEWNS, func(*specs.Spec, int) {}, "task 1: network namespace: the restored one has the node's"},
		"not the node's":   {"", own, func(s *specs.Spec, _ int) { s.Linux.Namespaces = s.Linux.Namespaces[:2] }, "network namespace: the restored one has one of its own"},
		"the node's IPC":   {"", own, func(s *specs.Spec, _ int) { s.Linux.Namespaces[1].Type = specs.IPCNamespace }, "ipc namespace"},
		"user":             {"", own, func(s *specs.Spec, _ int) { s.Process.User.UID, s.Process.Capabilities = 1000, nil }, ": uid: the restored one has 0, the pod's spec has 1000"},
		"group":            {"group", own, func(s *specs.Spec, _ int) { s.Process.Capabilities.Bounding = []string{"CAP_CHOWN"} }, "supplementary group: the restored one has 27"},
		"capability":       {"", own, func(s *specs.Spec, _ int) { s.Process.Capabilities.Bounding = s.Process.Capabilities.Bounding[1:] }, "bounding capabilities: the restored one has CAP_CHOWN too"},
		"ambient":          {"ambient", own, func(*specs.Spec, int) {}, "ambient capabilities: the restored one has CAP_CHOWN too"},
		"no_new_privs":     {"", own, func(s *specs.Spec, _ int) { s.Process.NoNewPrivileges = true }, "no_new_privs: the restored one has not set"},
		"seccomp":          {"", own, func(s *specs.Spec, _ int) { s.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActErrno} }, "seccomp: the restored one has none, the pod's spec has a filter"},
		"limit":            {"", own, limited("RLIMIT_NOFILE", 1), "RLIMIT_NOFILE: the restored one has"},
		"AppArmor profile": {"", own, func(s *specs.Spec, _ int) { s.Process.ApparmorProfile = "thaw-test-strict" }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			cgroup, pid := container(t, tc.become, tc.flags)
			s := granted(t)
			tc.change(s, pid)
			seen, err := Container(s, []string{"/sys/fs/cgroup/none", cgroup})
			if name == "AppArmor profile" { // hosts have none, or another one
				if err == nil {
					t.Error("is under the profile")
				}
				return
			}
			if tc.says == "" {
				if err != nil || !slices.Equal(seen, []int{pid}) {
					t.Errorf("saw %v, %v; the process is %d", seen, err, pid)
				}
				return
			}
			if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.says) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v does not say %q", err, tc.says)
			}
		})
	}
}

func TestNoCgroup(t *testing.T) {
	if _, err := Container(granted(t), []string{"/sys/fs/cgroup/none"}); err == nil || !strings.Contains(err.Error(), "/sys/fs/cgroup/none") {
		t.Errorf("error %v", err)
	}
}

func TestParseStatus(t *testing.T) {
	const good = "Name:\tserver\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 10 \nNSpid:\t4711\t12\nCapInh:\t0000000000000001\n" +
		"CapPrm:\t0000000000000002\nCapEff:\t0000000000000004\nCapBnd:\t000001ffffffffff\nCapAmb:\t0000000000000010\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n"
	th, err := parseStatus(good)
	if err != nil {
		t.Fatal(err)
	}
	c := th.Creds
	if th.Comm != "server" || th.TID != 12 || th.Seccomp != image.SeccompFilter || !c.NoNewPrivs || fmt.Sprint(c.Groups) != "[9 10]" ||
		c.UID != 1 || c.EUID != 2 || c.SUID != 3 || c.FSUID != 4 || c.GID != 5 || c.EGID != 6 || c.SGID != 7 || c.FSGID != 8 ||
		c.Inheritable != 1 || c.Permitted != 2 || c.Effective != 4 || c.Bounding != 1<<41-1 || c.Ambient != 16 {
		t.Errorf("got %+v", th)
	}
	for line := range strings.SplitSeq(strings.TrimSuffix(good, "Seccomp_filters:\t1\n"), "\n") {
		if line == "" {
			continue
		}
		if _, err := parseStatus(strings.Replace(good, line+"\n", "", 1)); err == nil {
			t.Errorf("without %q it is taken", line)
		}
	}
	for old, bad := range map[string]string{"Uid:\t1": "Uid:", "CapBnd:\t": "CapBnd:\tx", "9 10": "9 x"} {
		if _, err := parseStatus(strings.Replace(good, old, bad, 1)); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func BenchmarkContainer(b *testing.B) {
	cgroup, _ := container(b, "", own)
	s := granted(b)
	for b.Loop() {
		if _, err := Container(s, []string{cgroup}); err != nil {
			b.Fatal(err)
		}
	}
}
