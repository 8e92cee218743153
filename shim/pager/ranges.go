// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"slices"
	"sort"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// segment is a range of virtual pages that an address space still has to get:
// all zero, or consecutive pages of one blob.
type segment struct {
	start, end uint64 // where the pages belong now; page-aligned
	page       uint64 // of the first one in the blob
	blob       int32  // index, or pageindex.Zero
}

// from returns the part of s from address a on.
func (s segment) from(a uint64) segment {
	if s.blob != pageindex.Zero {
		s.page += (a - s.start) / pageSize
	}
	s.start = a
	return s
}

// to returns the part of s before address a.
func (s segment) to(a uint64) segment {
	s.end = a
	return s
}

// continues tells whether b is the direct continuation of a.
func continues(a, b segment) bool {
	return a.end == b.start && a.blob == b.blob &&
		(a.blob == pageindex.Zero || a.page+(a.end-a.start)/pageSize == b.page)
}

// leafSize bounds the segments in a leaf: changing one moves at most 4 KiB,
// and a million segments are 16 thousand leaves.
const leafSize = 128

// leaf is a part of a ranges. One that is shared is never changed again.
type leaf struct {
	segs   []segment // in ascending order; never empty
	shared bool
}

// ranges is an ordered set of segments that do not overlap: a tree of two
// levels. Its memory is in proportion to the number of segments, and a copy of it
// shares all that neither side has changed since, because a program that forks a
// hundred times must not cost a hundred times the memory.
type ranges struct {
	leaves []*leaf
	pages  uint64
}

// newRanges returns the ranges of a process's runs.
func newRanges(runs []pageindex.Run) ranges {
	var r ranges
	var segs []segment
	for _, run := range runs {
		s := segment{start: run.Start, end: run.End(), blob: int32(run.Blob)}
		if run.Blob != pageindex.Zero {
			s.page = run.Page
		}
		r.pages += run.Pages
		if n := len(segs); n > 0 && continues(segs[n-1], s) {
			segs[n-1].end = s.end
			continue
		}
		if len(segs) == leafSize {
			r.leaves = append(r.leaves, &leaf{segs: segs})
			segs = nil
		}
		if segs == nil {
			segs = make([]segment, 0, leafSize)
		}
		segs = append(segs, s)
	}
	if len(segs) > 0 {
		r.leaves = append(r.leaves, &leaf{segs: slices.Clip(segs)})
	}
	return r
}

// clone returns a copy that can be changed independently.
func (r *ranges) clone() ranges {
	for _, l := range r.leaves {
		l.shared = true
	}
	return ranges{leaves: slices.Clone(r.leaves), pages: r.pages}
}

// leafOf returns the index of the first leaf with a segment that ends behind a.
func (r *ranges) leafOf(a uint64) int {
	return sort.Search(len(r.leaves), func(i int) bool {
		s := r.leaves[i].segs
		return s[len(s)-1].end > a
	})
}

// segOf returns the index of the first segment that ends behind a.
func segOf(segs []segment, a uint64) int {
	return sort.Search(len(segs), func(i int) bool { return segs[i].end > a })
}

// next returns the first segment that ends behind a: the one a is in, or else
// the one that follows.
func (r *ranges) next(a uint64) (segment, bool) {
	i := r.leafOf(a)
	if i == len(r.leaves) {
		return segment{}, false
	}
	segs := r.leaves[i].segs
	return segs[segOf(segs, a)], true
}

// own makes leaf i changeable.
func (r *ranges) own(i int) *leaf {
	l := r.leaves[i]
	if l.shared {
		l = &leaf{segs: slices.Clone(l.segs)}
		r.leaves[i] = l
	}
	return l
}

// settle restores the bounds of leaf i's size after a change.
func (r *ranges) settle(i int) {
	l := r.leaves[i]
	switch n := len(l.segs); {
	case n == 0:
		r.leaves = slices.Delete(r.leaves, i, i+1)
	case n > leafSize:
		half := &leaf{segs: slices.Clone(l.segs[n/2:])}
		l.segs = slices.Delete(l.segs, n/2, n)
		r.leaves = slices.Insert(r.leaves, i+1, half)
	}
}

// remove takes the pages from lo to hi out. It returns the parts taken if
// collect is true, and how many pages they were.
func (r *ranges) remove(lo, hi uint64, collect bool) (taken []segment, pages uint64) {
	for lo < hi {
		i := r.leafOf(lo)
		if i == len(r.leaves) || r.leaves[i].segs[0].start >= hi {
			break
		}
		segs := r.leaves[i].segs
		j := segOf(segs, lo)
		if segs[j].start >= hi {
			break
		}
		k := j
		var rest [2]segment
		n := 0
		for ; k < len(segs) && segs[k].start < hi; k++ {
			s := segs[k]
			if s.start < lo {
				rest[n] = s.to(lo)
				n++
				s = s.from(lo)
			}
			if s.end > hi {
				rest[n] = s.from(hi)
				n++
				s = s.to(hi)
			}
			if collect {
				taken = append(taken, s)
			}
			pages += (s.end - s.start) / pageSize
		}
		last := segs[k-1].end
		l := r.own(i)
		l.segs = slices.Replace(l.segs, j, k, rest[:n]...)
		r.settle(i)
		lo = max(lo, last)
	}
	r.pages -= pages
	return taken, pages
}

// insert puts s in. Nothing of it may be there.
func (r *ranges) insert(s segment) {
	r.pages += (s.end - s.start) / pageSize
	if len(r.leaves) == 0 {
		r.leaves = append(r.leaves, &leaf{segs: []segment{s}})
		return
	}
	i := min(r.leafOf(s.start), len(r.leaves)-1)
	l := r.own(i)
	j := segOf(l.segs, s.start)
	switch {
	case j > 0 && continues(l.segs[j-1], s):
		l.segs[j-1].end = s.end
	case j < len(l.segs) && continues(s, l.segs[j]):
		l.segs[j].start, l.segs[j].page = s.start, s.page
	default:
		l.segs = slices.Insert(l.segs, j, s)
	}
	r.settle(i)
}

// move takes the pages from lo to hi to another place, where nothing remains of
// what was there before.
func (r *ranges) move(lo, hi, to uint64) {
	moved, _ := r.remove(lo, hi, true)
	r.remove(to, to+(hi-lo), false)
	for _, s := range moved {
		s.start, s.end = s.start-lo+to, s.end-lo+to
		r.insert(s)
	}
}
