// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"strings"

	core "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pidns"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/seccomp"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/sysctl"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Seccomp filters of one instruction: BPF_RET with SECCOMP_RET_ALLOW, and with SECCOMP_RET_ERRNO.
var (
	allowsAll  = []byte{6, 0, 0, 0, 0, 0, 0xff, 0x7f}
	refusesAll = []byte{6, 0, 0, 0, 1, 0, 5, 0}
)

// nobody is the user of pods that are not root's.
const nobody = 1000

// asNobody makes the spec that of a pod without privileges.
func asNobody(s *specs.Spec) {
	s.Process.User = specs.User{UID: nobody, GID: nobody}
	s.Process.Capabilities = &specs.LinuxCapabilities{}
}

// tasksAsNobody makes the images those of such a pod.
func tasksAsNobody(i *Image) {
	for _, e := range i.State {
		if !strings.HasPrefix(e.Name, "core-") {
			continue
		}
		message(i, e.Name, func(c *core.CoreEntry) {
			id := proto.Uint32(nobody)
			m := c.GetThreadCore().GetCreds()
			m.Uid, m.Euid, m.Suid, m.Fsuid, m.Gid, m.Egid, m.Sgid, m.Fsgid = id, id, id, id, id, id, id, id
			m.Groups = nil
			none := []uint32{0, 0}
			m.CapInh, m.CapPrm, m.CapEff, m.CapBnd = none, none, none, none
		})
	}
}

// taskTricks lie about who the processes are.
func taskTricks() []Trick {
	task := func(change func(*core.CoreEntry)) func(*Image) { return edit("core-1.img", change) }
	unprivileged := func(change func(*core.CoreEntry)) func(*Image) {
		return func(i *Image) {
			tasksAsNobody(i)
			message(i, "core-1.img", change)
		}
	}
	return []Trick{
		{Name: "root-in-a-users-pod", Pod: asNobody, Make: unprivileged(func(c *core.CoreEntry) { c.ThreadCore.Creds.Euid = proto.Uint32(0) }), Says: "uid: the checkpoint has 0, the pod's spec has 1000"},
		{Name: "group-of-root", Pod: asNobody, Make: unprivileged(func(c *core.CoreEntry) { c.ThreadCore.Creds.Groups = []uint32{0} }), Says: "supplementary group: the checkpoint has 0"},
		{Name: "many-groups", Make: task(func(c *core.CoreEntry) { c.ThreadCore.Creds.Groups = make([]uint32, 70_000) }), Says: "more than 65536 groups"},
		{Name: "capability-too-many", Make: task(func(c *core.CoreEntry) { c.ThreadCore.Creds.CapBnd[0] |= 1 << 21 }), Says: "bounding capabilities: the checkpoint has CAP_SYS_ADMIN too"},
		{Name: "capabilities-of-three-words", Make: task(func(c *core.CoreEntry) { c.ThreadCore.Creds.CapEff = []uint32{0, 0, 1} }), Says: "effective capabilities have 3 words"},
		{Name: "securebits", Make: task(func(c *core.CoreEntry) { c.ThreadCore.Creds.Secbits = proto.Uint32(1 << 8) }), Says: "securebits: the checkpoint has 0x100"},
		{Name: "no-credentials", Make: task(func(c *core.CoreEntry) { c.ThreadCore.Creds = nil }), Says: "core-1.img holds no credentials"},
		{Name: "label-of-the-host", Make: task(func(c *core.CoreEntry) {
			c.ThreadCore.Creds.LsmSockcreate = proto.String("system_u:system_r:init_t:s0")
		}), Says: "SELinux label of new sockets"},
		{Name: "escalation-allowed", Pod: func(s *specs.Spec) { s.Process.NoNewPrivileges = true }, Make: func(*Image) {}, Says: "no_new_privs: the checkpoint has not set"},
		{
			Name: "no-seccomp", Make: func(*Image) {}, Says: "seccomp: the checkpoint has none",
			Pod: func(s *specs.Spec) { s.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActErrno} },
		},
		{
			Name: "weaker-filter", Says: "seccomp filter: the checkpoint has one that lets system call 0 ",
			Pod: func(s *specs.Spec) { s.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActErrno} },
			Make: func(i *Image) {
				filter := &seccomp.SeccompFilter{Filter: allowsAll, Flags: proto.Uint32(unix.SECCOMP_FILTER_FLAG_TSYNC)}
				i.put("seccomp.img", framed(i.content("seccomp.img")[:8], encode(&seccomp.SeccompEntry{SeccompFilters: []*seccomp.SeccompFilter{filter}})))
				for _, e := range i.State {
					if strings.HasPrefix(e.Name, "core-") {
						message(i, e.Name, func(c *core.CoreEntry) {
							c.ThreadCore.SeccompMode, c.ThreadCore.SeccompFilter = core.SeccompMode_filter.Enum(), proto.Uint32(0)
						})
					}
				}
			},
		},
		{Name: "seccomp-of-the-process", Make: task(func(c *core.CoreEntry) { c.Tc.OldSeccompMode = core.SeccompMode_disabled.Enum() }), Says: "seccomp mode for the whole process"},
		{
			Name: "uid-of-another-encoding", Says: "field 1 of creds_entry, which this thaw does not know",
			Make: task(func(c *core.CoreEntry) {
				m := c.ThreadCore.Creds
				m.ProtoReflect().SetUnknown(append(m.ProtoReflect().GetUnknown(), protowire.AppendFixed32(protowire.AppendTag(nil, 1, protowire.Fixed32Type), 0)...))
			}),
		},
		{
			Name: "limit-too-high", Says: "RLIMIT_NOFILE: the checkpoint has",
			Make: func(*Image) {}, Pod: func(s *specs.Spec) {
				s.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 8, Soft: 8}}
			},
		},
		{Name: "real-time", Make: task(func(c *core.CoreEntry) { c.ThreadCore.SchedPolicy = proto.Uint32(1) }), Says: "scheduling: the checkpoint has nice 0, policy 1"},
		{Name: "forged-login", Make: task(func(c *core.CoreEntry) { c.Tc.Loginuid = proto.Uint32(31337) }), Says: "login user of the audit log: the checkpoint has 31337"},
		{Name: "unknown-state", Make: task(func(c *core.CoreEntry) { c.Tc.TaskState = proto.Uint32(77) }), Says: "core-1.img has unknown task state 77"},
		{
			Name: "name-with-control-characters", Says: `task 1 (\x1b[31mroot\n): bounding capabilities`,
			Make: task(func(c *core.CoreEntry) {
				c.Tc.Comm, c.ThreadCore.Comm = proto.String("\x1b[31mroot\n"), proto.String("\x1b[31mroot\n")
				c.ThreadCore.Creds.CapBnd[0] |= 1 << 16
			}),
		},
		{Name: "task-twice", Make: func(i *Image) {
			messages(i, "pstree.img", func(l []*pstree.PstreeEntry) []*pstree.PstreeEntry { return append(l, l[1]) })
		}, Says: "twice, or out of range"},
		{Name: "task-without-parent", Make: func(i *Image) {
			messages(i, "pstree.img", func(l []*pstree.PstreeEntry) []*pstree.PstreeEntry {
				l[1].Ppid = proto.Uint32(4711)
				return l
			})
		}, Says: "without its parent 4711"},
		{Name: "task-number-zero", Make: edit("pstree.img", func(e *pstree.PstreeEntry) { e.Pid = proto.Uint32(0) }), Says: "pstree.img has task 0"},
		{Name: "thread-without-core", Make: edit("pstree.img", func(e *pstree.PstreeEntry) { e.Threads = append(e.Threads, 999) }), Says: "core-999.img is missing"},
		{Name: "many-threads", Make: edit("pstree.img", func(e *pstree.PstreeEntry) {
			for n := range uint32(1 << 17) {
				e.Threads = append(e.Threads, 1000+n)
			}
		}), Says: "core-1000.img is missing"},
		{Name: "descriptor-of-nothing", Make: edit("fdinfo-", func(e *fdinfo.FdinfoEntry) { e.Id = proto.Uint32(4711) }), Says: "is file 4711, which files.img does not have"},
		{Name: "descriptor-twice", Make: func(i *Image) {
			messages(i, i.first("fdinfo-"), func(l []*fdinfo.FdinfoEntry) []*fdinfo.FdinfoEntry { return append(l, l[0]) })
		}, Says: "descriptor 0 twice, or out of range"},
		{Name: "descriptor-out-of-range", Make: edit("fdinfo-", func(e *fdinfo.FdinfoEntry) { e.Fd = proto.Uint32(1<<32 - 1) }), Says: "descriptor 4294967295 twice, or out of range"},
	}
}

// namespaceTricks lie about the namespaces.
func namespaceTricks() []Trick {
	ids := func(change func(*core.TaskKobjIdsEntry)) func(*Image) { return edit("ids-1.img", change) }
	network := func(change func(*netdev.NetnsEntry)) func(*Image) { return edit("netns-", change) }
	return []Trick{
		{Name: "network-it-makes", Make: network(func(e *netdev.NetnsEntry) { e.ExtKey = nil }), Says: "network namespace: the checkpoint has one that it brings along"},
		{Name: "network-of-another-name", Make: network(func(e *netdev.NetnsEntry) { e.ExtKey = proto.String("hostNetNS") }), Says: "network namespace: the checkpoint has one of the name hostNetNS"},
		{Name: "sysctls", Make: network(func(e *netdev.NetnsEntry) {
			e.AllConf4 = []*sysctl.SysctlEntry{{Type: sysctl.SysctlType_CTL_32.Enum(), Iarg: proto.Int32(1)}}
		}), Says: "has settings (sysctls) for a network namespace that others set up"},
		{Name: "processes-of-the-host", Make: func(i *Image) {
			i.put("pidns-9.img", newImage(0x61157326, &pidns.PidnsEntry{ExtKey: proto.String("extRootPidNS")}))
			for _, e := range i.State {
				if strings.HasPrefix(e.Name, "ids-") {
					message(i, e.Name, func(e *core.TaskKobjIdsEntry) { e.PidNsId = proto.Uint32(9) })
				}
			}
		}, Says: "PID namespace: the checkpoint has process numbers shared with others"},
		{Name: "nested-namespace", Make: ids(func(e *core.TaskKobjIdsEntry) { e.MntNsId = proto.Uint32(999) }), Says: "mount namespace: the checkpoint has one of its own inside the container"},
		{Name: "nested-users", Make: ids(func(e *core.TaskKobjIdsEntry) { e.UserNsId = proto.Uint32(998) }), Says: "user namespace: the checkpoint has one of its own"},
	}
}
