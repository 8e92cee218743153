// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/uffd"
)

// Finding is the result of one check of this node.
type Finding struct {
	Name   string // what was checked, e.g. "userfaultfd"
	OK     bool
	Detail string // what was found
	Remedy string // what to do; "" if OK
}

// CheckHost looks at everything that CRIU and lazy restores need of this node and
// returns a finding for each, in a fixed order. path is as in Find. The checks
// take effect for this process: run them as the user that runs the shim.
func CheckHost(ctx context.Context, path string) []Finding {
	h := host{root: "/"}
	out := []Finding{checkKernel(), checkUserfaultfd()}
	out = append(out, h.capabilities()...)
	out = append(out, h.run(), h.cgroup())
	return append(out, checkBinary(ctx, path)...)
}

// minimumKernel is the first with all events of userfaultfd that the fault
// handler needs and with clone3's set_tid, by which CRIU restores PIDs without
// guessing.
var minimumKernel = Version{5, 9, 0}

// KernelVersion returns the version of the running kernel.
func KernelVersion() (Version, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return Version{}, err
	}
	return ParseVersion(unix.ByteSliceToString(u.Release[:]))
}

// host is where the node's files are; its root is another one in tests.
type host struct{ root string }

func checkKernel() Finding {
	f := Finding{Name: "kernel"}
	v, err := KernelVersion()
	switch {
	case err != nil:
		f.Detail, f.Remedy = err.Error(), "run a kernel of a known version"
	case v.Less(minimumKernel):
		f.Detail, f.Remedy = v.String(), fmt.Sprintf("run Linux %d.%d or later", minimumKernel.Major, minimumKernel.Minor)
	default:
		f.OK, f.Detail = true, v.String()
	}
	return f
}

// checkUserfaultfd asks the kernel itself: it depends on how it was built and on
// this process's capabilities.
func checkUserfaultfd() Finding {
	f := Finding{Name: "userfaultfd"}
	features, err := uffd.Probe()
	switch {
	case err == unix.ENOSYS:
		f.Detail, f.Remedy = "not in this kernel", "run a kernel with CONFIG_USERFAULTFD=y"
	case err == unix.EPERM:
		f.Detail, f.Remedy = "refused", "run as root with CAP_SYS_PTRACE, without which the events of forks are refused"
	case features != 0 && features&uffd.FeatureEvents != uffd.FeatureEvents:
		f.Detail = fmt.Sprintf("features %#x lack the events of fork, remap, remove or unmap", features)
		f.Remedy = "run Linux 4.11 or later"
	case err != nil:
		f.Detail, f.Remedy = err.Error(), "run a kernel with CONFIG_USERFAULTFD=y"
	default:
		f.OK, f.Detail = true, "with all events"
	}
	return f
}

// needed are the capabilities without which something fails.
var needed = []struct {
	number int
	name   string
	why    string
}{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "CRIU needs it for namespaces and mounts"},
	{unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE", "CRIU needs it to dump, and userfaultfd to serve faults of the kernel"},
	{unix.CAP_SYS_RESOURCE, "CAP_SYS_RESOURCE", "without it CRIU cannot read or set the limits of processes that run as another user"},
	{unix.CAP_CHECKPOINT_RESTORE, "CAP_CHECKPOINT_RESTORE", "CRIU needs it to choose PIDs and to read the map of a process"},
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", "CRIU needs it for sockets and to hold connections"},
}

func (h host) capabilities() []Finding {
	var effective uint64
	raw, err := h.read("proc/self/status")
	if err == nil {
		effective, err = parseEffective(raw)
	}
	var out []Finding
	for _, c := range needed {
		f := Finding{Name: c.name, OK: err == nil && effective&(1<<c.number) != 0, Detail: "there"}
		if !f.OK {
			f.Detail, f.Remedy = "missing", c.why+": give it to containerd's service (systemd: CapabilityBoundingSet)"
			if err != nil {
				f.Detail = err.Error()
			}
		}
		out = append(out, f)
	}
	return out
}

func parseEffective(status string) (uint64, error) {
	for line := range strings.Lines(status) {
		if v, ok := strings.CutPrefix(line, "CapEff:"); ok {
			return strconv.ParseUint(strings.TrimSpace(v), 16, 64)
		}
	}
	return 0, fmt.Errorf("no CapEff in /proc/self/status")
}

// run checks that CRIU can cache what it found out of the kernel: it does so in
// /run/criu.kdat, and only on a tmpfs.
func (h host) run() Finding {
	f := Finding{Name: "/run on tmpfs"}
	var st unix.Statfs_t
	switch err := unix.Statfs(h.root+"run", &st); {
	case err != nil:
		f.Detail = err.Error()
	case st.Type != unix.TMPFS_MAGIC:
		f.Detail = "another filesystem: CRIU cannot cache criu.kdat and each restore takes about 0.1 s longer"
	default:
		f.OK, f.Detail = true, "CRIU caches criu.kdat there"
		return f
	}
	f.Remedy = "mount a tmpfs on /run"
	return f
}

func (h host) cgroup() Finding {
	var st unix.Statfs_t
	f := Finding{Name: "cgroups"}
	switch err := unix.Statfs(h.root+"sys/fs/cgroup", &st); {
	case err != nil:
		f.Detail, f.Remedy = err.Error(), "mount cgroups at /sys/fs/cgroup"
	case st.Type == unix.CGROUP2_SUPER_MAGIC:
		f.OK, f.Detail = true, "version 2"
	default:
		f.OK, f.Detail = true, "version 1: checkpoints can be restored on nodes with version 1 only"
	}
	return f
}

// maxStatus bounds in bytes what is read of a file in /proc.
const maxStatus = 64 << 10

func (h host) read(name string) (string, error) {
	f, err := os.Open(h.root + name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	p := make([]byte, maxStatus)
	n, err := f.Read(p)
	return string(p[:n]), err
}

// checkBinary finds criu, compares its version with what the kernel needs, and
// asks it for the features that lazy restores rely on.
func checkBinary(ctx context.Context, path string) []Finding {
	f := Finding{Name: "criu"}
	kernel, err := KernelVersion()
	if err != nil {
		f.Detail, f.Remedy = err.Error(), "run a kernel of a known version"
		return []Finding{f}
	}
	need, _ := Required(kernel)
	b, err := Find(ctx, path)
	if err != nil {
		f.Detail, f.Remedy = err.Error(), fmt.Sprintf("install CRIU %s or later", need)
		return []Finding{f}
	}
	f.Detail = fmt.Sprintf("%s at %s", b.Version, b.Path)
	if err := b.Check(kernel); err != nil {
		f.Detail, f.Remedy = err.Error(), fmt.Sprintf("install CRIU %s or later", need)
		return []Finding{f}
	}
	f.OK = true
	out := []Finding{f}
	for _, name := range []string{"uffd-noncoop", "clone3_set_tid", "external_net_ns"} {
		f := Finding{Name: "criu feature " + name}
		ok, detail, err := b.Supports(ctx, name)
		switch {
		case err != nil:
			f.Detail, f.Remedy = err.Error(), "see whether `criu check` works"
		case ok:
			f.OK, f.Detail = true, "supported"
		default:
			f.Detail, f.Remedy = detail, "run `criu check` and see what the kernel or CRIU lacks"
		}
		out = append(out, f)
	}
	return out
}
