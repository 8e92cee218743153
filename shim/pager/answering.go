// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxNoMemory is how long the kernel may refuse memory. When a container is at
	// its limit, its memory cgroup kills one of its processes before long.
	maxNoMemory = 10 * time.Second
	// retryBackground is the pause after a background request that failed.
	retryBackground = time.Second
)

// fault is a page that a thread waits for.
type fault struct {
	*space
	page uint64
}

// wait is a chunk that was asked for.
type wait struct {
	demand bool
	faults []fault
}

// land handles the answer to a request.
func (p *Pager) land(r landing) error {
	l := &p.loop
	if r.urgency == Ahead { // for which nobody waits
		if r.err == nil {
			l.ahead.arrived(r.blob, r.chunks)
		}
		return nil
	}
	demand := r.urgency == Demand
	if !demand {
		l.background--
	}
	for _, c := range r.chunks {
		if err := p.landChunk(Chunk{r.blob, c}, demand, r.err); err != nil {
			return err
		}
	}
	return nil
}

// landChunk handles the answer for one chunk.
func (p *Pager) landChunk(c Chunk, demand bool, failure error) error {
	l := &p.loop
	w := l.waits[c]
	if w == nil {
		return nil
	}
	st := p.stores[c.Blob]
	present := st.present(int(c.Chunk))
	if failure == nil && !present {
		// The daemon was started anew since and has made another store, because this one was gone or damaged.
		if err := st.reopen(); err != nil {
			return err
		}
		present = st.present(int(c.Chunk))
	}
	if failure == nil && !present {
		return fmt.Errorf("chunk %d of blob %d was reported as fetched but is not marked in the page store: restart thaw-snapshotter", c.Chunk, c.Blob)
	}
	if !present {
		if w.demand && !demand {
			return nil // the request that faults wait for is still under way
		}
		if demand && anyAlive(w.faults) {
			if errors.Is(failure, context.Canceled) && p.ctx.Err() != nil {
				return errClosing
			}
			return fmt.Errorf("chunk %d of blob %d: %w", c.Chunk, c.Blob, failure)
		}
		// Nobody waits. The background filling asks again, but not at once: the
		// registry may be down for long, and a fault will ask for itself.
		l.holdOff = time.Now().Add(retryBackground)
		delete(l.waits, c)
		return nil
	}
	for _, f := range w.faults {
		f.touches.add(f.page / faultWindow) // who waited so long shall not come again soon
	}
	l.round = append(l.round, w.faults...)
	delete(l.waits, c)
	return nil
}

// anyAlive tells whether some thread still waits.
func anyAlive(faults []fault) bool {
	for _, f := range faults {
		if _, ok := f.pending[f.page]; ok && !f.gone && f.fd.Alive() {
			return true
		}
	}
	return false
}

// answerAll answers the faults at hand.
func (p *Pager) answerAll() error {
	l := &p.loop
	l.round = append(l.round, l.retry...)
	l.retry = l.retry[:0]
	for i := 0; i < len(l.round); i++ { // it grows when events are read
		f := l.round[i]
		if err := p.answerOne(f); err != nil {
			return err
		}
		if !f.gone {
			p.letGoIfComplete(f.space)
		}
	}
	clear(l.round)
	l.round = l.round[:0]
	return nil
}

func (p *Pager) answerOne(f fault) error {
	l := &p.loop
	for try := 0; ; try++ {
		if _, ok := f.pending[f.page]; !ok || f.gone {
			return nil // answered together with another one
		}
		switch err := p.answer(f.space, f.page); err {
		case nil:
			return nil
		case unix.ESRCH:
			p.drop(f.space)
			return nil
		case unix.EAGAIN:
			if try > 0 {
				l.retry = append(l.retry, f)
				return nil
			}
			if err := p.drain(f.space); err != nil {
				return err
			}
		case unix.ENOMEM:
			return p.outOfMemory(f)
		default:
			return err
		}
	}
}

// outOfMemory puts a fault off. The limit of a memory cgroup is enforced by a
// kill inside it, which ends the waiting.
func (p *Pager) outOfMemory(f fault) error {
	l := &p.loop
	now := max(time.Since(l.started), 1)
	if l.noMemory == 0 {
		l.noMemory = now
	}
	if now-l.noMemory > maxNoMemory {
		return fmt.Errorf("no memory for pages of task %d in %v (%w): raise the container's memory limit", f.pid, maxNoMemory, unix.ENOMEM)
	}
	l.spins = maxSpins
	l.retry = append(l.retry, f)
	return nil
}
