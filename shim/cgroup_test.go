// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"os"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestSystemdPath(t *testing.T) {
	for in, want := range map[string]string{
		"kubepods-burstable-pod1.slice:cri-containerd:abc": "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-abc.scope",
		":cri:x":              "system.slice/cri-x.scope",
		"-.slice:cri:x":       "cri-x.scope",
		"a.slice:cri:x.slice": "a.slice/x.slice",
		"/plain/path":         "/plain/path",
	} {
		if got := systemdPath(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

func TestCgroupPath(t *testing.T) {
	for _, c := range []struct {
		path    string
		systemd bool
		want    string // "": an error
	}{
		{"/k8s.io/abc", false, "/k8s.io/abc"},
		{"a.slice:cri:x", true, "/a.slice/cri-x.scope"},
		{"", false, ""},
		{"", true, ""},
		{"/", false, ""},
		{"/x/..", false, ""},
		{"below-my-own", false, ""},
	} {
		path, err := cgroupPath(&specs.Spec{Linux: &specs.Linux{CgroupsPath: c.path}}, c.systemd)
		if path != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%q: %q, %v", c.path, path, err)
		}
	}
	if _, err := cgroupPath(&specs.Spec{}, false); err == nil {
		t.Error("a spec without a linux section has a cgroup")
	}
}

// TestRemoveCgroups removes cgroups from all hierarchies, with those in them, and nobody else's.
func TestRemoveCgroups(t *testing.T) {
	const path = "/thaw-shim-test/box"
	dirs := cgroupDirs(path)
	for _, dir := range dirs {
		if err := os.MkdirAll(filepath.Join(dir, "child"), 0o700); err != nil {
			t.Skipf("no cgroup can be made here: %v", err)
		}
		t.Cleanup(func() {
			_ = os.Remove(filepath.Join(dir, "child"))
			_ = os.Remove(dir)
			if err := os.Remove(filepath.Dir(dir)); err != nil {
				t.Error(err)
			}
		})
	}
	for range 2 {
		if err := removeCgroups(path); err != nil {
			t.Error(err)
		}
	}
	for _, dir := range dirs {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s is left", dir)
		}
	}
}
