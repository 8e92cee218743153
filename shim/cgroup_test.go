// SPDX-License-Identifier: Apache-2.0

package shim

import "testing"

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
