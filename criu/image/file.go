// SPDX-License-Identifier: Apache-2.0

package image

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	sk_inet "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-inet"
	sk_unix "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-unix"
	"golang.org/x/sys/unix"
)

// FileType is what an open file is (CRIU, images/fdinfo.proto).
type FileType uint32

// File types.
const (
	RegularFile FileType = 1 // files, directories and devices by path
	Pipe        FileType = 2
	FIFO        FileType = 3
	InetSocket  FileType = 4
	UnixSocket  FileType = 5
	EventFD     FileType = 6
	EventPoll   FileType = 7
	Inotify     FileType = 8
	SignalFD    FileType = 9
	Packet      FileType = 10 // packet socket
	TTY         FileType = 11
	Fanotify    FileType = 12
	Netlink     FileType = 13
	Namespace   FileType = 14 // a namespace file in /proc
	TunTap      FileType = 15
	PluginFile  FileType = 16 // restored by a plugin of CRIU
	TimerFD     FileType = 17
	MemFD       FileType = 18
	BPFMap      FileType = 19
	PidFD       FileType = 20
)

var fileTypes = map[FileType]string{
	RegularFile: "file", Pipe: "pipe", FIFO: "fifo", InetSocket: "inet socket", UnixSocket: "unix socket", EventFD: "eventfd",
	EventPoll: "epoll", Inotify: "inotify", SignalFD: "signalfd", Packet: "packet socket", TTY: "terminal", Fanotify: "fanotify",
	Netlink: "netlink socket", Namespace: "namespace file", TunTap: "tun/tap device", PluginFile: "file of a CRIU plugin",
	TimerFD: "timerfd", MemFD: "memfd", BPFMap: "BPF map", PidFD: "pidfd",
}

func (t FileType) String() string {
	if s, ok := fileTypes[t]; ok {
		return s
	}
	return fmt.Sprintf("file of type %d", uint32(t))
}

// maxOpenFiles bounds the open files in images. A dump of so many takes minutes.
const maxOpenFiles = 1 << 18

// OpenFile is one open file description, which several descriptors may share.
type OpenFile struct {
	Type FileType
	ID   uint32
	// Owner is who is told of I/O on the file (F_SETOWN); nil if nobody.
	Owner *Owner
	// NetNS is the network namespace of a socket, see IDs.NetNS; 0 if it is none or the
	// image does not say.
	NetNS uint32
	// Mark is the mark of a socket's packets (SO_MARK); 0 if there is none.
	Mark    uint32
	Regular *Regular // of RegularFile, else nil
	Inet    *Inet    // of InetSocket, else nil
	Unix    *Unix    // of UnixSocket, else nil
	Netlink *NetlinkSocket
	Watches []Watch // of Inotify
	Clock   uint32  // of TimerFD, as in timerfd_create(2)
}

// Owner is who gets the signals of a file.
type Owner struct {
	UID, EUID, Signal uint32
	PID               uint32
}

// Regular is an open file, directory or device with a path.
type Regular struct {
	Path  string // in the container, without the leading slash of older images
	Flags uint32 // as in open(2)
	Mode  uint32 // type and permissions, as in stat(2); 0 if not recorded
	Mount int32  // ID of the mount that it is on; -1 if not recorded
	Size  uint64 // in bytes; 0 if not recorded
	// External files are restored by a plugin or inherited.
	External bool
}

// Inet is an internet socket.
type Inet struct {
	Family, Type, Protocol uint32 // as in socket(2)
	State                  uint32 // as in the kernel's net/tcp_states.h: 1 established, 7 closed, 10 listen
	Local, Remote          netip.AddrPort
	Interface              string // that it is bound to
}

// Unix is a unix socket.
type Unix struct {
	Inode uint32
	Peer  uint32 // inode of the other end; 0 if there is none
	Type  uint32 // as in socket(2)
	State uint32 // as Inet.State
	// Name is the path, or a NUL byte and the abstract name; "" if unnamed.
	Name    string
	Dir     string // that a relative path begins in
	Flags   uint32 // of CRIU: 1 external, 2 its peer is external (UnixExternal)
	Deleted bool
	// File is who owns the socket's file; nil if the image does not say.
	File *FileOwner
}

// FileOwner is the user and the group of a file.
type FileOwner struct{ UID, GID uint32 }

// Bits of Unix.Flags (CRIU, criu/include/sk-unix.h).
const (
	UnixExternal = 1 << 0 // the socket itself was made outside of the container
	UnixCallback = 1 << 2 // restored by a plugin
	UnixInherit  = 1 << 3 // inherited from whoever restores
)

// OpenFiles returns all open file descriptions in files.img.
func (d *Dir) OpenFiles() ([]OpenFile, error) {
	const name = "files.img"
	var out []OpenFile
	seen := make(map[uint32]bool)
	err := all(d, name, magicFiles, func() *fdinfo.FileEntry { return &fdinfo.FileEntry{} }, func(e *fdinfo.FileEntry) error {
		f, err := openFile(e)
		if err != nil {
			return fmt.Errorf("%w: %s: file %d: %w", ErrFormat, name, e.GetId(), err)
		}
		if e.Id == nil || seen[f.ID] {
			return fmt.Errorf("%w: %s has file %d twice", ErrFormat, name, e.GetId())
		}
		if len(out) == maxOpenFiles {
			return fmt.Errorf("%w: %s has more than %d files", ErrFormat, name, maxOpenFiles)
		}
		seen[f.ID] = true
		out = append(out, f)
		return nil
	})
	return out, err
}

func openFile(e *fdinfo.FileEntry) (OpenFile, error) {
	f := OpenFile{Type: FileType(e.GetType()), ID: e.GetId()}
	p, err := partOf(e)
	if err != nil {
		return f, err
	}
	f.Owner, f.NetNS, f.Mark = p.owner(), p.number("ns_id"), p.mark()
	if e.Type == nil { // a type that go-criu's enumeration lacks
		v, err := varints(e, fileType)
		if err != nil || len(v) != 1 {
			return f, fmt.Errorf("it has no type")
		}
		f.Type = FileType(v[0])
	}
	switch f.Type {
	case RegularFile:
		r := e.GetReg()
		if r == nil || r.Name == nil {
			return f, fmt.Errorf("it has no path")
		}
		f.Regular = &Regular{
			Path: r.GetName(), Flags: r.GetFlags(), Mode: r.GetMode(), Mount: r.GetMntId(), Size: r.GetSize(), External: r.GetExt(),
		}
	case InetSocket:
		s := e.GetIsk()
		if s == nil {
			return f, fmt.Errorf("its socket is missing")
		}
		i, err := inet(s)
		if err != nil {
			return f, err
		}
		f.Inet = i
	case UnixSocket:
		s := e.GetUsk()
		if s == nil {
			return f, fmt.Errorf("its socket is missing")
		}
		f.Unix = unixSocket(s)
	case Netlink:
		s := e.GetNlsk()
		if s == nil {
			return f, fmt.Errorf("its socket is missing")
		}
		f.Netlink = netlinkSocket(s)
	case Inotify:
		f.Watches = watches(e.GetIfy())
	case TimerFD:
		f.Clock = e.GetTfd().GetClockid()
	}
	return f, nil
}

func unixSocket(s *sk_unix.UnixSkEntry) *Unix {
	u := &Unix{
		Inode: s.GetIno(), Peer: s.GetPeer(), Type: s.GetType(), State: s.GetState(), Name: string(s.GetName()),
		Dir: s.GetNameDir(), Flags: s.GetUflags(), Deleted: s.GetDeleted(),
	}
	if p := s.GetFilePerms(); p != nil {
		u.File = &FileOwner{UID: p.GetUid(), GID: p.GetGid()}
	}
	return u
}

func inet(s *sk_inet.InetSkEntry) (*Inet, error) {
	i := &Inet{
		Family: s.GetFamily(), Type: s.GetType(), Protocol: s.GetProto(), State: s.GetState(), Interface: s.GetIfname(),
	}
	local, err := address(i.Family, s.GetSrcAddr())
	if err != nil {
		return nil, err
	}
	remote, err := address(i.Family, s.GetDstAddr())
	if err != nil {
		return nil, err
	}
	if s.GetSrcPort() > 65535 || s.GetDstPort() > 65535 {
		return nil, fmt.Errorf("port %d or %d", s.GetSrcPort(), s.GetDstPort())
	}
	i.Local = netip.AddrPortFrom(local, uint16(s.GetSrcPort()))
	i.Remote = netip.AddrPortFrom(remote, uint16(s.GetDstPort()))
	return i, nil
}

// address converts an address of one or four words in network order; CRIU
// leaves it out where a socket has none.
func address(family uint32, words []uint32) (netip.Addr, error) {
	n := 0
	switch family {
	case unix.AF_INET:
		n = 1
	case unix.AF_INET6:
		n = 4
	}
	if n == 0 || len(words) != 0 && len(words) != n {
		return netip.Addr{}, fmt.Errorf("address of %d words in family %d", len(words), family)
	}
	b := make([]byte, 0, 16)
	for _, w := range words {
		b = binary.NativeEndian.AppendUint32(b, w) // as it was in memory
	}
	if len(words) == 0 {
		b = make([]byte, 4*n)
	}
	a, _ := netip.AddrFromSlice(b)
	return a, nil
}
