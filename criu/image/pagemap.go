// SPDX-License-Identifier: Apache-2.0

package image

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"sort"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// maxPagesSize bounds a pages file in bytes (16 TiB), so that sums of sizes
// cannot overflow.
const maxPagesSize = 1 << 44

// maxRanges bounds the entries of all pagemaps of a dump: twice as many as the runs
// that a page index may have.
const maxRanges = 8 << 20

// Pagemap says which pages of an address space, or of a piece of shared memory,
// were dumped and where each is in its pages file.
type Pagemap struct {
	// ID is the PID of the process, or the shared memory's ID.
	ID uint64
	// Shared is true for shared memory: addresses are offsets in it.
	Shared bool
	// PagesID is the N of pages-N.img.
	PagesID uint32
	// Ranges are in ascending order of Start and do not overlap.
	Ranges []Range
	// Size is the length in bytes of the pages file that CRIU wrote.
	Size int64

	wide bool // entries count pages in 64 bits, as CRIU 4.2 and later write them
}

// Range is a run of pages that follow each other.
type Range struct {
	Start uint64 // address of the first page
	Pages uint64
	// Offset is where the first page is in the pages file, in bytes. It is -1 if
	// the pages are not in it.
	Offset int64
	// Lazy pages are those that CRIU leaves to userfaultfd in a lazy restore:
	// it reads none of them from the pages file then.
	Lazy bool
	// InParent pages are in an earlier dump that this one builds on.
	InParent bool
}

// End is the address behind the range.
func (r Range) End() uint64 { return r.Start + r.Pages*PageSize }

// Flags of a pagemap entry (CRIU, criu/include/pagemap.h).
const (
	pagemapParent  = 1
	pagemapLazy    = 2
	pagemapPresent = 4
	pagemapKnown   = pagemapParent | pagemapLazy | pagemapPresent
)

// File is the name of the pages file.
func (p *Pagemap) File() string { return fmt.Sprintf("pages-%d.img", p.PagesID) }

// Lazy iterates over the ranges that a lazy restore leaves to the fault handler.
func (p *Pagemap) Lazy() iter.Seq[Range] { return p.those(true) }

// Eager iterates over the ranges that CRIU reads from the pages file before the
// processes run.
func (p *Pagemap) Eager() iter.Seq[Range] { return p.those(false) }

func (p *Pagemap) those(lazy bool) iter.Seq[Range] {
	return func(yield func(Range) bool) {
		for _, r := range p.Ranges {
			if r.Lazy == lazy && !yield(r) {
				return
			}
		}
	}
}

// EagerSize is the total length of the eager pages in bytes.
func (p *Pagemap) EagerSize() int64 { return p.size(false) }

// LazySize is the total length of the lazy pages in bytes.
func (p *Pagemap) LazySize() int64 { return p.size(true) }

func (p *Pagemap) size(lazy bool) int64 {
	var n int64
	for r := range p.those(lazy) {
		n += int64(r.Pages) * PageSize
	}
	return n
}

// Complete returns nil if every page is in the pages file: nothing was left in
// an earlier dump or with a page server.
func (p *Pagemap) Complete() error {
	for _, r := range p.Ranges {
		if r.InParent {
			return fmt.Errorf("%w: %s has pages at %#x that are in an earlier dump: make a dump that does not build on another", ErrFormat, p.name(), r.Start)
		}
		if r.Offset < 0 {
			return fmt.Errorf("%w: %s has pages at %#x that were not dumped: dump without --lazy-pages and without a page server", ErrFormat, p.name(), r.Start)
		}
	}
	return nil
}

func (p *Pagemap) name() string {
	if p.Shared {
		return fmt.Sprintf("pagemap-shmem-%d.img", p.ID)
	}
	return fmt.Sprintf("pagemap-%d.img", p.ID)
}

// Pagemap returns the pagemap of a process. A process without one, such as a
// zombie or one that shares its parent's memory, is fs.ErrNotExist.
func (d *Dir) Pagemap(pid uint32) (*Pagemap, error) {
	return d.pagemap(&Pagemap{ID: uint64(pid)})
}

// SharedPagemap returns the pagemap of a piece of shared memory, or
// fs.ErrNotExist.
func (d *Dir) SharedPagemap(id uint64) (*Pagemap, error) {
	return d.pagemap(&Pagemap{ID: id, Shared: true})
}

// Pagemaps returns all pagemaps, those of processes first, each group in
// ascending order of ID. No two refer to the same pages file.
func (d *Dir) Pagemaps() ([]*Pagemap, error) {
	var out []*Pagemap
	ranges := 0
	files := make(map[uint32]string)
	for _, f := range d.files {
		rest, ok := strings.CutPrefix(f.Name, "pagemap-")
		if !ok || f.Kind != Message {
			continue
		}
		rest, shared := strings.CutPrefix(rest, "shmem-")
		id, err := strconv.ParseUint(strings.TrimSuffix(rest, ".img"), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%w: file name %.80q", ErrFormat, f.Name)
		}
		p, err := d.pagemap(&Pagemap{ID: id, Shared: shared})
		if err != nil {
			return nil, err
		}
		if other, ok := files[p.PagesID]; ok {
			return nil, fmt.Errorf("%w: %s and %s both refer to %s", ErrFormat, other, f.Name, p.File())
		}
		if ranges += len(p.Ranges); ranges > maxRanges {
			return nil, fmt.Errorf("%w: the pagemaps have more than %d entries: the memory is in too many pieces", ErrFormat, maxRanges)
		}
		files[p.PagesID] = f.Name
		out = append(out, p)
	}
	sort.Slice(out, func(i, j int) bool {
		if out[i].Shared != out[j].Shared {
			return !out[i].Shared
		}
		return out[i].ID < out[j].ID
	})
	return out, nil
}

func (d *Dir) pagemap(p *Pagemap) (*Pagemap, error) {
	name := p.name()
	in, err := d.read(name)
	if err != nil {
		return nil, err
	}
	if in == nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return p, p.parse(in)
}

func (p *Pagemap) parse(in []byte) error {
	f, err := newFrames(p.name(), in, magicPagemap)
	if err != nil {
		return err
	}
	head, err := f.next()
	if err != nil {
		return err
	}
	var id numbers
	if err := id.parse(head); err != nil {
		return f.errorf("head: %v", err)
	}
	if !id.has[1] {
		return f.errorf("names no pages file")
	}
	p.PagesID = uint32(id.value[1])
	entries := f.count()
	if entries > maxRanges {
		return f.errorf("has more than %d entries: the memory is in too many pieces", maxRanges)
	}
	if entries > 0 {
		p.Ranges = make([]Range, 0, entries)
	}
	var end uint64
	for f.more() {
		m, err := f.next()
		if err != nil {
			return err
		}
		var e numbers
		if err := e.parse(m); err != nil {
			return f.errorf("entry %d: %v", f.n-2, err)
		}
		r, err := e.entry()
		if err != nil {
			return f.errorf("entry %d: %v", f.n-2, err)
		}
		if r.Start < end {
			return f.errorf("entry %d at %#x overlaps the one before or is out of order", f.n-2, r.Start)
		}
		end = r.End()
		p.wide = p.wide || e.has[5]
		if r.Offset == 0 { // present: it lies behind those before
			r.Offset = p.Size
			if p.Size += int64(r.Pages) * PageSize; p.Size > maxPagesSize {
				return f.errorf("describes more than %d bytes", int64(maxPagesSize))
			}
		}
		p.Ranges = append(p.Ranges, r)
	}
	return nil
}

// numbers is a message whose fields are all varints numbered 1 to 5. There are
// millions of these entries in one checkpoint, too many for a general decoder.
type numbers struct {
	value [6]uint64
	has   [6]bool
}

var errField = errors.New("unknown field")

func (m *numbers) parse(in []byte) error {
	for len(in) > 0 {
		num, typ, n := protowire.ConsumeTag(in)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if typ != protowire.VarintType || int(num) >= len(m.value) {
			return errField
		}
		in = in[n:]
		v, n := protowire.ConsumeVarint(in)
		if n < 0 {
			return protowire.ParseError(n)
		}
		in = in[n:]
		m.value[num], m.has[num] = v, true
	}
	return nil
}

// entry interprets the fields of a pagemap_entry: 1 vaddr, 2 pages as uint32,
// 3 in_parent, 4 flags, 5 pages as uint64 (CRIU 4.2 and later, which leaves the
// second zero). Offset is 0 if the pages are present.
func (m *numbers) entry() (Range, error) {
	r := Range{Start: m.value[1], Pages: uint64(uint32(m.value[2])), Offset: -1}
	if m.has[5] {
		r.Pages = m.value[5]
	}
	if !m.has[1] || !m.has[2] && !m.has[5] {
		return r, errors.New("it has no address or no length")
	}
	if m.has[5] && m.value[2] != 0 && m.value[2] != m.value[5] {
		return r, fmt.Errorf("two lengths, %d and %d pages", m.value[2], m.value[5]) // which counts depends on CRIU's version
	}
	flags := uint64(uint32(m.value[4]))
	if flags&^pagemapKnown != 0 {
		return r, fmt.Errorf("unknown flags %#x", flags)
	}
	if m.value[3] != 0 { // images without flags
		flags |= pagemapParent
	} else if !m.has[4] {
		flags = pagemapPresent
	}
	r.Lazy, r.InParent = flags&pagemapLazy != 0, flags&pagemapParent != 0
	if flags&pagemapPresent != 0 {
		r.Offset = 0
	}
	if r.InParent && r.Offset == 0 {
		return r, errors.New("its pages are both here and in an earlier dump")
	}
	if r.Start%PageSize != 0 || r.Start >= maxAddress || r.Pages == 0 || r.Pages > (maxAddress-r.Start)/PageSize {
		return r, fmt.Errorf("%d pages at %#x", r.Pages, r.Start)
	}
	return r, nil
}
