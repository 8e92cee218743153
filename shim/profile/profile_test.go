// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/seccomp"
)

func TestMain(m *testing.M) {
	Main()
	os.Exit(m.Run())
}

// refusing is a profile that refuses some system calls.
func refusing(names ...string) *specs.LinuxSeccomp {
	return &specs.LinuxSeccomp{
		DefaultAction: specs.ActAllow, Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32},
		Syscalls: []specs.LinuxSyscall{{Names: names, Action: specs.ActErrno}},
	}
}

// runcPath is runc, or the test is skipped: it makes a container.
func runcPath(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("runc")
	if built := "../../build/bin/runc"; err != nil {
		path, err = filepath.Abs(built)
	}
	if _, serr := os.Stat(path); err != nil || serr != nil || os.Geteuid() != 0 {
		t.Skip("needs root and runc, e.g. after make deps")
	}
	return path
}

func TestFilter(t *testing.T) {
	path := runcPath(t)
	dir := filepath.Join(t.TempDir(), "seccomp")
	first, err := Filter(t.Context(), dir, path, refusing("unshare", "mount"))
	if err != nil {
		t.Fatal(err)
	}
	if len(first) < 3*instructionSize || binary.NativeEndian.Uint16(first) != unix.BPF_LD|unix.BPF_W|unix.BPF_ABS {
		t.Fatalf("no filter: %x", first)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("left behind: %v, %v", files, err)
	}
	for _, cgroup := range []string{"/sys/fs/cgroup/thaw-seccomp", "/sys/fs/cgroup/pids/thaw-seccomp"} {
		if _, err := os.Stat(cgroup); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", cgroup, err)
		}
	}
	// Asked again, runc is not: what was kept is the answer.
	kept, err := filepath.Glob(filepath.Join(dir, "????????????????????????????????????????????????????????????????"))
	if err != nil || len(kept) != 1 {
		t.Fatalf("kept: %q, %v", kept, err)
	}
	if err := os.WriteFile(kept[0], []byte("12345678"), 0o600); err != nil {
		t.Fatal(err)
	}
	if again, err := Filter(t.Context(), dir, path, refusing("unshare", "mount")); err != nil || string(again) != "12345678" {
		t.Errorf("another answer: %x, %v", again, err)
	}
	weaker, err := Filter(t.Context(), dir, path, refusing("mount"))
	if err != nil {
		t.Fatal(err)
	}
	budget := seccomp.MaxSteps
	if err := seccomp.Covers(first, weaker, &budget); err != nil {
		t.Error(err)
	}
	if err := seccomp.Covers(weaker, first, &budget); err == nil || !strings.Contains(err.Error(), "lets system call") {
		t.Errorf("a weaker filter covers: %v", err)
	}
}

// What an asker that was killed left behind is removed by the next.
func TestKilledAsker(t *testing.T) {
	path := runcPath(t)
	dir := t.TempDir()
	p := prober{dir: filepath.Join(dir, "container"), runtime: path}
	section, err := json.Marshal(refusing("mount"))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.create(section, true); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(p.pidFile())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Filter(t.Context(), dir, path, refusing("unshare")); err != nil {
		t.Error(err)
	}
	if state, err := os.ReadFile(filepath.Join("/proc", string(text), "stat")); err == nil && !strings.Contains(string(state), ") Z ") {
		t.Errorf("its container waits still: %s", state)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("left behind: %v, %v", files, err)
	}
}

// A profile that runc refuses, or that lets runc do nothing, is an error that says so, and leaves no container.
func TestRefused(t *testing.T) {
	path := runcPath(t)
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		profile *specs.LinuxSeccomp
		says    string
	}{
		"unknown action": {&specs.LinuxSeccomp{DefaultAction: "SCMP_ACT_NONSENSE"}, "SCMP_ACT_NONSENSE"},
		"a listener":     {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, ListenerPath: "/x"}, "SCMP_ACT_NOTIFY"},
	} {
		_, err := Filter(t.Context(), dir, path, tc.profile)
		if err == nil || !strings.Contains(err.Error(), tc.says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %v does not say %q", name, err, tc.says)
		}
	}
	if _, err := Filter(t.Context(), dir, "/nowhere/runc", refusing("mount")); err == nil || !strings.Contains(err.Error(), "/nowhere/runc") {
		t.Errorf("error %v", err)
	}
}

func TestKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "runc")
	write := func(s string) string {
		if err := os.WriteFile(path, []byte(s), 0o700); err != nil {
			t.Fatal(err)
		}
		k, err := keyOf(path, []byte("a"))
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	first := write("1")
	if other, err := keyOf(path, []byte("b")); err != nil || other == first {
		t.Errorf("another profile has the same key, %v", err)
	}
	if write("12") == first {
		t.Error("another runc has the same key")
	}
}

func TestDamaged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	for _, n := range []int{0, 7, maxProgram + instructionSize} {
		if err := os.WriteFile(path, make([]byte, n), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readProgram(path); err == nil {
			t.Errorf("%d bytes are a filter", n)
		}
	}
}

func TestForget(t *testing.T) {
	dir := t.TempDir()
	for i := range maxAnswers + 3 {
		if err := os.WriteFile(filepath.Join(dir, "a"+string(rune('a'+i/26))+string(rune('a'+i%26))), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := forget(dir); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != maxAnswers-1 {
		t.Errorf("%d left, %v", len(left), err)
	}
}

func BenchmarkFilter(b *testing.B) {
	path, err := filepath.Abs("../../build/bin/runc")
	if _, serr := os.Stat(path); err != nil || serr != nil || os.Geteuid() != 0 {
		b.Skip("needs root and runc, e.g. after make deps")
	}
	for name, kept := range map[string]bool{"asked": false, "kept": true} {
		b.Run(name, func(b *testing.B) {
			dir := b.TempDir()
			for b.Loop() {
				if !kept {
					if err := os.RemoveAll(dir); err != nil {
						b.Fatal(err)
					}
				}
				if _, err := Filter(b.Context(), dir, path, refusing("mount")); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
