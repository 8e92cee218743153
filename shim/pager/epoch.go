// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"fmt"

	"thaw.dev/thaw/criu/uffd"
)

// epoch is what happened to an address space since it was last seen quiet, that
// is, without a change of mappings under way.
//
// It is needed because the kernel queues the event of a change only after it let
// go of the lock under which it made it. So the events of two threads can come in
// the other order than what they report, and a change that is reported by several
// events may have others' events between them. Two cases matter:
//
//   - A fork and another thread's mremap or munmap: the child may have been copied
//     before or after the other change, whatever the order of the events. That is
//     decided when the space is quiet, when all that happened is known and the
//     child's mappings can be looked at. Until then the child is not followed: its
//     faults and events wait.
//   - An mremap reports in a last event that the old place is free. By then
//     another mremap may have filled that place, which must not be struck off.
//
// Some cases cannot be told apart from harmless twins and are taken for those: a
// munmap whose event is overtaken by that of an mremap that was given the place just
// freed, and a fork whose event is overtaken by that of a munmap. Both need a thread
// that is held up for the whole time between two neighbouring instructions of
// the kernel.
//
// Nothing can be filled but at quiet moments, because filling fails while a change
// is under way; so a fill that succeeds ends an epoch.
type epoch struct {
	open   bool
	base   ranges       // what was wanted at its beginning
	events []uffd.Event // Remap, Remove and Unmap
}

// maxEvents bounds the events that are kept while no child waits.
const maxEvents = 256

// begin opens the epoch if there is none.
func (s *space) begin() {
	if !s.recent.open {
		s.recent = epoch{open: true, base: s.wanted.clone()}
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
// read: children are followed.
func (p *Pager) quiet(s *space) {
	e, young := s.recent, s.young
	s.recent, s.young = epoch{}, nil
	delete(p.loop.restless, s)
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
			if e.trails(i) {
				continue
			}
			if i < read {
				// That it is mapped in the child says nothing: another mapping may
				// have grown over the place, which causes no event.
				r.remove(v.Start, v.End, false)
				continue
			}
			for at := v.Start; at < v.End; {
				seg, ok := r.next(at)
				if !ok || seg.start >= v.End {
					break
				}
				lo, hi := max(seg.start, v.Start), min(seg.end, v.End)
				if here, known := c.has(lo); known && !here {
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
	if v.Kind != uffd.Unmap || e.trails(i) {
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
// the events is not that of what they report, the child's mappings show it: it has
// the old place or the new one. They say nothing if something was at the new place
// before, if it has both (a mapping has grown over the old one, which causes no
// event) or none, or if another event since the earlier of the two touches these
// places; then the order counts.
func (e *epoch) moved(i int, c *space, read int) bool {
	m := e.events[i]
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
	if last < 0 || first < i {
		return before
	}
	for j := min(i, read); j < len(e.events); j++ {
		v := e.events[j]
		if j != i && j != last && (touches(v, m.Start, m.End) || touches(v, m.To, m.To+(m.End-m.Start))) {
			return before
		}
	}
	old, known := c.has(m.Start)
	arrived, alsoKnown := c.has(m.To)
	if !known || !alsoKnown || old == arrived {
		return before
	}
	return arrived
}

// touches tells whether an event says something about a place.
func touches(v uffd.Event, start, end uint64) bool {
	return v.Start < end && start < v.End ||
		v.Kind == uffd.Remap && v.To < end && start < v.To+(v.End-v.Start)
}

// has tells whether an address is in registered memory of a child. That is not
// known while the child changes its mappings itself.
func (s *space) has(at uint64) (here, known bool) {
	here, err := s.fd.Registered(at)
	return here, err == nil
}
