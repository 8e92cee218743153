// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"slices"
	"sync"
)

// holding gives the holder the userfaultfds of all processes and takes back those
// that are needed no more, one after another, so that nothing waits for another
// process: neither a restore nor a fault, while the holder is away.
//
// An address space that is let go of alive is served until the holder has closed its
// duplicate, or a change of its mappings would wait for ever for somebody who reads
// the event.
type holding struct {
	p  *Pager
	wg sync.WaitGroup

	mu      sync.Mutex
	queue   []handover
	running bool
}

// handover is one descriptor to be held, or no more.
type handover struct {
	s      *space
	forget bool
}

// ask queues a handover.
func (h *holding) ask(o handover) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.queue = append(h.queue, o)
	if !h.running {
		h.running = true
		h.wg.Go(h.work)
	}
}

// cancel takes a descriptor that nobody has been asked to hold yet out of the
// queue. It tells whether there was one.
func (h *holding) cancel(s *space) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.Index(h.queue, handover{s, false})
	if i < 0 {
		return false
	}
	h.queue = slices.Delete(h.queue, i, i+1)
	return true
}

// work does handovers until none is queued.
func (h *holding) work() {
	for {
		h.mu.Lock()
		if len(h.queue) == 0 || h.p.ctx.Err() != nil {
			h.running = false
			h.mu.Unlock()
			return
		}
		o := h.queue[0]
		h.queue = slices.Delete(h.queue, 0, 1)
		h.mu.Unlock()

		p := h.p
		if !o.forget {
			p.cfg.Holder.Hold(p.ctx, o.s.id, int(o.s.fd))
			continue
		}
		p.cfg.Holder.Forget(p.ctx, o.s.id)
		p.mu.Lock()
		p.released = append(p.released, o.s)
		p.mu.Unlock()
		p.wake()
	}
}
