// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/uffd"
)

// epoch is what happened to an address space since it was last seen quiet, that
// is, without a change of mappings under way.
//
// It is needed because the kernel queues the event of a change only after it let
// go of the lock under which it made it. So the events of two threads can come in
// the other order than what they report, and two such pairs matter:
//
//   - A fork and another thread's mremap or munmap: the child may have been copied
//     before or after the other change, whatever the order of the events.
//   - A munmap and another thread's mremap that is given the place that has just
//     become free: its memory must not be struck off by the late event. The same
//     is the case with an mremap, which reports in a second event that the old
//     place is free.
//
// Both are decided when the space is quiet, when all that happened is known and
// the kernel can be asked what is where. Until then a child is not followed:
// its faults and events wait. Nothing can be filled between two quiet moments
// but at them, because filling fails while a change is under way.
type epoch struct {
	open   bool
	base   ranges       // what was wanted at its beginning
	events []uffd.Event // Remap, Remove and Unmap
	doubts []span       // unmapped, but perhaps before memory was moved there
}

type span struct{ start, end uint64 }

// maxEvents bounds the events that are kept while no child waits.
const maxEvents = 256

// begin opens the epoch if there is none.
func (s *space) begin() {
	if !s.recent.open {
		s.recent = epoch{open: true, base: s.wanted.clone(), doubts: s.recent.doubts}
	}
}

// note keeps an event that is about to be applied.
func (p *Pager) note(s *space, e uffd.Event) {
	if len(s.recent.events) >= maxEvents && len(s.young) == 0 {
		// A space that changes often and is never filled is not seen quiet. That
		// events were swapped is unlikely for any, more so for old ones.
		s.recent.open = false
	}
	s.begin()
	s.recent.events = append(s.recent.events, e)
	if e.Kind == uffd.Remap {
		p.loop.restless[s] = true
	}
}

// overlaps tells whether a move put memory to where e says something.
func overlaps(move, e uffd.Event) bool {
	return move.Kind == uffd.Remap && move.To < e.End && e.Start < move.To+(move.End-move.Start)
}

// unmapped strikes off what an Unmap event reports, except memory that was moved
// there in this epoch: that is decided when the space is quiet.
func (p *Pager) unmapped(s *space, e uffd.Event) {
	var arrived []span
	for _, m := range s.recent.events {
		if overlaps(m, e) {
			arrived = append(arrived, span{max(m.To, e.Start), min(m.To+(m.End-m.Start), e.End)})
		}
	}
	if len(arrived) == 0 {
		p.strike(s, e.Start, e.End)
		return
	}
	slices.SortFunc(arrived, func(a, b span) int { return int(int64(a.start - b.start)) })
	at := e.Start
	for _, a := range arrived {
		if at < a.start {
			p.strike(s, at, a.start)
		}
		at = max(at, a.end)
	}
	if at < e.End {
		p.strike(s, at, e.End)
	}
	s.recent.doubts = append(s.recent.doubts, arrived...)
}

// fork takes a child over. It is followed when its parent is quiet.
func (p *Pager) fork(s *space, fd uffd.FD) error {
	s.begin()
	c := &space{fd: fd, id: p.nextID.Add(1), pid: s.pid, child: true, pending: map[uint64]waiting{}, parent: s, forked: len(s.recent.events)}
	p.keep(c) // in any case: the child may run, so its descriptor must stay open
	s.young = append(s.young, c)
	p.loop.restless[s] = true
	if p.cfg.Holder != nil {
		if err := p.cfg.Holder.Hold(c.id, int(fd), c.pid); err != nil {
			return fmt.Errorf("second holder for the userfaultfd of a child of task %d: %w", s.pid, err)
		}
	}
	return nil
}

// settle looks whether the spaces that forked or moved memory are quiet. It tells
// whether some are not.
func (p *Pager) settle() (waiting bool) {
	for s := range p.loop.restless {
		if s.fd.Changing() {
			waiting = true
			continue
		}
		p.quiet(s)
		p.letGoIfComplete(s)
	}
	return waiting
}

// quiet ends the epoch of a space that was seen quiet after its last event was
// read: children are followed and doubts resolved.
func (p *Pager) quiet(s *space) {
	e, young := s.recent, s.young
	s.recent, s.young = epoch{}, nil
	delete(p.loop.restless, s)
	for _, d := range e.doubts {
		p.resolve(s, d)
	}
	for _, c := range young {
		c.parent = nil
		if c.gone {
			continue
		}
		c.wanted = e.inherited(c, c.forked)
		if err := p.watch(int(c.fd)); err != nil {
			p.loop.failed = fmt.Errorf("userfaultfd of a child of task %d: %w", c.pid, err)
			return
		}
		p.letGoIfComplete(c)
	}
}

// resolve strikes off what is wanted in a range where nothing is mapped.
func (p *Pager) resolve(s *space, d span) {
	for at := d.start; at < d.end; {
		seg, ok := s.wanted.next(at)
		if !ok || seg.start >= d.end {
			return
		}
		lo, hi := max(seg.start, d.start), min(seg.end, d.end)
		switch here, err := s.fd.Registered(lo); {
		case err == unix.EAGAIN:
			// Changing again. What is wanted where nothing is mapped does no harm
			// until a mapping grows over it.
			s.recent.doubts = append(s.recent.doubts, span{lo, d.end})
			return
		case err == nil && !here:
			p.strike(s, lo, hi)
		}
		at = hi
	}
}

// inherited returns what a child wants that was forked in the epoch, when so many
// of its events had been read.
func (e *epoch) inherited(c *space, read int) ranges {
	r := e.base.clone()
	for i, v := range e.events {
		switch v.Kind {
		case uffd.Remove:
			if i < read { // a child of a fork meanwhile may see either
				r.remove(v.Start, v.End, false)
			}
		case uffd.Remap:
			if e.moved(i, c, read) {
				r.move(v.Start, v.End, v.To)
			}
		case uffd.Unmap:
			if j := e.moveOver(i); j >= 0 {
				if e.moved(j, c, read) {
					r.remove(v.Start, v.End, false)
				}
				continue
			}
			sure := !e.clear(span{v.Start, v.End}, i, i)
			for at := v.Start; at < v.End; {
				seg, ok := r.next(at)
				if !ok || seg.start >= v.End {
					break
				}
				lo, hi := max(seg.start, v.Start), min(seg.end, v.End)
				if sure && i < read || !sure && !c.has(lo) {
					r.remove(lo, hi, false)
				}
				at = hi
			}
		}
	}
	return r
}

// moveOver returns the index of the move whose first event is event i: one that
// was asked to go to a place where something was mapped, which it unmapped. -1:
// there is none.
func (e *epoch) moveOver(i int) int {
	v := e.events[i]
	if v.Kind != uffd.Unmap {
		return -1
	}
	for j := i + 1; j < len(e.events); j++ {
		if m := e.events[j]; m.Kind == uffd.Remap && m.To == v.Start {
			return j
		}
	}
	return -1
}

// moved tells whether a move came before the fork of a child. If the order of
// the events is not that of what they report, the child's mappings show it: the
// place that was left is still there in a child that was forked before, and gone
// from one that was forked later. They say nothing where other changes touch the
// same places, or if the old place was kept; then the order counts.
func (e *epoch) moved(i int, c *space, read int) bool {
	m := e.events[i]
	from, to := span{m.Start, m.End}, span{m.To, m.To + (m.End - m.Start)}
	first, last := i, -1
	for j, v := range e.events {
		if e.moveOver(j) == i {
			first = min(first, j) // all was done when the first event came
		}
		if j > i && last < 0 && v.Kind == uffd.Unmap && v.Start == m.Start && v.End == m.End {
			last = j
		}
	}
	before := first < read
	if last < 0 || !e.clear(from, first, i, last) || !e.clear(to, first, i, last) {
		return before
	}
	switch here := c.has(m.Start); {
	case before && here:
		return false
	case !before && !here && c.has(m.To):
		return true
	}
	return before
}

// clear tells whether no event but those given says something about a place.
func (e *epoch) clear(at span, but ...int) bool {
	for i, v := range e.events {
		if slices.Contains(but, i) {
			continue
		}
		if v.Start < at.end && at.start < v.End || overlaps(v, uffd.Event{Start: at.start, End: at.end}) {
			return false
		}
	}
	return true
}

// has tells whether an address is in registered memory of a child that is not
// followed yet.
func (s *space) has(at uint64) bool {
	here, err := s.fd.Registered(at)
	if err == unix.EAGAIN {
		// The child itself changes its mappings, and will until its events are
		// read. Registering again what is registered changes nothing, and fails where
		// nothing is mapped.
		return s.fd.Register(at, pageSize) == nil
	}
	return err == nil && here
}
