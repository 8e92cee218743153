// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"strings"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fh"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fown"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fsnotify"
	ghost_file "github.com/checkpoint-restore/go-criu/v7/crit/images/ghost-file"
	packet "github.com/checkpoint-restore/go-criu/v7/crit/images/packet-sock"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/regfile"
	remap_file_path "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
	sk_inet "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-inet"
	sk_netlink "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-netlink"
	sk_opts "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-opts"
	sk_unix "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-unix"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/timerfd"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// more is the number of files that tricks add.
const more = 4711

// open adds an open file.
func open(i *Image, f *fdinfo.FileEntry) {
	if f.Id == nil {
		f.Id = proto.Uint32(more)
	}
	messages(i, "files.img", func(l []*fdinfo.FileEntry) []*fdinfo.FileEntry { return append(l, f) })
}

func adds(f *fdinfo.FileEntry) func(*Image) {
	return func(i *Image) { open(i, proto.Clone(f).(*fdinfo.FileEntry)) }
}

func file(id uint32, path string, mode uint32) *fdinfo.FileEntry {
	return &fdinfo.FileEntry{Type: fdinfo.FdTypes_REG.Enum(), Id: proto.Uint32(id), Reg: &regfile.RegFileEntry{
		Id: proto.Uint32(id), Flags: proto.Uint32(0), Pos: proto.Uint64(0), Fown: &fown.FownEntry{}, Name: proto.String(path), Mode: proto.Uint32(mode),
	}}
}

// firstFile changes the first regular file.
func firstFile(change func(*fdinfo.FileEntry)) func(*Image) {
	return func(i *Image) {
		messages(i, "files.img", func(l []*fdinfo.FileEntry) []*fdinfo.FileEntry {
			for _, f := range l {
				if f.Reg != nil {
					change(f)
					return l
				}
			}
			panic("hostile: no regular file")
		})
	}
}

// volume gives the pod of nobody a volume in which everything is root's, and not all may be read.
func volume(s *specs.Spec) {
	asNobody(s)
	s.Mounts = append(s.Mounts, specs.Mount{Destination: "/data", Source: "/etc", Type: "bind"})
}

// remap makes the image make a file anew before it is opened.
func remap(i *Image, orig, target uint32, how remap_file_path.RemapType) {
	i.put("remap-fpath.img", newImage(magicRemap, &remap_file_path.RemapFilePathEntry{OrigId: proto.Uint32(orig), RemapId: proto.Uint32(target), RemapType: how.Enum()}))
}

func ghost(mode uint32) []byte {
	return newImage(magicGhost, &ghost_file.GhostFileEntry{Uid: proto.Uint32(0), Gid: proto.Uint32(0), Mode: proto.Uint32(mode)})
}

// fileTricks lie about open and deleted files.
func fileTricks() []Trick {
	asUser := func(change func(*Image)) func(*Image) {
		return func(i *Image) {
			tasksAsNobody(i)
			change(i)
		}
	}
	watch := func(w *fsnotify.InotifyWdEntry) *fdinfo.FileEntry {
		return &fdinfo.FileEntry{Type: fdinfo.FdTypes_INOTIFY.Enum(), Ify: &fsnotify.InotifyFileEntry{Id: proto.Uint32(more), Wd: []*fsnotify.InotifyWdEntry{w}}}
	}
	kind := func(t fdinfo.FdTypes) func(*Image) { return adds(&fdinfo.FileEntry{Type: t.Enum()}) }
	return []Trick{
		{Name: "path-with-dots", Make: firstFile(func(f *fdinfo.FileEntry) { f.Reg.Name = proto.String("/../../etc/shadow") }), Says: "open file: the checkpoint has /../../etc/shadow"},
		{Name: "path-with-an-end-within", Make: firstFile(func(f *fdinfo.FileEntry) { f.Reg.Name = proto.String("/etc/shadow\x00/harmless") }), Says: "files.img has a NUL byte in field 6 of reg_file_entry"},
		{Name: "path-of-megabytes", Make: firstFile(func(f *fdinfo.FileEntry) { f.Reg.Name = proto.String(strings.Repeat("/b", 4<<20)) }), Says: "open file: the checkpoint has /b/b/b"},
		{Name: "relative-path", Make: firstFile(func(f *fdinfo.FileEntry) { f.Reg.Name = proto.String("etc/shadow") }), Says: "open file: the checkpoint has etc/shadow"},
		{Name: "path-with-control-characters", Make: firstFile(func(f *fdinfo.FileEntry) { f.Reg.Name = proto.String("/x/../\x1b]0;owned\x07\nforged log entry") }), Says: `/x/../\x1b]0;owned\a\nforged log entry`},
		{Name: "inherited-file", Make: firstFile(func(f *fdinfo.FileEntry) { f.Reg.Ext = proto.Bool(true) }), Says: "from outside, the pod's spec has no such file"},
		{Name: "file-of-no-type", Make: firstFile(func(f *fdinfo.FileEntry) { f.Reg.Mode = nil }), Says: "of no type, the pod's spec has files whose type can be checked"},
		{Name: "file-on-no-mount", Make: firstFile(func(f *fdinfo.FileEntry) { f.Reg.MntId = proto.Int32(4711) }), Says: "on mount 4711, which is in no image"},
		{Name: "file-of-two-types", Make: firstFile(func(f *fdinfo.FileEntry) { f.Tfd = &timerfd.TimerfdEntry{} }), Says: "it is of two types"},
		{Name: "file-of-two-numbers", Make: firstFile(func(f *fdinfo.FileEntry) { f.Reg.Id = proto.Uint32(more) }), Says: "it is file 4711 too"},
		{Name: "file-twice", Make: func(i *Image) {
			messages(i, "files.img", func(l []*fdinfo.FileEntry) []*fdinfo.FileEntry { return append(l, l[0]) })
		}, Says: "files.img has file 1 twice"},
		{Name: "file-of-criu", Make: adds(file(more, "/proc/self/fd/7/etc/shadow", unix.S_IFREG|0o600)), Says: "/proc/self/fd/7/etc/shadow, which leads through links"},
		{Name: "open-disk", Make: adds(file(more, "/dev/sda", unix.S_IFBLK|0o600)), Says: "open device: the checkpoint has /dev/sda"},
		{Name: "tun", Make: kind(fdinfo.FdTypes_TUNF), Says: "a tun/tap device"},
		{Name: "fanotify", Make: kind(fdinfo.FdTypes_FANOTIFY), Says: "a fanotify"},
		{Name: "bpf-map", Make: kind(fdinfo.FdTypes_BPFMAP), Says: "a BPF map"},
		{Name: "namespace-file", Make: kind(fdinfo.FdTypes_NS), Says: "a namespace file"},
		{Name: "file-of-a-plugin", Make: kind(fdinfo.FdTypes_EXT), Says: "a file of a CRIU plugin"},
		{Name: "io-uring", Make: func(i *Image) { // no CRIU knows it, so it has no number of its own
			f := &fdinfo.FileEntry{}
			f.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 21))
			open(i, f)
		}, Says: "a file of type 21"},
		{Name: "timer-that-wakes-the-node", Make: adds(&fdinfo.FileEntry{Type: fdinfo.FdTypes_TIMERFD.Enum(), Tfd: &timerfd.TimerfdEntry{Id: proto.Uint32(more), Clockid: proto.Uint32(unix.CLOCK_BOOTTIME_ALARM)}}), Says: "a timerfd that wakes the node"},
		{Name: "signals-as-root", Pod: asNobody, Make: asUser(firstFile(func(f *fdinfo.FileEntry) {
			f.Reg.Fown = &fown.FownEntry{Uid: proto.Uint32(0), Euid: proto.Uint32(0), Signum: proto.Uint32(9), PidType: proto.Uint32(1), Pid: proto.Uint32(1)}
		})), Says: "owner of an open file: the checkpoint has uid 0 and 0"},
		{Name: "watch-by-a-handle", Make: func(i *Image) {
			open(i, watch(&fsnotify.InotifyWdEntry{SDev: deviceOf(i, "/etc/hosts"), FHandle: &fh.FhEntry{Handle: make([]uint64, 16)}}))
		}, Says: "inotify: the checkpoint has a watch on a file of filesystem"},
		{Name: "watch-with-dots", Make: adds(watch(&fsnotify.InotifyWdEntry{FHandle: &fh.FhEntry{Path: proto.String("/../etc")}})), Says: "inotify: the checkpoint has /../etc"},
		{Name: "file-of-root-in-a-volume", Pod: volume, Make: asUser(adds(file(more, "/data/shadow", unix.S_IFREG|0o600))), Says: "open file: the checkpoint has /data/shadow"},
		{Name: "deleted-file-in-a-volume", Pod: volume, Make: asUser(func(i *Image) {
			open(i, file(more, "/data/cron.d/gone", unix.S_IFREG|0o600))
			i.put("ghost-file-1.img", ghost(unix.S_IFREG|0o600))
			remap(i, more, 1, remap_file_path.RemapType_GHOST)
		}), Says: "/data/cron.d/gone, deleted and to be made anew"},
		{Name: "link-in-a-volume", Pod: volume, Make: asUser(func(i *Image) {
			open(i, file(more, "/data/other-name", unix.S_IFREG|0o600))
			remap(i, more, 1, remap_file_path.RemapType_LINKED)
		}), Says: "/data/other-name, deleted and to be made anew"},
		{Name: "deleted-file-missing", Make: func(i *Image) {
			open(i, file(more, "/gone", unix.S_IFREG|0o600))
			remap(i, more, 1, remap_file_path.RemapType_GHOST)
		}, Says: "makes file 4711 of 1, one of which is in no image"},
		{Name: "link-of-nothing", Make: func(i *Image) { remap(i, 4712, 1, remap_file_path.RemapType_LINKED) }, Says: "makes file 4712 of 1, one of which is in no image"},
		{Name: "remap-twice", Make: func(i *Image) {
			remap(i, 1, 2, remap_file_path.RemapType_PROCFS)
			rawMessages(i, "remap-fpath.img", func(m [][]byte) [][]byte { return append(m, m[0]) })
		}, Says: "remap-fpath.img has an entry without a file, file 1 twice"},
		{Name: "remap-in-an-unknown-way", Make: func(i *Image) { remap(i, 1, 1, 7) }, Says: "has file 1 in the unknown way 7"},
		{Name: "deleted-device", Make: func(i *Image) { i.put("ghost-file-1.img", ghost(unix.S_IFBLK|0o666)) }, Says: "deleted file: the checkpoint has a device"},
		{Name: "deleted-setuid-program", Make: func(i *Image) { i.put("ghost-file-1.img", ghost(unix.S_IFREG|unix.S_ISUID|0o755)) }, Says: "deleted file: the checkpoint has a set-user-ID program"},
	}
}

// socketTricks lie about sockets, all of which CRIU makes as root.
func socketTricks() []Trick {
	inet := func(s *sk_inet.InetSkEntry) *fdinfo.FileEntry {
		s.Id, s.Family = proto.Uint32(more), proto.Uint32(unix.AF_INET)
		return &fdinfo.FileEntry{Type: fdinfo.FdTypes_INETSK.Enum(), Isk: s}
	}
	netlink := func(s *sk_netlink.NetlinkSkEntry) *fdinfo.FileEntry {
		s.Id = proto.Uint32(more)
		return &fdinfo.FileEntry{Type: fdinfo.FdTypes_NETLINKSK.Enum(), Nlsk: s}
	}
	unprivileged := func(f *fdinfo.FileEntry) func(*Image) {
		return func(i *Image) {
			tasksAsNobody(i)
			adds(f)(i)
		}
	}
	return []Trick{
		{Name: "socket-of-the-host", Make: adds(&fdinfo.FileEntry{Type: fdinfo.FdTypes_UNIXSK.Enum(), Usk: &sk_unix.UnixSkEntry{Id: proto.Uint32(more), Uflags: proto.Uint32(1), Name: []byte("/run/containerd/containerd.sock")}}), Says: "a connection out of the container (/run/containerd/containerd.sock)"},
		{Name: "inherited-socket", Make: adds(&fdinfo.FileEntry{Type: fdinfo.FdTypes_UNIXSK.Enum(), Usk: &sk_unix.UnixSkEntry{Id: proto.Uint32(more), Uflags: proto.Uint32(8), Name: []byte("\x00criu")}}), Says: `a connection out of the container (\x00criu)`},
		{Name: "socket-in-a-volume", Pod: volume, Make: unprivileged(&fdinfo.FileEntry{Type: fdinfo.FdTypes_UNIXSK.Enum(), Usk: &sk_unix.UnixSkEntry{Id: proto.Uint32(more), Name: []byte("/data/agent.sock")}}), Says: "unix socket: the checkpoint has /data/agent.sock"},
		{Name: "socket-in-a-folder-of-megabytes", Make: adds(&fdinfo.FileEntry{Type: fdinfo.FdTypes_UNIXSK.Enum(), Usk: &sk_unix.UnixSkEntry{
			Id: proto.Uint32(more), Name: []byte("x"), NameDir: proto.String(strings.Repeat("/c", 4<<20)),
		}}), Says: "unix socket: the checkpoint has /c/c/c"},
		{Name: "socket-of-another-network", Make: adds(inet(&sk_inet.InetSkEntry{Type: proto.Uint32(unix.SOCK_STREAM), NsId: proto.Uint32(4711)})), Says: "a inet socket of another network"},
		{Name: "netlink-of-another-network", Make: adds(netlink(&sk_netlink.NetlinkSkEntry{NsId: proto.Uint32(4711)})), Says: "a netlink socket of another network"},
		{Name: "packet-socket-of-another-network", Make: adds(&fdinfo.FileEntry{Type: fdinfo.FdTypes_PACKETSK.Enum(), Psk: &packet.PacketSockEntry{Id: proto.Uint32(more), NsId: proto.Uint32(4711)}}), Says: "a packet socket of another network"},
		{Name: "raw-socket", Pod: asNobody, Make: unprivileged(inet(&sk_inet.InetSkEntry{Type: proto.Uint32(unix.SOCK_RAW)})), Says: "a inet socket, a raw or packet socket"},
		{Name: "packet-socket", Pod: asNobody, Make: unprivileged(&fdinfo.FileEntry{Type: fdinfo.FdTypes_PACKETSK.Enum(), Psk: &packet.PacketSockEntry{Id: proto.Uint32(more)}}), Says: "a packet socket, a raw or packet socket"},
		{Name: "marked-packets", Make: adds(inet(&sk_inet.InetSkEntry{Type: proto.Uint32(unix.SOCK_STREAM), Opts: &sk_opts.SkOptsEntry{SoMark: proto.Uint32(0xe00)}})), Says: "that marks its packets with 0xe00"},
		{Name: "audit-log", Make: adds(netlink(&sk_netlink.NetlinkSkEntry{Protocol: proto.Uint32(unix.NETLINK_AUDIT), Groups: []uint32{1}})), Says: "that listens to the node's audit log"},
		{Name: "netlink-groups", Make: adds(netlink(&sk_netlink.NetlinkSkEntry{Protocol: proto.Uint32(unix.NETLINK_XFRM), Groups: []uint32{2}})), Says: "that listens to groups of protocol 6"},
		{Name: "netlink-to-others", Make: adds(netlink(&sk_netlink.NetlinkSkEntry{State: proto.Uint32(1), DstPortid: proto.Uint32(1)})), Says: "a netlink socket that is connected"},
		{Name: "address-of-five-words", Make: adds(inet(&sk_inet.InetSkEntry{SrcAddr: make([]uint32, 5)})), Says: "address of 5 words in family 2"},
		{Name: "port-over-the-limit", Make: adds(inet(&sk_inet.InetSkEntry{SrcPort: proto.Uint32(1 << 20)})), Says: "port 1048576 or 0"},
	}
}
