// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"cmp"
	"slices"
	"sort"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// ahead fills what is expected to be touched: a fault costs more than a copy. It is
// the loop's alone.
type ahead struct {
	places map[Chunk][]place // of what is expected and not filled yet
	ready  []Chunk           // of them, in the page store: to be filled, in this order
}

// place is where a process has pages of a chunk in the checkpoint.
type place struct {
	pid   uint32
	start uint64
	page  uint64 // in the blob, what belongs at start
	pages uint64
}

// Expect tells the pager which chunks are likely to be touched, in the order in which
// they will: they are filled when they are in the page store and the restore is
// complete, faults first. They count as touched (see [Pager.WorkingSet]). It may be called
// once, at any time. Chunks that the page index does not have are ignored.
func (p *Pager) Expect(chunks []Chunk) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closing {
		return
	}
	p.expected = slices.DeleteFunc(slices.Clone(chunks), func(c Chunk) bool {
		return uint64(c.Blob) >= uint64(len(p.stores)) || uint64(c.Chunk) >= uint64(len(p.stores[c.Blob].blob.Chunks))
	})
	p.wake()
}

// expect finds the places of chunks and asks for those that are not there.
func (p *Pager) expect(chunks []Chunk) {
	a := &p.loop.ahead
	a.places = p.placesOf(chunks)
	for len(chunks) > 0 {
		var ask []uint32
		blob, n := chunks[0].Blob, 0
		for ; n < len(chunks) && chunks[n].Blob == blob && len(ask) < maxBatch; n++ {
			c := chunks[n]
			p.rec.touch(int32(blob), int(c.Chunk))
			if p.stores[blob].present(int(c.Chunk)) {
				a.ready = append(a.ready, c)
			} else {
				ask = append(ask, c.Chunk)
			}
		}
		if len(ask) > 0 {
			p.fetches.ask(request{blob, ask, Ahead})
		}
		chunks = chunks[n:]
	}
}

// placesOf returns where the dumped processes have pages of chunks.
func (p *Pager) placesOf(chunks []Chunk) map[Chunk][]place {
	sorted := slices.Clone(chunks)
	slices.SortFunc(sorted, func(a, b Chunk) int { return cmp.Or(cmp.Compare(a.Blob, b.Blob), cmp.Compare(a.Chunk, b.Chunk)) })
	sorted = slices.Compact(sorted)
	places := make(map[Chunk][]place, len(sorted))
	for i := range p.cfg.Index.Processes {
		proc := &p.cfg.Index.Processes[i]
		for _, run := range proc.Runs {
			if run.Blob == pageindex.Zero {
				continue
			}
			b := &p.cfg.Index.Blobs[run.Blob]
			first := Chunk{uint32(run.Blob), uint32(b.ChunkOf(run.Page))}
			for at := sort.Search(len(sorted), func(i int) bool {
				c := sorted[i]
				return c.Blob > first.Blob || c.Blob == first.Blob && c.Chunk >= first.Chunk
			}); at < len(sorted) && sorted[at].Blob == first.Blob; at++ {
				c := sorted[at]
				lo := max(run.Page, b.FirstPage(int(c.Chunk)))
				hi := min(run.Page+run.Pages, b.FirstPage(int(c.Chunk)+1))
				if lo >= hi {
					break
				}
				places[c] = append(places[c], place{proc.PID, run.Start + (lo-run.Page)*pageSize, lo, hi - lo})
			}
		}
	}
	return places
}

// arrived notes that chunks are in the page store.
func (a *ahead) arrived(blob uint32, chunks []uint32) {
	for _, c := range chunks {
		if c := (Chunk{blob, c}); a.places[c] != nil {
			a.ready = append(a.ready, c)
		}
	}
}

// fillExpected fills the next chunk of those that are ready.
func (p *Pager) fillExpected() error {
	l := &p.loop
	c := l.ahead.ready[0]
	places := l.ahead.places[c]
	if !p.stores[c.Blob].present(int(c.Chunk)) {
		places = nil // the store was made anew since it was there (store.reopen): it is fetched for who touches it
	}
	for _, at := range places {
		s := l.dumped(at.pid)
		if s == nil {
			continue
		}
		switch err := p.fillPlace(s, c, at); err {
		case nil:
		case unix.ESRCH:
			p.drop(s)
			continue
		case unix.EAGAIN:
			l.stalled = true // and once more, from the first place on
			return p.drain(s)
		case unix.ENOMEM: // the program comes first
			l.ahead = ahead{}
			return nil
		default:
			return err
		}
		p.letGoIfComplete(s)
	}
	delete(l.ahead.places, c)
	l.ahead.ready = l.ahead.ready[1:]
	return nil
}

// dumped returns the address space of a process that was in the checkpoint, nil if
// it has ended or wants nothing.
func (l *loop) dumped(pid uint32) *space {
	for _, s := range l.spaces {
		if s.pid == pid && !s.child {
			return s
		}
	}
	return nil
}

// fillPlace fills what is still wanted of a chunk where it was at the checkpoint. What
// the kernel refuses is left to the faults. Errors are those of [Pager.answer].
func (p *Pager) fillPlace(s *space, c Chunk, to place) error {
	end := to.start + to.pages*pageSize
	for at := to.start; at < end; {
		seg, ok := s.wanted.next(at)
		if !ok || seg.start >= end {
			return nil
		}
		lo, hi := max(at, seg.start), min(end, seg.end)
		at = hi
		if seg.blob != int32(c.Blob) || seg.from(lo).page != to.page+(lo-to.start)/pageSize {
			continue // something else was moved there
		}
		for lo < hi {
			n, err := p.copy(s, seg, lo, hi)
			lo += uint64(n)
			switch err {
			case nil:
			case unix.EEXIST:
				lo += pageSize
			case unix.ENOENT:
				lo = hi
			default:
				return err
			}
		}
	}
	return nil
}
