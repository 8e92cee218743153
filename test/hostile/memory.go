// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"encoding/binary"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pagemap"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// memoryTricks lie about address spaces.
func memoryTricks() []Trick {
	memory := func(change func(*mm.MmEntry)) func(*Image) { return edit("mm-1.img", change) }
	return []Trick{
		{Name: "mapping-backwards", Make: memory(func(e *mm.MmEntry) { e.Vmas[0].End = proto.Uint64(e.Vmas[0].GetStart() - pageSize) }), Says: "mm-1.img has a mapping from"},
		{Name: "mapping-unaligned", Make: memory(func(e *mm.MmEntry) { e.Vmas[0].Start = proto.Uint64(e.Vmas[0].GetStart() + 1) }), Says: "mm-1.img has a mapping from"},
		{Name: "mapping-of-the-kernel", Make: memory(func(e *mm.MmEntry) {
			e.Vmas[0].Start, e.Vmas[0].End = proto.Uint64(1<<63), proto.Uint64(1<<63+pageSize)
		}), Says: "mm-1.img has a mapping from 0x8000000000000000"},
		{Name: "mappings-overlap", Make: memory(func(e *mm.MmEntry) { e.Vmas[1].Start = e.Vmas[0].Start }), Says: "mm-1.img has overlapping mappings"},
		{Name: "mapping-of-unknown-kind", Make: memory(func(e *mm.MmEntry) { e.Vmas[0].Status = proto.Uint32(1 << 30) }), Says: "of unknown kind 0x40000000"},
		{Name: "mapping-of-no-file", Make: memory(func(e *mm.MmEntry) {
			for _, v := range e.Vmas {
				if v.GetStatus()&(1<<6) != 0 {
					v.Shmid = proto.Uint64(4711)
					return
				}
			}
			panic("hostile: no mapped file")
		}), Says: "maps file 4711, which files.img does not have"},
		{Name: "lazy-pages-in-huge-ones", Make: memory(func(e *mm.MmEntry) {
			for _, v := range e.Vmas {
				v.Flags = proto.Uint32(v.GetFlags() | unix.MAP_HUGETLB)
			}
		}), Says: "in no memory that is filled lazily"},
		{Name: "pages-in-no-memory", Make: memory(func(e *mm.MmEntry) { e.Vmas = e.Vmas[:1] }), Says: "in no memory"},
		{Name: "executable-missing", Make: memory(func(e *mm.MmEntry) { e.ExeFileId = proto.Uint32(4712) }), Says: "executable of task 1 is file 4712"},
	}
}

// pagemapTricks lie about which pages there are.
func pagemapTricks() []Trick {
	const at = "pagemap-1.img"
	entries := func(change func(list []*pagemap.PagemapEntry) []*pagemap.PagemapEntry) func(*Image) {
		return func(i *Image) {
			head, raw := frames(i.content(at))
			var list []*pagemap.PagemapEntry
			for _, p := range raw[1:] {
				e := &pagemap.PagemapEntry{}
				must(proto.UnmarshalOptions{AllowPartial: true}.Unmarshal(p, e))
				list = append(list, e)
			}
			raw = raw[:1]
			for _, e := range change(list) {
				raw = append(raw, encode(e))
			}
			i.put(at, framed(head, raw...))
		}
	}
	one := func(flags uint32, change func(*pagemap.PagemapEntry)) func(*Image) {
		return entries(func(list []*pagemap.PagemapEntry) []*pagemap.PagemapEntry {
			for _, e := range list {
				if e.GetFlags() == flags {
					change(e)
					return list
				}
			}
			panic("hostile: no such entry")
		})
	}
	const (
		parent, eager, lazy = 1, 4, 6

		// hugePages is the most pages that the field of 32 bits can say.
		hugePages = 1<<32 - 1
	)
	length := func(e *pagemap.PagemapEntry, n uint64) {
		e.NrPages = proto.Uint32(uint32(n))
		e.ProtoReflect().SetUnknown(nil) // the length in 64 bits, field 5
	}
	return []Trick{
		{Name: "pagemap-overlaps", Make: entries(func(l []*pagemap.PagemapEntry) []*pagemap.PagemapEntry { return append(l[:1:1], l...) }), Says: "overlaps the one before or is out of order"},
		{Name: "pagemap-unaligned", Make: one(eager, func(e *pagemap.PagemapEntry) { e.Vaddr = proto.Uint64(e.GetVaddr() + 1) }), Says: "pages at 0x"},
		{Name: "pagemap-overflows", Make: one(eager, func(e *pagemap.PagemapEntry) {
			e.Vaddr = proto.Uint64(1<<64 - pageSize)
			length(e, hugePages)
		}), Says: "4294967295 pages at 0xfffffffffffff000"},
		{Name: "pagemap-overflows-64-bits", Make: one(eager, func(e *pagemap.PagemapEntry) {
			e.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 5, protowire.VarintType), 1<<63))
		}), Says: "9223372036854775808 pages at"},
		{Name: "pagemap-of-16-tib", Make: entries(func(l []*pagemap.PagemapEntry) []*pagemap.PagemapEntry {
			e := &pagemap.PagemapEntry{Vaddr: proto.Uint64(1 << 50), NrPages: proto.Uint32(hugePages), Flags: proto.Uint32(lazy)}
			return append(l, e, &pagemap.PagemapEntry{Vaddr: proto.Uint64(1 << 51), NrPages: proto.Uint32(hugePages), Flags: proto.Uint32(lazy)})
		}), Says: "describes more than 17592186044416 bytes"},
		{Name: "pagemap-of-two-lengths", Make: one(eager, func(e *pagemap.PagemapEntry) {
			e.NrPages = proto.Uint32(7)
			e.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 5, protowire.VarintType), 1))
		}), Says: "two lengths, 7 and 1 pages"},
		{Name: "pagemap-without-pages", Make: one(eager, func(e *pagemap.PagemapEntry) { length(e, 0) }), Says: "0 pages at"},
		{Name: "pagemap-of-unknown-flags", Make: one(eager, func(e *pagemap.PagemapEntry) { e.Flags = proto.Uint32(64) }), Says: "unknown flags 0x40"},
		{Name: "pages-of-an-earlier-dump", Make: one(eager, func(e *pagemap.PagemapEntry) { e.Flags = proto.Uint32(parent) }), Says: "that are in an earlier dump"},
		{Name: "pages-nobody-dumped", Make: one(lazy, func(e *pagemap.PagemapEntry) { e.Flags = proto.Uint32(2) }), Says: "that were not dumped"},
		{Name: "eager-pages-said-to-be-lazy", Make: one(eager, func(e *pagemap.PagemapEntry) { e.Flags = proto.Uint32(lazy) }), Says: "eager pages of pages-"},
		{Name: "lazy-pages-said-to-be-eager", Make: one(lazy, func(e *pagemap.PagemapEntry) { e.Flags = proto.Uint32(eager) }), Says: "end too early"},
		{Name: "pagemap-names-no-file", Make: func(i *Image) {
			rawMessages(i, at, func(m [][]byte) [][]byte { m[0] = nil; return m })
		}, Says: "names no pages file"},
		{Name: "pages-shared-by-two", Make: func(i *Image) { i.copyOf(at, "pagemap-7.img") }, Says: "both refer to pages-"},
		{Name: "pagemap-of-nobody", Make: func(i *Image) { i.put("pagemap-999.img", emptyPagemap(77)) }, Says: "pagemap-999.img belongs to no process"},
		{Name: "pages-of-nobody", Make: func(i *Image) { i.put("pages-78.img", make([]byte, pageSize)) }, Says: "pages-78.img, to which no pagemap refers"},
		{Name: "lazy-shared-memory", Make: func(i *Image) {
			i.put("pagemap-shmem-9.img", framed(emptyPagemap(79), encode(&pagemap.PagemapEntry{Vaddr: proto.Uint64(0), NrPages: proto.Uint32(1), Flags: proto.Uint32(lazy)})))
		}, Says: "shared memory 9 has lazy pages"},
		{Name: "millions-of-entries", Make: func(i *Image) {
			p := emptyPagemap(80)
			for range 9 << 20 {
				p = binary.LittleEndian.AppendUint32(p, 0)
			}
			i.put("pagemap-998.img", p)
		}, Says: "has more than 8388608 entries"},
	}
}

// emptyPagemap is the image of a pagemap without entries.
func emptyPagemap(pages uint32) []byte {
	return newImage(0x56084025, &pagemap.PagemapHead{PagesId: proto.Uint32(pages)})
}
