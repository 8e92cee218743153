// SPDX-License-Identifier: Apache-2.0

package pager

import "fmt"

// minSweep is the least number of address spaces at which dead ones are looked
// for without being asked.
const minSweep = 16

// keep notes an address space, so that its descriptor is closed some day.
func (p *Pager) keep(s *space) {
	p.loop.spaces[int32(s.fd)] = s
	p.live.Add(1)
}

// follow begins to read an address space's events.
func (p *Pager) follow(s *space) error {
	if err := p.watch(int(s.fd)); err != nil {
		return fmt.Errorf("userfaultfd of task %d: %w", s.pid, err)
	}
	return nil
}

// sweepDead lets go of address spaces that have ended. Not to be called while
// events are applied.
func (p *Pager) sweepDead() {
	for _, s := range p.loop.spaces {
		if !s.fd.Alive() {
			p.drop(s)
		}
	}
	// The next time by itself when there are twice as many, so that a storm of
	// forks costs a constant number of looks for each.
	p.loop.swept = max(minSweep, 2*len(p.loop.spaces))
}

// drop ends the following of an address space that has ended or wants nothing.
func (p *Pager) drop(s *space) {
	if s.left {
		return
	}
	s.left = true
	p.quiet(s) // all its threads are dead, so all has happened and is read
	delete(p.loop.spaces, int32(s.fd))
	p.account(s, s.wanted.pages)
	s.wanted = ranges{}
	p.live.Add(-1)
	if p.cfg.Holder == nil || p.holding.cancel(s) {
		p.close(s)
		return
	}
	p.loop.leaving[int32(s.fd)] = s
	p.holding.ask(handover{s, true})
}

// close closes the descriptor of an address space that was let go of.
func (p *Pager) close(s *space) {
	s.recent.doubt = false // nothing depends on any order
	p.quiet(s)             // children go on
	s.gone = true
	s.pending = nil
	delete(p.loop.restless, s)
	delete(p.loop.leaving, int32(s.fd))
	s.fd.Close() // nobody else has it, so that it leaves the epoll set as well
	p.tellFilled()
}

// letGoIfComplete lets go of an address space that wants nothing. All that is
// missing in it is zero, which is what the kernel gives without a handler.
//
// Not while it changes: a fork of which the event is still to come may have been before the change that
// made the space complete, and closing would leave the child without a handler.
func (p *Pager) letGoIfComplete(s *space) {
	if !p.loop.restored || s.left || s.parent != nil || len(s.young) > 0 || s.recent.doubt || s.wanted.pages > 0 {
		return
	}
	if s.fd.Changing() {
		p.loop.restless[s] = true
		return
	}
	p.drop(s)
}

// tellFilled ends the Fill calls when there is nothing more to fill.
func (p *Pager) tellFilled() {
	l := &p.loop
	if !l.restored || len(l.spaces)+len(l.leaving) > 0 {
		return
	}
	for _, c := range l.fills {
		close(c)
	}
	l.fills = nil
}
