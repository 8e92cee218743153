// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
)

// anySocket checks what makes a socket more than the pod's user could open: CRIU makes
// and binds all of them as root.
func (c *check) anySocket(f *image.OpenFile) {
	refuse := func(what, spec string) {
		c.refuse(Difference{Field: "open socket", Image: "a " + f.Type.String() + what, Spec: spec, Remedy: "close it before the checkpoint, or grant what it needs in the pod (securityContext.capabilities.add)"})
	}
	if f.NetNS != 0 && f.NetNS != c.tasks[0].IDs.NetNS {
		refuse(" of another network", "sockets of the pod's network")
	}
	bounding := c.grants().bounding
	if f.Mark != 0 && bounding&(1<<capNetAdmin) == 0 {
		refuse(fmt.Sprintf(" that marks its packets with %#x", f.Mark), "no CAP_NET_ADMIN")
	}
	if (f.Type == image.Packet || f.Inet != nil && f.Inet.Type == unix.SOCK_RAW) && bounding&(1<<capNetRaw) == 0 {
		refuse(", a raw or packet socket", "no CAP_NET_RAW")
	}
	if i := f.Inet; i != nil && i.Local.Port() != 0 && bounding&(1<<capNetBindService) == 0 && c.nodeNetwork() && int(i.Local.Port()) < unprivilegedPort() {
		refuse(fmt.Sprintf(" at port %d of the node", i.Local.Port()), "no CAP_NET_BIND_SERVICE")
	}
	if n := f.Netlink; n != nil {
		listens := slices.ContainsFunc(n.Groups, func(g uint32) bool { return g != 0 })
		switch {
		case n.Connected && bounding&(1<<capNetAdmin) == 0:
			refuse(" that is connected", "no CAP_NET_ADMIN")
		case listens && n.Protocol == unix.NETLINK_AUDIT && bounding&(1<<capAuditRead) == 0:
			refuse(" that listens to the node's audit log", "no CAP_AUDIT_READ")
		case listens && !unprivilegedGroups[n.Protocol] && bounding&(1<<capNetAdmin) == 0:
			refuse(fmt.Sprintf(" that listens to groups of protocol %d", n.Protocol), "no CAP_NET_ADMIN")
		}
	}
}

// unprivilegedGroups are the netlink protocols whose multicast groups every process may
// listen to (NL_CFG_F_NONROOT_RECV in the kernel), apart from that of generic netlink,
// some of whose groups need a capability.
var unprivilegedGroups = map[uint32]bool{unix.NETLINK_ROUTE: true, unix.NETLINK_SOCK_DIAG: true, unix.NETLINK_KOBJECT_UEVENT: true}

// nodeNetwork reports whether the container is in the node's network. In a pod's own,
// the pod's sysctls say which ports need a capability, and nobody else is there.
func (c *check) nodeNetwork() bool {
	_, ok := c.namespace(specs.NetworkNamespace)
	return !ok
}

// unprivilegedPort is the lowest port that a process may bind without a capability in
// this process's network.
func unprivilegedPort() int {
	const usual = 1024
	p, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
	if err != nil {
		return usual
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(p)))
	if err != nil {
		return usual
	}
	return n
}
