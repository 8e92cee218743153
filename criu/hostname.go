// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"
)

// EncodeHostname returns the content of an image file utsns-N.img that gives a
// restored UTS namespace that host name and no NIS domain name. (It is not in
// package image because who only writes this file needs none of CRIU's other
// message types.)
func EncodeHostname(name string) []byte {
	const (
		magicCommon = 0x54564319 // of every service image, see CRIU's criu/include/magic.h
		magicUTS    = 0x54473203
		nodename    = 1 // fields of utsns_entry, images/utsns.proto
		domainname  = 2
		none        = "(none)" // the kernel's initial value
	)
	m := protowire.AppendString(protowire.AppendTag(nil, nodename, protowire.BytesType), name)
	m = protowire.AppendString(protowire.AppendTag(m, domainname, protowire.BytesType), none)
	out := binary.LittleEndian.AppendUint32(nil, magicCommon)
	out = binary.LittleEndian.AppendUint32(out, magicUTS)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(m)))
	return append(out, m...)
}
