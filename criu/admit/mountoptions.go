// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
)

// Flags of mount(2) that say how something is mounted. Others say what the call does: with MS_BIND in an
// image, CRIU would take the source of a tmpfs for a folder of the node.
const (
	mountAttributes = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME | unix.MS_NODIRATIME |
		unix.MS_RELATIME | unix.MS_STRICTATIME | unix.MS_NOSYMFOLLOW | unix.MS_PRIVATE | unix.MS_SLAVE | unix.MS_SHARED | unix.MS_UNBINDABLE
	superAttributes = unix.MS_RDONLY | unix.MS_SYNCHRONOUS | unix.MS_DIRSYNC | unix.MS_MANDLOCK | unix.MS_LAZYTIME
)

// mountFlags checks flags that any mount may have.
func (c *check) mountFlags(m *image.Mount, want map[string]specs.Mount) {
	refuse := func(what, spec string) {
		c.refuse(Difference{Field: "mount " + quote(m.Mountpoint), Image: what, Spec: spec, Remedy: "make the checkpoint from an ordinary container"})
	}
	if more := m.Flags&^mountAttributes | m.SuperFlags&^superAttributes; more != 0 {
		refuse(fmt.Sprintf("flags %#x", more), "flags of an existing mount")
	}
	if (m.Shared || m.Flags&unix.MS_SHARED != 0) && !shared(c.spec.Linux.RootfsPropagation) && !slices.ContainsFunc(want[m.Mountpoint].Options, shared) {
		refuse("mounts that the node sees", "a mount of the container's own")
	}
}

func shared(propagation string) bool { return propagation == "shared" || propagation == "rshared" }

// options are those that the runtime's own mounts may have, by the type of the filesystem. Others may make the
// kernel do what no container may: a control group's release_agent is a program that runs on the node.
var options = map[string][]string{
	"proc":    {"gid", "hidepid", "subset"},
	"sysfs":   {},
	"tmpfs":   {"size", "nr_blocks", "nr_inodes", "mode", "uid", "gid", "inode32", "inode64", "huge", "noswap", "mpol", "nr_quota"},
	"devpts":  {"newinstance", "gid", "mode", "ptmxmode", "max", "uid"},
	"mqueue":  {},
	"cgroup2": {"nsdelegate", "memory_recursiveprot", "memory_localevents", "memory_hugetlb_accounting", "favordynmods", "pids_localevents"},
	"cgroup": {
		"none", "xattr", "name=systemd", "cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "net_cls", "net_prio", "blkio",
		"perf_event", "hugetlb", "pids", "rdma", "misc",
	},
}

// mountOptions checks the options of a mount that CRIU makes itself.
func (c *check) mountOptions(m *image.Mount) {
	quoted := false
	for _, o := range strings.FieldsFunc(m.Options, func(r rune) bool { // labels have commas, in quotes
		quoted = quoted != (r == '"')
		return r == ',' && !quoted
	}) {
		name, _, _ := strings.Cut(o, "=")
		label := name == "context" && c.spec.Linux.MountLabel != "" && strings.Trim(strings.TrimPrefix(o, "context="), `"`) == c.spec.Linux.MountLabel
		known := o == "seclabel" || slices.Contains(options[m.Type], o) || name != "name" && slices.Contains(options[m.Type], name)
		if label || known && !strings.Contains(o, `"`) {
			continue
		}
		c.refuse(Difference{
			Field: "mount " + quote(m.Mountpoint), Image: "the option " + quote(o), Spec: "options of an ordinary " + m.Type,
			Remedy: "make the checkpoint from a container that mounts nothing itself",
		})
	}
}

// wholeRoot reports whether a mount that CRIU makes itself has the root of its filesystem,
// or a part of /proc or /sys at its own place. CRIU finds any other part by a path, in /proc one that may lead
// to the node's files (/proc/1/root).
func wholeRoot(m *image.Mount) bool {
	if m.Root == "/" {
		return true
	}
	switch m.Type {
	case "cgroup", "cgroup2":
		return true // a group, wherever the dump's host had it
	case "devpts":
		return m.Mountpoint == consolePlace && strings.Trim(m.Root, "/0123456789") == "" && path.Dir(m.Root) == "/"
	case "proc":
		return m.Mountpoint == "/proc"+m.Root && ofKernel(m.Mountpoint)
	case "sysfs":
		return m.Mountpoint == "/sys"+m.Root
	}
	return false
}
