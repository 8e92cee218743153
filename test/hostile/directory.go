// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"encoding/binary"
	"fmt"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/seccomp"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/userns"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Magic numbers of images that a good checkpoint need not have (CRIU, criu/include/magic.h).
const (
	magicNetdev = 0x57373951
	magicUserns = 0x55474906
	magicGhost  = 0x52583605
	magicRemap  = 0x59133954
	magicMM     = 0x57492820
)

// directoryTricks put files into CRIU's folder that do not belong there.
func directoryTricks() []Trick {
	add := func(name string, content []byte) func(*Image) {
		return func(i *Image) { i.put(name, content) }
	}
	return []Trick{
		{Name: "unknown-file", Make: add("criu.conf", []byte("action-script /evil\n")), Says: `"criu.conf", which is no CRIU image`},
		{Name: "control-characters-in-a-name", Make: add("core-1\x1b[2J\n.img", nil), Says: `"core-1\x1b[2J\n.img"`},
		{Name: "image-of-an-old-criu", Make: add("reg-files.img", newImage(1)), Says: `"reg-files.img"`},
		{Name: "network-of-its-own", Make: add("iptables-9.img", []byte("*nat\n")), Says: "iptables-9.img"},
		{Name: "routes-of-its-own", Make: add("route-9.img", []byte("x")), Says: "route-9.img"},
		{Name: "network-devices", Make: add("netdev-10.img", newImage(magicNetdev, &netdev.NetDeviceEntry{Name: proto.String("host0")})), Says: "network devices (netdev-10.img)"},
		{Name: "apparmor-policies", Make: add("apparmor.img", newImage(1)), Says: "AppArmor policies to load"},
		{Name: "users-of-its-own", Make: add("userns-9.img", newImage(magicUserns, &userns.UsernsEntry{})), Says: "user namespace: the checkpoint has one of its own (userns-9.img)"},
		{Name: "bpf-maps", Make: add("bpfmap-data.img", []byte("x")), Says: "BPF maps (bpfmap-data.img)"},
		{Name: "binfmt", Make: add("binfmt-misc.img", newImage(1)), Says: `"binfmt-misc.img"`},
		{Name: "no-inventory", Make: func(i *Image) { i.remove("inventory.img") }, Says: "inventory.img is missing"},
		{Name: "no-tasks", Make: func(i *Image) { i.remove("pstree.img") }, Says: "pstree.img is missing"},
		{Name: "no-descriptors", Make: func(i *Image) { i.remove("descriptors.json") }, Says: "descriptors.json is missing"},
		{
			Name: "fourth-descriptor", Make: add("descriptors.json", []byte(`["/dev/null","pipe:[1]","pipe:[2]","pipe:[3]"]`)),
			Says: "standard descriptors: the checkpoint has 4 in descriptors.json",
		},
		{
			Name: "descriptor-by-a-name", Make: add("descriptors.json", []byte(`["/dev/null","/x/pipe:[1]","pipe:[2]"]`)),
			Says: "standard descriptors: the checkpoint has /x/pipe:[1]",
		},
		{Name: "huge-descriptors", Make: add("descriptors.json", make([]byte, 1<<20)), Says: "descriptors.json has 1048576 bytes"},
		{
			Name: "criu-plugins", Says: "CRIU plugins: the checkpoint has need of evil_plugin",
			Make: edit("inventory.img", func(e *inventory.InventoryEntry) {
				names := protowire.AppendString(protowire.AppendTag(nil, 12, protowire.BytesType), "evil_plugin")
				e.ProtoReflect().SetUnknown(append(e.ProtoReflect().GetUnknown(), protowire.AppendBytes(protowire.AppendTag(nil, 12, protowire.BytesType), names)...))
			}),
		},
		{
			Name: "field-of-a-newer-criu", Says: "field 99 of inventory_entry",
			Make: edit("inventory.img", func(e *inventory.InventoryEntry) {
				e.ProtoReflect().SetUnknown(append(e.ProtoReflect().GetUnknown(), protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1)...))
			}),
		},
		{
			Name: "image-version", Make: edit("inventory.img", func(e *inventory.InventoryEntry) { e.ImgVersion = proto.Uint32(7) }),
			Says: "inventory.img has image version 7",
		},
		{
			Name: "many-files", Says: "state has more than 65536 files",
			Make: func(i *Image) {
				i.Tar = func(p []byte) []byte {
					more := make([]Entry, 1<<16)
					for n := range more {
						more[n] = Regular(fmt.Sprintf("core-%d.img", n+100), nil)
					}
					return append(p[:len(p)-1024:len(p)-1024], Tar(more)...)
				}
			},
		},
	}
}

// frameTricks damage the encoding of CRIU's images.
func frameTricks() []Trick {
	head := func(name string, change func([]byte) []byte) func(*Image) {
		return func(i *Image) { i.put(i.first(name), change(i.content(i.first(name)))) }
	}
	return []Trick{
		{Name: "wrong-magic", Make: head("core-1.img", func(p []byte) []byte { p[4] ^= 0xff; return p }), Says: "core-1.img begins with magic number"},
		{Name: "image-version-1.0", Make: head("files.img", func(p []byte) []byte { return p[4:] }), Says: "files.img does not begin as"},
		{Name: "cut-off-message", Make: head("mm-1.img", func(p []byte) []byte { return p[:len(p)-3] }), Says: "mm-1.img ends in the middle of message 0"},
		{Name: "empty-image", Make: head("pstree.img", func([]byte) []byte { return nil }), Says: "pstree.img does not begin as"},
		{
			Name: "length-of-4-gib", Says: "seccomp.img ends in the middle",
			Make: head("seccomp.img", func(p []byte) []byte { return append(p[:8], 0xff, 0xff, 0xff, 0xff, 1, 2, 3) }),
		},
		{
			Name: "message-over-the-limit", Says: "fs-1.img has a message of 16777217 bytes",
			Make: head("fs-1.img", func(p []byte) []byte {
				return append(binary.LittleEndian.AppendUint32(p[:8:8], 16<<20+1), make([]byte, 16<<20+1)...)
			}),
		},
		{
			Name: "two-messages", Says: "fs-1.img has more than one message",
			Make: func(i *Image) {
				rawMessages(i, "fs-1.img", func(m [][]byte) [][]byte { return append(m, m[0]) })
			},
		},
		{
			Name: "no-protobuf", Says: "cgroup.img message 0",
			Make: func(i *Image) {
				rawMessages(i, "cgroup.img", func([][]byte) [][]byte { return [][]byte{{0xff, 0xff, 0xff}} })
			},
		},
		{
			Name: "endless-nesting", Says: "cgroup.img message 0",
			Make: func(i *Image) {
				rawMessages(i, "cgroup.img", func([][]byte) [][]byte {
					dir := []byte{}
					for range 2000 { // cgroup_dir_entry.children is field 2
						dir = protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), dir)
					}
					dir = protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), dir)
					return [][]byte{protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), dir)}
				})
			},
		},
		{
			// Two bytes each in the image, more than a hundred in memory.
			Name: "millions-of-mappings", Says: "mm-1.img message 0 is damaged, or holds more than",
			Make: func(i *Image) { i.put("mm-1.img", framed(newImage(magicMM), many(14, 7<<20))) },
		},
		{
			Name: "millions-of-filters", Says: "seccomp.img message 0 is damaged, or holds more than",
			Make: func(i *Image) {
				i.put("seccomp.img", framed(i.content("seccomp.img")[:8], many(1, 7<<20)))
			},
		},
		{
			Name: "endless-chain-of-filters", Says: "stands on more than 6553 others",
			Make: func(i *Image) {
				e := &seccomp.SeccompEntry{}
				for n := range uint32(10_000) {
					f := &seccomp.SeccompFilter{Filter: make([]byte, 8), Flags: proto.Uint32(1)}
					if n > 0 {
						f.Prev = proto.Uint32(n - 1)
					}
					e.SeccompFilters = append(e.SeccompFilters, f)
				}
				i.put("seccomp.img", framed(i.content("seccomp.img")[:8], encode(e)))
			},
		},
		{
			Name: "images-over-the-limit", Says: "images of its kind are over the limit",
			Make: func(i *Image) {
				for n := range 9 {
					i.put(fmt.Sprintf("core-%d.img", 1000+n), make([]byte, 16<<20))
				}
			},
		},
	}
}

// many is a message with n empty messages in one of its fields.
func many(field protowire.Number, n int) []byte {
	one := protowire.AppendBytes(protowire.AppendTag(nil, field, protowire.BytesType), nil)
	out := make([]byte, 0, n*len(one))
	for range n {
		out = append(out, one...)
	}
	return out
}
