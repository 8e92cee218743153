// SPDX-License-Identifier: Apache-2.0

package image

import sk_netlink "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-netlink"

// NetlinkSocket is a netlink socket, see netlink(7).
type NetlinkSocket struct {
	Protocol uint32 // as in socket(2)
	// Groups are the multicast groups that it listens to, a bit for each.
	Groups []uint32
	// Connected is true if it sends to somebody else than the kernel.
	Connected bool
}

func netlinkSocket(s *sk_netlink.NetlinkSkEntry) *NetlinkSocket {
	const connected = 1 // net/netlink/af_netlink.h
	return &NetlinkSocket{
		Protocol: s.GetProtocol(), Groups: s.GetGroups(),
		Connected: s.GetState() == connected && (s.GetDstPortid() != 0 || s.GetDstGroup() != 0),
	}
}
