// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"strings"
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

func TestCgroupDirs(t *testing.T) {
	for _, c := range []struct {
		path    string
		systemd bool
		want    string // the end of each folder; "" for an error
	}{
		{"/k8s.io/abc", false, "/k8s.io/abc"},
		{"a.slice:cri:x", true, "/a.slice/cri-x.scope"},
		{"", false, ""},
		{"", true, ""},
		{"/", false, ""},
		{"/x/..", false, ""},
		{"below-my-own", false, ""},
	} {
		dirs, err := cgroupDirs(&specs.Spec{Linux: &specs.Linux{CgroupsPath: c.path}}, c.systemd)
		if (err != nil) != (c.want == "") || err == nil && len(dirs) == 0 {
			t.Errorf("%q: %v, %v", c.path, dirs, err)
		}
		for _, d := range dirs {
			if !strings.HasPrefix(d, cgroupRoot+"/") || !strings.HasSuffix(d, c.want) {
				t.Errorf("%q: %s", c.path, d)
			}
		}
	}
	if _, err := cgroupDirs(&specs.Spec{}, false); err == nil {
		t.Error("a spec without a linux section has a cgroup")
	}
}
