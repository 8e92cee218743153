// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"fmt"
	"slices"
	"sync"
)

// holding gives the second holder the userfaultfds of forked children and takes
// back those that are needed no more, one after another, so that the loop waits for
// no other process: faults are served while the holder is away.
//
// A child is served before it is held. To let it wait would protect nobody: if this
// process dies first, the kernel closes the descriptor and a child that waits gets
// zeros as one that runs. What guards it is the holder, which kills the whole
// container, children included, once this process is dead, and lets go of its own
// duplicates only then. So from the read of the fork event until the duplicate is on
// its way, which takes about as long as a message does, a child of a process whose
// page handler is killed in that moment can see zeros for as long as the kill takes;
// after it, never. No order of calls avoids that: the kernel gives the descriptor to
// the reader of the event alone, and lets the child go by the same call. If the holder
// is away, all of the container hangs on this process, dumped processes as well.
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
		if o.forget {
			p.cfg.Holder.Forget(p.ctx, o.s.id)
			p.mu.Lock()
			p.released = append(p.released, o.s)
			p.mu.Unlock()
		} else if err := p.cfg.Holder.Hold(p.ctx, o.s.id, int(o.s.fd), o.s.pid); err != nil && p.ctx.Err() == nil {
			p.mu.Lock()
			p.unheld = fmt.Errorf("second holder for the userfaultfd of a child of task %d: %w", o.s.pid, err)
			p.mu.Unlock()
		} else {
			continue
		}
		p.wake()
	}
}
