// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"fmt"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/uffd"
)

// epoch is what happened to an address space since it was last seen quiet, that
// is, without a change of mappings under way.
//
// It is needed because the kernel queues the event of a change only after it let
// go of the lock under which it made it. So the events of two threads can come in
// the other order than what they report, and a change that is reported by several
// events may have others' events between them. Three cases matter:
//
//   - A fork and another thread's mremap or munmap: the child may have been copied
//     before or after the other change, whatever the order of the events. The child
//     waits until the space is quiet: its faults and events are not looked at.
//   - An mremap to a place that another thread's munmap or mremap has just freed: if
//     its event comes first, the memory that was moved there is not what was freed.
//   - An mremap reports in a last event that the old place is free. By then
//     another mremap may have filled that place, which must not be struck off.
//
// In the first two the order is decided when the space is quiet, when all that
// happened is known and the mappings themselves can be looked at (order, place); until
// then nothing is filled. One thing defeats that, of which there is no event: that a
// mapping grows in place (mremap) over a place that was freed in the same epoch. So a
// place that parent and child both have although it was freed may have been grown over
// before the fork or after; and memory that was moved to a place, which is there
// although it was freed by an event behind both of the move's, may have gone with it
// and the place have been grown over, or the place have been freed before. What can not be
// told apart is taken to have happened in the order of the events, as nearly always:
// docs/limits.md says what that means.
//
// Nothing can be filled but at quiet moments, because filling fails while a change
// is under way; so a fill that succeeds ends an epoch.
type epoch struct {
	open   bool
	base   ranges       // what was wanted at its beginning
	events []uffd.Event // Remap, Remove and Unmap
	doubt  bool         // what is wanted may depend on another order than theirs
}

// presence tells whether registered memory is at an address.
type presence int8

const (
	unknown presence = iota
	absent
	mapped
)

// maxEvents bounds the events that are kept while nothing depends on their order.
const maxEvents = 256

// begin opens the epoch if there is none.
func (s *space) begin() {
	if !s.recent.open {
		s.recent = epoch{open: true, base: s.wanted.clone()}
	}
}

// note keeps an event that is about to be applied.
func (p *Pager) note(s *space, v uffd.Event) {
	e := &s.recent
	if len(e.events) >= maxEvents && len(s.young) == 0 && !e.doubt {
		// A space that changes often and is never filled is not seen quiet. That
		// events were swapped is unlikely for any, more so for old ones.
		e.open = false
	}
	s.begin()
	e.events = append(e.events, v)
	if v.Kind == uffd.Remap {
		if next, ok := s.wanted.next(v.To); ok && next.start < v.To+(v.End-v.Start) {
			e.doubt = true // what is there must have been moved away or unmapped
		}
	}
	if i := len(e.events) - 1; v.Kind != uffd.Remove && !e.trails(i) {
		for _, m := range e.events[:i] {
			if m.Kind == uffd.Remap && v.Start < m.To+(m.End-m.Start) && m.To < v.End {
				e.doubt = true
			}
		}
	}
	e.doubt = e.doubt || len(s.young) > 0
	if v.Kind == uffd.Remap || e.doubt {
		p.loop.restless[s] = true
	}
}

// fork takes a child over. It is followed when its parent is quiet.
func (p *Pager) fork(s *space, fd uffd.FD) {
	s.begin()
	c := &space{fd: fd, id: p.nextID.Add(1), pid: s.pid, child: true, pending: map[uint64]waiting{}, parent: s, forked: len(s.recent.events)}
	p.keep(c) // in any case: the child may run, so its descriptor must stay open
	c.lacks = c.lacking(&s.wanted)
	s.young = append(s.young, c)
	s.recent.doubt = s.recent.doubt || c.forked > 0
	p.loop.restless[s] = true
	if p.cfg.Holder != nil {
		p.holding.ask(handover{c, false})
	}
}

// settle looks whether the spaces that forked or moved memory are quiet. It tells
// whether some are not.
func (p *Pager) settle() (waiting bool) {
	for s := range p.loop.restless {
		if s.fd.Changing() || !p.quiet(s) {
			waiting = true
			continue
		}
		p.letGoIfComplete(s)
	}
	return waiting
}

// quiet ends the epoch of a space that was seen quiet after its last event was
// read, or is dead: what is wanted is put right, and children are followed. It
// reports false, and has done nothing, if mappings that must be looked at are
// changing again.
func (p *Pager) quiet(s *space) bool {
	e := &s.recent
	if e.doubt {
		changing := false
		parent := func(at uint64) presence {
			here, err := s.fd.Registered(at, pageSize)
			changing = changing || err == unix.EAGAIN
			return presenceOf(here, err)
		}
		order, wanted := e.order()
		inherited := make([]ranges, len(s.young))
		for i, c := range s.young {
			if !c.left {
				inherited[i] = e.inherited(order, c.forked, parent, c.has, c.lacking)
			}
		}
		if changing {
			return false
		}
		p.account(s, s.wanted.pages-wanted.pages)
		s.wanted = wanted
		for page := range s.pending { // decided by what seemed to be wanted
			p.loop.retry = append(p.loop.retry, fault{s, page})
		}
		for i, c := range s.young {
			c.wanted = inherited[i]
			c.lacks = append(c.lacks, c.lacking(&c.wanted)...)
		}
	} else {
		for _, c := range s.young {
			c.wanted = e.base.clone()
		}
	}
	young := s.young
	s.recent, s.young = epoch{}, nil
	delete(p.loop.restless, s)
	for _, c := range young {
		c.parent = nil
		if c.left {
			c.wanted = ranges{}
			continue
		}
		for _, l := range c.lacks {
			p.strike(c, l.start, l.end)
		}
		c.lacks = nil
		if err := p.watch(int(c.fd)); err != nil {
			p.loop.failed = fmt.Errorf("userfaultfd of a child of task %d: %w", c.pid, err)
			return true
		}
		p.letGoIfComplete(c)
	}
	return true
}

// has tells whether registered memory of a child is at an address. That is not
// known while the child changes its mappings itself.
func (s *space) has(at uint64) presence { return presenceOf(s.fd.Registered(at, pageSize)) }

func presenceOf(here bool, err error) presence {
	switch {
	case err != nil:
		return unknown
	case here:
		return mapped
	}
	return absent
}

// trails tells whether event i is the second half of a move, which says that the
// old place is free.
func (e *epoch) trails(i int) bool {
	v := e.events[i]
	if v.Kind != uffd.Unmap {
		return false
	}
	for j := i - 1; j >= 0; j-- {
		if m := e.events[j]; m.Kind != uffd.Remove && m.Start == v.Start && m.End == v.End {
			return m.Kind == uffd.Remap
		}
	}
	return false
}

// tail returns the index of the second half of event i, -1 if it is not a move or
// leaves the old place as it is (MREMAP_DONTUNMAP).
func (e *epoch) tail(i int) int {
	if e.events[i].Kind != uffd.Remap {
		return -1
	}
	for j := i + 1; j < len(e.events); j++ {
		if v := e.events[j]; v.Kind != uffd.Remove && v.Start == e.events[i].Start && v.End == e.events[i].End {
			if v.Kind == uffd.Unmap {
				return j
			}
			break
		}
	}
	return -1
}

// touched tells whether an event from the given one on, but for a move and its second
// half, says that the mapping at an address is another one.
func (e *epoch) touched(at uint64, from, but int) bool {
	tail := e.tail(but)
	for j := from; j < len(e.events); j++ {
		v := e.events[j]
		if v.Kind == uffd.Remove || j == but || j == tail {
			continue
		}
		if v.Start <= at && at < v.End || v.Kind == uffd.Remap && v.To <= at && at < v.To+(v.End-v.Start) {
			return true
		}
	}
	return false
}

// order returns the events in the order in which what they report happened, and
// what the space wants after that.
func (e *epoch) order() (order []int, wanted ranges) {
	wanted = e.base.clone()
	done := make([]bool, len(e.events))
	var put func(i int)
	put = func(i int) {
		done[i] = true
		if e.events[i].Kind == uffd.Remap {
			for j := i + 1; j < len(e.events); j++ {
				if !done[j] && e.overtaken(&wanted, i, j) {
					put(j)
				}
			}
		}
		order = append(order, i)
		if v := e.events[i]; v.Kind == uffd.Remap {
			wanted.move(v.Start, v.End, v.To)
		} else if !e.trails(i) {
			wanted.remove(v.Start, v.End, false)
		}
	}
	for i := range e.events {
		if !done[i] {
			put(i)
		}
	}
	return order, wanted
}

// overtaken tells whether event j, although it was read later, freed the place to
// which move i went. wanted is what was wanted before that.
func (e *epoch) overtaken(wanted *ranges, i, j int) bool {
	m, v := e.events[i], e.events[j]
	lo, hi := max(m.To, v.Start), min(m.To+(m.End-m.Start), v.End)
	if v.Kind == uffd.Remove || e.trails(j) || lo >= hi {
		return false
	}
	if next, ok := wanted.next(lo); ok && next.start < hi {
		return true // a move goes to where nothing is
	}
	return j < e.tail(i) // before the move was over, nobody knew where it went
}

// tracks returns what the events did to what was wanted, and what they left alone.
func (e *epoch) tracks(order []int) (rest ranges, tracks []track) {
	rest = e.base.clone()
	for _, i := range order {
		v := e.events[i]
		if e.trails(i) {
			continue
		}
		if v.Kind == uffd.Remap {
			tracks = e.advance(&rest, tracks, i, v.To, v.To+(v.End-v.Start), func(uint64) uint64 { return gone })
			tracks = e.advance(&rest, tracks, i, v.Start, v.End, func(at uint64) uint64 { return at - v.Start + v.To })
			continue
		}
		tracks = e.advance(&rest, tracks, i, v.Start, v.End, func(uint64) uint64 { return gone })
	}
	return rest, tracks
}

// advance adds a step to all that is between two addresses.
func (e *epoch) advance(rest *ranges, tracks []track, event int, start, end uint64, to func(uint64) uint64) []track {
	var out []track
	add := func(t track) {
		if len(t.pages) > 0 {
			t.steps = append(t.steps, step{event, to(t.at(len(t.steps)))})
			out = append(out, t)
		}
	}
	for _, t := range tracks {
		if t.at(len(t.steps)) == gone {
			out = append(out, t)
			continue
		}
		parts := t.split(len(t.steps), start, end)
		for _, i := range []int{0, 2} {
			if len(parts[i].pages) > 0 {
				out = append(out, parts[i])
			}
		}
		add(parts[1])
	}
	taken, _ := rest.remove(start, end, true)
	add(track{pages: taken})
	return out
}

// inherited returns what a child wants that was forked in the epoch, when so many
// of its events had been read.
// Mappings decide for a piece as a whole, so what the child lacks, wherever it may have been, is a piece of its own.
func (e *epoch) inherited(order []int, read int, parent, child func(uint64) presence, lacking func(*ranges) []span) ranges {
	r, whole := e.tracks(order)
	var tracks []track
	for _, t := range whole {
		tracks = append(tracks, t.divide(lacking)...)
	}
	for i := range tracks {
		t := &tracks[i]
		at := e.place(t, read, parent, child)
		if at == gone {
			continue
		}
		first := t.pages[0].start
		for _, s := range t.pages {
			s.start, s.end = s.start-first+at, s.end-first+at
			r.remove(s.start, s.end, false)
			r.insert(s)
		}
	}
	return r
}

// place returns where a piece was when a child was forked, or gone. If the order of
// the events is not that of what they report, the mappings show it.
func (e *epoch) place(t *track, read int, parent, child func(uint64) presence) uint64 {
	reported := t.reported(read)
	for k := range reported {
		if e.forkedBefore(t, k, parent, child) {
			return t.at(k)
		}
	}
	for k := len(t.steps); k > reported; k-- {
		// Nothing was at the new place before the move, but now there is something.
		if i, at := t.steps[k-1].event, t.at(k); at != gone && child(at) == mapped && !e.touched(at, 0, i) {
			return at
		}
	}
	at := t.at(reported)
	if at == gone || child(at) != absent {
		return at
	}
	for d := 1; d <= len(t.steps); d++ {
		for _, k := range []int{reported + d, reported - d} {
			if k >= 0 && k <= len(t.steps) && t.at(k) != gone && child(t.at(k)) == mapped {
				return t.at(k)
			}
		}
	}
	if n := len(t.steps); t.at(n) == gone && e.events[t.steps[n-1].event].Kind != uffd.Remove {
		return gone
	}
	return at
}

// forkedBefore tells whether a child was certainly forked before step k of a piece,
// although the fork was reported later: the child has memory there, its parent no
// more, and no later event says why.
func (e *epoch) forkedBefore(t *track, k int, parent, child func(uint64) presence) bool {
	i, at := t.steps[k].event, t.at(k)
	if e.events[i].Kind == uffd.Remove || child(at) != mapped {
		return false
	}
	if j := e.moveOver(i); j >= 0 {
		from := e.events[j].Start
		return child(from) == mapped && parent(from) == absent && !e.touched(from, j+1, j)
	}
	return parent(at) == absent && !e.touched(at, i+1, i)
}

// moveOver returns the index of the move whose first event seems to be event i: one
// that was asked to go to a place where something was mapped, which it unmapped.
// -1: there is none.
func (e *epoch) moveOver(i int) int {
	v := e.events[i]
	if v.Kind != uffd.Unmap {
		return -1
	}
	for j := i + 1; j < len(e.events); j++ {
		if m := e.events[j]; m.Kind == uffd.Remap && m.To == v.Start && m.End-m.Start <= v.End-v.Start {
			return j
		}
	}
	return -1
}
