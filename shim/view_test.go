// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"os"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// TestHostname: whatever the spec says or leaves open, the dump's host name is not among it.
func TestHostname(t *testing.T) {
	here, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	uts := func(path string) *specs.Linux {
		return &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.UTSNamespace, Path: path}}}
	}
	for name, tc := range map[string]struct {
		spec specs.Spec
		want string
	}{
		"host's namespace":     {specs.Spec{Hostname: "ignored"}, here},
		"new one":              {specs.Spec{Hostname: "pod", Linux: uts("")}, "pod"},
		"new one without name": {specs.Spec{Linux: uts("")}, here},
		"somebody's namespace": {specs.Spec{Linux: uts("/proc/self/ns/uts")}, here},
	} {
		got, err := hostnameOf(&tc.spec)
		if os.IsPermission(err) {
			t.Skip("entering a namespace needs root")
		}
		if err != nil || got != tc.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, tc.want)
		}
	}
}
