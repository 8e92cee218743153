// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	core "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/seccomp"
	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"thaw.dev/thaw/criu/image"
)

// The spec's filter must be in the chain of each thread; more filters are no fault.
func TestFilters(t *testing.T) {
	allows, kills := program(bpfReturn, bpfAllow), program(bpfReturn, unix.SECCOMP_RET_KILL_PROCESS)
	chain := func(programs ...[]byte) *seccomp.SeccompEntry {
		e := &seccomp.SeccompEntry{}
		for i, p := range programs {
			f := &seccomp.SeccompFilter{Filter: p, Flags: proto.Uint32(0)}
			if i > 0 {
				f.Prev = proto.Uint32(uint32(i - 1))
			}
			e.SeccompFilters = append(e.SeccompFilters, f)
		}
		return e
	}
	innermost := func(d *dump, n uint32) {
		for _, c := range d.cores {
			c.ThreadCore.SeccompFilter = proto.Uint32(n)
		}
	}
	const other = "seccomp filter: the checkpoint has one that lets system call 0 (architecture 0x0) do what the spec's does not, the pod's spec has a stricter one"
	for name, tc := range map[string]struct {
		change func(d *dump, s *specs.Spec)
		want   string // "": admitted
	}{
		"the same":          {func(*dump, *specs.Spec) {}, ""},
		"stricter":          {func(d *dump, _ *specs.Spec) { d.filters = chain(kills) }, ""},
		"weaker":            {func(d *dump, _ *specs.Spec) { d.filters = chain(allows) }, "task 1 (server): " + other},
		"one of its own":    {func(d *dump, _ *specs.Spec) { d.filters = chain(filter, allows); innermost(d, 1) }, ""},
		"the spec's behind": {func(d *dump, _ *specs.Spec) { d.filters = chain(allows, filter); innermost(d, 1) }, ""},
		"two of its own":    {func(d *dump, _ *specs.Spec) { d.filters = chain(allows, allows); innermost(d, 1) }, other},
		"not in the chain":  {func(d *dump, _ *specs.Spec) { d.filters = chain(allows, filter) }, other},
		"a thread's": {func(d *dump, _ *specs.Spec) {
			d.filters = chain(filter)
			d.filters.SeccompFilters = append(d.filters.SeccompFilters, &seccomp.SeccompFilter{Filter: allows, Flags: proto.Uint32(0)})
			d.cores[2].ThreadCore.SeccompFilter = proto.Uint32(1)
		}, "thread 2 of task 1 (server): " + other},
		"no spec's": {func(d *dump, s *specs.Spec) {
			d.filters, s.Linux.Seccomp = chain(allows), nil
		}, ""},
		"a listener": {func(d *dump, _ *specs.Spec) {
			d.filters.SeccompFilters[0].Flags = proto.Uint32(unix.SECCOMP_FILTER_FLAG_NEW_LISTENER)
		}, "flags of a seccomp filter: the checkpoint has 0x8 too"},
		"speculation by default": {func(d *dump, _ *specs.Spec) {
			d.filters.SeccompFilters[0].Flags = proto.Uint32(unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW | unix.SECCOMP_FILTER_FLAG_LOG)
		}, ""},
		"speculation that the spec has not": {func(d *dump, s *specs.Spec) {
			d.filters.SeccompFilters[0].Flags = proto.Uint32(unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW)
			s.Linux.Seccomp.Flags = []specs.LinuxSeccompFlag{specs.LinuxSeccompFlagLog}
		}, "flags of a seccomp filter: the checkpoint has 0x4 too"},
		"strict mode": {func(d *dump, _ *specs.Spec) {
			for _, c := range d.cores {
				c.ThreadCore.SeccompMode = core.SeccompMode_strict.Enum()
			}
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			d, s := ordinary(), spec()
			tc.change(d, s)
			err := checkDump(t, d, s)
			switch {
			case tc.want == "" && err != nil:
				t.Error(err)
			case tc.want != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("error %v does not say %q", err, tc.want)
			}
		})
	}
}

// The last check before a restore does not go without the spec's filter.
func TestFilterNotKnown(t *testing.T) {
	d, err := image.Open(ordinary().write(t))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	rootfs := t.TempDir()
	if err := os.WriteFile(filepath.Join(rootfs, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Check(d, spec(), Options{Rootfs: rootfs}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "not known on this node") {
		t.Errorf("error %v", err)
	}
	s := spec()
	s.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActAllow}
	if err := Check(d, s, Options{Rootfs: rootfs}); err != nil && strings.Contains(err.Error(), "seccomp") {
		t.Errorf("a spec that filters nothing: %v", err)
	}
}

// What the kernel shows is compared by the same rules.
func TestRunning(t *testing.T) {
	tasks := func() []image.Task {
		d, err := image.Open(filepath.Clean(ordinary().write(t)))
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		tasks, err := d.Tasks()
		if err != nil {
			t.Fatal(err)
		}
		return tasks
	}
	if found := Running(tasks(), spec()); len(found) > 0 {
		t.Error(found)
	}
	for want, change := range map[string]func(tasks []image.Task, s *specs.Spec){
		"uid":                   func(tasks []image.Task, s *specs.Spec) { s.Process.User.UID = 1000; s.Process.Capabilities = nil },
		"bounding capabilities": func(tasks []image.Task, _ *specs.Spec) { tasks[1].Threads[0].Creds.Bounding |= 1 << 21 },
		"ambient capabilities":  func(tasks []image.Task, _ *specs.Spec) { tasks[0].Threads[1].Creds.Ambient = 1 },
		"no_new_privs":          func(_ []image.Task, s *specs.Spec) { s.Process.NoNewPrivileges = true },
		"seccomp":               func(tasks []image.Task, _ *specs.Spec) { tasks[0].Threads[1].Seccomp = image.SeccompDisabled },
		"AppArmor profile":      func(_ []image.Task, s *specs.Spec) { s.Process.ApparmorProfile = "strict" },
		"SELinux label":         func(_ []image.Task, s *specs.Spec) { s.Process.SelinuxLabel = "container_t" },
		"RLIMIT_CPU":            func(_ []image.Task, s *specs.Spec) { s.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_CPU"}} },
	} {
		ts, s := tasks(), spec()
		change(ts, s)
		found := Running(ts, s)
		if len(found) == 0 || found[0].Field != want {
			t.Errorf("%s: found %v", want, found)
		}
	}
	labelled, s := tasks(), spec()
	s.Process.ApparmorProfile = "strict"
	for i := range labelled {
		for j := range labelled[i].Threads {
			labelled[i].Threads[j].Creds.LSMProfile = "strict (enforce)"
		}
	}
	if found := Running(labelled, s); len(found) > 0 {
		t.Error(found)
	}
}
