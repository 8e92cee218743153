// SPDX-License-Identifier: Apache-2.0

package image

import "strings"

// Kind is what a file in a directory of images is, by its name.
type Kind int

const (
	// Unknown is a file that neither CRIU nor runc writes.
	Unknown Kind = iota
	// Message files hold protobuf messages.
	Message
	// Pages files hold memory, page behind page: pages-N.img.
	Pages
	// Content files hold what a message names: files that were deleted while
	// open, data in pipes and sockets, shared memory of System V.
	Content
	// Archive files are compressed tar archives of a tmpfs's content.
	Archive
	// External files are in another program's format: the state of a network
	// namespace that CRIU dumped, addresses, routes and packet filters.
	External
	// Descriptors is runc's list of the standard descriptors: descriptors.json.
	Descriptors
	// Diagnostic files are logs and statistics; a restore needs none of them.
	Diagnostic
)

// names are the names of image files (CRIU, criu/image-desc.c). The text before
// `%` is followed by one number, %d decimal or %x hexadecimal, then by the rest.
// Left out are files that older ones than CRIU 4.1 wrote, which it reads in place of those that a check reads, and those
// that are restored by a program that the image would choose.
var names = map[string]Kind{
	"inventory.img": Message, "pstree.img": Message, "files.img": Message,
	"fdinfo-%d.img": Message, "core-%d.img": Message, "ids-%d.img": Message, "mm-%d.img": Message, "fs-%d.img": Message,
	"pagemap-%d.img": Message, "pagemap-shmem-%d.img": Message,
	"tty-info.img": Message, "tty-data.img": Message, "filelocks.img": Message, "cpuinfo.img": Message, "seccomp.img": Message,
	"cgroup.img": Message, "remap-fpath.img": Message, "apparmor.img": Message, "memfd.img": Message,
	"bpfmap-file.img": Message, "bpfmap-data.img": Content,
	"utsns-%d.img": Message, "mountpoints-%d.img": Message, "userns-%d.img": Message, "timens-%d.img": Message, "pidns-%d.img": Message,
	"ipcns-var-%d.img": Message, "ipcns-shm-%d.img": Content, "ipcns-msg-%d.img": Message, "ipcns-sem-%d.img": Message,
	"netns-%d.img": Message, "netdev-%d.img": Message,
	"tcp-stream-%x.img": Content, "ghost-file-%x.img": Content, "pipes-data.img": Content, "fifo-data.img": Content, "sk-queues.img": Content,
	"pages-%d.img": Pages, "tmpfs-%d.tar.gz.img": Archive, "tmpfs-dev-%d.tar.gz.img": Archive,
	"ifaddr-%d.img": External, "route-%d.img": External, "route6-%d.img": External, "rule-%d.img": External,
	"iptables-%d.img": External, "ip6tables-%d.img": External, "nftables-%d.img": External,
	"netns-ct-%d.img": External, "netns-exp-%d.img": External,
	"descriptors.json": Descriptors,
	"dump.log":         Diagnostic, "restore.log": Diagnostic, "stats-dump": Diagnostic, "stats-restore": Diagnostic,
}

// KindOf returns the kind of the file with that name.
func KindOf(name string) Kind {
	if k, ok := names[name]; ok && !strings.Contains(name, "%") {
		return k
	}
	for i := 0; i < len(name); i++ {
		if !isDigit(name[i], true) {
			continue
		}
		for _, verb := range []string{"%d", "%x"} {
			n := digits(name[i:], verb == "%x")
			if n == 0 {
				continue
			}
			if k, ok := names[name[:i]+verb+name[i+n:]]; ok {
				return k
			}
		}
	}
	return Unknown
}

// digits returns how many digits s begins with; 0 if it is a number that CRIU
// would write otherwise (with a leading zero) or that has no room in 64 bits.
func digits(s string, hex bool) int {
	n := 0
	for n < len(s) && isDigit(s[n], hex) {
		n++
	}
	if n > 1 && s[0] == '0' || n > 20 {
		return 0
	}
	return n
}

func isDigit(c byte, hex bool) bool {
	return c >= '0' && c <= '9' || hex && c >= 'a' && c <= 'f'
}
