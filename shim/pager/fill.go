// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// How much is filled around a fault. All are powers of two.
const (
	// faultWindow is filled at the second fault in it, the first one gets its page alone: who touches two pages will mostly touch
	// more, and for each there would be one more round trip through the scheduler. Who touches one has not waited for the
	// others. The kernel maps half as much of a file around a fault.
	faultWindow = 128 << 10
	// zeroWindow: mapping the zero page costs about 0.1 µs a page and no memory.
	zeroWindow = 256 << 10
	// fillWindow and fillZeroWindow bound how long a fault waits for the
	// background filling: 100 to 200 µs.
	fillWindow     = 256 << 10
	fillZeroWindow = 4 << 20
)

// answer does all that can be done for a fault: fills the page and its
// neighbours, makes the thread look again, or lets it wait for its chunk. EAGAIN
// and ENOMEM: to be tried again; ESRCH: the address space is gone.
func (p *Pager) answer(s *space, page uint64) error {
	for {
		seg, ok := s.wanted.next(page)
		if !ok || seg.start > page {
			return p.answerZero(s, page, seg, ok)
		}
		lo := max(seg.start, page&^(faultWindow-1))
		hi := min(seg.end, page&^(faultWindow-1)+faultWindow)
		var n int
		var err error
		if seg.blob == pageindex.Zero {
			lo = max(seg.start, page&^(zeroWindow-1))
			hi = min(seg.end, page&^(zeroWindow-1)+zeroWindow)
			n, err = p.zero(s, lo, hi)
		} else {
			st := p.stores[seg.blob]
			at := seg.from(page).page
			chunk := st.blob.ChunkOf(at)
			if p.rec.touch(seg.blob, chunk) {
				p.readAhead(seg.blob, chunk)
			}
			if !st.present(chunk) {
				p.await(s, page, Chunk{uint32(seg.blob), uint32(chunk)})
				return nil
			}
			lo = max(lo, page-min(page-lo, (at-st.blob.FirstPage(chunk))*pageSize))
			hi = min(hi, page+(st.blob.FirstPage(chunk+1)-at)*pageSize)
			switch {
			case p.neighbour(seg, chunk+1):
				hi = min(seg.end, page+(st.blob.FirstPage(chunk+2)-at)*pageSize, hi+faultWindow)
			case !s.touches.around(page) && !p.loop.asked.has(seg.blob, chunk):
				lo, hi = page, page+pageSize
			}
			n, err = p.copy(s, seg, lo, hi)
		}
		switch {
		case err == unix.EEXIST:
			// The page at lo is there. Nobody was woken, and nothing of it is wanted.
			p.filled(s, lo, lo+pageSize)
			if err := s.wake(lo, lo+pageSize); err != nil {
				return err
			}
			if lo == page {
				return nil
			}
		case err == unix.ENOENT && hi-lo > pageSize:
			// The window leaves the mapping, which may have been split since.
			if n, err = p.single(s, seg, page); err != nil || n == 0 {
				return p.lookAgain(s, page, err)
			}
			return nil
		case err == unix.ENOENT:
			return p.lookAgain(s, page, err)
		case err != nil:
			return err
		case lo+uint64(n) > page:
			return nil
		}
		// Filled up to something in front of the page; go on from there.
	}
}

// neighbour tells whether a chunk, behind the one that was touched, is filled with it:
// it was read ahead, and is there. Then it counts as touched.
func (p *Pager) neighbour(seg segment, chunk int) bool {
	st := p.stores[seg.blob]
	if chunk >= len(st.blob.Chunks) || !p.loop.asked.has(seg.blob, chunk) || !st.present(chunk) {
		return false
	}
	if p.rec.touch(seg.blob, chunk) {
		p.readAhead(seg.blob, chunk)
	}
	return true
}

// single fills one page of a segment.
func (p *Pager) single(s *space, seg segment, page uint64) (int, error) {
	if seg.blob == pageindex.Zero {
		return p.zero(s, page, page+pageSize)
	}
	return p.copy(s, seg, page, page+pageSize)
}

// lookAgain ends a fault on a page that is there, or that is mapped no more
// while the event that says so is still to come: the thread tries again and
// finds out. A mapped page faults again, so nobody is lost.
func (p *Pager) lookAgain(s *space, page uint64, err error) error {
	if err != unix.EEXIST && err != unix.ENOENT {
		return err
	}
	if err == unix.EEXIST {
		p.strike(s, page, page+pageSize)
	}
	delete(s.pending, page)
	return s.wake(page, page+pageSize)
}

// answerZero answers a fault on a page that is not wanted: it was not in the
// checkpoint, or the program gave it up. The pages behind it up to the next that is
// wanted are zero too, and the kernel stops in front of one that is there.
func (p *Pager) answerZero(s *space, page uint64, next segment, ok bool) error {
	p.zeroFaults.Add(1)
	hi := page&^(zeroWindow-1) + zeroWindow
	if ok {
		hi = min(hi, next.start)
	}
	_, err := p.zero(s, page, hi)
	if err == unix.ENOENT && hi-page > pageSize {
		_, err = p.zero(s, page, page+pageSize)
	}
	if err != nil {
		return p.lookAgain(s, page, err)
	}
	return nil
}

// zero maps zero pages. Errors are as with [uffd.FD.Copy].
func (p *Pager) zero(s *space, lo, hi uint64) (int, error) {
	if s.recent.doubt {
		return 0, unix.EAGAIN
	}
	p.ioctls.Add(1)
	n, err := s.fd.Zero(lo, hi-lo)
	if n > 0 {
		p.filled(s, lo, lo+uint64(n))
	}
	return n, p.outcome(s, err)
}

// copy copies pages of a segment. Errors are as with [uffd.FD.Copy].
func (p *Pager) copy(s *space, seg segment, lo, hi uint64) (int, error) {
	if s.recent.doubt {
		return 0, unix.EAGAIN
	}
	st, page := p.stores[seg.blob], seg.from(lo).page
	if !st.presentPages(page, (hi-lo)/pageSize) {
		return 0, fmt.Errorf("page store: pages %d to %d are not there and were about to be used", page, page+(hi-lo)/pageSize-1)
	}
	if err := st.sound(); err != nil {
		return 0, fmt.Errorf("page store: %w", err)
	}
	p.ioctls.Add(1)
	n, err := s.fd.Copy(lo, st.at(page, (hi-lo)/pageSize), hi-lo)
	if n > 0 {
		p.copied.Add(uint64(n) / pageSize)
		st.used(page, uint64(n)/pageSize)
		p.filled(s, lo, lo+uint64(n))
	}
	return n, p.outcome(s, err)
}

// outcome sorts the errors of filling: those that callers decide about stay
// what they are, the others must not happen.
func (p *Pager) outcome(s *space, err error) error {
	switch err {
	case nil:
		p.loop.noMemory = 0
		if s.recent.open {
			p.quiet(s) // or it would have been EAGAIN
		}
		return nil
	case unix.EAGAIN, unix.EEXIST, unix.ENOENT, unix.ESRCH, unix.ENOMEM:
		return err
	case unix.ENOSPC:
		return unix.ESRCH
	case unix.EFAULT:
		return errUnreadable
	}
	return fmt.Errorf("filling memory: %w", err)
}

// await lets a fault wait for its chunk.
func (p *Pager) await(s *space, page uint64, c Chunk) {
	p.remoteFaults.Add(1)
	w := p.loop.waits[c]
	if w == nil {
		w = &wait{}
		p.loop.waits[c] = w
	}
	w.faults = append(w.faults, fault{s, page})
	if !w.demand {
		w.demand = true
		p.fetches.ask(request{c.Blob, []uint32{c.Chunk}, Demand})
	}
}

// readAhead asks for the chunks that are likely to be touched after this one, if
// that can be told.
func (p *Pager) readAhead(blob int32, chunk int) {
	st := p.stores[blob]
	var list []uint32
	for _, c := range p.loop.predict[blob].Touch(chunk, len(st.blob.Chunks)) {
		if !st.present(c) && p.loop.asked.add(blob, c) {
			list = append(list, uint32(c))
		}
	}
	if len(list) > 0 {
		p.fetches.ask(request{uint32(blob), list, Ahead})
	}
}

// fillSome does one step of the background filling.
func (p *Pager) fillSome() error {
	l := &p.loop
	l.stalled = false
	if l.restored && len(l.ahead.ready) > 0 {
		return p.fillExpected()
	}
	if !l.filling() || l.paused || time.Now().Before(l.holdOff) {
		return nil
	}
	for _, s := range l.spaces {
		if s.parent != nil {
			continue // not followed yet
		}
		more, err := p.fillNext(s)
		switch err {
		case nil:
		case unix.ESRCH:
			p.drop(s)
			return nil
		case unix.EAGAIN, unix.ENOMEM: // at the limit the program comes first
			l.stalled = true
			if err == unix.ENOMEM {
				l.spins = maxSpins
			}
			return p.drain(s)
		default:
			return err
		}
		p.letGoIfComplete(s)
		if more {
			return nil
		}
	}
	l.paused = true
	return nil
}

// fillNext fills a piece of what an address space wants, in the background. It
// tells whether there is more that can be done now.
func (p *Pager) fillNext(s *space) (more bool, err error) {
	seg, ok := s.wanted.next(s.cursor)
	if !ok {
		s.cursor = 0
		return s.wanted.pages > 0, nil
	}
	lo := max(seg.start, s.cursor)
	hi := min(seg.end, lo+fillZeroWindow)
	if seg.blob != pageindex.Zero {
		st := p.stores[seg.blob]
		at := seg.from(lo).page
		chunk := st.blob.ChunkOf(at)
		if !st.present(chunk) {
			p.lookAhead(s, lo)
			return false, nil
		}
		hi = min(seg.end, lo+fillWindow, lo+(st.blob.FirstPage(chunk+1)-at)*pageSize)
	}
	for {
		var n int
		if seg.blob == pageindex.Zero {
			n, err = p.zero(s, lo, hi)
		} else {
			n, err = p.copy(s, seg, lo, hi)
		}
		switch {
		case err == nil:
			s.cursor = lo + uint64(n)
			return true, nil
		case err == unix.EEXIST:
			p.filled(s, lo, lo+pageSize)
			s.cursor = lo + pageSize
			return true, s.wake(lo, lo+pageSize)
		case err == unix.ENOENT && hi-lo > pageSize:
			hi = lo + (hi-lo)/2&^(pageSize-1)
		case err == unix.ENOENT:
			// No mapping of ours. If it is on the move its event is still to come and
			// the page must be wanted until then; else it was never given to this
			// address space (madvise DONTFORK in a child), and never will be.
			if s.fd.Changing() {
				return false, unix.EAGAIN
			}
			p.strike(s, lo, lo+pageSize)
			s.cursor = lo + pageSize
			return true, nil
		default:
			return false, err
		}
	}
}

// lookAhead asks for the chunks that the background filling needs next, from an
// address on.
func (p *Pager) lookAhead(s *space, at uint64) {
	const segments = 256 // looked at; a fragmented space has many to a chunk
	l := &p.loop
	batch := request{urgency: Background}
	ask := func() {
		if len(batch.chunks) > 0 {
			l.background++
			p.fetches.ask(batch)
			batch.chunks = nil
		}
	}
	defer ask()
	for range segments {
		if l.background == 2*maxRunning[Background] {
			return
		}
		seg, ok := s.wanted.next(at)
		if !ok {
			return
		}
		at = max(at, seg.start)
		if seg.blob == pageindex.Zero {
			at = seg.end
			continue
		}
		st := p.stores[seg.blob]
		page := seg.from(at).page
		chunk := st.blob.ChunkOf(page)
		if c := (Chunk{uint32(seg.blob), uint32(chunk)}); !st.present(chunk) && l.waits[c] == nil {
			if c.Blob != batch.blob {
				ask()
			}
			l.waits[c] = &wait{}
			batch.blob, batch.chunks = c.Blob, append(batch.chunks, c.Chunk)
			if len(batch.chunks) == maxBatch {
				ask()
			}
		}
		at = min(seg.end, at+(st.blob.FirstPage(chunk+1)-page)*pageSize)
	}
}
