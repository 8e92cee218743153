// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"archive/tar"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	core "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fh"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fsnotify"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	packet "github.com/checkpoint-restore/go-criu/v7/crit/images/packet-sock"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pagemap"
	remap_file_path "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
	sk_inet "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-inet"
	sk_netlink "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-netlink"
	sk_opts "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-opts"
	sk_unix "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-unix"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/vma"
	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"thaw.dev/thaw/criu/image"
)

func checkDump(t *testing.T, d *dump, s *specs.Spec) error {
	t.Helper()
	dir, err := image.Open(d.write(t))
	if err != nil {
		return err
	}
	defer dir.Close()
	return Check(dir, s, Options{Filter: filter, Exists: func(p string) bool { return p != "/proc/absent" }})
}

func capSets(names ...string) *specs.LinuxCapabilities {
	return &specs.LinuxCapabilities{Bounding: names, Permitted: names, Effective: names}
}

// unprivileged makes the dump and the spec those of a pod whose user is not root.
func unprivileged(d *dump, s *specs.Spec) {
	for _, tid := range []uint32{1, 2, 3} {
		c := d.cores[tid].ThreadCore
		c.Creds = credsOf(1000, 0)
	}
	s.Process.User = specs.User{UID: 1000, GID: 1000}
}

// What ordinary containers do is admitted.
func TestAdmits(t *testing.T) {
	for name, change := range map[string]func(d *dump, s *specs.Spec){
		"the same spec": func(*dump, *specs.Spec) {},
		"a user":        unprivileged,
		"no privileges": func(d *dump, s *specs.Spec) {
			unprivileged(d, s)
			s.Process.Capabilities, s.Process.NoNewPrivileges = &specs.LinuxCapabilities{}, true
			for tid, m := range d.creds {
				d.cores[tid].ThreadCore.Creds.CapBnd, m.noNewPrivs = words(0), true
			}
		},
		"file capabilities of a user": func(d *dump, s *specs.Spec) {
			unprivileged(d, s)
			c := d.cores[1].ThreadCore.Creds
			c.CapPrm, c.CapEff = words(1<<5), words(1<<5)
		},
		"more confined than the spec": func(d *dump, s *specs.Spec) {
			d.creds[1].noNewPrivs = true
			s.Linux.Seccomp = nil
		},
		"filters that the leader spreads": func(d *dump, _ *specs.Spec) {
			d.filters.SeccompFilters[0].Flags = proto.Uint32(1)
			d.cores[2].ThreadCore.SeccompMode, d.cores[2].ThreadCore.SeccompFilter = nil, nil
		},
		"AppArmor": func(d *dump, s *specs.Spec) {
			d.inventory.Lsmtype = inventory.Lsmtype_APPARMOR.Enum()
			for _, c := range d.cores {
				c.ThreadCore.Creds.LsmProfile = proto.String("cri-containerd.apparmor.d (enforce)")
			}
			s.Process.ApparmorProfile = "cri-containerd.apparmor.d"
		},
		"SELinux": func(d *dump, s *specs.Spec) {
			d.inventory.Lsmtype = inventory.Lsmtype_SELINUX.Enum()
			for _, c := range d.cores {
				c.ThreadCore.Creds.LsmProfile, c.ThreadCore.Creds.LsmSockcreate = proto.String("container_t"), proto.String("container_t")
			}
			s.Process.SelinuxLabel = "container_t"
		},
		"host network": func(d *dump, s *specs.Spec) {
			d.ids.NetNsId, d.ids.UtsNsId, d.netns = proto.Uint32(1), proto.Uint32(1), nil
			s.Linux.Namespaces = s.Linux.Namespaces[:3]
		},
		"a zombie": func(d *dump, _ *specs.Spec) {
			d.cores[3].Tc.TaskState = proto.Uint32(uint32(image.Dead))
			d.cores[3].ThreadCore = nil
		},
		"a spec mount that the images lack": func(_ *dump, s *specs.Spec) {
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/dev/termination-log", Type: "bind"})
		},
		"deleted file": func(d *dump, _ *specs.Spec) { d.extra["ghost-file-1.img"] = ghost(t, unix.S_IFREG|0o600) },
		"pidfd": func(d *dump, _ *specs.Spec) {
			f := &fdinfo.FileEntry{Id: proto.Uint32(9)}
			raw := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), uint64(image.PidFD))
			f.ProtoReflect().SetUnknown(raw)
			d.files = append(d.files, f)
		},
		"terminal": func(d *dump, s *specs.Spec) {
			d.mounts = append(d.mounts, mount(120, "/dev/console", "DEVPTS", unix.MS_NOSUID, ""))
			s.Process.Terminal = true
		},
		"deleted file that is made anew": func(d *dump, _ *specs.Spec) {
			d.files = append(d.files, regular(9, "/tmp/gone", unix.S_IFREG|0o600))
			d.extra["ghost-file-1.img"] = ghost(t, unix.S_IFREG|0o600)
			d.extra["remap-fpath.img"] = frame(t, 0x59133954, &remap_file_path.RemapFilePathEntry{
				OrigId: proto.Uint32(9), RemapId: proto.Uint32(1), RemapType: remap_file_path.RemapType_GHOST.Enum(),
			})
		},
		"news of network devices": func(d *dump, _ *specs.Spec) { d.files = append(d.files, netlink(unix.NETLINK_ROUTE, 1)) },
		"audit messages":          func(d *dump, _ *specs.Spec) { d.files = append(d.files, netlink(unix.NETLINK_AUDIT, 0)) },
		"watches": func(d *dump, _ *specs.Spec) {
			d.files = append(d.files, inotify(&fsnotify.InotifyWdEntry{SDev: proto.Uint32(103), FHandle: &fh.FhEntry{Path: proto.String("/etc/hosts")}},
				&fsnotify.InotifyWdEntry{SDev: proto.Uint32(102), FHandle: &fh.FhEntry{}}))
		},
		"SELinux label of a tmpfs": func(d *dump, s *specs.Spec) {
			d.mounts[2].Options = proto.String(`size=65536k,context="system_u:object_r:container_file_t:s0:c1,c2",mode=755`)
			s.Linux.MountLabel = "system_u:object_r:container_file_t:s0:c1,c2"
		},
		"shared mounts": func(d *dump, s *specs.Spec) {
			d.mounts[3].SharedId = proto.Uint32(7)
			s.Mounts[2].Options = append(s.Mounts[2].Options, "rshared")
		},
		"log of the dump": func(d *dump, _ *specs.Spec) { d.extra["dump.log"] = []byte("x") },
	} {
		t.Run(name, func(t *testing.T) {
			d, s := ordinary(), spec()
			change(d, s)
			if err := checkDump(t, d, s); err != nil {
				t.Error(err)
			}
		})
	}
}

// One test for each thing that is refused: want is part of the error's text.
func TestRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(d *dump, s *specs.Spec)
		want   string
	}{
		// files in the directory
		"strange file":      {func(d *dump, _ *specs.Spec) { d.extra["evil\n.img"] = nil }, `evil\n.img`},
		"firewall rules":    {func(d *dump, _ *specs.Spec) { d.extra["iptables-10.img"] = nil }, "iptables-10.img"},
		"AppArmor policies": {func(d *dump, _ *specs.Spec) { d.extra["apparmor.img"] = nil }, "AppArmor policies"},
		"CRIU plugin": {func(d *dump, _ *specs.Spec) {
			inner := protowire.AppendString(protowire.AppendTag(nil, 12, protowire.BytesType), "amdgpu")
			d.inventory.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 12, protowire.BytesType), inner))
		}, "need of amdgpu"},
		"uprobes": {func(d *dump, _ *specs.Spec) {
			d.inventory.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 14, protowire.VarintType), 1))
		}, "uprobes"},
		"field of a newer CRIU": {func(d *dump, _ *specs.Spec) {
			d.inventory.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1))
		}, "field 99 of inventory_entry"},

		// users
		"uid of a user's pod": {func(d *dump, s *specs.Spec) {
			unprivileged(d, s)
			d.cores[3].ThreadCore.Creds.Uid = proto.Uint32(0)
		}, "task 3 (server): uid: the checkpoint has 0, the pod's spec has 1000"},
		"euid of a thread": {func(d *dump, s *specs.Spec) {
			unprivileged(d, s)
			d.cores[2].ThreadCore.Creds.Euid = proto.Uint32(0)
		}, "thread 2 of task 1 (server): uid"},
		"other uid without CAP_SETUID": {func(d *dump, s *specs.Spec) {
			s.Process.Capabilities = capSets("CAP_CHOWN", "CAP_KILL", "CAP_SETGID")
			for _, c := range d.cores {
				c.ThreadCore.Creds.CapBnd, c.ThreadCore.Creds.CapPrm, c.ThreadCore.Creds.CapEff = words(0), words(0), words(0)
			}
		}, "task 3 (server): uid: the checkpoint has 33"},
		"gid": {func(d *dump, s *specs.Spec) {
			unprivileged(d, s)
			d.cores[1].ThreadCore.Creds.Egid = proto.Uint32(0)
		}, "gid: the checkpoint has 0"},
		"group": {func(d *dump, s *specs.Spec) {
			unprivileged(d, s)
			d.cores[1].ThreadCore.Creds.Groups = []uint32{1000, 27}
		}, "supplementary group: the checkpoint has 27"},
		"owner of a file": {func(d *dump, s *specs.Spec) {
			unprivileged(d, s)
			d.files[0].Reg.Fown = owner(1, 0)
		}, "owner of an open file"},

		// capabilities
		"bounding":    {func(d *dump, _ *specs.Spec) { d.cores[3].ThreadCore.Creds.CapBnd = words(granted | 1<<21) }, "bounding capabilities: the checkpoint has CAP_SYS_ADMIN too"},
		"permitted":   {func(d *dump, _ *specs.Spec) { d.cores[2].ThreadCore.Creds.CapPrm = words(1 << 40) }, "permitted capabilities: the checkpoint has CAP_CHECKPOINT_RESTORE too"},
		"effective":   {func(d *dump, _ *specs.Spec) { d.cores[1].ThreadCore.Creds.CapEff = words(1 << 63) }, "effective capabilities: the checkpoint has CAP_63 too"},
		"inheritable": {func(d *dump, _ *specs.Spec) { d.cores[1].ThreadCore.Creds.CapInh = words(1) }, "inheritable capabilities: the checkpoint has CAP_CHOWN too, the pod's spec has none"},
		"ambient":     {func(d *dump, _ *specs.Spec) { d.creds[1].ambient = 1 }, "ambient capabilities: the checkpoint has CAP_CHOWN too"},
		"drop ALL":    {func(_ *dump, s *specs.Spec) { s.Process.Capabilities = nil }, "bounding capabilities: the checkpoint has CAP_CHOWN,CAP_KILL,CAP_SETGID,CAP_SETUID too, the pod's spec has none"},
		"words of capabilities": {func(d *dump, _ *specs.Spec) {
			d.cores[1].ThreadCore.Creds.CapPrm = []uint32{0, 0, 0}
		}, "permitted capabilities have 3 words"},

		// confinement
		"no_new_privs": {func(d *dump, s *specs.Spec) {
			s.Process.NoNewPrivileges = true
			d.creds[1].noNewPrivs, d.creds[3].noNewPrivs = true, true
		}, "thread 2 of task 1 (server): no_new_privs"},
		"no seccomp":         {func(d *dump, _ *specs.Spec) { d.cores[3].ThreadCore.SeccompMode = nil }, "task 3 (server): seccomp: the checkpoint has none"},
		"a thread's seccomp": {func(d *dump, _ *specs.Spec) { d.cores[2].ThreadCore.SeccompMode = nil }, "thread 2 of task 1 (server): seccomp"},
		"filter that is missing": {func(d *dump, _ *specs.Spec) {
			d.cores[1].ThreadCore.SeccompFilter = proto.Uint32(5)
		}, "filter 5 that is in no image"},
		"filters in a circle": {func(d *dump, _ *specs.Spec) {
			d.filters.SeccompFilters[0].Prev = proto.Uint32(0)
		}, "comes before"},
		"seccomp for the process": {func(d *dump, _ *specs.Spec) {
			d.cores[1].Tc.OldSeccompMode = core.SeccompMode_disabled.Enum()
		}, "seccomp mode for the whole process"},
		"securebits": {func(d *dump, _ *specs.Spec) { d.cores[1].ThreadCore.Creds.Secbits = proto.Uint32(4) }, "securebits"},
		"AppArmor":   {func(_ *dump, s *specs.Spec) { s.Process.ApparmorProfile = "strict" }, "AppArmor profile: the checkpoint has none, the pod's spec has strict"},
		"SELinux":    {func(_ *dump, s *specs.Spec) { s.Process.SelinuxLabel = "container_t" }, "SELinux label"},
		"SELinux label of sockets": {func(d *dump, s *specs.Spec) {
			d.inventory.Lsmtype = inventory.Lsmtype_SELINUX.Enum()
			for _, c := range d.cores {
				c.ThreadCore.Creds.LsmProfile = proto.String("container_t")
			}
			d.cores[2].ThreadCore.Creds.LsmSockcreate = proto.String("init_t")
			s.Process.SelinuxLabel = "container_t"
		}, "thread 2 of task 1 (server): SELinux label of new sockets: the checkpoint has init_t, the pod's spec has container_t"},
		"limits": {func(_ *dump, s *specs.Spec) {
			s.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_CPU", Hard: 0}}
		}, "RLIMIT_CPU"},
		"limits that are not in the images": {func(_ *dump, s *specs.Spec) {
			s.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 1024}}
		}, "task 1 (server): RLIMIT_NOFILE: the checkpoint has none"},

		"nice":             {func(d *dump, _ *specs.Spec) { d.cores[3].ThreadCore.SchedNice = proto.Int32(-5) }, "task 3 (server): scheduling: the checkpoint has nice -5"},
		"real-time policy": {func(d *dump, _ *specs.Spec) { d.cores[2].ThreadCore.SchedPolicy = proto.Uint32(unix.SCHED_FIFO) }, "policy 1"},

		// namespaces
		"shared PID namespace now": {func(_ *dump, s *specs.Spec) { s.Linux.Namespaces[0].Path = "/proc/7/ns/pid" }, "without shareProcessNamespace"},
		"host PID namespace now":   {func(_ *dump, s *specs.Spec) { s.Linux.Namespaces = s.Linux.Namespaces[1:] }, "the node's process numbers"},
		"host PID namespace then":  {func(d *dump, _ *specs.Spec) { d.ids.PidNsId = proto.Uint32(1) }, "process numbers shared with others"},
		"host mount namespace":     {func(d *dump, _ *specs.Spec) { d.ids.MntNsId = proto.Uint32(1) }, "mount namespace: the checkpoint has the host's"},
		"host IPC":                 {func(d *dump, _ *specs.Spec) { d.ids.IpcNsId = proto.Uint32(1) }, "IPC namespace: the checkpoint has the host's"},
		"own network":              {func(d *dump, _ *specs.Spec) { d.netns.ExtKey = nil }, "one that it brings along"},
		"network of another key":   {func(d *dump, _ *specs.Spec) { d.netns.ExtKey = proto.String("other") }, "one of the name other"},
		"network not dumped":       {func(d *dump, _ *specs.Spec) { d.netns = nil }, "one that it brings along"},
		"host network now":         {func(_ *dump, s *specs.Spec) { s.Linux.Namespaces = s.Linux.Namespaces[:4] }, "restore in a pod without hostNetwork"},
		"host network then":        {func(d *dump, _ *specs.Spec) { d.ids.NetNsId, d.netns = proto.Uint32(1), nil }, "network namespace: the checkpoint has the host's"},
		"user namespace then":      {func(d *dump, _ *specs.Spec) { d.ids.UserNsId = proto.Uint32(10) }, "user namespace: the checkpoint has one of its own"},
		"user namespace now": {func(_ *dump, s *specs.Spec) {
			s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		}, "hostUsers: false"},
		"time namespace inside": {func(d *dump, _ *specs.Spec) {
			ids := proto.Clone(d.ids).(*core.TaskKobjIdsEntry)
			ids.TimeNsId = proto.Uint32(12)
			d.extra["ids-3.img"] = frame(t, 0x54432030, ids)
		}, "task 3 (server): time namespace"},
		"cgroup namespace": {func(_ *dump, s *specs.Spec) {
			s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace})
		}, "cgroup namespace"},
		"nested namespace": {func(d *dump, _ *specs.Spec) {
			other := proto.Clone(d.ids).(*core.TaskKobjIdsEntry)
			other.MntNsId = proto.Uint32(11)
			d.extra["ids-3.img"] = frame(t, 0x54432030, other)
		}, "nested namespaces"},
		"first process gone": {func(d *dump, _ *specs.Spec) { d.cores[1].Tc.TaskState = proto.Uint32(6) }, "a process that has exited"},

		// mounts
		"missing volume":       {func(_ *dump, s *specs.Spec) { s.Mounts = s.Mounts[:3] }, "external mount: the checkpoint has /run/secrets/token, the pod's spec has no mount there"},
		"volume elsewhere":     {func(d *dump, _ *specs.Spec) { d.mounts[3].Mountpoint = proto.String("/etc/shadow") }, "/etc/hosts at /etc/shadow"},
		"volume not read-only": {func(d *dump, _ *specs.Spec) { d.mounts[4].Flags = proto.Uint32(0) }, "mount /run/secrets/token: the checkpoint has a mount that is not read-only"},
		"root not read-only":   {func(_ *dump, s *specs.Spec) { s.Root.Readonly = true }, "mount /: the checkpoint has a mount that is not read-only"},
		"proc without nosuid":  {func(d *dump, _ *specs.Spec) { d.mounts[1].Flags = proto.Uint32(unix.MS_NOEXEC | unix.MS_NODEV) }, "not nosuid"},
		"host disk": {func(d *dump, _ *specs.Spec) {
			m := mount(120, "/mnt", "AUTO", 0, "")
			m.Fsname, m.Source = proto.String("ext4"), proto.String("/dev/sda1")
			d.mounts = append(d.mounts, m)
		}, "a filesystem of type ext4 at /mnt"},
		"part of a volume": {func(d *dump, _ *specs.Spec) { d.mounts[2].RootDev = d.mounts[4].RootDev }, "a part (/) of another filesystem at /dev"},
		"part of the root": {func(d *dump, _ *specs.Spec) {
			d.mounts[2].RootDev, d.mounts[2].Root = d.mounts[0].RootDev, proto.String("/etc")
		}, "a part (/etc) of another filesystem at /dev"},
		"way out of a mount":    {func(d *dump, _ *specs.Spec) { d.mounts[2].Root = proto.String("/../../etc") }, "a part (/../../etc) of another filesystem at /dev"},
		"devtmpfs":              {func(d *dump, _ *specs.Spec) { d.mounts = append(d.mounts, mount(120, "/host", "DEVTMPFS", 0, "")) }, "type devtmpfs"},
		"another proc":          {func(d *dump, _ *specs.Spec) { d.mounts = append(d.mounts, mount(120, "/mnt/proc", "PROC", 0, "")) }, "proc at /mnt/proc"},
		"writable part of proc": {func(d *dump, _ *specs.Spec) { d.mounts = append(d.mounts, mount(120, "/proc/fs", "PROC", 0, "")) }, "proc at /proc/fs"},
		"mount with dots":       {func(d *dump, _ *specs.Spec) { d.mounts[2].Mountpoint = proto.String("/a/../..") }, "inside the container's root"},
		"SELinux label of others": {func(d *dump, _ *specs.Spec) {
			d.mounts[2].Options = proto.String(`context="system_u:object_r:etc_t:s0"`)
		}, "the option context="},
		"label in disguise": {func(d *dump, s *specs.Spec) {
			d.mounts[2].Options = proto.String(`size=1k",release_agent=/evil,"`)
		}, "the option size=1k"},
		"plugin's mount":      {func(d *dump, _ *specs.Spec) { d.mounts[2].WithPlugin = proto.Bool(true) }, "CRIU plugin"},
		"deleted mount":       {func(d *dump, _ *specs.Spec) { d.mounts[2].Deleted = proto.Bool(true) }, "inside the container's root"},
		"unmasked":            {func(d *dump, _ *specs.Spec) { d.mounts = append(d.mounts[:5:5], d.mounts[6:]...) }, "/proc/kcore open"},
		"unmasked directory":  {func(d *dump, _ *specs.Spec) { d.mounts = append(d.mounts[:6:6], d.mounts[7:]...) }, "/proc/acpi open"},
		"writable sysctls":    {func(d *dump, _ *specs.Spec) { d.mounts = d.mounts[:7] }, "/proc/sys writable"},
		"masks the pod lacks": {func(_ *dump, s *specs.Spec) { s.Linux.MaskedPaths = nil }, "no masked paths"},
		"no mounts":           {func(d *dump, _ *specs.Spec) { d.mounts = nil }, "no mounts in the images"},

		// files
		"path with dots":    {func(d *dump, _ *specs.Spec) { d.files[0].Reg.Name = proto.String("/../etc/shadow") }, "paths inside the container's root"},
		"relative path":     {func(d *dump, _ *specs.Spec) { d.files[0].Reg.Name = proto.String("etc/shadow") }, "paths inside the container's root"},
		"file from outside": {func(d *dump, _ *specs.Spec) { d.files[0].Reg.Ext = proto.Bool(true) }, "from outside"},
		"open device": {func(d *dump, _ *specs.Spec) {
			d.files = append(d.files, regular(9, "/dev/sda", unix.S_IFBLK|0o600))
		}, "open device: the checkpoint has /dev/sda"},
		"tun":           {func(d *dump, _ *specs.Spec) { d.files = append(d.files, typed(fdinfo.FdTypes_TUNF)) }, "tun/tap device"},
		"BPF map":       {func(d *dump, _ *specs.Spec) { d.files = append(d.files, typed(fdinfo.FdTypes_BPFMAP)) }, "BPF map"},
		"fanotify":      {func(d *dump, _ *specs.Spec) { d.files = append(d.files, typed(fdinfo.FdTypes_FANOTIFY)) }, "fanotify"},
		"namespace":     {func(d *dump, _ *specs.Spec) { d.files = append(d.files, typed(fdinfo.FdTypes_NS)) }, "namespace file"},
		"plugin's file": {func(d *dump, _ *specs.Spec) { d.files = append(d.files, typed(fdinfo.FdTypes_EXT)) }, "CRIU plugin"},
		"type of a newer CRIU": {func(d *dump, _ *specs.Spec) {
			f := &fdinfo.FileEntry{Id: proto.Uint32(9)}
			f.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 77))
			d.files = append(d.files, f)
		}, "file of type 77"},
		"packet socket": {func(d *dump, _ *specs.Spec) {
			f := typed(fdinfo.FdTypes_PACKETSK)
			f.Psk = &packet.PacketSockEntry{}
			d.files = append(d.files, f)
		}, "a packet socket, a raw or packet socket"},
		"raw socket": {func(d *dump, _ *specs.Spec) {
			f := typed(fdinfo.FdTypes_INETSK)
			f.Isk = &sk_inet.InetSkEntry{Family: proto.Uint32(unix.AF_INET), Type: proto.Uint32(unix.SOCK_RAW), Fown: owner(0, 0), Opts: &sk_opts.SkOptsEntry{}}
			d.files = append(d.files, f)
		}, "raw or packet socket"},
		"unix socket out of the container": {func(d *dump, _ *specs.Spec) {
			f := typed(fdinfo.FdTypes_UNIXSK)
			f.Usk = &sk_unix.UnixSkEntry{Uflags: proto.Uint32(image.UnixExternal), Name: []byte("/run/host\x1b[2J.sock"), Fown: owner(0, 0), Opts: &sk_opts.SkOptsEntry{}}
			d.files = append(d.files, f)
		}, `/run/host\x1b[2J.sock`},
		"socket of another network": {func(d *dump, _ *specs.Spec) {
			f := typed(fdinfo.FdTypes_INETSK)
			f.Isk = &sk_inet.InetSkEntry{Family: proto.Uint32(unix.AF_INET), Type: proto.Uint32(unix.SOCK_STREAM), NsId: proto.Uint32(2), Fown: owner(0, 0), Opts: &sk_opts.SkOptsEntry{}}
			d.files = append(d.files, f)
		}, "of another network"},
		"file twice":            {func(d *dump, _ *specs.Spec) { d.files = append(d.files, regular(1, "/x", 0)) }, "file 1 twice"},
		"executable missing":    {func(d *dump, _ *specs.Spec) { d.files = d.files[1:] }, "executable of task 1"},
		"descriptor of nothing": {func(d *dump, _ *specs.Spec) { d.fds[0].Id = proto.Uint32(44) }, "descriptor 0 of task 1"},
		"deleted device":        {func(d *dump, _ *specs.Spec) { d.extra["ghost-file-1.img"] = ghost(t, unix.S_IFBLK|0o600) }, "deleted file: the checkpoint has a device"},
		"deleted setuid file":   {func(d *dump, _ *specs.Spec) { d.extra["ghost-file-1.img"] = ghost(t, unix.S_IFREG|unix.S_ISUID|0o755) }, "set-user-ID program"},

		// tmpfs
		"tmpfs device": {func(d *dump, _ *specs.Spec) {
			d.tmpfs = append(d.tmpfs, tar.Header{Name: "sda", Typeflag: tar.TypeBlock, Devmajor: 8})
		}, "device 8:0 (sda"},
		"tmpfs path upwards": {func(d *dump, _ *specs.Spec) {
			d.tmpfs = append(d.tmpfs, tar.Header{Name: "../../x", Typeflag: tar.TypeReg})
		}, "leads out of it (../../x"},
		"tmpfs absolute path": {func(d *dump, _ *specs.Spec) {
			d.tmpfs = append(d.tmpfs, tar.Header{Name: "/etc/x", Typeflag: tar.TypeReg})
		}, "leads out of it (/etc/x"},
		"tmpfs path through link": {func(d *dump, _ *specs.Spec) {
			d.tmpfs = append(d.tmpfs, tar.Header{Name: "fd/x", Typeflag: tar.TypeReg})
		}, "path through a link"},
		"tmpfs hard link": {func(d *dump, _ *specs.Spec) {
			d.tmpfs = append(d.tmpfs, tar.Header{Name: "x", Linkname: "../y", Typeflag: tar.TypeLink})
		}, "hard link that leads out"},
		"tmpfs damaged": {func(d *dump, _ *specs.Spec) { d.extra["tmpfs-dev-62.tar.gz.img"] = []byte("x") }, "tmpfs-dev-62"},

		"control group": {func(d *dump, _ *specs.Spec) { d.cgroup.Sets[0].Ctls[0].Path = proto.String("/pod/../../init") }, "control group"},

		// memory
		"lazy pages in a file's memory": {func(d *dump, _ *specs.Spec) { d.ranges[0].Flags = proto.Uint32(6) }, "no memory that is filled lazily"},
		"lazy pages in no memory":       {func(d *dump, _ *specs.Spec) { d.ranges[1].Vaddr = proto.Uint64(0x30000) }, "pages at 0x30000, in no memory"},
		"lazy pages over the end":       {func(d *dump, _ *specs.Spec) { d.ranges[1].NrPages, d.pages = proto.Uint32(5), 6 }, "pages at 0x24000, in no memory"},
		"pages of an earlier dump":      {func(d *dump, _ *specs.Spec) { d.ranges = []*pagemap.PagemapEntry{pagesAt(0x10000, 1, 1)} }, "earlier dump"},
		"short pages file":              {func(d *dump, _ *specs.Spec) { d.pages = 2 }, "pages-1.img has 8192 bytes"},
		"pagemap of nobody":             {func(d *dump, _ *specs.Spec) { d.extra["pagemap-9.img"] = pagemapOf(t, 9) }, "pagemap-9.img belongs to no process"},
		"process twice":                 {func(d *dump, _ *specs.Spec) { d.pstree[1].Pid = proto.Uint32(1) }, "task 1 twice"},
		"no credentials":                {func(d *dump, _ *specs.Spec) { d.cores[2].ThreadCore.Creds = nil }, "core-2.img holds no credentials"},
		"core missing":                  {func(d *dump, _ *specs.Spec) { delete(d.cores, 2) }, "core-2.img is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			d, s := ordinary(), spec()
			tc.change(d, s)
			err := checkDump(t, d, s)
			if err == nil {
				t.Fatal("admitted")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %q\nlacks %q", err, tc.want)
			}
			if strings.ContainsAny(err.Error(), "\n\x1b") {
				t.Errorf("error %q has control characters", err)
			}
			if !errors.Is(err, errdefs.ErrFailedPrecondition) && !errors.Is(err, image.ErrFormat) {
				t.Errorf("error %q has no class", err)
			}
		})
	}
}

// Links in the root filesystem are followed within it.
func TestResolvesDestinations(t *testing.T) {
	rootfs := t.TempDir()
	for _, dir := range []string{"run", "var", "data"} {
		if err := os.Mkdir(filepath.Join(rootfs, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for link, target := range map[string]string{"var/run": "/run", "data/up": "../../../../run", "data/loop": "loop"} {
		if err := os.Symlink(target, filepath.Join(rootfs, link)); err != nil {
			t.Fatal(err)
		}
	}
	r, err := openRootfs(rootfs)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	c := &check{rootfs: r}
	for in, want := range map[string]string{
		"/var/run/x/y": "/run/x/y", "/data/up/z": "/run/z", "/data/loop": "/data/loop", "/none/x": "/none/x", "/": "/", "a//b": "/a/b",
	} {
		if got := c.resolve(in); got != want {
			t.Errorf("%s is %s, want %s", in, got, want)
		}
	}
}

// An error names a few differences and counts the rest.
func TestRefusalIsShort(t *testing.T) {
	d, s := ordinary(), spec()
	s.Process.Capabilities, s.Process.NoNewPrivileges = nil, true
	err := checkDump(t, d, s)
	var r *Refusal
	if !errors.As(err, &r) || len(r.Differences) != 13 || !strings.Contains(err.Error(), "(and 10 more)") || strings.Count(err.Error(), "capabilities.add") != 1 {
		t.Errorf("error %v", err)
	}
}

// CRIU opens files as root: what the pod's user could not open in a volume is
// refused.
func TestRefusesFilesOfVolumes(t *testing.T) {
	host := t.TempDir()
	for file, mode := range map[string]os.FileMode{"open": 0o644, "secret": 0o600, "closed/x": 0o644} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(host, file)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(host, file), nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(host, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(host, "closed"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("secret", filepath.Join(host, "link")); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		path  string
		flags uint32
		user  uint32
		ok    bool
	}{
		{"/data/open", unix.O_RDONLY, 1000, true},
		{"/data/open", unix.O_WRONLY, 1000, false},
		{"/data/open", unix.O_RDWR, 1000, false},
		{"/data/secret", unix.O_RDONLY, 1000, false},
		{"/data/secret", unix.O_PATH, 1000, true},
		{"/data/closed/x", unix.O_RDONLY, 1000, false},
		{"/data/link", unix.O_RDONLY, 1000, false},
		{"/data/gone", unix.O_RDONLY, 1000, true},
		{"/data", unix.O_RDONLY | unix.O_DIRECTORY, 1000, true},
		{"/database", unix.O_RDWR, 1000, true},
		{"/data/secret", unix.O_RDWR, uint32(os.Getuid()), true},
	} {
		c := &check{spec: spec()}
		c.spec.Process.User = specs.User{UID: tc.user, GID: tc.user}
		c.spec.Process.Capabilities = nil
		c.spec.Mounts = []specs.Mount{{Destination: "/data", Source: host, Type: "bind"}}
		c.volume(&image.Regular{Path: tc.path, Flags: tc.flags})
		if ok := len(c.found) == 0; ok != tc.ok {
			t.Errorf("%s with flags %#x by user %d: admitted %v, %v", tc.path, tc.flags, tc.user, ok, c.found)
		}
	}
}

// Flags of a mapping count as well as those of the file, and no other name helps.
func TestRefusesWaysAroundFilesOfVolumes(t *testing.T) {
	host := t.TempDir()
	if err := os.Chmod(host, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(host, "open"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	volume := func(d *dump, s *specs.Spec) {
		unprivileged(d, s)
		s.Process.Capabilities = &specs.LinuxCapabilities{}
		for _, c := range d.cores {
			c.ThreadCore.Creds.CapBnd = words(0)
		}
		s.Mounts = append(s.Mounts, specs.Mount{Destination: "/data", Source: host, Type: "bind"})
		d.files = append(d.files, regular(9, "/data/open", unix.S_IFREG|0o644))
	}
	mapping := func(d *dump, prot, status uint32) *vma.VmaEntry {
		a := area(0x30000, 0x31000, unix.MAP_SHARED, image.AreaRegular|image.Status(status))
		a.Shmid, a.Prot = proto.Uint64(9), proto.Uint32(prot)
		d.mm.Vmas = append(d.mm.Vmas, a)
		return a
	}
	remap := func(d *dump, orig, target uint32) {
		d.files = append(d.files, regular(10, "/data/new", unix.S_IFREG|0o644), regular(11, "/tmp/new", unix.S_IFREG|0o644))
		d.extra["remap-fpath.img"] = frame(t, 0x59133954, &remap_file_path.RemapFilePathEntry{
			OrigId: proto.Uint32(orig), RemapId: proto.Uint32(target), RemapType: remap_file_path.RemapType_LINKED.Enum(),
		})
	}
	for name, tc := range map[string]struct {
		change func(*dump)
		want   string // "" if it is admitted
	}{
		"read":             {func(*dump) {}, ""},
		"mapped to read":   {func(d *dump) { mapping(d, 1, uint32(image.AreaFileShared)) }, ""},
		"mapped to write":  {func(d *dump) { mapping(d, 3, uint32(image.AreaFileShared)) }, "open file: the checkpoint has /data/open"},
		"flags of mapping": {func(d *dump) { mapping(d, 1, uint32(image.AreaFilePrivate)).Fdflags = proto.Uint32(unix.O_RDWR) }, "open file: the checkpoint has /data/open"},
		"private mapping":  {func(d *dump) { mapping(d, 3, uint32(image.AreaFilePrivate)) }, ""},
		"link in a volume": {func(d *dump) { remap(d, 10, 9) }, "/data/new, deleted"},
		"link out of one":  {func(d *dump) { remap(d, 11, 9) }, "/data/open, deleted"},
		"link elsewhere":   {func(d *dump) { remap(d, 11, 1) }, ""},
		"made anew in a volume": {func(d *dump) {
			d.files = append(d.files, regular(10, "/data/sub/gone", unix.S_IFREG|0o644))
			d.extra["ghost-file-1.img"] = ghost(t, unix.S_IFREG|0o600)
			d.extra["remap-fpath.img"] = frame(t, 0x59133954, &remap_file_path.RemapFilePathEntry{
				OrigId: proto.Uint32(10), RemapId: proto.Uint32(1), RemapType: remap_file_path.RemapType_GHOST.Enum(),
			})
		}, "/data/sub/gone, deleted and to be made anew"},
		"two numbers": {func(d *dump) { d.files[len(d.files)-1].Reg.Id = proto.Uint32(12) }, "file 9: it is file 12 too"},
	} {
		d, s := ordinary(), spec()
		volume(d, s)
		tc.change(d)
		err := checkDump(t, d, s)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

// rootfsWith makes a root filesystem of links, and a file so that it is not empty.
func rootfsWith(t *testing.T, links map[string]string) string {
	t.Helper()
	rootfs := t.TempDir()
	for link, target := range links {
		p := filepath.Join(rootfs, link)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, p); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(rootfs, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return rootfs
}

// checkIn checks as a pod whose user is not root, with a volume at /data.
func checkIn(t *testing.T, rootfs, volume string, change func(d *dump, s *specs.Spec)) error {
	t.Helper()
	d, s := ordinary(), spec()
	unprivileged(d, s)
	s.Process.Capabilities = &specs.LinuxCapabilities{}
	for _, c := range d.cores {
		c.ThreadCore.Creds.CapBnd = words(0)
	}
	s.Mounts = append(s.Mounts, specs.Mount{Destination: "/data", Source: volume, Type: "bind"})
	change(d, s)
	dir, err := image.Open(d.write(t))
	if err != nil {
		return err
	}
	defer dir.Close()
	return Check(dir, s, Options{Rootfs: rootfs, Filter: filter, Exists: func(p string) bool { return p != "/proc/absent" }})
}

// CRIU follows links of the root filesystem, of tmpfs mounts and of /proc as
// root: no such way may lead to what the pod's user could not open.
func TestRefusesLinksIntoVolumes(t *testing.T) {
	volume := t.TempDir()
	if err := os.Chmod(volume, 0o755); err != nil {
		t.Fatal(err)
	}
	for file, mode := range map[string]os.FileMode{"secret": 0o600, "open": 0o644} {
		if err := os.WriteFile(filepath.Join(volume, file), nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	rootfs := rootfsWith(t, map[string]string{
		"var/run": "/run", "link": "/data", "app/up": "../data/secret", "app/open": "/data/open", "far": "app/../link/secret",
		"dots": "/data/../data/secret", "loop": "/loop", "out": "../../../../../data", "self": "/proc/self/root", "fds": "/dev/fd",
	})
	open := func(p string) func(*dump, *specs.Spec) {
		return func(d *dump, _ *specs.Spec) { d.files = append(d.files, regular(9, p, unix.S_IFREG|0o644)) }
	}
	flags := func(p string, flags uint32) func(*dump, *specs.Spec) {
		return func(d *dump, s *specs.Spec) {
			open(p)(d, s)
			d.files[len(d.files)-1].Reg.Flags = proto.Uint32(flags)
		}
	}
	remap := func(target string) func(*dump, *specs.Spec) {
		return func(d *dump, _ *specs.Spec) {
			d.files = append(d.files, regular(10, "/tmp/new", unix.S_IFREG|0o644), regular(11, target, unix.S_IFREG|0o644))
			d.extra["remap-fpath.img"] = frame(t, 0x59133954, &remap_file_path.RemapFilePathEntry{
				OrigId: proto.Uint32(10), RemapId: proto.Uint32(11), RemapType: remap_file_path.RemapType_LINKED.Enum(),
			})
		}
	}
	const stray = "leads through links"
	for name, tc := range map[string]struct {
		change func(d *dump, s *specs.Spec)
		want   string // "" if it is admitted
	}{
		"nothing":                 {func(*dump, *specs.Spec) {}, ""},
		"a link to a folder":      {open("/link/secret"), "/link/secret, a link to /data/secret"},
		"a relative link":         {open("/app/up"), "/app/up, a link to /data/secret"},
		"a link over another":     {open("/far"), "/far, a link to /data/secret"},
		"a link out of the root":  {open("/out/secret"), "/out/secret, a link to /data/secret"},
		"up from a volume":        {open("/dots"), stray},
		"in a circle":             {open("/loop"), stray},
		"a process's root":        {open("/proc/1/root/data/secret"), stray},
		"a process's folder":      {open("/proc/1/task/1/cwd"), stray},
		"a process's files":       {open("/proc/1/fd/3"), stray},
		"a link to one":           {open("/self/data/secret"), stray},
		"a link to a tmpfs' link": {open("/fds/3"), stray},
		"a link of a tmpfs":       {open("/dev/fd/3"), stray},
		"a file of /proc":         {open("/proc/1/status"), ""},
		"a folder of /proc":       {open("/proc/1/fd"), ""},
		"what the user may open":  {open("/app/open"), ""},
		"elsewhere":               {open("/var/run/x"), ""},
		"the link itself":         {flags("/app/up", unix.O_PATH|unix.O_NOFOLLOW), ""},
		"a name through a link":   {remap("/link/open"), "deleted and to be made anew"},
		"root": {func(d *dump, s *specs.Spec) {
			open("/link/secret")(d, s)
			s.Process.Capabilities = capSets("CAP_DAC_OVERRIDE")
			s.Process.User = specs.User{}
			for _, c := range d.cores {
				c.ThreadCore.Creds = credsOf(0, 0)
				c.ThreadCore.Creds.CapBnd = words(0)
			}
		}, ""},
	} {
		err := checkIn(t, rootfs, volume, tc.change)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
	// Links to what CRIU has open are nobody's.
	err := checkIn(t, rootfs, volume, func(d *dump, s *specs.Spec) {
		open("/proc/self/fd/7/etc/shadow")(d, s)
		s.Process.Capabilities = capSets("CAP_DAC_OVERRIDE")
		s.Process.User = specs.User{}
		for _, c := range d.cores {
			c.ThreadCore.Creds = credsOf(0, 0)
			c.ThreadCore.Creds.CapBnd = words(0)
		}
	})
	if err == nil || !strings.Contains(err.Error(), stray) {
		t.Errorf("a descriptor of CRIU, for root: %v", err)
	}
	// Without the root filesystem, the links are not known.
	if err := checkIn(t, "", volume, open("/link/secret")); err != nil {
		t.Errorf("without a root filesystem: %v", err)
	}
	if err := checkIn(t, t.TempDir(), volume, open("/x")); err == nil || !strings.Contains(err.Error(), "mount namespace") {
		t.Errorf("an empty root filesystem: %v", err)
	}
}

// CRIU binds sockets as root and removes what was there: the pod's user must have
// been able to.
func TestRefusesSocketsInVolumes(t *testing.T) {
	volume := t.TempDir()
	me := uint32(os.Getuid())
	for dir, mode := range map[string]os.FileMode{"": 0o755, "wide": 0o777, "narrow": 0o755, "closed": 0o700} {
		p := filepath.Join(volume, dir)
		if err := os.MkdirAll(p, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(volume, "wide", "file"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(volume, "wide", "other"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	rootfs := rootfsWith(t, map[string]string{"var/run": "/run", "link": "/data/narrow", "sock": "/data/narrow/new"})
	for _, tc := range []struct {
		dir, name string
		owner     *uint32 // of the file, in the images
		user      uint32
		want      string // "" if it is admitted
	}{
		{"", "", nil, 1000, ""},
		{"", "\x00/data/narrow/abstract", nil, 1000, ""},
		{"", "/tmp/new", nil, 1000, ""},
		{"", "/var/run/new", nil, 1000, ""},
		{"", "/data/wide/new", nil, 1000, ""},
		{"", "/data/wide/new\x00", proto.Uint32(1000), 1000, ""},
		{"", "/data/wide/new", proto.Uint32(0), 1000, "/data/wide/new of user 0"},
		{"", "/data/wide/other", nil, 1000, "/data/wide/other, the pod's spec has a user who may not bind it"},
		{"", "/data/wide/other", nil, me, ""},
		{"", "/data/wide/file", nil, me, "may not bind it"},
		{"", "/data/narrow/new", nil, 1000, "may not bind it"},
		{"", "/data/closed/new", nil, 1000, "may not bind it"},
		{"", "/data", nil, me, "may not bind it"},
		{"", "/link/new", nil, 1000, "/link/new, a link to /data/narrow/new"},
		{"", "/sock", nil, 1000, ""}, // the name itself is not followed
		{"/data/narrow", "new", nil, 1000, "/data/narrow/new"},
		{"/data/wide", "../narrow/new", nil, 1000, "leads through links"},
		{"/link", "new", nil, 1000, "/link/new, a link to /data/narrow/new"},
	} {
		err := checkIn(t, rootfs, volume, func(d *dump, s *specs.Spec) {
			for _, c := range d.cores {
				c.ThreadCore.Creds = credsOf(tc.user, 0)
				c.ThreadCore.Creds.CapBnd = words(0)
			}
			s.Process.User = specs.User{UID: tc.user, GID: tc.user}
			f := typed(fdinfo.FdTypes_UNIXSK)
			f.Usk = &sk_unix.UnixSkEntry{Name: []byte(tc.name), Fown: owner(0, 0), Opts: &sk_opts.SkOptsEntry{}}
			if tc.dir != "" {
				f.Usk.NameDir = proto.String(tc.dir)
			}
			if tc.owner != nil {
				f.Usk.FilePerms = &sk_unix.FilePermsEntry{Mode: proto.Uint32(0o755), Uid: tc.owner, Gid: tc.owner}
			}
			d.files = append(d.files, f)
		})
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%q in %q by user %d: %v, want %q", tc.name, tc.dir, tc.user, err, tc.want)
		}
	}
}

func netlink(protocol, groups uint32) *fdinfo.FileEntry {
	f := typed(fdinfo.FdTypes_NETLINKSK)
	f.Nlsk = &sk_netlink.NetlinkSkEntry{Protocol: proto.Uint32(protocol), Groups: []uint32{groups}}
	return f
}

func inotify(watches ...*fsnotify.InotifyWdEntry) *fdinfo.FileEntry {
	f := typed(fdinfo.FdTypes_INOTIFY)
	f.Ify = &fsnotify.InotifyFileEntry{Wd: watches}
	return f
}

func typed(typ fdinfo.FdTypes) *fdinfo.FileEntry {
	return &fdinfo.FileEntry{Type: typ.Enum(), Id: proto.Uint32(9)}
}
