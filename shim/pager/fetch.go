// SPDX-License-Identifier: Apache-2.0

package pager

import "sync"

// How many requests of each urgency run at once. Faults are few (a thread waits for
// each) and must not wait for one another; the filling in the background must leave
// the link free.
var maxRunning = [...]int{Demand: 32, Ahead: 16, Background: 4}

// maxBatch is how many chunks nobody waits for are asked for at once: of 128 KiB
// each, as many as the daemon asks a registry for in one request (2 MiB).
const maxBatch = 16

// request asks for chunks of a blob.
type request struct {
	blob    uint32
	chunks  []uint32
	urgency Urgency
}

// landing is the answer to a request.
type landing struct {
	request
	err error
}

// fetches runs requests, each in a goroutine, at most so many at once.
type fetches struct {
	p  *Pager
	wg sync.WaitGroup

	mu      sync.Mutex
	queue   [len(maxRunning)][]request
	running [len(maxRunning)]int
}

// ask starts or queues a request. Its landing comes through the loop's messages.
func (f *fetches) ask(r request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	u := r.urgency
	if f.running[u] == maxRunning[u] {
		f.queue[u] = append(f.queue[u], r)
		return
	}
	f.running[u]++
	f.wg.Add(1)
	go f.work(r)
}

// work does requests of one urgency until none is queued.
func (f *fetches) work(r request) {
	defer f.wg.Done()
	u := r.urgency
	for {
		err := f.p.cfg.Fetcher.Fetch(f.p.ctx, r.blob, r.chunks, u)
		f.p.mu.Lock()
		f.p.landed = append(f.p.landed, landing{r, err})
		f.p.mu.Unlock()
		f.p.wake()

		f.mu.Lock()
		q := f.queue[u]
		if len(q) == 0 || f.p.ctx.Err() != nil {
			f.running[u]--
			f.mu.Unlock()
			return
		}
		r, f.queue[u] = q[0], q[1:]
		f.mu.Unlock()
	}
}
