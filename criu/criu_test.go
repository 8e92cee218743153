// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"thaw.dev/thaw/criu/image"
)

func TestParseVersion(t *testing.T) {
	for in, want := range map[string]Version{
		"4.1.1": {4, 1, 1}, " 4.2\n": {4, 2, 0}, "6.18.44-generic": {6, 18, 44}, "6.1.0-39-amd64": {6, 1, 0}, "3.17.1": {3, 17, 1}, "6.18-rc1": {6, 18, 0},
	} {
		if got, err := ParseVersion(in); err != nil || got != want {
			t.Errorf("%q is %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "4", "x.y", "4.", ".1", "99999999.1"} {
		if v, err := ParseVersion(in); err == nil {
			t.Errorf("%q is %v", in, v)
		}
	}
}

// fake makes a criu that prints what is given.
func fake(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "criu")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFind(t *testing.T) {
	b, err := Find(context.Background(), fake(t, "echo Version: 4.1.1; echo GitID: v4.1.1-dirty"))
	if err != nil || b.Version != (Version{4, 1, 1}) {
		t.Fatalf("%+v, %v", b, err)
	}
	if err := b.Check(Version{6, 14, 0}); err != nil {
		t.Error(err)
	}
	if err := b.Check(Version{6, 16, 0}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "4.2.0 or later") {
		t.Errorf("error %v", err)
	}
	b.Version = Version{3, 17, 1}
	if err := b.Check(Version{6, 1, 0}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "4.1.0 or later") {
		t.Errorf("error %v", err)
	}
	if _, err := Find(context.Background(), filepath.Join(t.TempDir(), "criu")); !errdefs.IsNotFound(err) {
		t.Errorf("missing: error %v", err)
	}
	for name, script := range map[string]string{"fails": "exit 1", "says nothing": "exit 0", "says nonsense": "echo Version: new"} {
		if _, err := Find(context.Background(), fake(t, script)); err == nil {
			t.Errorf("criu that %s is accepted", name)
		}
	}
}

func TestSupports(t *testing.T) {
	b := &Binary{Path: fake(t, `[ "$3" = good ] || { echo "Error (cr-check.c:1): no such thing" >&2; exit 1; }`)}
	if ok, _, err := b.Supports(context.Background(), "good"); !ok || err != nil {
		t.Errorf("%v, %v", ok, err)
	}
	if ok, detail, err := b.Supports(context.Background(), "bad"); ok || err != nil || !strings.Contains(detail, "no such thing") {
		t.Errorf("%v, %q, %v", ok, detail, err)
	}
}

func TestRestoreOptions(t *testing.T) {
	got, err := RestoreOptions{LazyPages: true, LogFile: "/run/thaw/restores/x-1/restore.log", Verbosity: 4}.Encode()
	want := "lazy-pages\ntcp-close\nfile-locks\nmanage-cgroups=ignore\nverbosity=4\nlog-file /run/thaw/restores/x-1/restore.log\n"
	if err != nil || string(got) != want {
		t.Errorf("%q, %v", got, err)
	}
	for _, path := range []string{"", "a b", "a\nexec-cmd", "#x", `"x"`, "../x", "/a/../b", "-x", "a#b", "/x/", strings.Repeat("x", 2000)} {
		if got, err := (RestoreOptions{LogFile: path, Verbosity: 4}).Encode(); err == nil {
			t.Errorf("log file %q is accepted: %q", path, got)
		}
	}
	got, err = RestoreOptions{LogFile: "x", Mounts: map[string]string{"b": "/run/thaw/container-k8s.io~1/mounts/1", "a": "/m"}}.Encode()
	if want := "external mnt[a]:/m\nexternal mnt[b]:/run/thaw/container-k8s.io~1/mounts/1\n"; err != nil || !strings.Contains(string(got), want) {
		t.Errorf("%q, %v", got, err)
	}
	for key, path := range map[string]string{"a": "relative", "b": "/a b", "c": "/x#", "d": "~/x", "e": "/a/../b", "": "/x", "a b": "/x", "x]:/y": "/x"} {
		if got, err := (RestoreOptions{LogFile: "x", Mounts: map[string]string{key: path}}).Encode(); err == nil {
			t.Errorf("mount %q at %q is accepted: %q", key, path, got)
		}
	}
	if _, err := (RestoreOptions{LogFile: "x", Verbosity: 5}).Encode(); err == nil {
		t.Error("verbosity 5 is accepted")
	}
}

func TestFirstError(t *testing.T) {
	for name, tc := range map[string]struct{ log, want string }{
		"none":     {"(00.1) all is well\n", ""},
		"first":    {"(00.1) mnt: x\n(00.052982) Error (criu/files-reg.c:1790): Can't lookup mount=84 for fd=1 path=/out\n(00.1) Error (criu/cr-dump.c:1681): Dump files failed\n", "Can't lookup mount=84 for fd=1 path=/out"},
		"pie":      {"pie: 12: Error (criu/pie/restorer.c:1): No space\n", "No space"},
		"task":     {"(00.2)      1: Error (criu/mount.c:12): mnt: Can't mount\n", "mnt: Can't mount"},
		"harmless": {"(0.1) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n(0.2) Error (criu/tty.c:1): tty: bad\n", "tty: bad"},
		"only harmless": {
			"(0.1) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n",
			"rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted",
		},
		"terminal":     {"(0.1) Error (a.c:1): x\x1b[2J\r\x00y\xff\n", "x [2J y"},
		"no line end":  {"(0.1) Error (a.c:1): last", "last"},
		"a forged one": {"(0.1) comm is (x) Error (a.c:1): fake\n(0.2) Error (a.c:2): true\n", "true"},
	} {
		if got, err := FirstError(strings.NewReader(tc.log)); err != nil || got != tc.want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	long := "(0.1) Error (a.c:1): " + strings.Repeat("é", 10000) + "\n"
	if got, err := FirstError(strings.NewReader(long)); err != nil || len(got) > maxQuoted+3 || !strings.HasSuffix(got, "é...") {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func TestCPUFeatures(t *testing.T) {
	got, err := parseCPUInfo(strings.NewReader("processor\t: 0\nflags\t\t: fpu sse avx avx2\nbugs : x\n\nprocessor : 1\nflags : avx fpu sse\n"))
	if err != nil || !slices.Equal(got, []string{"avx", "fpu", "sse"}) {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := parseCPUInfo(strings.NewReader("x\n")); err == nil {
		t.Error("no features are accepted")
	}
	here, err := CPUFeatures()
	if err != nil || MissingCPUFeatures(here, here) != nil {
		t.Errorf("%v, %v", here, err)
	}
	err = CheckCPU([]string{"fpu", "avx512f", "md_clear", "arch_capabilities", "hypervisor", "erms"}, []string{"fpu"})
	if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "lacks avx512f, which") {
		t.Errorf("error %v", err)
	}
	if err := CheckCPU([]string{"fpu", "ibpb", "vmx", "tsc_known_freq"}, []string{"fpu"}); err != nil {
		t.Errorf("harmless features: %v", err)
	}
}

func TestCheckHost(t *testing.T) {
	found := make(map[string]Finding)
	for _, f := range CheckHost(context.Background(), filepath.Join(t.TempDir(), "criu")) {
		found[f.Name] = f
		if f.OK == (f.Remedy != "") || f.Detail == "" {
			t.Errorf("finding %+v", f)
		}
	}
	if f := found["criu"]; f.OK || !strings.Contains(f.Detail, "not installed") {
		t.Errorf("finding %+v", f)
	}
	if _, err := parseEffective("CapInh:\t0\nCapEff:\tzz\n"); err == nil {
		t.Error("bad capabilities are accepted")
	}
	if v, err := parseEffective("CapInh:\t0\nCapEff:\t0000000001000000\n"); err != nil || v != 1<<24 {
		t.Errorf("%x, %v", v, err)
	}
}

func FuzzFirstError(f *testing.F) {
	f.Add([]byte("(00.1) Error (criu/x.c:1): text\n"))
	f.Fuzz(func(t *testing.T, log []byte) {
		got, err := FirstError(strings.NewReader(string(log)))
		if err != nil || len(got) > maxQuoted+3 || strings.ContainsAny(got, "\n\r\x1b\x00") {
			t.Fatalf("%q, %v", got, err)
		}
	})
}

func TestEncodeHostname(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "utsns-4.img"), EncodeHostname("pod-7"), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := image.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if got, err := d.Hostname(4); err != nil || got != "pod-7" {
		t.Errorf("%q, %v", got, err)
	}
}
