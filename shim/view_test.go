// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"os"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/snapshotter/premount"
)

// TestView: with a plan for mounts, other images are taken for it, and the archives are not there.
func TestView(t *testing.T) {
	layout := t.TempDir()
	shared := filepath.Join(layout, "criu")
	for name, content := range map[string]string{
		"criu/core-1.img": "core", "criu/mountpoints-5.img": "own", "criu/tmpfs-dev-7.tar.gz.img": "archive", "criu/utsns-3.img": "theirs",
		"premount/mountpoints-5.img": "given",
	} {
		path := filepath.Join(layout, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	plan := &premount.Plan{Images: []string{"mountpoints-5.img"}, Archives: []string{"tmpfs-dev-7.tar.gz.img"}}
	for name, c := range map[string]struct {
		plan *premount.Plan
		want map[string]string
	}{
		"plan":    {plan, map[string]string{"core-1.img": "core", "mountpoints-5.img": "given"}},
		"no plan": {nil, map[string]string{"core-1.img": "core", "mountpoints-5.img": "own", "tmpfs-dev-7.tar.gz.img": "archive"}},
	} {
		dir := filepath.Join(layout, name)
		if err := makeView(dir, shared, "pod", c.plan); err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != len(c.want)+1 {
			t.Errorf("%s: %v, %v", name, entries, err)
		}
		for file, want := range c.want {
			if got, err := os.ReadFile(filepath.Join(dir, file)); err != nil || string(got) != want {
				t.Errorf("%s: %s is %q, %v", name, file, got, err)
			}
		}
		if got, err := os.ReadFile(filepath.Join(dir, "utsns-3.img")); err != nil || string(got) == "theirs" {
			t.Errorf("%s: the host name is the dump's: %v", name, err)
		}
	}
}

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
