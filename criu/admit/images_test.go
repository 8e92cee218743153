// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/cgroup"
	core_x86 "github.com/checkpoint-restore/go-criu/v7/crit/images/core-x86"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/creds"
	core "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fown"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fs"
	ghost_file "github.com/checkpoint-restore/go-criu/v7/crit/images/ghost-file"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/regfile"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/rlimit"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/seccomp"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/vma"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"thaw.dev/thaw/criu/image"
)

// Capabilities in tests: what the spec grants.
const granted = 1<<0 | 1<<5 | 1<<capSetGID | 1<<capSetUID // CHOWN, KILL, SETGID, SETUID

// dump is a container's images before they are encoded: a process and a child
// that dropped to user 33 in a pod that grants a few capabilities.
type dump struct {
	inventory *inventory.InventoryEntry
	pstree    []*pstree.PstreeEntry
	cores     map[uint32]*core.CoreEntry
	ids       *core.TaskKobjIdsEntry
	creds     map[uint32]*more
	mm        *mm.MmEntry
	mounts    []*mnt.MntEntry
	files     []*fdinfo.FileEntry
	fds       []*fdinfo.FdinfoEntry
	filters   *seccomp.SeccompEntry
	netns     *netdev.NetnsEntry
	ranges    []*pagemap.PagemapEntry
	cgroup    *cgroup.CgroupEntry
	tmpfs     []tar.Header
	pages     int
	extra     map[string][]byte
}

// more are the credentials that go-criu's type has no fields for.
type more struct {
	noNewPrivs bool
	ambient    uint64
}

func words(set uint64) []uint32 { return []uint32{uint32(set), uint32(set >> 32)} }

func credsOf(uid uint32, permitted uint64) *creds.CredsEntry {
	p := proto.Uint32(uid)
	return &creds.CredsEntry{
		Uid: p, Euid: p, Suid: p, Fsuid: p, Gid: p, Egid: p, Sgid: p, Fsgid: p, Secbits: proto.Uint32(0),
		CapInh: words(0), CapPrm: words(permitted), CapEff: words(permitted), CapBnd: words(granted), Groups: []uint32{uid},
	}
}

func coreOf(uid uint32, permitted uint64, process bool) *core.CoreEntry {
	c := &core.CoreEntry{
		Mtype: core.CoreEntry_X86_64.Enum(),
		ThreadCore: &core.ThreadCoreEntry{
			FutexRla: proto.Uint64(0), FutexRlaLen: proto.Uint32(0), Creds: credsOf(uid, permitted), Comm: proto.String("server"),
			SeccompMode: core.SeccompMode_filter.Enum(), SeccompFilter: proto.Uint32(0),
		},
	}
	if process {
		c.Tc = &core.TaskCoreEntry{
			TaskState: proto.Uint32(uint32(image.Alive)), ExitCode: proto.Uint32(0), Personality: proto.Uint32(0), Flags: proto.Uint32(0),
			BlkSigset: proto.Uint64(0), Comm: proto.String("server"),
			Rlimits: &core.TaskRlimitsEntry{Rlimits: []*rlimit.RlimitEntry{{Cur: proto.Uint64(1), Max: proto.Uint64(1)}}},
		}
	}
	return c
}

func mount(id int, place, typ string, flags uint32, key string) *mnt.MntEntry {
	m := &mnt.MntEntry{
		MntId: proto.Uint32(uint32(id)), ParentMntId: proto.Uint32(1), RootDev: proto.Uint32(uint32(id)), Flags: proto.Uint32(flags), Root: proto.String("/"),
		Mountpoint: proto.String(place), Source: proto.String(typ), Options: proto.String(""),
	}
	m.Fstype = proto.Uint32(uint32(mnt.Fstype_value[typ]))
	if key != "" {
		m.ExtKey, m.ExtMount = proto.String(key), proto.Bool(true)
	}
	return m
}

func regular(id uint32, path string, mode uint32) *fdinfo.FileEntry {
	return &fdinfo.FileEntry{Type: fdinfo.FdTypes_REG.Enum(), Id: proto.Uint32(id), Reg: &regfile.RegFileEntry{
		Id: proto.Uint32(id), Flags: proto.Uint32(0), Pos: proto.Uint64(0), Fown: owner(0, 0), Name: proto.String(path), Mode: proto.Uint32(mode),
	}}
}

func owner(pid, uid uint32) *fown.FownEntry {
	return &fown.FownEntry{
		Uid: proto.Uint32(uid), Euid: proto.Uint32(uid), Signum: proto.Uint32(0), PidType: proto.Uint32(0), Pid: proto.Uint32(pid),
	}
}

func area(start, end uint64, flags uint32, status image.Status) *vma.VmaEntry {
	return &vma.VmaEntry{
		Start: proto.Uint64(start), End: proto.Uint64(end), Pgoff: proto.Uint64(0), Shmid: proto.Uint64(0), Prot: proto.Uint32(3),
		Flags: proto.Uint32(flags), Status: proto.Uint32(uint32(status)), Fd: proto.Int64(-1),
	}
}

func mapped(a *vma.VmaEntry, file uint64) *vma.VmaEntry {
	a.Shmid = proto.Uint64(file)
	return a
}

func pagesAt(start uint64, n, flags uint32) *pagemap.PagemapEntry {
	return &pagemap.PagemapEntry{Vaddr: proto.Uint64(start), NrPages: proto.Uint32(n), Flags: proto.Uint32(flags)}
}

func ordinary() *dump {
	ids := func(n uint32) *core.TaskKobjIdsEntry {
		return &core.TaskKobjIdsEntry{
			VmId: proto.Uint32(n), FilesId: proto.Uint32(n), FsId: proto.Uint32(n), SighandId: proto.Uint32(n), PidNsId: proto.Uint32(n),
			NetNsId: proto.Uint32(n), IpcNsId: proto.Uint32(n), UtsNsId: proto.Uint32(n), MntNsId: proto.Uint32(n),
			UserNsId: proto.Uint32(7), CgroupNsId: proto.Uint32(8),
		}
	}
	const anonymous = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	return &dump{
		inventory: &inventory.InventoryEntry{
			ImgVersion: proto.Uint32(2), FdinfoPerId: proto.Bool(true), NsPerId: proto.Bool(true), RootIds: ids(1), Lsmtype: inventory.Lsmtype_NO_LSM.Enum(),
		},
		pstree: []*pstree.PstreeEntry{
			{Pid: proto.Uint32(1), Ppid: proto.Uint32(0), Pgid: proto.Uint32(1), Sid: proto.Uint32(1), Threads: []uint32{1, 2}},
			{Pid: proto.Uint32(3), Ppid: proto.Uint32(1), Pgid: proto.Uint32(1), Sid: proto.Uint32(1), Threads: []uint32{3}},
		},
		cores: map[uint32]*core.CoreEntry{1: coreOf(0, granted, true), 2: coreOf(0, granted, false), 3: coreOf(33, 0, true)},
		creds: map[uint32]*more{1: {}, 2: {}, 3: {}},
		ids:   ids(10),
		mm: &mm.MmEntry{
			MmStartCode: proto.Uint64(0), MmEndCode: proto.Uint64(0), MmStartData: proto.Uint64(0), MmEndData: proto.Uint64(0), MmStartStack: proto.Uint64(0),
			MmStartBrk: proto.Uint64(0), MmBrk: proto.Uint64(0), MmArgStart: proto.Uint64(0), MmArgEnd: proto.Uint64(0), MmEnvStart: proto.Uint64(0),
			MmEnvEnd: proto.Uint64(0), ExeFileId: proto.Uint32(1),
			Vmas: []*vma.VmaEntry{
				mapped(area(0x10000, 0x14000, unix.MAP_PRIVATE, image.AreaRegular|image.AreaFilePrivate), 1),
				area(0x20000, 0x24000, anonymous, image.AreaRegular|image.AreaAnonPrivate),
			},
		},
		mounts: []*mnt.MntEntry{
			mount(100, "/", "OVERLAYFS", 0, ""),
			mount(101, "/proc", "PROC", unix.MS_NOSUID|unix.MS_NOEXEC|unix.MS_NODEV, ""),
			mount(102, "/dev", "TMPFS", unix.MS_NOSUID, ""),
			mount(103, "/etc/hosts", "TMPFS", 0, "/etc/hosts"),
			mount(104, "/run/secrets/token", "TMPFS", unix.MS_RDONLY, "/run/secrets/token"),
			mount(105, "/proc/kcore", "TMPFS", unix.MS_NOSUID, "/dev/null"),
			mount(106, "/proc/acpi", "TMPFS", unix.MS_RDONLY, ""),
			mount(107, "/proc/sys", "PROC", unix.MS_RDONLY|unix.MS_NOSUID, ""),
		},
		files: []*fdinfo.FileEntry{
			regular(1, "/usr/bin/server", unix.S_IFREG|0o755),
			regular(2, "/", unix.S_IFDIR|0o755),
			regular(3, "/dev/null", unix.S_IFCHR|0o666),
		},
		fds: []*fdinfo.FdinfoEntry{{Id: proto.Uint32(3), Flags: proto.Uint32(0), Type: fdinfo.FdTypes_REG.Enum(), Fd: proto.Uint32(0)}},
		filters: &seccomp.SeccompEntry{SeccompFilters: []*seccomp.SeccompFilter{
			{Filter: filter, Flags: proto.Uint32(0)},
		}},
		netns:  &netdev.NetnsEntry{ExtKey: proto.String(netKey)},
		ranges: []*pagemap.PagemapEntry{pagesAt(0x10000, 1, 4), pagesAt(0x20000, 2, 6)},
		pages:  3,
		cgroup: &cgroup.CgroupEntry{Sets: []*cgroup.CgSetEntry{{Id: proto.Uint32(1), Ctls: []*cgroup.CgMemberEntry{{Name: proto.String("memory"), Path: proto.String("/pod/x")}}}}},
		tmpfs: []tar.Header{
			{Name: "./", Typeflag: tar.TypeDir},
			{Name: "./null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3},
			{Name: "./fd", Typeflag: tar.TypeSymlink, Linkname: "/proc/self/fd"},
		},
		extra: map[string][]byte{"descriptors.json": []byte(`["/dev/null","pipe:[12]","pipe:[13]"]`)},
	}
}

// filter is what the node's runtime makes of spec's seccomp section: it refuses all.
var filter = program(bpfReturn, 0x50001)

// Instructions of the filters in tests.
const (
	bpfReturn = unix.BPF_RET | unix.BPF_K
	bpfAllow  = unix.SECCOMP_RET_ALLOW
)

// program is a seccomp filter of one instruction.
func program(code uint16, k uint32) []byte {
	return binary.NativeEndian.AppendUint32(append(binary.NativeEndian.AppendUint16(nil, code), 0, 0), k)
}

// spec is one that grants exactly what ordinary has.
func spec() *specs.Spec {
	caps := CapabilityNames(granted)
	return &specs.Spec{
		Root: &specs.Root{Path: "rootfs"},
		Process: &specs.Process{
			User:         specs.User{UID: 0, GID: 0},
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Permitted: caps, Effective: caps},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Options: []string{"nosuid"}},
			{Destination: "/etc/hosts", Type: "bind", Options: []string{"rbind", "rw"}},
			{Destination: "/var/run/secrets/token", Type: "bind", Options: []string{"rbind", "ro"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace},
				{Type: specs.MountNamespace},
				{Type: specs.IPCNamespace, Path: "/proc/7/ns/ipc"},
				{Type: specs.UTSNamespace, Path: "/proc/7/ns/uts"},
				{Type: specs.NetworkNamespace, Path: "/run/netns/pod"},
			},
			Seccomp:       &specs.LinuxSeccomp{DefaultAction: specs.ActErrno},
			MaskedPaths:   []string{"/proc/kcore", "/proc/acpi", "/proc/absent"},
			ReadonlyPaths: []string{"/proc/sys"},
		},
	}
}

// write encodes a dump into a directory.
func (d *dump) write(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	put := func(name string, content []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	encode := func(name string, magic uint32, messages ...proto.Message) { put(name, frame(t, magic, messages...)) }
	encode("inventory.img", 0x58313116, d.inventory)
	encode("pstree.img", 0x50273030, list(d.pstree)...)
	for tid, c := range d.cores {
		if c.ThreadInfo == nil {
			c.ThreadInfo = &core_x86.ThreadInfoX86{}
		}
		if m := d.creds[tid]; m != nil && c.GetThreadCore().GetCreds() != nil {
			var raw []byte
			if m.noNewPrivs {
				raw = protowire.AppendVarint(protowire.AppendTag(raw, 18, protowire.VarintType), 1)
			}
			for _, w := range words(m.ambient) {
				raw = protowire.AppendVarint(protowire.AppendTag(raw, 19, protowire.VarintType), uint64(w))
			}
			c.ThreadCore.Creds.ProtoReflect().SetUnknown(raw)
		}
		encode(fmt.Sprintf("core-%d.img", tid), 0x55053847, c)
	}
	for _, e := range d.pstree {
		pid := e.GetPid()
		if _, ok := d.extra[fmt.Sprintf("ids-%d.img", pid)]; !ok {
			encode(fmt.Sprintf("ids-%d.img", pid), 0x54432030, d.ids)
		}
		encode(fmt.Sprintf("mm-%d.img", pid), 0x57492820, d.mm)
		encode(fmt.Sprintf("fs-%d.img", pid), 0x51403912, &fs.FsEntry{CwdId: proto.Uint32(2), RootId: proto.Uint32(2)})
	}
	d.plant()
	for _, f := range d.files {
		if f.Isk != nil {
			f.Isk.Id = f.Id
		}
		if f.Usk != nil {
			f.Usk.Id = f.Id
		}
		if f.Psk != nil {
			f.Psk.Id = f.Id
		}
		if f.Nlsk != nil {
			f.Nlsk.Id = f.Id
		}
		if f.Ify != nil {
			f.Ify.Id = f.Id
		}
	}
	encode("mountpoints-10.img", 0x55563928, list(d.mounts)...)
	encode("files.img", 0x56303138, list(d.files)...)
	encode("fdinfo-10.img", 0x56213732, list(d.fds)...)
	encode("seccomp.img", 0x64413049, d.filters)
	encode("cgroup.img", 0x59383330, d.cgroup)
	if d.netns != nil {
		encode("netns-10.img", 0x55933752, d.netns)
	}
	encode("pagemap-1.img", 0x56084025, append([]proto.Message{&pagemap.PagemapHead{PagesId: proto.Uint32(1)}}, list(d.ranges)...)...)
	put("pages-1.img", make([]byte, d.pages*image.PageSize))
	put("tmpfs-dev-62.tar.gz.img", archive(t, d.tmpfs))
	for name, content := range d.extra {
		put(name, content)
	}
	return dir
}

// plant puts each mount on the innermost one above its place.
func (d *dump) plant() {
	for _, m := range d.mounts {
		above := ""
		for _, o := range d.mounts {
			place := strings.TrimSuffix(o.GetMountpoint(), "/")
			if o.GetMntId() != m.GetMntId() && strings.HasPrefix(m.GetMountpoint(), place+"/") && len(place) >= len(above) && m.GetParentMntId() == 1 {
				above = place
			}
		}
		for _, o := range d.mounts {
			if m.GetParentMntId() == 1 && m.GetMountpoint() != "/" && strings.TrimSuffix(o.GetMountpoint(), "/") == above {
				m.ParentMntId = proto.Uint32(o.GetMntId())
			}
		}
	}
}

func list[M proto.Message](in []M) []proto.Message {
	out := make([]proto.Message, len(in))
	for i, m := range in {
		out[i] = m
	}
	return out
}

func archive(t testing.TB, headers []tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for i := range headers {
		if err := w.WriteHeader(&headers[i]); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	z.Close()
	return b.Bytes()
}

func ghost(t testing.TB, mode uint32) []byte {
	t.Helper()
	return frame(t, 0x52583605, &ghost_file.GhostFileEntry{Uid: proto.Uint32(0), Gid: proto.Uint32(0), Mode: proto.Uint32(mode)})
}

// frame encodes messages as an image file.
func frame(t testing.TB, magic uint32, messages ...proto.Message) []byte {
	t.Helper()
	var b []byte
	if magic != 0x58313116 { // the inventory has no common magic number
		b = binary.LittleEndian.AppendUint32(b, 0x54564319)
	}
	b = binary.LittleEndian.AppendUint32(b, magic)
	for _, m := range messages {
		raw, err := (proto.MarshalOptions{AllowPartial: true}).Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(len(raw)))
		b = append(b, raw...)
	}
	return b
}

func pagemapOf(t testing.TB, pagesID uint32) []byte {
	t.Helper()
	return frame(t, 0x56084025, &pagemap.PagemapHead{PagesId: proto.Uint32(pagesID)})
}
