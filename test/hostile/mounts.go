// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"fmt"
	"strings"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/cgroup"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// mounts changes the list of mounts; place finds one of them.
func mounts(change func(list []*mnt.MntEntry) []*mnt.MntEntry) func(*Image) {
	return func(i *Image) { messages(i, i.first("mountpoints-"), change) }
}

func place(list []*mnt.MntEntry, at string) *mnt.MntEntry {
	for _, m := range list {
		if m.GetMountpoint() == at {
			return m
		}
	}
	panic("hostile: no mount at " + at)
}

// deviceOf is the filesystem of a mount.
func deviceOf(i *Image, at string) (device *uint32) {
	mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
		device = place(l, at).RootDev
		return l
	})(i)
	return device
}

// newMount is one more mount, on another.
func newMount(list []*mnt.MntEntry, on string, e *mnt.MntEntry) []*mnt.MntEntry {
	e.MntId, e.ParentMntId = proto.Uint32(4711), place(list, on).MntId
	if e.RootDev == nil {
		e.RootDev = proto.Uint32(4712)
	}
	if e.Root == nil {
		e.Root = proto.String("/")
	}
	if e.Flags == nil {
		e.Flags = proto.Uint32(0)
	}
	if e.Source == nil {
		e.Source = proto.String("none")
	}
	e.SbFlags, e.Options = proto.Uint32(e.GetSbFlags()), proto.String(e.GetOptions())
	return append(list, e)
}

func fstype(t mnt.Fstype) *uint32 { return proto.Uint32(uint32(t)) }

// mountTricks lie about mounts, from which CRIU makes those of the container.
func mountTricks() []Trick {
	at := func(place_ string, change func(*mnt.MntEntry)) func(*Image) {
		return mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
			change(place(l, place_))
			return l
		})
	}
	add := func(on string, e *mnt.MntEntry) func(*Image) {
		return mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
			return newMount(l, on, proto.Clone(e).(*mnt.MntEntry))
		})
	}
	return []Trick{
		{Name: "disk-of-the-node", Make: add("/", &mnt.MntEntry{Fstype: fstype(mnt.Fstype_AUTO), Fsname: proto.String("ext4"), Source: proto.String("/dev/sda1"), Mountpoint: proto.String("/mnt")}), Says: "a filesystem of type ext4 at /mnt"},
		{Name: "debugfs", Make: add("/sys", &mnt.MntEntry{Fstype: fstype(mnt.Fstype_DEBUGFS), Mountpoint: proto.String("/sys/kernel/debug"), Flags: proto.Uint32(unix.MS_RDONLY)}), Says: "a filesystem of type debugfs"},
		{Name: "volume-nobody-gave", Make: add("/", &mnt.MntEntry{Fstype: fstype(mnt.Fstype_AUTO), Mountpoint: proto.String("/host"), ExtKey: proto.String("/host"), ExtMount: proto.Bool(true)}), Says: "external mount: the checkpoint has /host, the pod's spec has no mount there"},
		{Name: "volume-elsewhere", Make: at("/etc/hosts", func(e *mnt.MntEntry) { e.Mountpoint = proto.String("/etc/passwd") }), Says: "external mount: the checkpoint has /etc/hosts at /etc/passwd"},
		{Name: "volume-by-a-host-path", Make: at("/etc/hosts", func(e *mnt.MntEntry) { e.ExtKey = proto.String("/var/lib/kubelet") }), Says: "/var/lib/kubelet at /etc/hosts"},
		{Name: "folder-in-place-of-a-tmpfs", Make: at("/dev", func(e *mnt.MntEntry) {
			e.Source, e.SbFlags = proto.String("/"), proto.Uint32(unix.MS_BIND|unix.MS_REC)
		}), Says: "mount /dev: the checkpoint has flags 0x5000"},
		{Name: "moved-mount", Make: at("/dev", func(e *mnt.MntEntry) { e.Flags = proto.Uint32(e.GetFlags() | unix.MS_MOVE) }), Says: "mount /dev: the checkpoint has flags 0x2000"},
		{Name: "release-agent", Make: add("/sys", &mnt.MntEntry{
			Fstype: fstype(mnt.Fstype_CGROUP), Source: proto.String("cgroup"), Mountpoint: proto.String("/sys/evil"), Flags: proto.Uint32(unix.MS_RDONLY), Options: proto.String("none,name=evil,release_agent=/evil"),
		}), Says: "mount /sys/evil: the checkpoint has the option name=evil"},
		{Name: "option-of-a-tmpfs", Make: at("/dev", func(e *mnt.MntEntry) { e.Options = proto.String("size=64k,usrquota") }), Says: "the option usrquota, the pod's spec has options of an ordinary tmpfs"},
		{Name: "root-of-a-process", Make: add("/proc", &mnt.MntEntry{
			Fstype: fstype(mnt.Fstype_PROC), RootDev: proto.Uint32(4713), Root: proto.String("/1/root/etc"), Mountpoint: proto.String("/proc/1/root/etc"), Flags: proto.Uint32(unix.MS_RDONLY),
		}), Says: "a part (/1/root/etc) of proc at /proc/1/root/etc"},
		{Name: "part-of-proc-elsewhere", Make: add("/proc", &mnt.MntEntry{
			Fstype: fstype(mnt.Fstype_PROC), RootDev: proto.Uint32(4713), Root: proto.String("/sys/kernel"), Mountpoint: proto.String("/proc/tty"), Flags: proto.Uint32(unix.MS_RDONLY),
		}), Says: "a part (/sys/kernel) of proc at /proc/tty"},
		{Name: "mask-through-a-process", Make: add("/proc", &mnt.MntEntry{
			Fstype: fstype(mnt.Fstype_TMPFS), Mountpoint: proto.String("/proc/1/root/etc"), Flags: proto.Uint32(unix.MS_RDONLY),
		}), Says: "mount: the checkpoint has tmpfs at /proc/1/root/etc"},
		{Name: "mask-elsewhere", Make: at("/proc/keys", func(e *mnt.MntEntry) { e.Mountpoint = proto.String("/proc/self/exe") }), Says: "masked path: the checkpoint has /proc/self/exe, the pod's spec has it open"},
		{Name: "part-of-a-volume", Make: mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
			place(l, "/dev/mqueue").RootDev = place(l, "/etc/hosts").RootDev
			return l
		}), Says: "a part (/) of another filesystem at /dev/mqueue"},
		{Name: "way-out-of-a-mount", Make: at("/dev", func(e *mnt.MntEntry) { e.Root = proto.String("/../../etc") }), Says: "a part (/../../etc) of another filesystem"},
		{Name: "dots-with-an-end-within", Make: at("/sys/fs/cgroup/cpu", func(e *mnt.MntEntry) { e.Root = proto.String("/..\x00/x") }), Says: "has a NUL byte in field 6 of mnt_entry"},
		{Name: "mountpoint-with-dots", Make: at("/dev/shm", func(e *mnt.MntEntry) { e.Mountpoint = proto.String("/dev/../../etc") }), Says: "mount: the checkpoint has /dev/../../etc"},
		{Name: "relative-mountpoint", Make: at("/dev/shm", func(e *mnt.MntEntry) { e.Mountpoint = proto.String("dev/shm") }), Says: "mount: the checkpoint has dev/shm"},
		{Name: "mount-by-a-plugin", Make: at("/dev/shm", func(e *mnt.MntEntry) { e.WithPlugin = proto.Bool(true) }), Says: "/dev/shm, restored by a CRIU plugin"},
		{Name: "shared-with-the-node", Make: at("/dev/shm", func(e *mnt.MntEntry) { e.SharedId = proto.Uint32(1) }), Says: "mount /dev/shm: the checkpoint has mounts that the node sees"},
		{Name: "writable-sysfs", Make: at("/sys", func(e *mnt.MntEntry) { e.Flags = proto.Uint32(e.GetFlags() &^ unix.MS_RDONLY) }), Says: "mount /sys: the checkpoint has a mount that is not read-only"},
		{Name: "unmasked", Make: mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
			place(l, "/proc/keys").Mountpoint = proto.String("/proc/kmsg")
			return l
		}), Says: "masked path: the checkpoint has /proc/keys open"},
		{Name: "masked-elsewhere", Make: func(i *Image) { // in the image of a namespace that no task is in
			i.copyOf(i.first("mountpoints-"), "mountpoints-999.img")
			mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
				for n, m := range l {
					m.MntId, m.ParentMntId = proto.Uint32(m.GetMntId()+10_000), proto.Uint32(m.GetParentMntId()+10_000)
					if strings.HasPrefix(m.GetMountpoint(), "/proc/keys") {
						l = append(l[:n:n], l[n+1:]...)
					}
				}
				return l
			})(i)
		}, Says: "of mount namespace 999 that no task is in"},
		{Name: "masks-under-another-mount", Make: add("/proc", &mnt.MntEntry{Fstype: fstype(mnt.Fstype_PROC), RootDev: proto.Uint32(109), Mountpoint: proto.String("/proc"), Flags: proto.Uint32(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)}), Says: "/proc, where another mount is too"},
		{Name: "hidden-mount", Make: mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
			place(l, "/proc/sys").ParentMntId = place(l, "/").MntId
			return l
		}), Says: "/proc/sys, which is not on the mount above it"},
		{Name: "mountpoint-of-megabytes", Make: at("/dev/shm", func(e *mnt.MntEntry) { e.Mountpoint = proto.String(strings.Repeat("/a", 4<<20)) }), Says: "mount: the checkpoint has /a/a/a"},
		{Name: "thousands-of-mounts", Make: mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
			for n := range uint32(20_000) {
				m := proto.Clone(place(l, "/dev")).(*mnt.MntEntry)
				m.MntId, m.Mountpoint, m.SbFlags = proto.Uint32(10_000+n), proto.String(fmt.Sprint("/m", n)), proto.Uint32(unix.MS_BIND)
				l = append(l, m)
			}
			return l
		}), Says: "mount /m0: the checkpoint has flags 0x1000"},
		{Name: "mount-twice", Make: mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry { return append(l, l[0]) }), Says: "is in the images twice"},
		{Name: "no-mounts", Make: func(i *Image) { i.remove(i.first("mountpoints-")) }, Says: "no mounts in the images"},
		{Name: "control-group-of-others", Make: edit("cgroup.img", func(e *cgroup.CgroupEntry) {
			e.Sets[0].Ctls[0].Path = proto.String("/pod/../../../system.slice")
		}), Says: "control group: the checkpoint has /pod/../../../system.slice"},
	}
}
