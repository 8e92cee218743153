// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/uffd"
)

// space is one address space that is followed.
type space struct {
	fd     uffd.FD
	id     uint64
	pid    uint32 // in the page index; of the dumped ancestor for a child
	child  bool   // forked after the restore
	left   bool   // let go of: nothing is wanted, or it is dead
	gone   bool   // closed
	wanted ranges

	// pending are the faults that were read and not answered yet, by page.
	pending map[uint64]waiting
	// touches are the places of the last faults.
	touches touches
	// recent are the changes since the space was last seen quiet.
	recent epoch
	// young are children that are not followed yet, see epoch. For them, parent is
	// set, forked is the number of recent events that came before the fork's, and lacks is what they did not inherit.
	young  []*space
	parent *space
	forked int
	lacks  []span
	// cursor is where the background filling has got to.
	cursor uint64
}

// touches remembers fault windows, by number, each in the one place that it can have.
type touches [32]uint64

// around tells whether a page's window is remembered, and remembers it. A walk comes to the next one in the same manner.
func (t *touches) around(page uint64) bool {
	window := page / faultWindow
	known := t.has(window)
	t.add(window)
	if known {
		t.add(window + 1)
	}
	return known
}

func (t *touches) add(window uint64)      { t[window%uint64(len(t))] = window + 1 }
func (t *touches) has(window uint64) bool { return t[window%uint64(len(t))] == window+1 }

// waiting are the threads that wait for a page.
type waiting struct {
	since time.Time // when the first fault was read
	n     int
}

// drain reads and applies all events that wait.
func (p *Pager) drain(s *space) error {
	for {
		n, err := s.fd.Read(&p.loop.events)
		if err == unix.EAGAIN {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading events of task %d: %w (too many open files: raise the shim's limit)", s.pid, err)
		}
		now := time.Now()
		var first error
		for i := range n { // all of them: one may carry a descriptor
			if err := p.apply(s, p.loop.events.Event(i), now); err != nil && first == nil {
				first = err
			}
		}
		if first != nil {
			return first
		}
		if n < p.loop.events.Len() {
			return nil
		}
	}
}

// apply makes wanted follow one event.
func (p *Pager) apply(s *space, e uffd.Event, now time.Time) error {
	switch e.Kind {
	case uffd.Pagefault:
		p.faults.Add(1)
		page := e.Start &^ (pageSize - 1)
		w, again := s.pending[page]
		if !again {
			w.since = now
			p.loop.round = append(p.loop.round, fault{s, page})
		}
		w.n++
		s.pending[page] = w
		return nil
	case uffd.Fork:
		p.fork(s, e.FD)
		return nil
	case uffd.Remap:
		// A thread that waits at either place must look again: at the old one there
		// may be nothing now, and at the new one is other memory.
		if err := s.wakePending(e.Start, e.End); err != nil {
			return err
		}
		if err := s.wakePending(e.To, e.To+(e.End-e.Start)); err != nil {
			return err
		}
		p.note(s, e)
		before := s.wanted.pages
		s.wanted.move(e.Start, e.End, e.To)
		p.account(s, before-s.wanted.pages)
		return nil
	case uffd.Unmap, uffd.Remove:
		if err := s.wakePending(e.Start, e.End); err != nil {
			return err
		}
		p.note(s, e)
		if !s.recent.trails(len(s.recent.events) - 1) {
			p.strike(s, e.Start, e.End)
		}
		return nil
	}
	return fmt.Errorf("task %d: unknown userfaultfd event %#x", s.pid, e.Kind)
}

// strike takes pages off what is wanted.
func (p *Pager) strike(s *space, lo, hi uint64) {
	_, n := s.wanted.remove(lo, hi, false)
	p.account(s, n)
}

// account notes that an address space wants n pages less.
func (p *Pager) account(s *space, n uint64) {
	if !s.child {
		p.missing.Add(-int64(n))
	}
}

// wakePending makes the threads that wait for pages of a range fault again, and
// forgets their faults.
func (s *space) wakePending(lo, hi uint64) error {
	found := false
	for page := range s.pending {
		if page >= lo && page < hi {
			delete(s.pending, page)
			found = true
		}
	}
	if !found {
		return nil
	}
	return s.wake(lo, hi)
}

func (s *space) wake(lo, hi uint64) error {
	if err := s.fd.Wake(lo, hi-lo); err != nil {
		return fmt.Errorf("waking task %d: %w", s.pid, err)
	}
	return nil
}

// filled notes that the kernel filled pages and woke who waited for them.
func (p *Pager) filled(s *space, lo, hi uint64) {
	p.strike(s, lo, hi)
	if len(s.pending) == 0 {
		return
	}
	now := time.Now()
	answer := func(page uint64, w waiting) {
		for range w.n {
			p.wait.add(now.Sub(w.since))
		}
		delete(s.pending, page)
	}
	if uint64(len(s.pending)) < (hi-lo)/pageSize {
		for page, w := range s.pending {
			if page >= lo && page < hi {
				answer(page, w)
			}
		}
		return
	}
	for page := lo; page < hi; page += pageSize {
		if w, ok := s.pending[page]; ok {
			answer(page, w)
		}
	}
}
