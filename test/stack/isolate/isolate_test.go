// SPDX-License-Identifier: Apache-2.0

//go:build linux

package isolate

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		os.Exit(0)
	}
	Enter()
	os.Exit(m.Run())
}

func TestInside(t *testing.T) {
	if !Inside() {
		t.Fatal("Enter returned outside")
	}
	if init, err := os.ReadFile("/proc/1/environ"); err != nil || !strings.Contains(string(init), stageEnv+"="+stageInit) {
		t.Errorf("PID 1 is not the init stage: %v", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs("/run", &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Errorf("/run is not a tmpfs: type %#x, error %v", fs.Type, err)
	}
	devices, err := net.Interfaces()
	if err != nil || len(devices) != 1 || devices[0].Flags&net.FlagUp == 0 {
		t.Errorf("want lo only, and up: %v, %v", devices, err)
	}
}

func TestEtcIsShadowed(t *testing.T) {
	if err := os.WriteFile("/etc/thaw-isolate-test", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	host := filepath.Join(scratch, "0", "upper", "thaw-isolate-test")
	if _, err := os.Stat(host); err != nil {
		t.Errorf("the write went to the host: %v", err)
	}
}

func TestCgroupIsRoot(t *testing.T) {
	paths, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(paths)), "\n") {
		path := line[strings.LastIndex(line, ":")+1:]
		if path != "/" && path != "/init" {
			t.Errorf("outside of the namespace's root: %s", line)
		}
	}
	all, err := hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range all {
		dir := filepath.Join(h.mountpoint, "isolate-test")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Errorf("cannot make a cgroup: %v", err)
		}
		// Left behind on purpose: outer removes it.
	}
}
