// SPDX-License-Identifier: Apache-2.0

package image

import (
	"encoding/binary"
	"sort"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
)

// MakeEager marks pages as eager whose lazy restore would go wrong, and returns the
// new content of each pagemap file that says so, by file name. Apart from that
// the images stay as they are. They are pages of:
//
//   - areas that a child gets empty (MADV_WIPEONFORK; the kernel's own random number state is
//     one): nobody tells a fault handler, and it would fill the child's with what the parent had;
//   - areas that a process has in common with a parent that has locked them. CRIU maps
//     the parent's, the kernel fills it with zeros at once, and pages that the child
//     inherits by that never fault.
//
// All maps must be complete.
func MakeEager(tasks []Task, maps []*Pagemap) map[string][]byte {
	byPID := make(map[uint32]*Task, len(tasks))
	for i := range tasks {
		byPID[tasks[i].PID] = &tasks[i]
	}
	areas := make(map[uint32]eagerAreas, len(tasks))
	out := make(map[string][]byte)
	for _, m := range maps {
		if m.Shared || m.ID > 1<<32-1 {
			continue
		}
		if m.makeEager(find(byPID, areas, uint32(m.ID)).lazy) {
			out[m.name()] = m.encode()
		}
	}
	return out
}

// eagerAreas are the areas of a process that are to be restored eagerly.
type eagerAreas struct {
	lazy      []Area // those that CRIU would restore lazily
	populated []Area // those in which a child may find pages that were not dumped
}

// find computes a process's areas, and those of its ancestors before.
func find(tasks map[uint32]*Task, known map[uint32]eagerAreas, pid uint32) eagerAreas {
	if e, ok := known[pid]; ok {
		return e
	}
	known[pid] = eagerAreas{} // images in which parents go in a circle must not end the program
	t := tasks[pid]
	if t == nil || t.Memory == nil {
		return eagerAreas{}
	}
	inherited := find(tasks, known, t.PPID).populated
	var e eagerAreas
	for _, a := range t.Memory.Areas {
		if a.Status&AreaGuard != 0 {
			continue
		}
		switch {
		case a.Flags&(unix.MAP_ANONYMOUS|unix.MAP_LOCKED) == unix.MAP_ANONYMOUS|unix.MAP_LOCKED:
			e.populated = append(e.populated, a)
		case !a.Lazy():
		case overlaps(inherited, a):
			e.lazy = append(e.lazy, a)
			e.populated = append(e.populated, a)
		case a.Advice&(1<<unix.MADV_WIPEONFORK) != 0:
			e.lazy = append(e.lazy, a)
		}
	}
	known[pid] = e
	return e
}

// overlaps tells whether one of areas, which are in ascending order, overlaps a.
func overlaps(areas []Area, a Area) bool {
	i := sort.Search(len(areas), func(i int) bool { return areas[i].End > a.Start })
	return i < len(areas) && areas[i].Start < a.End
}

// makeEager marks the pages in areas, which are in ascending order, as eager. It
// tells whether there are any.
func (p *Pagemap) makeEager(areas []Area) (changed bool) {
	if len(areas) == 0 {
		return false
	}
	var out []Range
	for _, r := range p.Ranges {
		for r.Lazy {
			i := sort.Search(len(areas), func(i int) bool { return areas[i].End > r.Start })
			if i == len(areas) || areas[i].Start >= r.End() {
				break
			}
			if areas[i].Start > r.Start {
				var head Range
				head, r = r.cut(areas[i].Start)
				out = append(out, head)
			}
			changed = true
			if areas[i].End >= r.End() {
				r.Lazy = false
				break
			}
			head, tail := r.cut(areas[i].End)
			head.Lazy = false
			out, r = append(out, head), tail
		}
		out = append(out, r)
	}
	p.Ranges = out
	return changed
}

// cut divides a range at an address in it.
func (r Range) cut(at uint64) (head, tail Range) {
	head, tail = r, r
	head.Pages = (at - r.Start) / PageSize
	tail.Start, tail.Pages = at, r.Pages-head.Pages
	if r.Offset >= 0 {
		tail.Offset += int64(head.Pages) * PageSize
	}
	return head, tail
}

// encode returns the content of a pagemap file. The pages must be complete.
func (p *Pagemap) encode() []byte {
	out := binary.LittleEndian.AppendUint32(nil, magicCommon)
	out = binary.LittleEndian.AppendUint32(out, magicPagemap)
	message := func(fields ...uint64) {
		var m []byte
		for i := 0; i < len(fields); i += 2 {
			m = protowire.AppendTag(m, protowire.Number(fields[i]), protowire.VarintType)
			m = protowire.AppendVarint(m, fields[i+1])
		}
		out = binary.LittleEndian.AppendUint32(out, uint32(len(m)))
		out = append(out, m...)
	}
	message(1, uint64(p.PagesID))
	for _, r := range p.Ranges {
		flags := uint64(pagemapPresent)
		if r.Lazy {
			flags |= pagemapLazy
		}
		if p.wide {
			message(1, r.Start, 2, 0, 4, flags, 5, r.Pages)
		} else {
			message(1, r.Start, 2, r.Pages, 4, flags)
		}
	}
	return out
}
