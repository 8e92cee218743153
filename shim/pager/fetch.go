// SPDX-License-Identifier: Apache-2.0

package pager

import "sync"

// How many requests run at once. Faults are few (a thread waits for each) and
// must not wait for one another; the filling in the background must leave the
// link free.
const (
	maxDemand     = 32
	maxBackground = 4
)

// request asks for a chunk.
type request struct {
	Chunk
	demand bool
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
	queue   map[bool][]request // by demand
	running map[bool]int
}

func (f *fetches) init(p *Pager) {
	f.p, f.queue, f.running = p, map[bool][]request{}, map[bool]int{}
}

func limit(demand bool) int {
	if demand {
		return maxDemand
	}
	return maxBackground
}

// ask starts or queues a request. Its landing comes through the loop's messages.
func (f *fetches) ask(r request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.running[r.demand] == limit(r.demand) {
		f.queue[r.demand] = append(f.queue[r.demand], r)
		return
	}
	f.running[r.demand]++
	f.wg.Add(1)
	go f.work(r)
}

// work does requests of one kind until none is queued.
func (f *fetches) work(r request) {
	defer f.wg.Done()
	for {
		err := f.p.cfg.Fetcher.Fetch(f.p.ctx, r.Blob, []uint32{r.Chunk.Chunk}, r.demand)
		f.p.mu.Lock()
		f.p.landed = append(f.p.landed, landing{r, err})
		f.p.mu.Unlock()
		f.p.wake()

		f.mu.Lock()
		q := f.queue[r.demand]
		if len(q) == 0 || f.p.ctx.Err() != nil {
			f.running[r.demand]--
			f.mu.Unlock()
			return
		}
		r, f.queue[r.demand] = q[0], q[1:]
		f.mu.Unlock()
	}
}
